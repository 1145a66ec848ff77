//! Starts upstream's control plane twice on the same disk storage with the same keys.
//!
//! Uses the release that `make dist` builds. Without a release the test is skipped.

// Clippy's exception for tests does not apply to helpers of integration tests.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use control_plane::port::ReservedPort;
use control_plane::{
    ClusterConfig, ClusterKeys, ClusterPki, ClusterStorage, ControlPlaneCommand, ControlPlaneEvent,
};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};

/// `coracle internal control-plane`.
struct ControlPlane {
    process: Child,
    events: BufReader<ChildStdout>,
    client: Client,
    _port: ReservedPort,
}

impl ControlPlane {
    async fn start(release: &Path, state: &Path) -> ControlPlane {
        let keys = ClusterKeys::Directory(state.join("keys"));
        let pki = ClusterPki::open(&keys, Duration::from_secs(3600)).unwrap();
        let admin = pki.administrator().unwrap();
        let port = ReservedPort::new(0).unwrap();
        let mut files = pki.files(vec!["127.0.0.1".to_owned()]).unwrap();
        files.insert("tokens.csv".to_owned(), "unused,nobody,1\n".to_owned());
        let config = ClusterConfig {
            name: "test".to_owned(),
            release: release.to_owned(),
            // Only advertised. The API server refuses a loopback address.
            addresses: vec!["192.0.2.1".parse().unwrap()],
            api_port: port.number(),
            service_cidr: "100.96.0.0/16".to_owned(),
            pod_cidr: "100.64.0.0/11".to_owned(),
            storage: ClusterStorage::Disk(state.join("storage")),
            seed: seed(release),
            workload: None,
            lowers_gogc: true,
            log_dir: None,
            verbose: false,
            files,
            admin_kubeconfig: String::new(),
        };
        let mut process = Command::new(env!("CARGO_BIN_EXE_coracle"))
            .args(["internal", "control-plane"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let start = ControlPlaneCommand::Start(Box::new(config));
        let line = serde_json::to_string(&start).unwrap();
        writeln!(process.stdin.as_mut().unwrap(), "{line}").unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], port.number()));
        let client = cluster::client::connect(address, pki.cluster.cert_pem(), &admin);
        ControlPlane {
            events: BufReader::new(process.stdout.take().unwrap()),
            process,
            client: client.await.unwrap(),
            _port: port,
        }
    }

    fn wait_for(&mut self, expected: &ControlPlaneEvent) {
        loop {
            let mut line = String::new();
            let read = self.events.read_line(&mut line).unwrap();
            assert!(read > 0, "the control plane ended");
            let event: ControlPlaneEvent = serde_json::from_str(&line).unwrap();
            let failed = matches!(
                event,
                ControlPlaneEvent::SetupFailed { .. } | ControlPlaneEvent::Failed { .. }
            );
            assert!(!failed, "{event:?}");
            if event == *expected {
                return;
            }
        }
    }

    fn config_maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), "default")
    }

    fn stop(mut self) {
        drop(self.process.stdin.take());
        self.wait_for(&ControlPlaneEvent::Stopped);
        self.process.wait().unwrap();
    }
}

fn release() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let releases = root.join("../../target/dist/lib/coracle/kubernetes");
    let release = std::fs::read_dir(releases).ok()?.flatten().next()?;
    release.path().canonicalize().ok()
}

fn seed(release: &Path) -> Option<PathBuf> {
    let mut seeds = std::fs::read_dir(release.join("seeds")).ok()?.flatten();
    Some(seeds.next()?.path().join("store"))
}

#[tokio::test]
async fn next_control_plane_keeps_objects_and_keys() {
    let Some(release) = release() else {
        eprintln!("skipped: no release of Kubernetes, `make dist` builds it");
        return;
    };
    let state = tempfile::tempdir().unwrap();
    let mut first = ControlPlane::start(&release, state.path()).await;
    first.wait_for(&ControlPlaneEvent::ApiServerResponds);
    let mut map = ConfigMap::default();
    map.metadata.name = Some("kept".to_owned());
    let deadline = Instant::now() + Duration::from_secs(60);
    let created = loop {
        match first.config_maps().create(&Default::default(), &map).await {
            Ok(created) => break created,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    // Killed, not stopped: etcd has confirmed the write, so it is on disk.
    first.process.kill().unwrap();
    first.process.wait().unwrap();

    let mut second = ControlPlane::start(&release, state.path()).await;
    second.wait_for(&ControlPlaneEvent::ApiServerResponds);
    let kept = second.config_maps().get("kept").await.unwrap();
    assert_eq!(kept.metadata.uid, created.metadata.uid);
    second.stop();
}
