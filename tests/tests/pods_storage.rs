//! Claims and the volumes behind them: provisioning, reclaim policies, expansion, rejections, and access by other users.

use std::time::Duration;

use e2e::{Lab, Role, SmallDisk, TestCluster, checking_pod, merged, wait_until};
use serde_json::{Value, json};

const ONE: &[&str] = &["srun", "-N1", "coracle", "run"];
/// The directory of shared volumes of `user1`.
const SHARED: &str = "/home/user1/.local/share/coracle/volumes";

fn object(kind: &str, name: &str, more: Value) -> Value {
    let own = json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}});
    merged(own, more)
}

fn class(name: &str, kind: &str, more: Value) -> Value {
    let own =
        json!({"apiVersion": "storage.k8s.io/v1", "provisioner": format!("coracle.dev/{kind}")});
    object("StorageClass", name, merged(own, more))
}

fn claim(name: &str, class: &str, more: Value) -> Value {
    let mut spec =
        json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}});
    if class != "default" {
        spec["storageClassName"] = json!(class);
    }
    let spec = json!({"spec": merged(spec, more)});
    object("PersistentVolumeClaim", name, spec)
}

/// A pod that mounts claims, each at a directory of its name.
fn using(name: &str, claims: &[&str], more: Value, script: &str) -> Value {
    let volume = |name: &&str| json!({"name": name, "persistentVolumeClaim": {"claimName": name}});
    let mount = |name: &&str| json!({"name": name, "mountPath": format!("/{name}")});
    let volumes: Vec<Value> = claims.iter().map(volume).collect();
    let mounts: Vec<Value> = claims.iter().map(mount).collect();
    let spec = merged(json!({"volumes": volumes}), more);
    checking_pod(name, spec, json!({"volumeMounts": mounts}), script)
}

/// The directory of a claim's volume.
#[track_caller]
fn directory_of(cluster: &mut TestCluster, claim: &str) -> String {
    let volume = cluster.json(&format!("get pvc {claim}"))["spec"]["volumeName"].clone();
    let volume = cluster.json(&format!(
        "get pv {}",
        volume.as_str().expect("a bound claim")
    ));
    let spec = &volume["spec"];
    let path = spec["hostPath"]["path"].as_str();
    let path = path.or(spec["local"]["path"].as_str());
    path.unwrap_or_else(|| panic!("{volume:#}")).to_owned()
}

fn number(value: &Value) -> u64 {
    let text = value.as_str().unwrap_or_else(|| panic!("{value}"));
    text.parse().expect("a number")
}

fn rejected_claims() -> Vec<(Value, &'static str)> {
    let much = json!({"resources": {"requests": {"storage": "65Mi"}}});
    let source = json!({"dataSource": {"kind": "PersistentVolumeClaim", "name": "deleted"}});
    vec![
        (
            claim("block", "shared", json!({"volumeMode": "Block"})),
            "block volumes are not supported",
        ),
        (
            claim(
                "chosen",
                "shared",
                json!({"selector": {"matchLabels": {"a": "b"}}}),
            ),
            "claim Selector is not supported",
        ),
        (
            claim("copy", "shared", source),
            "claim DataSource is not supported",
        ),
        (
            claim("greedy", "shared", much),
            "68157440 bytes are requested, but only ",
        ),
        (
            claim("fast", "fast", json!({})),
            "StorageClass \"fast\" has the parameter \"speed\", but coracle.dev/shared supports no parameters",
        ),
        (
            claim("careful", "careful", json!({})),
            "StorageClass \"careful\" has the mount options [\"noexec\"], but coracle.dev/shared supports no mount options",
        ),
        (
            claim("no-class", "absent", json!({})),
            "storageclass.storage.k8s.io \"absent\" not found",
        ),
    ]
}

