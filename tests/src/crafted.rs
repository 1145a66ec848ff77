//! Images with a configuration and a last layer of the test's choice.

use serde_json::{Value, json};

use crate::Lab;

/// Makes an archive as `docker save` does: a busybox, and upon it what `$LAYER` writes to standard output as a tar file.
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

/// A last layer with nothing in it.
pub const EMPTY_LAYER: &str = "tar --create --files-from=/dev/null";

/// A last layer with `/bin/busybox-chown`, which carries `cap_chown=ep`, and a `/tmp` for everybody. Only root could give a file a
/// capability for tar to find, so what tar would write of it is written here, before the file.
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
    /// Puts an image into the store of `user1`; `config` is as in an image's configuration, `layer` writes a tar file.
    #[track_caller]
    pub fn load_image(&self, name: &str, config: Value, layer: &str) {
        self.archive(name, config, layer, "coracle image load --input -");
    }

    /// Puts an image into the store of a user.
    #[track_caller]
    pub fn load_image_for(&self, user: &str, name: &str, config: Value, layer: &str) {
        self.archive_for(user, name, config, layer, "coracle image load --input -");
    }

    /// Writes an archive with the image for a command of `user1` to read.
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
