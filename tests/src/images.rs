//! [`BUSYBOX`], the image that most tests use: Debian's static busybox and nothing else. Tests make it themselves, so that they need
//! no registry and no build. And helpers for pods of other images.

use std::time::Duration;

use serde_json::{Value, json};

use crate::{Lab, TestCluster, eventually, merged, pod};

/// The name under which [`Lab::load_busybox`] loads the image.
pub const BUSYBOX: &str = "coracle.test/busybox:1";

/// Writes an archive to standard output, in the format of `docker save`.
const ARCHIVE: &str = r#"
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir -p root/bin root/etc root/tmp root/var
chmod 1777 root/tmp
cp "$(command -v busybox)" root/bin/busybox
for applet in $(busybox --list); do [ "$applet" = busybox ] || ln -s busybox "root/bin/$applet"; done
printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n' > root/etc/passwd
printf 'root:x:0:\nnogroup:x:65534:\n' > root/etc/group
# Reproducible, so that its digest never changes.
tar --directory=root --sort=name --mtime=@0 --owner=0 --group=0 --create --file=layer.tar .
printf '{"architecture":"amd64","os":"linux","config":{"Env":["PATH=/bin"],"Cmd":["sh"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
  "$(sha256sum < layer.tar | cut -d' ' -f1)" > config.json
printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$1" > manifest.json
tar --create --mtime=@0 manifest.json config.json layer.tar
"#;

impl Lab {
    /// Loads [`BUSYBOX`] into the store of `user1`.
    #[track_caller]
    pub fn load_busybox(&self) {
        self.load_busybox_for("user1");
    }

    /// Loads [`BUSYBOX`] into the store of a user.
    #[track_caller]
    pub fn load_busybox_for(&self, user: &str) {
        self.load_busybox_on("login", user, BUSYBOX);
    }

    /// Loads busybox into the store of a user under another name.
    #[track_caller]
    pub fn load_busybox_as(&self, user: &str, name: &str) {
        self.load_busybox_on("login", user, name);
    }

    /// Loads busybox as `name` into a user's store on this host, in labs whose hosts share no home directory.
    #[track_caller]
    pub fn load_busybox_on(&self, host: &str, user: &str, name: &str) {
        let script = format!(
            "set -o pipefail; bash -c '{}' archive {name} | coracle image load --input -",
            ARCHIVE.replace('\'', r"'\''")
        );
        self.sh(&script).on(host).user(user).run().succeeded();
    }
}

/// The configuration of an image that prints a text and exits.
pub fn echo_config(text: &str) -> Value {
    json!({"Env": ["PATH=/bin"], "Cmd": ["echo", text]})
}

/// A pod with one container, which runs the image's own command.
pub fn image_pod(name: &str, image: &str, more: Value) -> Value {
    let main = json!({"name": "main", "image": image});
    pod(name, json!({}), &[merged(main, more)])
}

/// Waits until a pull of the pod's image has failed with an error that contains `expected`.
#[track_caller]
pub fn wait_for_pull_error(cluster: &mut TestCluster, pod: &str, expected: &str) {
    let mut last = Value::Null;
    let seen = eventually(Duration::from_secs(45), || {
        last = cluster.pod(pod)["status"]["containerStatuses"][0]["state"]["waiting"].clone();
        let reason = last["reason"].as_str().unwrap_or_default();
        let message = last["message"].as_str().unwrap_or_default();
        let failed = ["ErrImagePull", "ImagePullBackOff"].contains(&reason);
        (failed && message.contains(expected)).then_some(())
    });
    assert!(seen.is_some(), "{pod}: never {expected:?}: {last}");
}
