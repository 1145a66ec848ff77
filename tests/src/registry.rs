//! Registries on the login host, from Debian's `docker-registry`: one with password authentication, and one with TLS.

use serde_json::Value;

use crate::{Lab, Running, wait_until};

/// The address of the registry with passwords, as in image references.
pub const REGISTRY: &str = "login:5000";
/// The address of the registry with TLS.
pub const MIRROR: &str = "login:5001";

/// An htpasswd entry for `user` with the password `right`, as `htpasswd -B` writes it.
const PASSWORDS: &str = "user:$2y$05$H8Im/kYs2XHsNYcymyhT6OMqdC.iiprx4V4OVCeTEb21QkOx6DWvy\n";
/// Makes a CA in `ca.pem`, and a certificate of it for `login`.
const CERTIFICATE: &str = r"
set -eu
cd ~/mirror
key='-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes'
openssl req -x509 $key -days 2 -subj '/CN=The site' -keyout ca.key -out ca.pem
openssl req -new $key -subj /CN=login -keyout key.pem -out request.pem
echo 'subjectAltName=DNS:login' > names
openssl x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out cert.pem
";
/// Functions that the scripts below share. `$1` is the registry's address, `$2` the repository, `$3` the tag.
const FUNCTIONS: &str = r#"
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
base=$1/v2/$2 tag=$3
request() { curl --silent --show-error --fail --insecure --user user:right "$@"; }
descriptor() { printf '{"mediaType":"%s","size":%s,"digest":"sha256:%s"%s}' "$2" "$(stat -c %s "$1")" "$(sha256sum < "$1" | cut -c1-64)" "${3:-}"; }
manifest() { request --request PUT --header "Content-Type: $1" --data-binary @manifest "$base/manifests/$tag"; }
"#;
/// Reads an archive in the format of `docker save`, and pushes the image in the format `$4`.
const PUSH: &str = r#"
case $4 in
  docker)
    kind=application/vnd.docker.distribution.manifest.v2+json config=application/vnd.docker.container.image.v1+json
    layer=application/vnd.docker.image.rootfs.diff.tar.gzip pack='gzip --no-name --fast' ;;
  *)
    kind=application/vnd.oci.image.manifest.v1+json config=application/vnd.oci.image.config.v1+json
    layer=application/vnd.oci.image.layer.v1.tar pack=cat ;;
esac
case $4 in zstd) layer=$layer+zstd pack='zstd --quiet' ;; esac
tar --extract
for blob in first second; do $pack < $blob.tar > $blob; done
for blob in config.json first second; do
  to=$(request --request POST --dump-header - --output /dev/null "$base/blobs/uploads/" | tr -d '\r' | sed -n 's/^[Ll]ocation: //p')
  request --request PUT --header 'Content-Type: application/octet-stream' --data-binary "@$blob" "$to&digest=sha256:$(sha256sum < $blob | cut -c1-64)"
done
printf '{"schemaVersion":2,"mediaType":"%s","config":%s,"layers":[%s,%s]}' \
  $kind "$(descriptor config.json $config)" "$(descriptor first $layer)" "$(descriptor second $layer)" > manifest
manifest $kind
"#;
/// Pushes an index of images that were pushed before. `$4` and all that follow are entries such as `arm64=TAG`.
const PUSH_INDEX: &str = r#"
shift 3
kind=application/vnd.oci.image.manifest.v1+json list=
for entry; do
  request --header "Accept: $kind" --output one "$base/manifests/${entry#*=}"
  list=$list${list:+,}$(descriptor one $kind ",\"platform\":{\"os\":\"linux\",\"architecture\":\"${entry%%=*}\"}")
done
index=application/vnd.oci.image.index.v1+json
printf '{"schemaVersion":2,"mediaType":"%s","manifests":[%s]}' $index "$list" > manifest
manifest $index
"#;

/// The format in which an image is pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageFormat {
    /// OCI, with uncompressed layers.
    Plain,
    /// OCI, with layers compressed by zstd.
    Zstd,
    /// Docker schema 2, with layers compressed by gzip.
    Docker,
}

/// A registry, stopped on drop.
#[derive(Debug)]
pub struct Registry<'a> {
    lab: &'a Lab,
    /// Its directory, in the home directory of `user1`.
    dir: &'static str,
    host: &'static str,
    url: String,
    running: Option<Running>,
}

