//! Images whose configuration and last layer are chosen by the test.

use serde_json::{Value, json};

use crate::Lab;

/// Makes an archive in the format of `docker save`. Its first layer has busybox. `$LAYER` writes the second layer to standard
/// output as a tar file.
const ARCHIVE: &str = r#"
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir -p root/bin root/etc root/tmp scratch
cp "$(command -v busybox)" root/bin/busybox
for applet in sh cat echo id pwd env ls sleep stat tr grep; do ln -s busybox "root/bin/$applet"; done
printf 'root:x:0:0:root:/root:/bin/sh\napp:x:1234:1235:app:/home/app:/bin/sh\n' > root/etc/passwd
printf 'root:x:0:\napp:x:1235:\nvideo:x:44:app\n' > root/etc/group
tar --directory=root --sort=name --mtime=@0 --owner=0 --group=0 --create --file=first.tar .
(cd scratch && bash -c "$LAYER") > second.tar
sum() { sha256sum < "$1" | cut -d' ' -f1; }
printf '%s' "$CONFIG" | sed "s/FIRST/sha256:$(sum first.tar)/; s/SECOND/sha256:$(sum second.tar)/" > config.json
printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["first.tar","second.tar"]}]' "$NAME" > manifest.json
tar --create manifest.json config.json first.tar second.tar
"#;

/// An empty last layer.
pub const EMPTY_LAYER: &str = "tar --create --files-from=/dev/null";

/// A last layer with `/bin/busybox-chown`, which has the file capability `cap_chown=ep`, and a world-writable `/tmp`. Only root can
/// set a file capability, so the script writes tar's extended header itself, before the file.
pub const CAPABLE_LAYER: &str = r#"
perl -e '
my $record = " SCHILY.xattr.security.capability=" . pack("V5", 0x02000001, 1, 0, 0, 0) . "\n";
$record = (length($record) + 2) . $record;
my $header = pack("a100a8a8a8a12a12a8a1a100a8a247", "pax", "0000644", "0000000", "0000000", sprintf("%011o", length $record), "00000000000", " " x 8, "x", "", "ustar\x0000", "");
substr($header, 148, 8) = sprintf("%06o\0 ", unpack("%32C*", $header));
print $header, pack("a512", $record);
'
mkdir bin && mkdir -m 1777 tmp && cp "$(command -v busybox)" bin/busybox-chown
tar --format=ustar --owner=0 --group=0 --create bin/busybox-chown tmp
"#;

impl Lab {
    /// Loads an image into the store of `user1`. `config` is the `config` object of the image's configuration; `layer` is a command
    /// that writes a tar file.
    #[track_caller]
    pub fn load_image(&self, name: &str, config: Value, layer: &str) {
        self.archive(name, config, layer, "coracle image load --input -");
    }

    /// Loads an image into the store of a user.
    #[track_caller]
    pub fn load_image_for(&self, user: &str, name: &str, config: Value, layer: &str) {
        self.archive_for(user, name, config, layer, "coracle image load --input -");
    }

    /// Makes an archive of the image, and pipes it to `reader`, a command of `user1`.
    #[track_caller]
    pub fn archive(&self, name: &str, config: Value, layer: &str, reader: &str) {
        self.archive_for("user1", name, config, layer, reader);
    }

    #[track_caller]
    fn archive_for(&self, user: &str, name: &str, config: Value, layer: &str, reader: &str) {
        let config = json!({"architecture": "amd64", "os": "linux", "config": config,
            "rootfs": {"type": "layers", "diff_ids": ["FIRST", "SECOND"]}});
        let quoted = |text: &str| text.replace('\'', r"'\''");
        let script = format!(
            "set -o pipefail; export NAME='{name}' CONFIG='{}' LAYER='{}'; bash -c '{}' | {reader}",
            quoted(&config.to_string()),
            quoted(layer),
            quoted(ARCHIVE)
        );
        self.sh(&script).user(user).run().succeeded();
    }
}
