//! What is to be measured of a pod: its running containers and its volumes.

use k8s_openapi::api::core::v1::Volume as VolumeSpec;

use super::{LinuxRuntime, Volume, World};
use crate::usage::{Subject, VolumeSubject};
use pod_protocol::usage::PodUsage;

impl<W: World> LinuxRuntime<W> {
    /// What the pod uses now, if that can be found out.
    pub async fn usage(&self) -> Option<PodUsage> {
        let spec = self.spec();
        let containers = self.subjects();
        let volumes: Vec<VolumeSubject> = {
            let made = self.volumes.borrow();
            let specs = spec.volumes.iter().flatten();
            specs
                .filter_map(|volume| volume_subject(volume, made.get(&volume.name)?))
                .collect()
        };
        let mut usage = self
            .meter
            .measure(
                self.inner.as_raw_nonzero().get(),
                self.group.get(),
                spec.host_network == Some(true),
                &containers,
                &volumes,
                &self.places.etc(),
            )
            .await?;
        // Where an image can't be stacked it was copied, which the container has not written.
        for (subject, measured) in containers.iter().zip(&mut usage.containers) {
            if let Some(root) = &mut measured.root {
                root.used = root.used.saturating_sub(copied(subject));
            }
        }
        Some(usage)
    }

    fn subjects(&self) -> Vec<Subject> {
        let containers = self.containers.borrow();
        let mut subjects: Vec<Subject> = containers
            .iter()
            .filter_map(|(id, running)| {
                let attempt = running.attempt;
                let group = self.group.get();
                let group = group.map(|pod| pod.below(&format!("{}-{attempt}", running.name)));
                Some(Subject {
                    name: running.name.clone(),
                    id: id.clone(),
                    first: linux::usage::pid_of(&running.process)?,
                    started: running.started,
                    root: self
                        .places
                        .disk
                        .join("containers")
                        .join(&running.name)
                        .join(attempt.to_string()),
                    logs: self.places.logs.join(&running.name),
                    group: group.filter(|group| group.path().is_dir()),
                })
            })
            .collect();
        subjects.sort_by(|a, b| a.name.cmp(&b.name));
        subjects
    }
}

/// How a volume is measured. What belongs to the host, and images, are not the pod's.
fn volume_subject(spec: &VolumeSpec, made: &Volume) -> Option<VolumeSubject> {
    let Volume::Directory { path, .. } = made else {
        return None;
    };
    let in_memory = |medium: Option<&str>| medium.is_some_and(|medium| !medium.is_empty());
    let whole = if let Some(source) = &spec.empty_dir {
        in_memory(source.medium.as_deref())
    } else if spec.persistent_volume_claim.is_some()
        || spec.ephemeral.is_some()
        || spec.nfs.is_some()
    {
        // These may be large, and may be others' too: as upstream, their file system is told of.
        true
    } else if spec.config_map.is_some()
        || spec.secret.is_some()
        || spec.projected.is_some()
        || spec.downward_api.is_some()
    {
        false
    } else {
        return None;
    };
    Some(VolumeSubject {
        name: spec.name.clone(),
        path: path.clone(),
        whole,
    })
}

fn copied(subject: &Subject) -> u64 {
    let text = std::fs::read_to_string(subject.root.join("copied")).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn volumes_are_measured_by_their_kind() {
        let subject = |source: serde_json::Value| {
            let mut spec = source;
            spec["name"] = json!("v");
            let spec: VolumeSpec = serde_json::from_value(spec).unwrap();
            let made = Volume::Directory {
                path: "/v".into(),
                read_only: false,
            };
            volume_subject(&spec, &made).map(|subject| subject.whole)
        };
        assert_eq!(subject(json!({"emptyDir": {}})), Some(false));
        assert_eq!(
            subject(json!({"emptyDir": {"medium": "Memory"}})),
            Some(true)
        );
        assert_eq!(subject(json!({"configMap": {"name": "c"}})), Some(false));
        let claim = json!({"persistentVolumeClaim": {"claimName": "c"}});
        assert_eq!(subject(claim), Some(true));
        assert_eq!(subject(json!({"hostPath": {"path": "/"}})), None);
    }
}
