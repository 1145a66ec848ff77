//! Pulls from Debian's `docker-registry`, with passwords, with and without TLS.
//!
//! If it is not installed (`apt install docker-registry`), the tests print that and pass.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod common;

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use images::{
    Digest, ImageError, LocalImage, NoProgress, PullPolicy, RegistryConfig, RegistryCredential,
    RegistrySecret, ensure,
};
use reqwest::Client;

/// User `user`, password `right`, in the format of `htpasswd -B`.
const PASSWORDS: &str = "user:$2y$05$H8Im/kYs2XHsNYcymyhT6OMqdC.iiprx4V4OVCeTEb21QkOx6DWvy\n";

const LOOPBACK: std::net::IpAddr = std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

struct Registry {
    process: Child,
    address: String,
    scheme: &'static str,
    dir: tempfile::TempDir,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn program() -> Option<PathBuf> {
    let found = Path::new("/usr/bin/docker-registry");
    if found.exists() {
        return Some(found.to_path_buf());
    }
    eprintln!("docker-registry is not installed: nothing was tested");
    None
}

impl Registry {
    fn start(
        host: std::net::IpAddr,
        passwords: bool,
        certificate: Option<(&Path, &Path)>,
    ) -> Option<Registry> {
        let program = program()?;
        let dir = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind((host, 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        let mut config = format!(
            "version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\nstorage: {{filesystem: {{rootdirectory: {}/data}}}}\n",
            dir.path().display()
        );
        if passwords {
            let file = dir.path().join("htpasswd");
            fs::write(&file, PASSWORDS).unwrap();
            config += &format!(
                "auth: {{htpasswd: {{realm: test, path: {}}}}}\n",
                file.display()
            );
        }
        config += &format!("http:\n  addr: {address}\n");
        if let Some((certificate, key)) = certificate {
            config += &format!(
                "  tls: {{certificate: {}, key: {}}}\n",
                certificate.display(),
                key.display()
            );
        }
        let file = dir.path().join("config.yml");
        fs::write(&file, config).unwrap();
        let process = Command::new(program)
            .arg("serve")
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let began = Instant::now();
        while std::net::TcpStream::connect(&address).is_err() {
            assert!(
                began.elapsed() < Duration::from_secs(20),
                "docker-registry does not start"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Some(Registry {
            process,
            address,
            scheme: if certificate.is_some() {
                "https"
            } else {
                "http"
            },
            dir,
        })
    }

    fn client() -> Client {
        Client::builder()
            .tls_danger_accept_invalid_certs(true)
            .build()
            .unwrap()
    }

    /// Pushes an image.
    async fn push(&self, repository: &str, tag: &str, image: &TestImage) {
        let base = format!("{}://{}/v2/{repository}", self.scheme, self.address);
        let client = Self::client();
        for blob in image.blobs() {
            let begun = client
                .post(format!("{base}/blobs/uploads/"))
                .header("authorization", "Basic dXNlcjpyaWdodA==")
                .send()
                .await
                .unwrap();
            assert_eq!(begun.status(), 202);
            let location = begun.headers()["location"].to_str().unwrap().to_owned();
            let mark = if location.contains('?') { '&' } else { '?' };
            let done = client
                .put(format!("{location}{mark}digest={}", Digest::of(blob)))
                .header("authorization", "Basic dXNlcjpyaWdodA==")
                .header("content-type", "application/octet-stream")
                .body(blob.clone())
                .send()
                .await
                .unwrap();
            assert_eq!(done.status(), 201);
        }
        self.push_manifest(repository, tag, &image.manifest, image.media_type)
            .await;
    }

    async fn push_manifest(&self, repository: &str, tag: &str, manifest: &[u8], media_type: &str) {
        let url = format!(
            "{}://{}/v2/{repository}/manifests/{tag}",
            self.scheme, self.address
        );
        let pushed = Self::client()
            .put(url)
            .header("authorization", "Basic dXNlcjpyaWdodA==")
            .header("content-type", media_type)
            .body(manifest.to_vec())
            .send()
            .await
            .unwrap();
        assert_eq!(pushed.status(), 201);
    }
}

async fn pull(
    node: &TestNode,
    reference: &str,
    credentials: Vec<RegistryCredential>,
    config: &RegistryConfig,
) -> Result<LocalImage, ImageError> {
    let mut request = request(reference, PullPolicy::Always);
    request.credentials = credentials;
    ensure(&node.store, &node.layers, &request, config, &NoProgress).await
}

#[tokio::test]
async fn oci_docker_and_multi_platform_images_are_pulled() {
    let Some(registry) = Registry::start(LOOPBACK, false, None) else {
        return;
    };
    let config = insecure(&[&registry.address]);
    for (name, media_type) in [("team/oci", OCI), ("docker", DOCKER)] {
        let image = TestImage::usual(media_type);
        registry.push(name, "1", &image).await;
        let node = TestNode::new();
        let reference = format!("{}/{name}:1", registry.address);
        let pulled = pull(&node, &reference, Vec::new(), &config).await.unwrap();
        assert_eq!(
            pulled.id,
            format!("{}/{name}@{}", registry.address, image.digest())
        );
        assert_eq!(fs::read(pulled.layers[1].join("bin/app")).unwrap(), b"two");
        let pinned = pull(&node, &pulled.id, Vec::new(), &config).await.unwrap();
        assert_eq!(pinned.layers, pulled.layers);
    }
    // A multi-platform image.
    let image = TestImage::usual(OCI);
    let mut entry = descriptor(&image.manifest, OCI);
    entry["platform"] = serde_json::json!({"os": "linux", "architecture": images::architecture()});
    let index =
        serde_json::json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]});
    registry.push("multi", "one", &image).await;
    registry
        .push_manifest("multi", "all", index.to_string().as_bytes(), OCI_INDEX)
        .await;
    let node = TestNode::new();
    let pulled = pull(
        &node,
        &format!("{}/multi:all", registry.address),
        Vec::new(),
        &config,
    )
    .await;
    assert!(
        pulled
            .unwrap()
            .id
            .ends_with(&Digest::of(index.to_string().as_bytes()).to_string())
    );
    // A missing image.
    let error = pull(
        &node,
        &format!("{}/none:1", registry.address),
        Vec::new(),
        &config,
    )
    .await;
    assert!(error.unwrap_err().to_string().ends_with("not found"));
}

#[tokio::test]
async fn password_is_required_and_checked() {
    let Some(registry) = Registry::start(LOOPBACK, true, None) else {
        return;
    };
    registry.push("app", "1", &TestImage::usual(OCI)).await;
    let reference = format!("{}/app:1", registry.address);
    let config = insecure(&[&registry.address]);
    let credential = |password: &str| RegistryCredential {
        pattern: registry.address.clone(),
        secret: RegistrySecret::Password {
            username: "user".into(),
            password: password.into(),
        },
    };
    let node = TestNode::new();
    for credentials in [Vec::new(), vec![credential("wrong")]] {
        let error = pull(&node, &reference, credentials, &config)
            .await
            .unwrap_err();
        assert_eq!(error.reason(), "ErrImagePull");
        assert!(error.to_string().contains("pull access denied"), "{error}");
    }
    pull(&node, &reference, vec![credential("right")], &config)
        .await
        .unwrap();
    // A pull secret in Kubernetes' format.
    let json = serde_json::json!({"auths": {&registry.address: {"username": "user", "password": "right"}}});
    let secret = images::registry::credentials::from_dockerconfigjson(json.to_string().as_bytes());
    pull(&TestNode::new(), &reference, secret.unwrap(), &config)
        .await
        .unwrap();
}

/// A non-loopback address of this host. Sends no packet.
fn outer_address() -> Option<std::net::IpAddr> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

#[tokio::test]
async fn private_certificate_needs_configuration() {
    let Some(address) = outer_address() else {
        eprintln!("this host has no network: nothing was tested");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (certificate, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"];
    let made = Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=registry",
        ])
        .args(curve)
        .args(["-addext", &format!("subjectAltName=IP:{address}")])
        .args(["-addext", "basicConstraints=critical,CA:FALSE"])
        .arg("-out")
        .arg(&certificate)
        .arg("-keyout")
        .arg(&key)
        .stderr(Stdio::null())
        .status();
    if !made.is_ok_and(|status| status.success()) {
        eprintln!("openssl is not installed: nothing was tested");
        return;
    }
    let Some(registry) = Registry::start(address, false, Some((&certificate, &key))) else {
        return;
    };
    registry.push("app", "1", &TestImage::usual(OCI)).await;
    let toml = registry.dir.path().join("registries.toml");
    let rule = |rule: String| format!("[registry.\"{}\"]\n{rule}\n", registry.address);
    for (rules, good) in [
        (String::new(), false),
        (rule("insecure = true".to_owned()), true),
        (rule(format!("ca = \"{}\"", certificate.display())), true),
    ] {
        fs::write(&toml, &rules).unwrap();
        let config = RegistryConfig::read(&toml).unwrap();
        let reference = format!("{}/app:1", registry.address);
        let pulled = pull(&TestNode::new(), &reference, Vec::new(), &config).await;
        assert_eq!(pulled.is_ok(), good, "{rules}: {pulled:?}");
        if let Err(error) = pulled {
            assert_eq!(error.reason(), "RegistryUnavailable");
        }
    }
}

/// The password comes from a helper in `credHelpers` or `credsStore`.
#[tokio::test]
async fn credential_helpers_are_run() {
    let Some(registry) = Registry::start(LOOPBACK, true, None) else {
        return;
    };
    registry.push("app", "1", &TestImage::usual(OCI)).await;
    let dir = tempfile::tempdir().unwrap();
    let helper = dir.path().join("docker-credential-test");
    let script = format!(
        "#!/bin/sh\nread -r server\n[ \"$1\" = get ] && [ \"$server\" = {} ] || {{ echo 'credentials not found in native keychain'; exit 1; }}\n\
         echo '{{\"ServerURL\":\"x\",\"Username\":\"user\",\"Secret\":\"right\"}}'\n",
        registry.address
    );
    fs::write(&helper, script).unwrap();
    fs::set_permissions(&helper, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let rules = dir.path().join("coracle");
    fs::create_dir(&rules).unwrap();
    let rule = format!("[registry.\"{}\"]\ninsecure = true\n", registry.address);
    fs::write(rules.join("registries.toml"), rule).unwrap();
    // Helpers are found by PATH, which is per process, so the pull runs in a child.
    let test = std::env::current_exe().unwrap();
    for config in [
        format!(r#"{{"credHelpers":{{"{}":"test"}}}}"#, registry.address),
        r#"{"credsStore":"test"}"#.to_owned(),
    ] {
        fs::write(dir.path().join("config.json"), config).unwrap();
        let path = format!(
            "{}:{}",
            dir.path().display(),
            std::env::var("PATH").unwrap()
        );
        let status = Command::new(&test)
            .args([
                "--exact",
                "pull_with_environment",
                "--ignored",
                "--nocapture",
            ])
            .env("PATH", path)
            .env("DOCKER_CONFIG", dir.path())
            .env("XDG_CONFIG_HOME", dir.path())
            .env("TEST_REFERENCE", format!("{}/app:1", registry.address))
            .status()
            .unwrap();
        assert!(status.success());
    }
}

#[tokio::test]
#[ignore = "run by credential_helpers_are_run, with its own environment"]
async fn pull_with_environment() {
    let Ok(reference) = std::env::var("TEST_REFERENCE") else {
        return;
    };
    let config = RegistryConfig::from_environment().unwrap();
    pull(&TestNode::new(), &reference, Vec::new(), &config)
        .await
        .unwrap();
}
