//! Makes a seed: boots a control plane on an empty store and keeps the objects that upstream writes into it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use console::Phases;
use control_plane::port::ReservedPort;
use control_plane::{ClusterConfig, ClusterPki, ClusterStorage, ControlPlaneEvent};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::Api;
use releases::Release;

use crate::{ControlPlaneProcess, carry, objects};

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
    let port = ReservedPort::new(0)?;
    let pki = ClusterPki::new(10 * SEED_TIMEOUT)?;
    let admin = pki.administrator()?;
    let mut files = pki.files(vec!["127.0.0.1".to_owned()])?;
    files.insert(
        "tokens.csv".into(),
        format!("{},nobody,1\n", crate::token::generate()?),
    );
    let config = ClusterConfig {
        name: "seed".into(),
        release: release.dir.clone(),
        addresses: linux::address::host_addresses()?,
        api_port: port.number(),
        service_cidr: service_cidr.to_owned(),
        pod_cidr: "100.64.0.0/11".to_owned(),
        storage: ClusterStorage::Memory,
        seed: None,
        workload: None,
        lowers_gogc: release.is_our_build(),
        log_dir: None,
        verbose: false,
        files,
        admin_kubeconfig: String::new(),
    };
    let mut control_plane = ControlPlaneProcess::start(config).await?;
    let populated = tokio::time::timeout(SEED_TIMEOUT, async {
        while control_plane.next_event().await? != ControlPlaneEvent::ApiServerResponds {}
        let api = std::net::SocketAddr::from(([127, 0, 0, 1], port.number()));
        let client = crate::client::connect(api, pki.cluster.cert_pem(), &admin).await?;
        wait_for_bootstrap_objects(&client).await;
        objects::create_rbac_objects(&client).await
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
