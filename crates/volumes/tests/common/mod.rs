//! Upstream's API server, etcd and the controllers of storage and service accounts, for one test.
//!
//! Uses the release that `make dist` builds. Without a release the tests are skipped.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ServiceAccount;
use kube::{Api, Client, Config};

/// A control plane, stopped on drop.
pub struct ApiServer {
    dir: tempfile::TempDir,
    port: u16,
    children: Vec<Child>,
}

impl ApiServer {
    /// Starts a control plane and waits until it is ready; `None` without a release.
    pub async fn start() -> Option<Self> {
        let release =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/dist/lib/coracle/kubernetes");
        let release = std::fs::read_dir(release).ok()?.flatten().next()?.path();
        let dir = tempfile::tempdir().unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("sa.key"), key.serialize_pem()).unwrap();
        std::fs::write(path("sa.pub"), key.public_key_pem()).unwrap();
        let users =
            "admin-token,admin,1,system:masters\nnode-token,system:node:node1,2,system:nodes\n";
        std::fs::write(path("users"), users).unwrap();
        let [etcd, peer, port] = free_ports();
        let url = |port| format!("http://127.0.0.1:{port}");

        let mut server = Self {
            dir,
            port,
            children: Vec::new(),
        };
        server.spawn(
            &release,
            "etcd",
            &[
                ("data-dir", path_text(&server.path("etcd"))),
                ("listen-client-urls", url(etcd)),
                ("advertise-client-urls", url(etcd)),
                ("listen-peer-urls", url(peer)),
                ("initial-advertise-peer-urls", url(peer)),
                ("initial-cluster", format!("default={}", url(peer))),
                ("unsafe-no-fsync", "true".to_owned()),
            ],
        );
        server.spawn(
            &release,
            "kube-apiserver",
            &[
                ("etcd-servers", url(etcd)),
                ("bind-address", "127.0.0.1".to_owned()),
                ("secure-port", port.to_string()),
                ("cert-dir", path_text(&server.path("certs"))),
                ("token-auth-file", path_text(&server.path("users"))),
                ("authorization-mode", "Node,RBAC".to_owned()),
                ("enable-admission-plugins", "NodeRestriction".to_owned()),
                ("service-cluster-ip-range", "100.96.0.0/16".to_owned()),
                (
                    "service-account-issuer",
                    "https://kubernetes.default.svc".to_owned(),
                ),
                (
                    "service-account-key-file",
                    path_text(&server.path("sa.pub")),
                ),
                (
                    "service-account-signing-key-file",
                    path_text(&server.path("sa.key")),
                ),
            ],
        );
        server.wait_until_ready().await;
        std::fs::write(server.path("kubeconfig"), server.kubeconfig()).unwrap();
        server.spawn(&release, "kube-controller-manager", &[
            ("kubeconfig", path_text(&server.path("kubeconfig"))),
            ("leader-elect", "false".to_owned()),
            ("secure-port", "0".to_owned()),
            ("service-account-private-key-file", path_text(&server.path("sa.key"))),
            ("root-ca-file", path_text(&server.path("certs/apiserver.crt"))),
            ("controllers", "persistentvolume-binder-controller,persistentvolume-protection-controller,persistentvolumeclaim-protection-controller,serviceaccount-controller,root-ca-certificate-publisher-controller".to_owned()),
        ]);
        let accounts: Api<ServiceAccount> = Api::namespaced(server.admin(), "default");
        until("the default service account", async || {
            accounts.get_opt("default").await.unwrap()
        })
        .await;
        Some(server)
    }

    /// A client with all permissions.
    pub fn admin(&self) -> Client {
        self.client("admin-token")
    }

    /// A client as `system:node:node1`.
    #[allow(dead_code, reason = "not every test needs a node")]
    pub fn node(&self) -> Client {
        self.client("node-token")
    }

    fn client(&self, token: &str) -> Client {
        let mut config = Config::new(format!("https://127.0.0.1:{}", self.port).parse().unwrap());
        config.accept_invalid_certs = true;
        config.auth_info.token = Some(token.to_owned().into());
        Client::try_from(config).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn spawn(&mut self, release: &Path, name: &str, flags: &[(&str, String)]) {
        let log = std::fs::File::create(self.path(&format!("{name}.log"))).unwrap();
        let flags = flags
            .iter()
            .map(|(flag, value)| format!("--{flag}={value}"));
        let child = Command::new(release.join(name))
            .args(flags)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.children.push(child);
    }

    async fn wait_until_ready(&self) {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let request = http::Request::get("/readyz").body(Vec::new()).unwrap();
            if self.admin().request_text(request).await.is_ok() {
                return;
            }
            if Instant::now() > deadline {
                let log = std::fs::read_to_string(self.path("kube-apiserver.log"));
                panic!("the API server is not ready: {log:?}");
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    fn kubeconfig(&self) -> String {
        serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{ "name": "c", "cluster": {
                "server": format!("https://127.0.0.1:{}", self.port), "insecure-skip-tls-verify": true,
            }}],
            "users": [{ "name": "c", "user": { "token": "admin-token" } }],
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "c" } }],
        })
        .to_string()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        for child in self.children.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Polls until `poll` returns a value, for a minute. `awaited` is for the error message.
pub async fn until<T>(awaited: &str, poll: impl AsyncFn() -> Option<T>) -> T {
    for _ in 0..600 {
        if let Some(value) = poll().await {
            return value;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("timed out waiting for {awaited}");
}

fn free_ports() -> [u16; 3] {
    let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

fn path_text(path: &Path) -> String {
    path.display().to_string()
}
