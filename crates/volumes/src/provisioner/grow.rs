//! Claims that ask for more than they got.

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use kube::api::{Patch, PatchParams};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, ResourceExt};
use serde_json::json;

use super::decide::{self, Growth, Place};
use super::{ProvisionError, Provisioner, place};

impl Provisioner {
    /// Gives a claim that asks for more than it has what it asks for. Whether nothing is left to be tried again.
    pub(super) async fn serve_growth(
        &mut self,
        claim: &PersistentVolumeClaim,
        volumes: &Store<PersistentVolume>,
        nodes: &Store<Node>,
    ) -> bool {
        let volume = decide::bound_to(claim).and_then(|name| volumes.get(&ObjectRef::new(name)));
        let Some((volume, growth)) =
            volume.and_then(|volume| Some((volume.clone(), decide::growth(claim, &volume)?)))
        else {
            return true;
        };
        let grown = self.grow(claim, &volume, &growth, nodes).await;
        let (warning, reason, message) = match &grown {
            Ok(()) => (
                false,
                "VolumeResizeSuccessful",
                format!("Resize volume succeeded: {}", growth.to.0),
            ),
            Err(error) => (
                true,
                "VolumeResizeFailed",
                format!("failed to resize volume: {error}"),
            ),
        };
        self.say(claim, warning, reason, message).await;
        grown.is_ok()
    }

    /// Nothing holds a volume to its size, so it grows by word alone; but not beyond what there is.
    async fn grow(
        &self,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
        growth: &Growth,
        nodes: &Store<Node>,
    ) -> Result<(), ProvisionError> {
        match decide::place(volume) {
            Some(Place::Local { node }) => {
                if let Some(node) = nodes.get(&ObjectRef::new(&node)) {
                    decide::check_node_room(claim, &node).map_err(ProvisionError::Refused)?;
                }
            }
            _ => {
                let room = place::room(&self.shared_dir)?;
                decide::fits(growth.by, room).map_err(ProvisionError::Refused)?;
            }
        }
        let capacity = json!({ "capacity": { "storage": growth.to } });
        let parameters = PatchParams::default();
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let patch = Patch::Merge(json!({ "spec": capacity }));
        api.patch(&volume.name_any(), &parameters, &patch).await?;
        let patch = Patch::Merge(json!({ "status": capacity }));
        self.claims_beside(claim)
            .patch_status(&claim.name_any(), &parameters, &patch)
            .await?;
        Ok(())
    }
}
