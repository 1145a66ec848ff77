//! Hostile image layers.

use e2e::{
    TestCluster, checking_container, echo_config, image_pod, pod, store, wait_for_pull_error,
    wait_until,
};
use serde_json::{Value, json};

/// Layers that must be rejected, with the error messages.
const REJECTED: &[(&str, &str, &str)] = &[
    (
        "above",
        "touch x && tar --absolute-names --transform='s,^x,srv/../../../tmp/escaped,' --create x",
        "leaves the layer",
    ),
    (
        "linked",
        "touch a && ln a b && tar --absolute-names --transform='flags=h;s,^a,/etc/shadow,' --create a b",
        "it is a hard link to /etc/shadow, which is not a file of this layer",
    ),
    (
        "circle",
        "ln -s b a && ln -s a b && mkdir d && touch d/x && tar --transform='s,^d,a,' --create a b d/x",
        "a/x",
    ),
    (
        "hidden",
        "touch .wh... && tar --create .wh...",
        "it is a whiteout of an invalid name",
    ),
    (
        "header",
        r#"perl -e '$s = 3 << 20; $h = pack("a100a8a8a8a12a12a8a1a100a8a247", "././\@LongLink", "0000644", "0000000", "0000000", sprintf("%011o", $s), "00000000000", " " x 8, "L", "", "ustar  ", ""); substr($h, 148, 8) = sprintf("%06o\0 ", unpack("%32C*", $h)); print $h, "x" x $s;'"#,
        "an extension header has 3145728 bytes",
    ),
    (
        "bomb",
        "truncate --size=24M zeros && tar --create zeros",
        "the image is too large: its layers have more bytes than the limit",
    ),
    (
        "many-files",
        "seq 1500 | xargs touch && tar --create .",
        "the image is too large: it has more files than the limit",
    ),
];

/// An unusual layer that is accepted: its entries stay inside of the root directory or are ignored.
const ODD: &str = r#"
add() { tar --file=layer --append --absolute-names "$@"; }
tar --file=layer --create --files-from=/dev/null
# Absolute names are relative to the container's root.
echo absolute > x; add --transform='s,^x,/srv/absolute,' x
# Symlinks are followed as if the layer were the root.
ln -s ../../../../../../tmp out; ln -s /escaped absolute-out; mkdir dir; echo through > dir/escaped-here
add out absolute-out
add --transform='s,^dir,out,' dir/escaped-here
add --transform='s,^dir,absolute-out,' dir/escaped-here
# A hard link to a symlink is that symlink.
ln -s /etc/shadow link; ln link again; add link again
# The last entry of a name counts.
echo first > twice; add twice; echo last > twice; add twice
mkdir thing; echo below > thing/below; add thing; rm -r thing; echo file > thing; add thing
# Devices are ignored.
add --transform='s,^/dev/,srv/,' /dev/null /dev/full
# A whiteout follows links only inside of the layer.
ln -s ../../../../etc far; add far; mkdir p; touch p/.wh.group; add --transform='s,^p,far,' p/.wh.group
# Opaque markers of overlay file systems would hide lower layers. tar cannot write them, so perl does, before the archive.
perl -e '
sub header {
  my ($name, $kind, $size) = @_;
  my $h = pack("a100a8a8a8a12a12a8a1a100a8a247", $name, "0000755", "0000000", "0000000", sprintf("%011o", $size), "00000000000", " " x 8, $kind, "", "ustar\x0000", "");
  substr($h, 148, 8) = sprintf("%06o\0 ", unpack("%32C*", $h));
  $h
}
my $records = join "", map { my $r = " SCHILY.xattr.$_.opaque=y\n"; (length($r) + 2) . $r } qw(user.overlay trusted.overlay user.fuseoverlayfs);
print header("pax", "x", length $records), pack("a512", $records), header("etc/", "5", 0);
'
cat layer
"#;

#[test]
fn hostile_layers_are_rejected_or_contained() {
    let lab = store::acquire_lab();
    for (name, layer, _) in REJECTED {
        lab.load_image(
            &format!("coracle.test/{name}:1"),
            echo_config("never"),
            layer,
        );
    }
    let odd = "coracle.test/odd:1";
    lab.load_image(odd, echo_config("odd"), ODD);
    let limits = "CORACLE_IMAGE_LIMITS=bytes=16M,files=1000";
    let args = ["env", limits, "srun", "-N1", "coracle", "run"];
    let mut cluster = TestCluster::start_as(&lab, "user1", &args);
    let checks = checking_container(
        "main",
        json!({"image": odd}),
        r#"
        is absolute absolute "$(cat /srv/absolute)"
        is 'through a link' through "$(cat /tmp/escaped-here)"
        is 'through another' through "$(cat /escaped/escaped-here)"
        is 'a hard link to a link' /etc/shadow "$(busybox readlink /again)"
        fails cat /again
        is twice last "$(cat /twice)"
        is 'file instead of a directory' file "$(cat /thing)"
        is 'files beside the devices' 'absolute' "$(ls /srv)"
        works grep root /etc/passwd
        fails cat /etc/group
        "#,
    );
    let mut pods: Vec<Value> = REJECTED
        .iter()
        .map(|(name, ..)| image_pod(name, &format!("coracle.test/{name}:1"), json!({})))
        .collect();
    pods.push(pod("odd", json!({}), &[checks]));
    cluster.create_objects(&pods);
    for (name, _, expected) in REJECTED {
        wait_for_pull_error(&mut cluster, name, expected);
    }
    cluster.assert_checks_pass(&["odd"]);
    let outside =
        "ls -d /tmp/escaped* /escaped* /srv/absolute /tmp/coracle-*/escaped* 2> /dev/null; true";
    assert_eq!(lab.root("node1", outside).stdout, "");
    // Partially unpacked layers are removed. A retry may be in progress.
    wait_until(30, "no partial layer is left", || {
        let partial = "ls -d /tmp/coracle-*/layers/.new-* 2> /dev/null; true";
        lab.root("node1", partial).stdout.is_empty()
    });
    cluster.exit(0);
    let names: Vec<_> = REJECTED
        .iter()
        .map(|(name, ..)| format!("coracle.test/{name}:1"))
        .collect();
    lab.sh(&format!("coracle image rm {odd} {}", names.join(" ")))
        .run()
        .succeeded();
    lab.assert_nothing_left();
}
