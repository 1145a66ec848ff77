//! Expansion of volumes.

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use kube::api::{Patch, PatchParams};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, ResourceExt};
use serde_json::json;

use super::decide::{self, Expansion, VolumeLocation};
use super::{ProvisionError, Provisioner, shared_dir};

impl Provisioner {
    /// Expands the volume of a claim that requests more than its capacity. Returns false if a retry is needed.
    pub(super) async fn serve_expansion(
        &mut self,
        claim: &PersistentVolumeClaim,
        volumes: &Store<PersistentVolume>,
        nodes: &Store<Node>,
    ) -> bool {
        let volume = decide::bound_to(claim).and_then(|name| volumes.get(&ObjectRef::new(name)));
        let Some((volume, expansion)) =
            volume.and_then(|volume| Some((volume.clone(), decide::expansion(claim, &volume)?)))
        else {
            return true;
        };
        let expanded = self.expand(claim, &volume, &expansion, nodes).await;
        let (warning, reason, message) = match &expanded {
            Ok(()) => (
                false,
                "VolumeResizeSuccessful",
                format!("Resize volume succeeded: {}", expansion.to.0),
            ),
            Err(error) => (
                true,
                "VolumeResizeFailed",
                format!("failed to resize volume: {error}"),
            ),
        };
        self.record_event(claim, warning, reason, message).await;
        expanded.is_ok()
    }

    /// Updates the capacity. Sizes are not enforced, but the capacity must not exceed the free space.
    async fn expand(
        &self,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
        expansion: &Expansion,
        nodes: &Store<Node>,
    ) -> Result<(), ProvisionError> {
        match decide::location(volume) {
            Some(VolumeLocation::Local { node }) => {
                if let Some(node) = nodes.get(&ObjectRef::new(&node)) {
                    decide::check_node_disk(claim, &node).map_err(ProvisionError::Rejected)?;
                }
            }
            _ => {
                let space = shared_dir::disk_space(&self.shared_dir)?;
                decide::check_available(expansion.by, space).map_err(ProvisionError::Rejected)?;
            }
        }
        let capacity = json!({ "capacity": { "storage": expansion.to } });
        let parameters = PatchParams::default();
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let patch = Patch::Merge(json!({ "spec": capacity }));
        api.patch(&volume.name_any(), &parameters, &patch).await?;
        let patch = Patch::Merge(json!({ "status": capacity }));
        self.claims_in_namespace_of(claim)
            .patch_status(&claim.name_any(), &parameters, &patch)
            .await?;
        Ok(())
    }
}
