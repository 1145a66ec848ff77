//! Root file systems of containers by each method: the kernel's overlayfs, fuse-overlayfs, and a copy.

use e2e::{BUSYBOX, Lab, TestCluster, checking_container, container_status, pod, wait_until};
use serde_json::{Value, json};

const IMAGE: &str = "coracle.test/layered:1";

/// On top of a busybox with /etc and /tmp: deleted, replaced, linked and owned files.
const LAYER: &str = r"
mkdir -p etc srv/closed
printf 'root:x:0:0:root:/root:/bin/sh\n' > etc/passwd
touch .wh.tmp etc/.wh..wh..opq
echo linked > srv/one; ln srv/one srv/two
echo owned > srv/owned; chmod 4750 srv/owned
echo closed > srv/closed/file; chmod 500 srv/closed
ln -s /srv/one srv/link
truncate --size=64M srv/sparse
tar --owner=33 --group=44 --sparse --create .wh.tmp etc/.wh..wh..opq etc/passwd srv
chmod 700 srv/closed
";

/// Checks that every container of the image has the original content, in spite of changes by others.
const CHECKS: &str = r#"
fails ls /tmp
fails cat /etc/group
is 'etc' 'hostname hosts passwd resolv.conf ' "$(ls /etc | tr '\n' ' ')"
is 'hard link' 'linked' "$(cat /srv/two)"
is 'names of the hard link' 2 "$(stat -c %h /srv/one)"
is 'link' 'linked' "$(cat /srv/link)"
is 'closed' 'closed' "$(cat /srv/closed/file)"
is 'mode' 4750 "$(stat -c %a /srv/owned)"
is 'mode of a directory' 500 "$(stat -c %a /srv/closed)"
is 'size' 67108864 "$(stat -c %s /srv/sparse)"
is 'time' "$(stat -c %Y /srv/one)" "$(stat -c %Y /srv/two)"
fails ls /mark
works busybox touch /mark /srv/closed/new
echo changed > /srv/one
is 'changed' changed "$(cat /srv/one)"
works busybox rm -r /srv/closed /etc/passwd
works busybox mkdir /srv/closed
is 'replaced directory' '' "$(ls /srv/closed)"
works busybox mv /srv /moved
is 'moved' 'owned' "$(cat /moved/owned)"
works busybox chown 7:8 /moved/owned
works busybox chmod 2711 /moved
"#;

fn with_image(script: &str) -> Value {
    checking_container(
        "main",
        json!({"image": IMAGE, "imagePullPolicy": "Never"}),
        script,
    )
}

/// A pod with the image as a volume.
fn volume(name: &str) -> Value {
    let container = checking_container(
        "main",
        json!({"volumeMounts": [
            {"name": "image", "mountPath": "/all"},
            {"name": "image", "mountPath": "/part", "subPath": "srv"},
        ]}),
        r#"
        is all 'bin etc srv ' "$(ls /all | tr '\n' ' ')"
        fails ls /all/etc/group
        is part linked "$(cat /part/one)"
        fails touch /all/new
        fails touch /part/new
        "#,
    );
    let volumes = json!([{"name": "image", "image": {"reference": IMAGE, "pullPolicy": "Never"}}]);
    pod(name, json!({"volumes": volumes}), &[container])
}

fn start(lab: &Lab, user: &str, method: &str) -> TestCluster {
    let variable = format!("CORACLE_ROOTFS={method}");
    TestCluster::start_as(
        lab,
        user,
        &["env", &variable, "srun", "-N1", "coracle", "run"],
    )
}

/// The number of fuse-overlayfs processes.
fn fuse_processes(lab: &Lab) -> usize {
    let all = lab.processes("node1").into_iter();
    all.filter(|process| process.args.contains("fuse-overlayfs -f "))
        .count()
}

