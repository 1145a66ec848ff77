//! A control plane without nodes, for minutes: to make a seed, and to check manifests (`coracle run --dry-run`).

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use control_plane::dir::ControlPlaneDirOfPid;
use control_plane::port::ReservedPort;
use control_plane::{ClusterConfig, ClusterPki, ClusterStorage, ControlPlaneEvent};
use releases::Release;

use crate::{ControlPlaneProcess, objects};

/// Time in which it starts and has created its objects.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time that it has to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// A running control plane without nodes.
pub struct TemporaryControlPlane {
    /// The URL of its API.
    pub api: String,
    /// An administrator's client.
    pub client: kube::Client,
    process: ControlPlaneProcess,
    pki: ClusterPki,
    seeded: bool,
    _port: ReservedPort,
}

impl TemporaryControlPlane {
    /// Starts it on this host, from `seed` if there is one, and waits until the API server responds.
    pub async fn start(
        release: &Release,
        service_cidr: &str,
        pod_cidr: &str,
        seed: Option<PathBuf>,
    ) -> anyhow::Result<Self> {
        let port = ReservedPort::new(0)?;
        let pki = ClusterPki::new(10 * START_TIMEOUT)?;
        let admin = pki.administrator()?;
        let mut files = pki.files(vec!["127.0.0.1".to_owned()])?;
        files.insert(
            "tokens.csv".into(),
            format!("{},nobody,1\n", crate::token::generate()?),
        );
        let address = SocketAddr::from(([127, 0, 0, 1], port.number()));
        let (api, ca) = (format!("https://{address}"), pki.cluster.cert_pem());
        let seeded = seed.is_some();
        let config = ClusterConfig {
            name: "temporary".into(),
            release: release.dir.clone(),
            addresses: linux::address::host_addresses()?,
            api_port: port.number(),
            service_cidr: service_cidr.to_owned(),
            pod_cidr: pod_cidr.to_owned(),
            storage: ClusterStorage::Memory,
            seed,
            workload: None,
            lowers_gogc: release.is_our_build(),
            log_dir: None,
            verbose: false,
            files,
            admin_kubeconfig: control_plane::kubeconfig::kubeconfig("temporary", &api, ca, &admin),
        };
        let mut process = ControlPlaneProcess::start(config).await?;
        let responds = async {
            while process.next_event().await? != ControlPlaneEvent::ApiServerResponds {}
            crate::client::connect(address, ca, &admin).await
        };
        let client = tokio::time::timeout(START_TIMEOUT, responds)
            .await
            .context("the API server did not respond in time")??;
        Ok(Self {
            api,
            client,
            process,
            pki,
            seeded,
            _port: port,
        })
    }

    /// Waits until Pods can be created in it.
    pub async fn wait_until_ready(&self) -> anyhow::Result<()> {
        let ready = async {
            if !self.seeded {
                objects::create_rbac_objects(&self.client).await?;
            }
            objects::prepare_namespaces(&self.client, self.pki.cluster.cert_pem()).await
        };
        tokio::time::timeout(START_TIMEOUT, ready)
            .await
            .context("the control plane did not create its objects in time")?
    }

    /// Its directory, as other processes see it.
    pub fn dir(&self) -> anyhow::Result<ControlPlaneDirOfPid> {
        self.process.dir().context("the control plane is not up")
    }

    /// Stops it.
    pub async fn stop(self) {
        self.process.stop(STOP_TIMEOUT).await;
    }

    /// Stops it and copies its store to the new directory `path`.
    pub async fn stop_and_save(self, path: &Path) -> anyhow::Result<()> {
        self.process.stop_and_save(path).await
    }
}
