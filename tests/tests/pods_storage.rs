//! Claims and the volumes behind them: provisioning, reclaim policies, expansion, rejections, and access by other users.

use e2e::{Cluster, Lab, SmallDisk, looking_pod, merged, wait_until};
use serde_json::{Value, json};

const ONE: &[&str] = &["srun", "-N1", "coracle", "run"];
/// The directory of shared volumes of `user1`.
const SHARED: &str = "/home/user1/.local/share/coracle/volumes";

fn object(kind: &str, name: &str, more: Value) -> Value {
    let own = json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}});
    merged(own, more)
}

fn class(name: &str, place: &str, more: Value) -> Value {
    let own =
        json!({"apiVersion": "storage.k8s.io/v1", "provisioner": format!("coracle.dev/{place}")});
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
    looking_pod(name, spec, json!({"volumeMounts": mounts}), script)
}

/// The directory of a claim's volume.
#[track_caller]
fn place_of(cluster: &mut Cluster, claim: &str) -> String {
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

fn refused() -> Vec<(Value, &'static str)> {
    let much = json!({"resources": {"requests": {"storage": "65Mi"}}});
    let source = json!({"dataSource": {"kind": "PersistentVolumeClaim", "name": "gone"}});
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
    let lab = Lab::ready();
    lab.load_busybox();
    // A file system of 64 MiB, like a quota.
    let options = "size=64m,uid=2001,gid=2001,mode=0700";
    let disk = SmallDisk::on_node1(&lab, "quota", SHARED, options);
    lab.sh("mkdir precious && echo mine > precious/file && chmod 700 precious && chmod 600 precious/file")
        .run()
        .succeeded();
    let mut cluster = Cluster::start_as(&lab, "user1", ONE);
    let retain = json!({"reclaimPolicy": "Retain"});
    let late = json!({"volumeBindingMode": "WaitForFirstConsumer"});
    let all = ["gone", "gone-local", "kept", "kept-local"];
    let much = json!({"resources": {"requests": {"storage": "1Pi"}}});
    let mut objects = vec![
        class("keep", "shared", retain.clone()),
        class("keep-local", "local", merged(retain, late)),
        class("fast", "shared", json!({"parameters": {"speed": "high"}})),
        class("careful", "shared", json!({"mountOptions": ["noexec"]})),
        claim("gone", "default", json!({})),
        claim("gone-local", "local", json!({})),
        claim("kept", "keep", json!({})),
        claim("kept-local", "keep-local", json!({})),
        claim("greedy-local", "local", much),
        using("too-much", &["greedy-local"], json!({}), "true"),
        // Its links lead to the user's files, and its closed directory is of another owner and without permissions: removal must
        // handle both.
        using(
            "writer",
            &all,
            json!({}),
            r#"
for v in gone gone-local kept kept-local; do works sh -c "echo $v > /$v/file"; done
is 'size of the file system' 67108864 "$(($(stat -f -c '%b*%S' /gone)))"
works ln -s /home/user1/precious /gone/link
works ln -s /home/user1/precious/file /gone/link-to-file
works sh -c 'mkdir /gone/closed && touch /gone/closed/x && chown -R 1234:1234 /gone/closed && chmod 0 /gone/closed'
"#,
        ),
    ];
    objects.extend(refused().into_iter().map(|(claim, _)| claim));
    cluster.create_objects(&objects);
    cluster.find_all_right(&["writer"]);
    cluster.create_objects(&[
        using(
            "group",
            &["gone"],
            json!({"securityContext": {"fsGroup": 3000}}),
            r#"
is group '3000 2777' "$(stat -c '%g %a' /gone)"
is 'group of a file' 3000 "$(stat -c %g /gone/file)"
is 'file of another user' '1234 3000' "$(stat -c '%u %g' /gone/closed/x)"
"#,
        ),
        using("holder", &["gone"], json!({}), "exec sleep 1005"),
    ]);
    cluster.find_all_right(&["group"]);
    lab.sh("stat -c '%a %u %g' precious precious/file")
        .run()
        .printed("700 2001 2001\n600 2001 2001");

    for (refused, words) in refused() {
        let name = refused["metadata"]["name"].as_str().unwrap();
        cluster.event(name, words);
        let claim = cluster.json(&format!("get pvc {name}"));
        assert_eq!(claim["status"]["phase"], "Pending", "{name}");
    }
    cluster.event("greedy-local", "but the disk of node \"node1\" has ");
    assert_eq!(cluster.pod("too-much")["status"]["phase"], "Pending");

    what_there_is_is_told(&mut cluster);
    claims_grow(&mut cluster);
    let places = all.map(|claim| place_of(&mut cluster, claim));
    for place in &places {
        nobody_else_gets_there(&lab, place);
    }

    cluster.ask("kubectl delete pod --all --wait --grace-period=1 --timeout=50s");
    cluster.ask("kubectl delete pvc --all --wait --timeout=50s");
    let is_there = |place: &str| lab.root("node1", &format!("ls -d {place}")).code == 0;
    let [gone, gone_local, kept, kept_local] = &places;
    wait_until(30, "the directories of deleted claims go", || {
        !is_there(gone) && !is_there(gone_local)
    });
    wait_until(30, "only the volumes that are kept are left", || {
        cluster.ask("kubectl get pv --no-headers --sort-by=.spec.storageClassName -o custom-columns=C:.spec.storageClassName,S:.status.phase")
            == "keep         Released\nkeep-local   Released"
    });
    for (place, words) in [(kept, "kept"), (kept_local, "kept-local")] {
        lab.root("node1", &format!("cat {place}/file"))
            .printed(words);
    }
    lab.sh("cat precious/file").run().printed("mine");
    cluster.exit(0);

    // The retained shared volume outlives its cluster. The local one is removed with the job.
    lab.root("node1", &format!("cat {kept}/file; ls {SHARED} | wc -l"))
        .printed("kept\n1");
    assert!(!is_there(kept_local), "{kept_local}");
    drop(disk);
    lab.remove("precious");
    lab.nothing_left();
}

/// The PersistentVolume, the Node and the pod's stats have the capacity of the file system.
fn what_there_is_is_told(cluster: &mut Cluster) {
    let volume = |cluster: &mut Cluster, claim: &str| {
        let name = cluster.json(&format!("get pvc {claim}"))["spec"]["volumeName"].clone();
        cluster.json(&format!("get pv {}", name.as_str().expect("a bound claim")))["metadata"]["annotations"]
            .clone()
    };
    let shared = volume(cluster, "gone");
    let total = number(&shared["coracle.dev/filesystem-bytes"]);
    let available = number(&shared["coracle.dev/filesystem-available-bytes"]);
    assert_eq!(total, 64 << 20, "{shared}");
    assert!(available <= total && available > 60 << 20, "{shared}");
    let local = volume(cluster, "gone-local");
    assert!(
        number(&local["coracle.dev/filesystem-bytes"]) > 1 << 30,
        "{local}"
    );

    cluster.wait_for("holder", "condition=Ready");
    let mut last = Value::Null;
    wait_until(30, "the pod's figures tell of its claim", || {
        let text = cluster.ask("kubectl get --raw /api/v1/nodes/node1/proxy/stats/summary");
        last = serde_json::from_str(&text).expect("JSON");
        let pods = last["pods"].as_array().into_iter().flatten();
        let volumes = pods.flat_map(|pod| pod["volume"].as_array().into_iter().flatten());
        let mut claimed = volumes.filter(|volume| volume["pvcRef"]["name"] == "gone");
        claimed.any(|volume| volume["capacityBytes"] == 64 << 20)
    });
}

/// Expansion works up to the capacity of the file system.
fn claims_grow(cluster: &mut Cluster) {
    let ask_for = |cluster: &mut Cluster, size: &str| {
        let patch = json!({"spec": {"resources": {"requests": {"storage": size}}}});
        cluster.ask(&format!("kubectl patch pvc gone --patch '{patch}'"));
    };
    ask_for(cluster, "2Mi");
    let has = "kubectl get pvc gone -o jsonpath={.status.capacity.storage}; kubectl get pv -o jsonpath={.items[*].spec.capacity.storage}";
    wait_until(30, "the claim has grown", || {
        let sizes = cluster.ask(has);
        sizes.starts_with("2Mi") && sizes.matches("2Mi").count() == 2
    });
    ask_for(cluster, "1Gi");
    cluster.event(
        "gone",
        "failed to resize volume: 1071644672 bytes are requested, but only ",
    );
    assert!(cluster.ask(has).starts_with("2Mi"));
}

/// Other users have no access even with the path, which is random.
#[track_caller]
fn nobody_else_gets_there(lab: &Lab, place: &str) {
    let (parent, name) = place.rsplit_once('/').expect("a path");
    let random = name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    assert!(random, "{place}");
    lab.root("node1", &format!("cat {place}/file")).succeeded();
    for command in ["ls", "cat", "touch"] {
        let script = format!("{command} {parent} || {command} {place} || {command} {place}/file");
        let tried = lab.sh(&script).user("user2").on("node1").run();
        assert_ne!(tried.code, 0, "{script}{tried}");
        tried.says(&["Permission denied"]);
    }
}
