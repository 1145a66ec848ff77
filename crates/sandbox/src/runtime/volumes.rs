//! Creates the pod's volumes, each when the first container needs it, and updates their content.

use k8s_openapi::api::core::v1::PodSpec;
use pod_protocol::{Bundle, Problem};

use super::{LinuxRuntime, volume_spec};
use crate::node_services::{NodeServices, ReadyVolume};

impl<S: NodeServices> LinuxRuntime<S> {
    /// Creates all volumes but image volumes, which only the containers that mount them wait for.
    pub(super) async fn create_volumes(
        &self,
        bundle: &Bundle,
        spec: &PodSpec,
    ) -> Result<(), Problem> {
        let names = bundle.volumes.keys();
        for name in names.filter(|name| volume_spec::image(spec, name).is_none()) {
            self.create_volume(bundle, name).await?;
            if volume_spec::is_shared(spec, name) {
                self.share_volume(name)?;
            }
        }
        Ok(())
    }

    /// Creates a volume, once.
    pub(super) async fn create_volume(&self, bundle: &Bundle, name: &str) -> Result<(), Problem> {
        let Some(source) = bundle.volumes.get(name) else {
            return Ok(());
        };
        // Several containers may need the same volume.
        let _lock = self.volume_lock.lock().await;
        if self.volumes.borrow().contains_key(name) {
            return Ok(());
        }
        let spec = bundle.pod.spec.as_ref();
        let volume = match spec.and_then(|spec| volume_spec::image(spec, name)) {
            Some(request) => {
                let image = self
                    .services
                    .ensure_image(&request, &bundle.pull_credentials);
                ReadyVolume::Layers(image.await?.layers)
            }
            None => {
                let fs_group = fs_group(bundle);
                self.services.set_up_volume(name, source, fs_group).await?
            }
        };
        let volume = self.merge_layers(name, volume).await;
        let volume = volume.map_err(|error| volume_spec::mount_problem(name, &error))?;
        self.volumes.borrow_mut().insert(name.to_owned(), volume);
        Ok(())
    }

    /// Updates the content of volumes whose source has changed since `before`, or whose last update failed.
    pub(super) async fn update_volumes(&self, before: &Bundle, bundle: &Bundle) {
        let fs_group = fs_group(bundle);
        for (name, source) in &bundle.volumes {
            let exists = self.volumes.borrow().contains_key(name);
            let is_stale = self.stale_volumes.borrow_mut().remove(name);
            if !exists || (before.volumes.get(name) == Some(source) && !is_stale) {
                continue;
            }
            let updated = self.services.set_up_volume(name, source, fs_group).await;
            if let Err(problem) = updated {
                tracing::warn!(
                    volume = name,
                    problem = problem.message,
                    "cannot update volume"
                );
                self.stale_volumes.borrow_mut().insert(name.clone());
            }
        }
    }

    /// Makes a volume a shared mount, so that mounts below it propagate to the pod's other containers.
    fn share_volume(&self, name: &str) -> Result<(), Problem> {
        let path = match self.volumes.borrow().get(name) {
            Some(ReadyVolume::Directory { path, .. }) => path.clone(),
            Some(ReadyVolume::Layers(_)) | None => return Ok(()),
        };
        if self.shared_volumes.borrow().contains(&path) {
            return Ok(());
        }
        linux::mount_tree::make_shared(&path)
            .map_err(|error| volume_spec::mount_problem(name, &error))?;
        self.shared_volumes.borrow_mut().push(path);
        Ok(())
    }
}

fn fs_group(bundle: &Bundle) -> Option<i64> {
    let spec = bundle.pod.spec.as_ref()?;
    spec.security_context.as_ref()?.fs_group
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{RecordingServices, bundle, run_local, runtime};
    use super::*;
    use crate::container_runtime::{ImagePullPolicy, ImageRequest};

    #[tokio::test]
    async fn image_volume_is_pulled_by_its_policy() {
        run_local(async {
            let services = RecordingServices::default();
            let image = json!({"reference": "data:1", "pullPolicy": "Never"});
            let volumes = json!([{"name": "v", "image": image}]);
            let mut bundle = bundle(json!({"containers": [], "volumes": volumes}));
            bundle.volumes.insert("v".to_owned(), json!({}));
            let (runtime, _inner) = runtime(services.clone(), bundle.clone());
            runtime.create_volume(&bundle, "v").await.unwrap();
            runtime.create_volume(&bundle, "v").await.unwrap();
            let request = ImageRequest {
                reference: "data:1".to_owned(),
                policy: ImagePullPolicy::Never,
            };
            assert_eq!(*services.images.borrow(), [request]);
            assert!(services.volumes.borrow().is_empty());
            assert!(runtime.volumes.borrow().contains_key("v"));
        })
        .await;
    }

    #[tokio::test]
    async fn failed_volume_update_is_retried() {
        run_local(async {
            let services = RecordingServices::default();
            let bundle_with = |content: &str| {
                let mut bundle = bundle(json!({"containers": []}));
                bundle.volumes.insert("v".to_owned(), json!(content));
                bundle.volumes.insert("same".to_owned(), json!("same"));
                bundle
            };
            let (runtime, _inner) = runtime(services.clone(), bundle_with("old"));
            for name in ["v", "same"] {
                let volume = ReadyVolume::Layers(Vec::new());
                runtime.volumes.borrow_mut().insert(name.to_owned(), volume);
            }
            assert!(runtime.put_bundle(bundle_with("old")).await.1);
            services.broken.borrow_mut().insert("v".to_owned());
            assert!(!runtime.put_bundle(bundle_with("new")).await.1);
            assert!(!runtime.put_bundle(bundle_with("new")).await.1);
            services.broken.borrow_mut().clear();
            assert!(runtime.put_bundle(bundle_with("new")).await.1);
            assert!(runtime.put_bundle(bundle_with("new")).await.1);
            assert_eq!(*services.volumes.borrow(), ["v", "v", "v"]);
        })
        .await;
    }
}
