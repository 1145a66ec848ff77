//! A registry on the login host: Debian's `docker-registry`, which demands a password.

use serde_json::Value;

use crate::{Lab, Running, wait_until};

/// Where it listens, as images are called after it.
pub const REGISTRY: &str = "login:5000";

/// In the home directory of `user1`.
const DIR: &str = "registry";
/// `user`, `right`, as `htpasswd -B` writes it.
const PASSWORDS: &str = "user:$2y$05$H8Im/kYs2XHsNYcymyhT6OMqdC.iiprx4V4OVCeTEb21QkOx6DWvy\n";
const CONFIG: &str = "version: 0.1
log: {level: error, accesslog: {disabled: true}}
storage: {filesystem: {rootdirectory: /home/user1/registry/data}}
auth: {htpasswd: {realm: test, path: /home/user1/registry/htpasswd}}
http: {addr: ':5000'}
";
/// Reads an archive as `docker save` writes it, and pushes the image as `$1`, with the tag `1`.
const PUSH: &str = r#"
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
tar --extract
base=http://login:5000/v2/$1
ask() { curl --silent --show-error --fail --user user:right "$@"; }
descriptor() { printf '{"mediaType":"%s","size":%s,"digest":"sha256:%s"}' "$2" "$(stat -c %s "$1")" "$(sha256sum < "$1" | cut -c1-64)"; }
for blob in config.json first.tar second.tar; do
  to=$(ask --request POST --dump-header - --output /dev/null "$base/blobs/uploads/" | tr -d '\r' | sed -n 's/^[Ll]ocation: //p')
  ask --request PUT --header 'Content-Type: application/octet-stream' --data-binary "@$blob" "$to&digest=sha256:$(sha256sum < $blob | cut -c1-64)"
done
layer=application/vnd.oci.image.layer.v1.tar
printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":%s,"layers":[%s,%s]}' \
  "$(descriptor config.json application/vnd.oci.image.config.v1+json)" "$(descriptor first.tar $layer)" "$(descriptor second.tar $layer)" > manifest
ask --request PUT --header 'Content-Type: application/vnd.oci.image.manifest.v1+json' --data-binary @manifest "$base/manifests/1"
"#;

/// A registry that runs until it is dropped.
#[derive(Debug)]
pub struct Registry<'a> {
    lab: &'a Lab,
    running: Option<Running>,
}

impl Lab {
    /// Starts a registry, and tells the Coracle of `user1` that it has no TLS.
    #[track_caller]
    pub fn registry(&self) -> Registry<'_> {
        self.write(&format!("{DIR}/config.yml"), CONFIG);
        self.write(&format!("{DIR}/htpasswd"), PASSWORDS);
        self.write(
            ".config/coracle/registries.toml",
            &format!("[registry.\"{REGISTRY}\"]\ninsecure = true\n"),
        );
        let running = self.call(&[
            "docker-registry",
            "serve",
            "/home/user1/registry/config.yml",
        ]);
        let registry = Registry {
            lab: self,
            running: Some(running.start()),
        };
        wait_until(20, "the registry answers", || {
            self.sh("curl --silent http://login:5000/v2/").run().code == 0
        });
        registry
    }
}

impl Registry<'_> {
    /// Pushes an image, made as by [`Lab::load_image`]; what it is called.
    #[track_caller]
    pub fn push(&self, name: &str, config: Value, layer: &str) -> String {
        let push = format!("bash -c '{}' push {name}", PUSH.replace('\'', r"'\''"));
        self.lab.archive(name, config, layer, &push);
        format!("{REGISTRY}/{name}:1")
    }
}

impl Drop for Registry<'_> {
    fn drop(&mut self) {
        self.running = None;
        self.lab.remove(DIR);
        self.lab.remove(".config");
    }
}