#[track_caller]
fn assert_rootfs_matches_image(method: &str) {
    let lab = Lab::acquire();
    lab.load_busybox();
    lab.load_image(IMAGE, json!({"Env": ["PATH=/bin"], "Cmd": ["sh"]}), LAYER);
    let mut cluster = start(&lab, "user1", method);
    let owner = r#"is owner 33:44 "$(stat -c %u:%g /srv/owned)""#;
    let user = json!({"securityContext": {"runAsUser": 33, "runAsGroup": 44}});
    cluster.create_objects(&[
        pod("one", json!({}), &[with_image(&format!("{owner}\n{CHECKS}"))]),
        // Each container, and each run of it, has its own root file system.
        pod("two", json!({}), &[with_image(CHECKS), checking_container("other", json!({"image": IMAGE}), CHECKS)]),
        pod(
            "again",
            json!({"restartPolicy": "OnFailure", "volumes": [{"name": "v", "emptyDir": {}}]}),
            &[e2e::merged(
                with_image(&format!("{CHECKS}\ntest -e /v/done && exit 0; busybox touch /v/done; exit 1")),
                json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]}),
            )],
        ),
        pod(
            "user",
            user,
            &[with_image(
                r#"works cat /srv/owned; works cat /srv/closed/file; fails busybox touch /srv/closed/mine; fails busybox touch /bin/new; is me 33 "$(id -u)""#,
            )],
        ),
        pod(
            "read-only",
            json!({}),
            &[e2e::merged(
                with_image("fails busybox touch /new; works cat /srv/one"),
                json!({"securityContext": {"readOnlyRootFilesystem": true}}),
            )],
        ),
        volume("volume"),
        pod(
            "stays",
            json!({}),
            &[json!({"name": "main", "image": BUSYBOX, "command": ["sleep", "10000"]})],
        ),
    ]);
    cluster.assert_checks_pass(&["one", "two", "again", "user", "read-only", "volume"]);
    assert_eq!(
        container_status(&cluster.pod("again"), "main")["restartCount"],
        1
    );
    cluster.wait_for("stays", "condition=Ready");
    let expected = usize::from(method == "fuse-overlayfs");
    wait_until(
        10,
        "only the running container has a fuse-overlayfs",
        || fuse_processes(&lab) == expected,
    );

    // Kill the pod's sandbox, and with it all of its processes.
    let sandboxes: Vec<_> = lab
        .processes("node1")
        .into_iter()
        .filter(|process| process.args.contains("internal sandbox"))
        .collect();
    let is_outer = |pid: u32| !sandboxes.iter().any(|sandbox| sandbox.pid == pid);
    for sandbox in sandboxes.iter().filter(|sandbox| is_outer(sandbox.parent)) {
        lab.kill("node1", "KILL", sandbox);
    }
    cluster.wait_for_phase("stays", "Failed");
    wait_until(10, "no fuse-overlayfs runs", || fuse_processes(&lab) == 0);
    cluster.shell("kubectl delete pod --all --grace-period=0");
    wait_until(30, "no directory of a pod is left", || {
        let left = lab.root("node1", "ls -d /tmp/coracle-*/pods/* 2> /dev/null; true");
        left.stdout.is_empty()
    });
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn overlayfs_matches_image() {
    assert_rootfs_matches_image("overlay");
}

#[test]
fn fuse_overlayfs_matches_image() {
    assert_rootfs_matches_image("fuse-overlayfs");
}

#[test]
fn copy_matches_image() {
    assert_rootfs_matches_image("copy");
}

#[test]
fn single_id_users_can_use_all_three_methods() {
    let lab = Lab::acquire();
    lab.load_busybox_for("user2");
    for method in ["overlay", "fuse-overlayfs", "copy"] {
        let mut cluster = start(&lab, "user2", method);
        let script =
            "works touch /new; works chown 7:8 /new; works rm -r /etc/group /tmp; works mkdir /tmp";
        cluster.create_objects(&[
            pod(
                "root",
                json!({}),
                &[checking_container("main", json!({}), script)],
            ),
            pod(
                "other",
                json!({"securityContext": {"runAsUser": 1000}}),
                &[checking_container(
                    "main",
                    json!({}),
                    "works cat /etc/passwd; works touch /tmp/new; works rm /tmp/new",
                )],
            ),
        ]);
        cluster.assert_checks_pass(&["root", "other"]);
        cluster.exit(0);
    }
    lab.assert_nothing_left();
}

#[test]
fn unknown_rootfs_method_is_rejected() {
    let lab = Lab::acquire();
    lab.sh("CORACLE_ROOTFS=unionfs srun -N1 coracle run true")
        .run()
        .exited_with(64)
        .stderr_has(&["CORACLE_ROOTFS is \"unionfs\"", "overlay", "hint: "]);
    lab.sh("CORACLE_ROOTFS=copy coracle doctor")
        .run()
        .stdout_has(&["as CORACLE_ROOTFS requests"]);
    lab.assert_nothing_left();
}
