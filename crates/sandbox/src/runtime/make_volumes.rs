//! Makes the pod's volumes, each when the first container waits for it.

use k8s_openapi::api::core::v1::PodSpec;

use super::{LinuxRuntime, volumes};
use crate::seams::{Volume, World};
use pod_protocol::{Bundle, Problem};

impl<W: World> LinuxRuntime<W> {
    /// Makes the volumes but those that are images, which only those containers wait for that mount them.
    pub(super) async fn make_volumes(
        &self,
        bundle: &Bundle,
        spec: &PodSpec,
    ) -> Result<(), Problem> {
        let names = bundle.volumes.keys();
        for name in names.filter(|name| volumes::image(spec, name).is_none()) {
            self.make_volume(bundle, name).await?;
            if volumes::is_shared(spec, name) {
                self.share_volume(name)?;
            }
        }
        Ok(())
    }

    /// Makes a volume if it is not there yet.
    pub(super) async fn make_volume(&self, bundle: &Bundle, name: &str) -> Result<(), Problem> {
        let Some(source) = bundle.volumes.get(name) else {
            return Ok(());
        };
        // Several containers may wait for one.
        let _making = self.making_volume.lock().await;
        if self.volumes.borrow().contains_key(name) {
            return Ok(());
        }
        let volume = self
            .world
            .volume(name, source, fs_group(bundle), &bundle.pull_credentials)
            .await?;
        let volume = self.one_directory(name, volume).await;
        let volume = volume.map_err(|error| volumes::failed(name, &error))?;
        self.volumes.borrow_mut().insert(name.to_owned(), volume);
        Ok(())
    }

    /// Lets what containers mount in a volume travel to the others.
    fn share_volume(&self, name: &str) -> Result<(), Problem> {
        let path = match self.volumes.borrow().get(name) {
            Some(Volume::Directory { path, .. }) => path.clone(),
            Some(Volume::Layers(_)) | None => return Ok(()),
        };
        if self.shared.borrow().contains(&path) {
            return Ok(());
        }
        linux::tree::share(&path).map_err(|error| volumes::failed(name, &error))?;
        self.shared.borrow_mut().push(path);
        Ok(())
    }
}

pub(super) fn fs_group(bundle: &Bundle) -> Option<i64> {
    let spec = bundle.pod.spec.as_ref()?;
    spec.security_context.as_ref()?.fs_group
}