impl Lab {
    /// Starts the registry with passwords, and configures it as plain HTTP for `user1`.
    #[track_caller]
    pub fn start_registry(&self) -> Registry<'_> {
        self.write("registry/htpasswd", PASSWORDS);
        self.write_registries_config(&format!("[registry.\"{REGISTRY}\"]\ninsecure = true\n"));
        let auth = "auth: {htpasswd: {realm: test, path: /home/user1/registry/htpasswd}}\n";
        self.serve("registry", REGISTRY, "http", auth, "")
    }

    /// Starts the registry with TLS. Its CA is in `~/mirror/ca.pem`.
    #[track_caller]
    pub fn start_mirror(&self) -> Registry<'_> {
        self.sh("mkdir -p ~/mirror").run().succeeded();
        self.sh(CERTIFICATE).run().succeeded();
        let tls =
            ", tls: {certificate: /home/user1/mirror/cert.pem, key: /home/user1/mirror/key.pem}";
        self.serve("mirror", MIRROR, "https", "", tls)
    }

    /// Writes Coracle's registry configuration for `user1`.
    pub fn write_registries_config(&self, toml: &str) {
        self.write(".config/coracle/registries.toml", toml);
    }

    #[track_caller]
    fn serve(
        &self,
        dir: &'static str,
        host: &'static str,
        scheme: &str,
        auth: &str,
        tls: &str,
    ) -> Registry<'_> {
        let port = host.trim_start_matches("login");
        let config = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: /home/user1/{dir}/data}}}}\n\
             {auth}http: {{addr: '{port}'{tls}}}\n"
        );
        let file = self.write(&format!("{dir}/config.yml"), &config);
        let running = self.command(&["docker-registry", "serve", &file]);
        let registry = Registry {
            lab: self,
            dir,
            host,
            url: format!("{scheme}://{host}"),
            running: Some(running.start()),
        };
        let ping = format!("curl --silent --insecure {}/v2/", registry.url);
        wait_until(20, "the registry answers", || {
            self.sh(&ping).run().code == 0
        });
        registry
    }
}

impl Registry<'_> {
    /// The directory of its images.
    pub(crate) fn data(&self) -> String {
        format!("/home/user1/{}/data", self.dir)
    }

    /// Pushes an image, made as by [`Lab::load_image`]; returns its reference.
    #[track_caller]
    pub fn push(&self, name: &str, config: Value, layer: &str) -> String {
        self.push_as(name, "1", ImageFormat::Plain, config, layer)
    }

    /// Pushes an image with a tag and in a format; returns its reference.
    #[track_caller]
    pub fn push_as(
        &self,
        name: &str,
        tag: &str,
        format: ImageFormat,
        config: Value,
        layer: &str,
    ) -> String {
        let format = match format {
            ImageFormat::Plain => "plain",
            ImageFormat::Zstd => "zstd",
            ImageFormat::Docker => "docker",
        };
        let push = self.script(PUSH, &format!("{name} {tag} {format}"));
        self.lab.archive(name, config, layer, &push);
        format!("{}/{name}:{tag}", self.host)
    }

    /// Pushes an index of the images with these tags, for these architectures and in this order; returns its reference.
    #[track_caller]
    pub fn push_index(&self, name: &str, tag: &str, entries: &[(&str, &str)]) -> String {
        let entries: Vec<_> = entries
            .iter()
            .map(|(architecture, tag)| format!("{architecture}={tag}"))
            .collect();
        let push = self.script(PUSH_INDEX, &format!("{name} {tag} {}", entries.join(" ")));
        self.lab.sh(&push).run().succeeded();
        format!("{}/{name}:{tag}", self.host)
    }

    fn script(&self, script: &str, arguments: &str) -> String {
        let script = format!("{FUNCTIONS}{script}").replace('\'', r"'\''");
        format!("bash -c '{script}' push {} {arguments}", self.url)
    }

    /// The digest of a tag, and its manifest.
    #[track_caller]
    pub fn manifest(&self, name: &str, tag: &str) -> (String, Value) {
        let kinds =
            "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json";
        let url = format!("{}/v2/{name}/manifests/{tag}", self.url);
        let request = format!(
            "curl --silent --fail --insecure --user user:right --header 'Accept: {kinds}' {url}"
        );
        let digest = self
            .lab
            .sh(&format!("{request} | sha256sum | cut -c1-64"))
            .run();
        let text = self.lab.sh(&request).run().succeeded().stdout;
        let document = serde_json::from_str(&text).expect("a manifest is JSON");
        (format!("sha256:{}", digest.stdout.trim()), document)
    }

    /// Changes one byte of an image's last layer in the registry's storage.
    #[track_caller]
    pub fn corrupt_layer(&self, name: &str, tag: &str) {
        let (_, manifest) = self.manifest(name, tag);
        let layer = manifest["layers"].as_array().and_then(|all| all.last());
        let digest = layer.and_then(|layer| layer["digest"].as_str());
        let hex = digest.expect("a layer").trim_start_matches("sha256:");
        let file = format!(
            "{}/docker/registry/v2/blobs/sha256/{}/{hex}/data",
            self.data(),
            &hex[..2]
        );
        let overwrite = format!("printf '!' | dd of={file} bs=1 seek=600 conv=notrunc status=none");
        self.lab.sh(&overwrite).run().succeeded();
    }

    /// The number of successful requests with this prefix, such as `GET /v2/NAME/blobs/`.
    pub fn successful_requests(&self, prefix: &str) -> usize {
        let log = self.running.as_ref().map(Running::stdout);
        let quoted = format!("\"{prefix}");
        log.unwrap_or_default()
            .lines()
            .filter(|line| line.contains(&quoted) && line.contains("\" 200 "))
            .count()
    }
}

impl Drop for Registry<'_> {
    fn drop(&mut self) {
        self.running = None;
        self.lab.remove(self.dir);
        self.lab.remove(".config");
    }
}
