//! The image that pods of tests run: Debian's static busybox, and nothing else. It is made on the spot, so that no registry and
//! no build is needed. And what pods of other images are made of and say.

use std::time::Duration;

use serde_json::{Value, json};

use crate::{Cluster, Lab, eventually, merged, pod};

/// The name under which [`Lab::load_busybox`] puts it into the store.
pub const BUSYBOX: &str = "coracle.test/busybox:1";

/// Writes an archive as `docker save` does to standard output.
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
# The same bytes each time: then it is the same image.
tar --directory=root --sort=name --mtime=@0 --owner=0 --group=0 --create --file=layer.tar .
printf '{"architecture":"amd64","os":"linux","config":{"Env":["PATH=/bin"],"Cmd":["sh"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
  "$(sha256sum < layer.tar | cut -d' ' -f1)" > config.json
printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$1" > manifest.json
tar --create --mtime=@0 manifest.json config.json layer.tar
"#;

impl Lab {
    /// Puts [`BUSYBOX`] into the store of `user1`.
    #[track_caller]
    pub fn load_busybox(&self) {
        self.load_busybox_for("user1");
    }

    /// Puts [`BUSYBOX`] into the store of a user.
    #[track_caller]
    pub fn load_busybox_for(&self, user: &str) {
        self.load_busybox_as(user, BUSYBOX);
    }

    /// Puts busybox into the store of a user under another name.
    #[track_caller]
    pub fn load_busybox_as(&self, user: &str, name: &str) {
        let script = format!(
            "set -o pipefail; bash -c '{}' archive {name} | coracle image load --input -",
            ARCHIVE.replace('\'', r"'\''")
        );
        self.sh(&script).user(user).run().succeeded();
    }
}

/// The configuration of an image that says something and ends.
pub fn says(text: &str) -> Value {
    json!({"Env": ["PATH=/bin"], "Cmd": ["echo", text]})
}

/// A pod of one container that does what its image says.
pub fn plain(name: &str, image: &str, more: Value) -> Value {
    let main = json!({"name": "main", "image": image});
    pod(name, json!({}), &[merged(main, more)])
}

/// Waits until a pod waits, with these words in its message.
#[track_caller]
pub fn waits_with(cluster: &mut Cluster, pod: &str, words: &str) {
    let mut last = Value::Null;
    let seen = eventually(Duration::from_secs(45), || {
        last = cluster.pod(pod)["status"]["containerStatuses"][0]["state"]["waiting"].clone();
        let reason = last["reason"].as_str().unwrap_or_default();
        let message = last["message"].as_str().unwrap_or_default();
        let pulling = ["ErrImagePull", "ImagePullBackOff"].contains(&reason);
        (pulling && message.contains(words)).then_some(())
    });
    assert!(seen.is_some(), "{pod}: never {words:?}: {last}");
}
