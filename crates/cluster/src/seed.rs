//! Makes a seed: boots a control plane on an empty store and keeps the objects that upstream writes into it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use console::Phases;
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::Api;
use releases::Release;

use crate::{TemporaryControlPlane, carry, objects};

/// Making a seed takes about five seconds.
const SEED_TIMEOUT: Duration = Duration::from_secs(60);

/// The seed for clusters of `release`, made now if it is missing; `None` if that is not possible.
pub async fn ensure(release: &Release, service_cidr: &str, phases: &mut Phases) -> Option<PathBuf> {
    let boot = async |path: &Path| Ok(make(release, service_cidr, path).await?);
    // A release that was carried here is about to be removed, with everything beside it.
    let prefer_cache = carry::is_carried();
    releases::seed::ensure(release, service_cidr, prefer_cache, phases, boot).await
}

/// Boots a control plane on an empty store, waits for upstream's objects, and saves the store to `path`.
async fn make(release: &Release, service_cidr: &str, path: &Path) -> anyhow::Result<()> {
    // The store does not depend on the range of pods.
    let pod_cidr = "100.64.0.0/11";
    let control_plane = TemporaryControlPlane::start(release, service_cidr, pod_cidr, None).await?;
    let populated = tokio::time::timeout(SEED_TIMEOUT, async {
        wait_for_bootstrap_objects(&control_plane.client).await;
        objects::create_rbac_objects(&control_plane.client).await
    });
    populated
        .await
        .context("the control plane did not create its objects in time")??;
    control_plane.stop_and_save(path).await
}

/// Waits for the objects that upstream writes into an empty store.
async fn wait_for_bootstrap_objects(client: &kube::Client) {
    let ready = || http::Request::get("/readyz").body(Vec::new());
    loop {
        if let Ok(request) = ready()
            && client.request_text(request).await.is_ok()
        {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for namespace in ["default", "kube-system", "kube-public", "kube-node-lease"] {
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
        while accounts.get("default").await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}
