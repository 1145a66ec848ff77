//! The containers and volumes of a pod whose usage is measured.

use k8s_openapi::api::core::v1::Volume as VolumeSpec;
use pod_protocol::usage::PodUsage;

use super::{MeasuredContainer, MeasuredVolume};
use crate::node_services::{NodeServices, ReadyVolume};
use crate::runtime::LinuxRuntime;

impl<S: NodeServices> LinuxRuntime<S> {
    /// The pod's current resource usage; `None` if it cannot be measured.
    pub async fn usage(&self) -> Option<PodUsage> {
        let spec = self.spec();
        let containers = self.measured_containers();
        let volumes: Vec<MeasuredVolume> = {
            let ready = self.volumes.borrow();
            let specs = spec.volumes.iter().flatten();
            specs
                .filter_map(|volume| measured_volume(volume, ready.get(&volume.name)?))
                .collect()
        };
        let mut usage = self
            .meter
            .measure(
                self.inner_pid.as_raw_nonzero().get(),
                self.cgroup.get(),
                spec.host_network == Some(true),
                &containers,
                &volumes,
                &self.dirs.etc(),
            )
            .await?;
        // A copy of the image counts as disk usage, but the container has not written it.
        for (container, measured) in containers.iter().zip(&mut usage.containers) {
            if let Some(root) = &mut measured.root {
                root.used = root.used.saturating_sub(copied_bytes(container));
            }
        }
        Some(usage)
    }

    fn measured_containers(&self) -> Vec<MeasuredContainer> {
        let containers = self.containers.borrow();
        let mut measured: Vec<MeasuredContainer> = containers
            .iter()
            .filter_map(|(id, running)| {
                let attempt = running.attempt;
                let cgroup = self.cgroup.get();
                let cgroup = cgroup.map(|pod| pod.child(&format!("{}-{attempt}", running.name)));
                Some(MeasuredContainer {
                    name: running.name.clone(),
                    id: id.clone(),
                    pid: linux::usage::pid_of_pidfd(&running.process)?,
                    started: running.started_at,
                    root: self
                        .dirs
                        .disk
                        .join("containers")
                        .join(&running.name)
                        .join(attempt.to_string()),
                    logs: self.dirs.logs.join(&running.name),
                    cgroup: cgroup.filter(|cgroup| cgroup.path().is_dir()),
                })
            })
            .collect();
        measured.sort_by(|a, b| a.name.cmp(&b.name));
        measured
    }
}

/// How a volume is measured. Images and directories of the host do not count.
fn measured_volume(spec: &VolumeSpec, ready: &ReadyVolume) -> Option<MeasuredVolume> {
    let ReadyVolume::Directory { path, .. } = ready else {
        return None;
    };
    let in_memory = |medium: Option<&str>| medium.is_some_and(|medium| !medium.is_empty());
    let whole_file_system = if let Some(source) = &spec.empty_dir {
        in_memory(source.medium.as_deref())
    } else if spec.persistent_volume_claim.is_some()
        || spec.ephemeral.is_some()
        || spec.nfs.is_some()
    {
        // These may be large and shared, so the usage of their file system is reported. As upstream.
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
    Some(MeasuredVolume {
        name: spec.name.clone(),
        path: path.clone(),
        whole_file_system,
    })
}

fn copied_bytes(container: &MeasuredContainer) -> u64 {
    let text = std::fs::read_to_string(container.root.join("copied")).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn volume_kind_decides_how_it_is_measured() {
        let measure = |source: serde_json::Value| {
            let mut spec = source;
            spec["name"] = json!("v");
            let spec: VolumeSpec = serde_json::from_value(spec).unwrap();
            let ready = ReadyVolume::Directory {
                path: "/v".into(),
                read_only: false,
            };
            measured_volume(&spec, &ready).map(|volume| volume.whole_file_system)
        };
        assert_eq!(measure(json!({"emptyDir": {}})), Some(false));
        assert_eq!(
            measure(json!({"emptyDir": {"medium": "Memory"}})),
            Some(true)
        );
        assert_eq!(measure(json!({"configMap": {"name": "c"}})), Some(false));
        let claim = json!({"persistentVolumeClaim": {"claimName": "c"}});
        assert_eq!(measure(claim), Some(true));
        assert_eq!(measure(json!({"hostPath": {"path": "/"}})), None);
    }
}
