//! Private images in the shared store, and passwords for registries.

use std::time::Duration;

use e2e::{
    BUSYBOX, Lab, REGISTRY, Running, TestCluster, echo_config, eventually, image_pod, merged,
};
use rustix::process::Signal;
use serde_json::{Value, json};

/// The attacker's registry, on the port `$1`. It has the manifest of a private image, `$2`, and none of its blobs. It prints all
/// credentials that it receives. Its images:
///
/// - `named`: a manifest that refers to the private configuration and layers
/// - `layers`: the private layers, with the attacker's configuration
/// - `diff-ids`: the attacker's blobs, with a configuration that refers to the private layers
/// - any other: HEAD confirms the digest that the client requests, GET fails
const HOSTILE: &str = r#"
import hashlib, http.server, io, json, socket, sys, tarfile

def sha(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()

def descriptor(data):
    return {"mediaType": "application/octet-stream", "size": len(data), "digest": sha(data)}

def archive(name):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    return file.getvalue()

KIND = "application/vnd.oci.image.manifest.v1+json"
private = json.loads(sys.argv[2])
layers = private.get("layers", [])
# Layers that are not compressed unpack to themselves.
config = json.dumps({"architecture": "amd64", "os": "linux",
    "config": {"Env": ["PATH=/bin"], "Cmd": ["echo", "stolen"]},
    "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]}}).encode()
decoys = [archive("decoy-%d" % number) for number, _ in enumerate(layers)]
BLOBS = {sha(blob): blob for blob in [config, *decoys]}
MANIFESTS = {name: json.dumps({"schemaVersion": 2, "mediaType": KIND, "config": config, "layers": layers}).encode()
    for name, config, layers in [
        ("named", private.get("config"), layers),
        ("layers", descriptor(config), layers),
        ("diff-ids", descriptor(config), [descriptor(decoy) for decoy in decoys])]}

class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle(self):
        # Clients try TLS first.
        if self.connection.recv(1, socket.MSG_PEEK) == b"\x16":
            self.connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        else:
            super().handle()

    def log_request(self, code="-", size="-"):
        print(self.command, self.path, int(code), self.headers.get("Authorization", "-"), flush=True)

    def respond(self, code, body=b"", headers={}):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        name = self.path.rsplit("/", 1)[-1]
        if self.path.startswith("/v2/closed/") and "Authorization" not in self.headers:
            return self.respond(401, headers={"WWW-Authenticate": "Basic realm=closed"})
        if "/manifests/" in self.path and name in MANIFESTS:
            body = MANIFESTS[name]
            return self.respond(200, body, {"Content-Type": KIND, "Docker-Content-Digest": sha(body)})
        if "/manifests/" in self.path and self.command == "HEAD":
            return self.respond(200, b"", {"Content-Type": KIND, "Docker-Content-Digest": name})
        if name in BLOBS:
            return self.respond(200, BLOBS[name])
        self.respond(404)

    do_HEAD = do_GET

server = http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Server)
print("serving", flush=True)
server.serve_forever()
"#;

/// Starts the attacker's registry, as `user2` on the login host.
fn hostile_registry(lab: &Lab, port: &str, private: &Value) -> Running {
    let private = private.to_string();
    let args = ["/usr/bin/python3", "-c", HOSTILE, port, &private];
    let mut server = lab.command(&args).user("user2").start();
    server.wait_for_stdout("serving");
    server
}

fn kill_registry(lab: &Lab, server: Running) {
    server.signal(Signal::KILL);
    drop(server);
    for stray in lab.processes_of("login", "user2") {
        lab.kill("login", "KILL", &stray);
    }
}

/// Waits until the image of the pod cannot be pulled.
#[track_caller]
fn wait_for_rejection(cluster: &mut TestCluster, name: &str) {
    let mut last = Value::Null;
    let seen = eventually(Duration::from_secs(60), || {
        last = cluster.pod(name)["status"].clone();
        let waiting = &last["containerStatuses"][0]["state"]["waiting"];
        let reason = waiting["reason"].as_str().unwrap_or_default();
        matches!(
            reason,
            "ErrImagePull" | "ImagePullBackOff" | "ErrImageNeverPull"
        )
        .then_some(())
    });
    assert!(seen.is_some(), "{name} got the image: {last:#}");
}

#[test]
fn private_images_require_the_pull_secret() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let registry = lab.start_registry();
    lab.write_registries_config(&format!(
        "[registry.\"{REGISTRY}\"]\ninsecure = true\n[registry.\"login:5100\"]\ninsecure = true\n"
    ));
    // A random layer: no other image in the store may have it, or it would not be private.
    let secret = "head -c 100 /dev/urandom > secret && tar --create secret";
    let private = registry.push("team/app", echo_config("private"), secret);
    let (digest, manifest) = registry.manifest("team/app", "1");
    let hostile = hostile_registry(&lab, "5100", &manifest);
    let mut cluster = TestCluster::start_as(&lab, "user1", &["srun", "-N1", "coracle", "run"]);
    cluster.shell(&format!(
        "kubectl create secret docker-registry right --docker-server={REGISTRY} --docker-username=user --docker-password=right"
    ));
    let mut owner = image_pod("owner", &private, json!({}));
    owner["spec"]["imagePullSecrets"] = json!([{"name": "right"}]);
    cluster.create_objects(&[owner.clone()]);
    cluster.wait_for_phase("owner", "Succeeded");

    let head = format!("login:5100/head@{digest}");
    let mut attacks: Vec<Value> = ["IfNotPresent", "Always", "Never"]
        .iter()
        .map(|policy| {
            let name = format!("head-{}", policy.to_lowercase());
            image_pod(&name, &head, json!({"imagePullPolicy": policy}))
        })
        .collect();
    attacks.extend(["named", "layers", "diff-ids"].map(|name| {
        let image = format!("login:5100/x:{name}");
        image_pod(name, &image, json!({}))
    }));
    cluster.create_objects(&attacks);
    for pod in &attacks {
        wait_for_rejection(
            &mut cluster,
            pod["metadata"]["name"].as_str().unwrap_or_default(),
        );
    }
    // The same image as a volume.
    let volume =
        json!({"restartPolicy": "Never", "volumes": [{"name": "v", "image": {"reference": head}}]});
    let mut reader = image_pod(
        "volume",
        BUSYBOX,
        json!({"command": ["ls", "/v/bin"],
        "volumeMounts": [{"name": "v", "mountPath": "/v"}]}),
    );
    reader["spec"] = merged(reader["spec"].clone(), volume);
    cluster.create_objects(&[reader]);
    cluster.wait_for_event("volume", "Warning Failed");
    assert_eq!(cluster.pod("volume")["status"]["phase"], "Pending");

    // The owner's next pod needs no request to the registry.
    let before = registry.successful_requests("GET /v2/team/app/");
    owner["metadata"]["name"] = json!("again");
    cluster.create_objects(&[owner]);
    cluster.wait_for_phase("again", "Succeeded");
    cluster.wait_for_event("again", "already present on machine");
    assert_eq!(registry.successful_requests("GET /v2/team/app/"), before);
    cluster.exit(0);
    kill_registry(&lab, hostile);
    drop(registry);
    lab.sh(&format!("coracle image rm {private}"))
        .run()
        .succeeded();
    lab.assert_nothing_left();
}

#[test]
fn loopback_registries_get_no_password_without_consent() {
    let lab = Lab::acquire();
    let hostile = hostile_registry(&lab, "5101", &json!({}));
    let auth = json!({"auths": {"localhost:5101": {"auth": "dXNlcjpyaWdodA=="}}});
    lab.write(".docker/config.json", &auth.to_string());
    let pull = "coracle image pull localhost:5101/closed/app:1 --store attacked";
    let got_password = |hostile: &Running| hostile.stdout().contains("Basic dXNlcjpyaWdodA==");
    let refused = lab.sh(pull).run();
    assert!(!got_password(&hostile), "{}", hostile.stdout());
    refused.exited_with(74).stderr_has(&[
        "localhost:5101",
        "hint: if this registry has no TLS, set `insecure = true`",
    ]);
    let mirror = "[registry.\"localhost:5101\"]\nmirrors = [\"http://localhost:5101\"]\n";
    lab.write_registries_config(mirror);
    lab.sh(pull)
        .run()
        .exited_with(74)
        .stderr_has(&["your own credentials were not tried"]);
    assert!(hostile.stdout().contains("/v2/closed/app/manifests/1 401"));
    assert!(!got_password(&hostile), "{}", hostile.stdout());
    lab.write_registries_config("[registry.\"localhost:5101\"]\ninsecure = true\n");
    lab.sh(pull).run().exited_with(74);
    assert!(got_password(&hostile), "{}", hostile.stdout());
    kill_registry(&lab, hostile);
    for name in [".docker", ".config", "attacked"] {
        lab.remove(name);
    }
    lab.assert_nothing_left();
}