#[test]
fn reclaim_policy_decides_about_volumes() {
    let lab = Lab::acquire();
    lab.load_busybox();
    // A file system of 64 MiB, like a quota.
    let options = "size=64m,uid=2001,gid=2001,mode=0700";
    let disk = SmallDisk::on_node1(&lab, "quota", SHARED, options);
    lab.sh("mkdir precious && echo mine > precious/file && chmod 700 precious && chmod 600 precious/file")
        .run()
        .succeeded();
    let mut cluster = TestCluster::start_as(&lab, "user1", ONE);
    let retain = json!({"reclaimPolicy": "Retain"});
    let late = json!({"volumeBindingMode": "WaitForFirstConsumer"});
    let all = ["deleted", "deleted-local", "retained", "retained-local"];
    let much = json!({"resources": {"requests": {"storage": "1Pi"}}});
    let mut objects = vec![
        class("keep", "shared", retain.clone()),
        class("keep-local", "local", merged(retain, late)),
        class("fast", "shared", json!({"parameters": {"speed": "high"}})),
        class("careful", "shared", json!({"mountOptions": ["noexec"]})),
        claim("deleted", "default", json!({})),
        claim("deleted-local", "local", json!({})),
        claim("retained", "keep", json!({})),
        claim("retained-local", "keep-local", json!({})),
        claim("greedy-local", "local", much),
        using("too-much", &["greedy-local"], json!({}), "true"),
        // Its links lead to the user's files, and its closed directory is of another owner and without permissions: removal must
        // handle both.
        using(
            "writer",
            &all,
            json!({}),
            r#"
for v in deleted deleted-local retained retained-local; do works sh -c "echo $v > /$v/file"; done
is 'size of the file system' 67108864 "$(($(stat -f -c '%b*%S' /deleted)))"
works ln -s /home/user1/precious /deleted/link
works ln -s /home/user1/precious/file /deleted/link-to-file
works sh -c 'mkdir /deleted/closed && touch /deleted/closed/x && chown -R 1234:1234 /deleted/closed && chmod 0 /deleted/closed'
"#,
        ),
    ];
    objects.extend(rejected_claims().into_iter().map(|(claim, _)| claim));
    cluster.create_objects(&objects);
    cluster.assert_checks_pass(&["writer"]);
    cluster.create_objects(&[
        using(
            "group",
            &["deleted"],
            json!({"securityContext": {"fsGroup": 3000}}),
            r#"
is group '3000 2777' "$(stat -c '%g %a' /deleted)"
is 'group of a file' 3000 "$(stat -c %g /deleted/file)"
is 'file of another user' '1234 3000' "$(stat -c '%u %g' /deleted/closed/x)"
"#,
        ),
        using("holder", &["deleted"], json!({}), "exec sleep 1005"),
    ]);
    cluster.assert_checks_pass(&["group"]);
    lab.sh("stat -c '%a %u %g' precious precious/file")
        .run()
        .stdout_is("700 2001 2001\n600 2001 2001");

    for (claim, expected) in rejected_claims() {
        let name = claim["metadata"]["name"].as_str().unwrap();
        cluster.wait_for_event(name, expected);
        let claim = cluster.json(&format!("get pvc {name}"));
        assert_eq!(claim["status"]["phase"], "Pending", "{name}");
    }
    cluster.wait_for_event("greedy-local", "but the disk of node \"node1\" has ");
    assert_eq!(cluster.pod("too-much")["status"]["phase"], "Pending");

    assert_capacity_is_reported(&mut cluster);
    assert_claims_can_be_expanded(&mut cluster);
    let dirs = all.map(|claim| directory_of(&mut cluster, claim));
    for dir in &dirs {
        assert_inaccessible_to_others(&lab, dir);
    }

    cluster.shell("kubectl delete pod --all --wait --grace-period=1 --timeout=50s");
    cluster.shell("kubectl delete pvc --all --wait --timeout=50s");
    let exists = |dir: &str| lab.root("node1", &format!("ls -d {dir}")).code == 0;
    let [deleted, deleted_local, retained, retained_local] = &dirs;
    wait_until(30, "the directories of deleted claims are removed", || {
        !exists(deleted) && !exists(deleted_local)
    });
    wait_until(30, "only retained volumes are left", || {
        cluster.shell("kubectl get pv --no-headers --sort-by=.spec.storageClassName -o custom-columns=C:.spec.storageClassName,S:.status.phase")
            == "keep         Released\nkeep-local   Released"
    });
    for (dir, content) in [(retained, "retained"), (retained_local, "retained-local")] {
        lab.root("node1", &format!("cat {dir}/file"))
            .stdout_is(content);
    }
    lab.sh("cat precious/file").run().stdout_is("mine");
    cluster.exit(0);

    // The retained shared volume outlives its cluster. The local one is removed with the job.
    lab.root(
        "node1",
        &format!("cat {retained}/file; ls {SHARED} | wc -l"),
    )
    .stdout_is("retained\n1");
    assert!(!exists(retained_local), "{retained_local}");
    drop(disk);
    lab.remove("precious");
    lab.assert_nothing_left();
}

/// The PersistentVolume, the Node and the pod's stats have the capacity of the file system.
fn assert_capacity_is_reported(cluster: &mut TestCluster) {
    let volume = |cluster: &mut TestCluster, claim: &str| {
        let name = cluster.json(&format!("get pvc {claim}"))["spec"]["volumeName"].clone();
        cluster.json(&format!("get pv {}", name.as_str().expect("a bound claim")))["metadata"]["annotations"]
            .clone()
    };
    let shared = volume(cluster, "deleted");
    let total = number(&shared["coracle.dev/filesystem-bytes"]);
    let available = number(&shared["coracle.dev/filesystem-available-bytes"]);
    assert_eq!(total, 64 << 20, "{shared}");
    assert!(available <= total && available > 60 << 20, "{shared}");
    let local = volume(cluster, "deleted-local");
    assert!(
        number(&local["coracle.dev/filesystem-bytes"]) > 1 << 30,
        "{local}"
    );

    cluster.wait_for("holder", "condition=Ready");
    let mut last = Value::Null;
    wait_until(30, "the pod's stats include its claim", || {
        let text = cluster.shell("kubectl get --raw /api/v1/nodes/node1/proxy/stats/summary");
        last = serde_json::from_str(&text).expect("JSON");
        let pods = last["pods"].as_array().into_iter().flatten();
        let volumes = pods.flat_map(|pod| pod["volume"].as_array().into_iter().flatten());
        let mut claimed = volumes.filter(|volume| volume["pvcRef"]["name"] == "deleted");
        claimed.any(|volume| volume["capacityBytes"] == 64 << 20)
    });
}

/// Expansion works up to the capacity of the file system.
fn assert_claims_can_be_expanded(cluster: &mut TestCluster) {
    let request_size = |cluster: &mut TestCluster, size: &str| {
        let patch = json!({"spec": {"resources": {"requests": {"storage": size}}}});
        cluster.shell(&format!("kubectl patch pvc deleted --patch '{patch}'"));
    };
    request_size(cluster, "2Mi");
    let get_sizes = "kubectl get pvc deleted -o jsonpath={.status.capacity.storage}; kubectl get pv -o jsonpath={.items[*].spec.capacity.storage}";
    wait_until(30, "the claim is expanded", || {
        let sizes = cluster.shell(get_sizes);
        sizes.starts_with("2Mi") && sizes.matches("2Mi").count() == 2
    });
    request_size(cluster, "1Gi");
    cluster.wait_for_event(
        "deleted",
        "failed to resize volume: 1071644672 bytes are requested, but only ",
    );
    assert!(cluster.shell(get_sizes).starts_with("2Mi"));
}

/// Other users have no access even with the path, which is random.
#[track_caller]
fn assert_inaccessible_to_others(lab: &Lab, dir: &str) {
    let (parent, name) = dir.rsplit_once('/').expect("a path");
    let random = name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    assert!(random, "{dir}");
    lab.root("node1", &format!("cat {dir}/file")).succeeded();
    for command in ["ls", "cat", "touch"] {
        let script = format!("{command} {parent} || {command} {dir} || {command} {dir}/file");
        let tried = lab.sh(&script).user("user2").on("node1").run();
        assert_ne!(tried.code, 0, "{script}{tried}");
        tried.stderr_has(&["Permission denied"]);
    }
}

#[test]
fn local_volume_survives_late_replacement_of_its_agent() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    let on_node2 = json!({"nodeSelector": {"kubernetes.io/hostname": "node2"}});
    let write = "works sh -c 'echo kept > /data/file'";
    let read = "is content kept \"$(cat /data/file)\"";
    cluster.create_objects(&[
        claim("data", "local", json!({})),
        using("writer", &["data"], on_node2.clone(), write),
    ]);
    cluster.assert_checks_pass(&["writer"]);
    cluster.shell("kubectl delete pod writer");

    // The leader cannot start another agent for a while, and no pod uses the volume.
    let leader = lab.find("node1", Role::LeaderWorker);
    lab.kill("node1", "STOP", &leader);
    let roles = [Role::AgentGuard, Role::Agent, Role::Hub];
    let pids = roles.map(|role| lab.find("node2", role).pid.to_string());
    lab.root("node2", &format!("kill -KILL {}", pids.join(" ")));
    std::thread::sleep(Duration::from_secs(15));
    lab.kill("node1", "CONT", &leader);
    wait_until(30, "both nodes are Ready again", || {
        cluster.has_ready_nodes(2)
    });
    cluster.create_objects(&[using("reader", &["data"], on_node2, read)]);
    cluster.assert_checks_pass(&["reader"]);
    cluster.exit(0);
    lab.assert_nothing_left();
}
