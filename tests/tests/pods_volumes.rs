//! Volumes of every kind as containers see them, and environment variables.

use std::time::Duration;

use e2e::{
    Lab, TestCluster, checking_container, checking_pod, container_status, eventually, merged, pod,
    wait_until,
};
use serde_json::{Value, json};

const ONE: &[&str] = &["srun", "-N1", "coracle", "run"];

#[track_caller]
fn cluster_of(lab: &Lab, user: &str) -> TestCluster {
    lab.load_busybox_for(user);
    TestCluster::start_as(lab, user, ONE)
}

fn object(kind: &str, name: &str, more: Value) -> Value {
    merged(
        json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}),
        more,
    )
}

/// A pod with volumes and mounts.
fn mounting(name: &str, volumes: Value, mounts: Value, script: &str) -> Value {
    checking_pod(
        name,
        json!({"volumes": volumes}),
        json!({"volumeMounts": mounts}),
        script,
    )
}

fn api_volume_pods() -> Vec<Value> {
    let config = json!({"data": {"one": "1", "two": "2"}, "binaryData": {"raw": "AAEC"}});
    let items = json!([{"key": "one", "path": "deep/er/one", "mode": 0o400}, {"key": "two", "path": "other"}]);
    vec![
        object("ConfigMap", "c", config),
        object("Secret", "s", json!({"stringData": {"key": "word"}})),
        mounting(
            "config",
            json!([{"name": "all", "configMap": {"name": "c"}}, {"name": "some", "configMap": {"name": "c", "items": items, "defaultMode": 0o440}},
                {"name": "none", "configMap": {"name": "absent", "optional": true}}, {"name": "no-item", "secret": {"secretName": "s", "optional": true, "items": [{"key": "x", "path": "x"}]}},
                {"name": "secret", "secret": {"secretName": "s", "defaultMode": 0o400}}]),
            json!([{"name": "all", "mountPath": "/all"}, {"name": "some", "mountPath": "/some"}, {"name": "none", "mountPath": "/none"}, {"name": "no-item", "mountPath": "/no-item"},
                {"name": "secret", "mountPath": "/secret"}, {"name": "all", "mountPath": "/etc/one", "subPath": "one"}]),
            r#"
is files 'one raw two' "$(echo $(ls /all))"
is one 1 "$(cat /all/one)"
is raw 000102 "$(xxd -p /all/raw)"
is mode 644 "$(stat -L -c %a /all/two)"
is link ..data/one "$(readlink /all/one)"
is "chosen files" 'deep other' "$(echo $(ls /some))"
is "the mode of others" 440 "$(stat -L -c %a /some/other)"
is "chosen file" 1 "$(cat /some/deep/er/one)"
is "its mode" 400 "$(stat -L -c %a /some/deep/er/one)"
is none '' "$(ls /none /no-item | grep -v ':$')"
is secret word "$(cat /secret/key)"
is "secret mode" 400 "$(stat -L -c %a /secret/key)"
is subPath 1 "$(cat /etc/one)"
fails touch /all/x /secret/x
fails sh -c 'echo x > /all/one'
is "secrets' file system" tmpfs "$(awk '$2 == "/secret" { print $3 }' /proc/self/mounts)"
"#,
        ),
        checking_pod(
            "projected",
            json!({"securityContext": {"runAsUser": 1000, "fsGroup": 3000}, "volumes": [{"name": "p", "projected": {"defaultMode": 0o440, "sources": [
                {"configMap": {"name": "c", "items": [{"key": "two", "path": "two"}]}}, {"secret": {"name": "s"}},
                {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
                    {"path": "cpu", "resourceFieldRef": {"containerName": "main", "resource": "requests.cpu", "divisor": "1m"}}]}},
                {"serviceAccountToken": {"path": "token", "audience": "me", "expirationSeconds": 600}}]}}]}),
            json!({"resources": {"requests": {"cpu": "250m"}}, "volumeMounts": [{"name": "p", "mountPath": "/p"}]}),
            r#"
is files 'cpu key labels token two' "$(echo $(ls /p))"
is labels 'app="projected"' "$(cat /p/labels)"
is cpu 250 "$(cat /p/cpu)"
is audience '["me"]' "$(cut -d. -f2 /p/token | tr _- /+ | base64 -d 2>/dev/null | grep -o '"aud":[^]]*]' | cut -d: -f2)"
is mode 440 "$(stat -L -c %a /p/key)"
MANY is group 3000 "$(stat -L -c %g /p/key)"
"#,
        ),
    ]
}

fn directory_volume_pods(lab_dir: &str) -> Vec<Value> {
    vec![
        checking_pod(
            "empty",
            json!({"securityContext": {"fsGroup": 3000}, "volumes": [{"name": "disk", "emptyDir": {}}, {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}}]}),
            json!({"env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}], "volumeMounts": [{"name": "disk", "mountPath": "/disk"}, {"name": "memory", "mountPath": "/memory"},
                {"name": "disk", "mountPath": "/sub", "subPath": "a/b"}, {"name": "disk", "mountPath": "/expr", "subPathExpr": "of-$(POD)"},
                {"name": "disk", "mountPath": "/ro", "readOnly": true}, {"name": "memory", "mountPath": "/all-ro", "readOnly": true, "recursiveReadOnly": "Enabled"}]}),
            r#"
works touch /disk/x /memory/x
is memory tmpfs "$(awk '$2 == "/memory" { print $3 }' /proc/self/mounts)"
fails dd if=/dev/zero of=/memory/big bs=1M count=8
works sh -c 'rm /memory/big; dd if=/dev/zero of=/memory/small bs=1M count=2'
works touch /sub/y /expr/z
works test -e /disk/a/b/y -a -e /disk/of-empty/z
works cat /ro/x /all-ro/x
fails touch /ro/w
fails touch /all-ro/w
MANY is group 3000 "$(stat -c %g /disk)"
MANY is 'bits of the volume' 2777 "$(stat -c %a /disk)"
"#,
        ),
        mounting(
            "host",
            json!([{"name": "dir", "hostPath": {"path": format!("{lab_dir}/data"), "type": "Directory"}}, {"name": "new", "hostPath": {"path": format!("{lab_dir}/new/er"), "type": "DirectoryOrCreate"}},
                {"name": "file", "hostPath": {"path": format!("{lab_dir}/data/file"), "type": "File"}}, {"name": "new-file", "hostPath": {"path": format!("{lab_dir}/made"), "type": "FileOrCreate"}},
                {"name": "null", "hostPath": {"path": "/dev/null", "type": "CharDevice"}}, {"name": "any", "hostPath": {"path": format!("{lab_dir}/data")}},
                {"name": "socket", "hostPath": {"path": format!("{lab_dir}/socket"), "type": "Socket"}}, {"name": "block", "hostPath": {"path": format!("{lab_dir}/block"), "type": "BlockDevice"}},
                {"name": "absent", "hostPath": {"path": format!("{lab_dir}/absent")}}, {"name": "link", "hostPath": {"path": format!("{lab_dir}/link"), "type": "Directory"}}]),
            json!([{"name": "dir", "mountPath": "/dir"}, {"name": "new", "mountPath": "/new"}, {"name": "file", "mountPath": "/file", "readOnly": true}, {"name": "new-file", "mountPath": "/new-file"},
                {"name": "null", "mountPath": "/null"}, {"name": "any", "mountPath": "/any", "mountPropagation": "HostToContainer"}, {"name": "socket", "mountPath": "/socket"},
                {"name": "block", "mountPath": "/block"}, {"name": "absent", "mountPath": "/absent"}, {"name": "link", "mountPath": "/link"}]),
            r#"
is file content "$(cat /dir/file)"
is 'same file' content "$(cat /file)"
fails sh -c 'echo x > /file'
works touch /dir/from-the-pod /new/x /any/x
works sh -c 'echo x > /null; echo y > /new-file'
works test -S /socket -a -b /block
works touch /absent/x
is 'through a link' content "$(cat /link/file)"
"#,
        ),
        mounting(
            "image",
            json!([{"name": "i", "image": {"reference": "coracle.test/data:1"}}]),
            json!([{"name": "i", "mountPath": "/i"}]),
            "is data hello \"$(cat /i/data/file)\"\nfails touch /i/x\n",
        ),
    ]
}

/// Pods that must not start, and texts of their events.
const FAILING: &[(&str, &str, &str)] = &[
    (
        "no-config",
        r#"{"configMap": {"name": "absent"}}"#,
        r#"MountVolume.SetUp failed for volume "v" : configmap "absent" not found"#,
    ),
    (
        "no-secret",
        r#"{"secret": {"secretName": "absent"}}"#,
        r#"MountVolume.SetUp failed for volume "v" : secret "absent" not found"#,
    ),
    (
        "no-key",
        r#"{"configMap": {"name": "c", "items": [{"key": "absent", "path": "x"}]}}"#,
        "non-existent config key: absent",
    ),
    (
        "not-a-dir",
        r#"{"hostPath": {"path": "/dev/null", "type": "Directory"}}"#,
        "hostPath type check failed: /dev/null is not a directory",
    ),
    (
        "not-a-file",
        r#"{"hostPath": {"path": "/dev/null", "type": "File"}}"#,
        "hostPath type check failed: /dev/null is not a file",
    ),
    (
        "not-a-socket",
        r#"{"hostPath": {"path": "/tmp", "type": "Socket"}}"#,
        "hostPath type check failed: /tmp is not a socket file",
    ),
    (
        "not-a-device",
        r#"{"hostPath": {"path": "/tmp", "type": "BlockDevice"}}"#,
        "hostPath type check failed: /tmp is not a block device",
    ),
    (
        "no-char-device",
        r#"{"hostPath": {"path": "/tmp", "type": "CharDevice"}}"#,
        "hostPath type check failed: /tmp is not a character device",
    ),
    (
        "no-new-dir",
        r#"{"hostPath": {"path": "/dev/null", "type": "DirectoryOrCreate"}}"#,
        "hostPath type check failed: /dev/null is not a directory",
    ),
    (
        "no-new-file",
        r#"{"hostPath": {"path": "/tmp", "type": "FileOrCreate"}}"#,
        "hostPath type check failed: /tmp is not a file",
    ),
    (
        "no-dir-for-file",
        r#"{"hostPath": {"path": "/tmp/none/file", "type": "FileOrCreate"}}"#,
        "cannot create /tmp/none/file: No such file or directory",
    ),
    (
        "huge-pages",
        r#"{"emptyDir": {"medium": "HugePages"}}"#,
        "Coracle does not support emptyDir on huge pages",
    ),
    (
        "not-allowed",
        r#"{"hostPath": {"path": "/etc/new/er", "type": "DirectoryOrCreate"}}"#,
        "/etc/new",
    ),
    (
        "no-nfs",
        r#"{"nfs": {"server": "nas", "path": "/x"}}"#,
        "nas:/x is not mounted on this node",
    ),
];

#[test]
fn volumes_of_every_kind_match_the_api() {
    let lab = Lab::acquire();
    for user in ["user1", "user2"] {
        let mut cluster = cluster_of(&lab, user);
        let many = if user == "user1" { "" } else { "#" };
        let home = format!("/home/{user}/volumes");
        lab.sh(&format!(
            "mkdir -p {home}/data && echo content > {home}/data/file && ln -s data {home}/link && perl -MIO::Socket::UNIX -e 'IO::Socket::UNIX->new(Local => $ARGV[0], Listen => 1) or die' {home}/socket"
        ))
        .user(user)
        .run()
        .succeeded();
        // Only the type of the file matters. The device is never opened.
        let device = format!("mknod {home}/block b 7 99 && chmod 666 {home}/block");
        lab.root("login", &device).succeeded();
        if user == "user1" {
            lab.load_image(
                "coracle.test/data:1",
                json!({}),
                "mkdir data && echo hello > data/file && tar --create data",
            );
        }
        let mut objects = api_volume_pods();
        objects.extend(
            directory_volume_pods(&home)
                .into_iter()
                .filter(|pod| user == "user1" || pod["metadata"]["name"] != "image"),
        );
        for (name, source, _) in FAILING {
            let mut volume: Value = serde_json::from_str(source).unwrap();
            volume["name"] = json!("v");
            objects.push(mounting(
                name,
                json!([volume]),
                json!([{"name": "v", "mountPath": "/v"}]),
                "true",
            ));
        }
        let text = Value::from(objects).to_string().replace("MANY ", many);
        let objects: Vec<Value> = serde_json::from_str(&text).unwrap();
        cluster.create_objects(&objects);
        let mut pods = vec!["config", "projected", "empty", "host"];
        if user == "user1" {
            pods.push("image");
        }
        cluster.assert_checks_pass(&pods);
        let files = lab
            .sh(&format!("cd {home} && ls data new/er && cat made"))
            .user(user)
            .run()
            .succeeded();
        files.stdout_has(&["from-the-pod", "y"]);
        for (name, _, expected) in FAILING {
            cluster.wait_for_event(name, expected);
            assert_eq!(cluster.pod(name)["status"]["phase"], "Pending", "{name}");
        }
        cluster.exit(0);
        lab.sh(&format!("rm -r {home}"))
            .user(user)
            .run()
            .succeeded();
    }
    lab.assert_nothing_left();
}

/// Fifty keys with the same value.
fn fifty_keys(value: &str) -> Value {
    (0..50)
        .map(|i| (format!("key-{i}"), json!(format!("{value}\n"))))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

#[test]
fn updates_reach_running_pods_atomically() {
    let lab = Lab::acquire();
    let mut cluster = cluster_of(&lab, "user1");
    let script = r#"
seen=
while :; do
  now="$(cat /c/one) $(cat /s/key) $(grep -o 'color=.*' /d/labels) $(cat /sub) $(cat /late/x 2>/dev/null)"
  [ "$now" = "$seen" ] || echo "now: $now"
  seen=$now
  sleep 0.1
done
"#;
    let mounts = json!([{"name": "c", "mountPath": "/c"}, {"name": "s", "mountPath": "/s"}, {"name": "d", "mountPath": "/d"},
        {"name": "c", "mountPath": "/sub", "subPath": "one"}, {"name": "late", "mountPath": "/late"}]);
    let volumes = json!([{"name": "c", "configMap": {"name": "c"}}, {"name": "s", "secret": {"secretName": "s"}}, {"name": "late", "configMap": {"name": "late", "optional": true}},
        {"name": "d", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}}]);
    cluster.create_objects(&[
        object("ConfigMap", "c", json!({"data": {"one": "1", "two": "2"}})),
        object("Secret", "s", json!({"stringData": {"key": "word"}})),
        object("ConfigMap", "many", json!({"data": fifty_keys("first")})),
        mounting("watcher", volumes, mounts, script),
        // A process in the `..data` directory sees files of one version only.
        mounting(
            "atomic",
            json!([{"name": "m", "configMap": {"name": "many"}}]),
            json!([{"name": "m", "mountPath": "/m"}]),
            r#"
while :; do
  cd -P /m/..data 2> /dev/null || continue
  seen=$(cat ./key-* 2> /dev/null | sort -u)
  case $seen in *first*second*) echo mixed;; first | second | '') ;; third) echo done; exit;; *) echo "odd: $seen";; esac
  sleep 0.02
done
"#,
        ),
    ]);
    cluster.wait_for_phase("watcher", "Running");
    cluster.wait_for_phase("atomic", "Running");
    for value in ["second", "first", "second", "first", "second", "third"] {
        let patch = json!({"data": fifty_keys(value)});
        cluster.shell(&format!("kubectl patch configmap many --patch '{patch}'"));
    }
    cluster.wait_for_phase("atomic", "Succeeded");
    assert_eq!(cluster.logs("atomic", "main"), "done");
    let wait_for_update = |cluster: &mut TestCluster, command: &str, expected: &str| {
        if !command.is_empty() {
            cluster.shell(command);
        }
        let mut last = String::new();
        wait_until(30, expected, || {
            last = cluster.logs("watcher", "main");
            last.contains(expected)
        });
    };
    wait_for_update(&mut cluster, "", "now: 1 word  1");
    wait_for_update(
        &mut cluster,
        r#"kubectl patch configmap c --patch "{\"data\": {\"one\": \"changed\"}}""#,
        "now: changed word  1",
    );
    wait_for_update(
        &mut cluster,
        r#"kubectl patch secret s --patch "{\"stringData\": {\"key\": \"other\"}}""#,
        "now: changed other  1",
    );
    wait_for_update(
        &mut cluster,
        "kubectl label pod watcher color=blue",
        "now: changed other color=\"blue\" 1",
    );
    wait_for_update(
        &mut cluster,
        "kubectl create configmap late --from-literal=x=y",
        "now: changed other color=\"blue\" 1 y",
    );
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn variables_are_set_from_all_sources() {
    let lab = Lab::acquire();
    let mut cluster = cluster_of(&lab, "user1");
    cluster.create_objects(&[
        object("ConfigMap", "c", json!({"data": {"ONE": "1", "not-a-name.x": "odd", "DEEP": "$(ONE)"}})),
        object("Secret", "s", json!({"stringData": {"key": "word"}})),
        object("Service", "my-web", json!({"spec": {"ports": [{"name": "http", "port": 80}, {"name": "other", "port": 81, "protocol": "UDP"}]}})),
    ]);
    let service = cluster.shell("kubectl get service my-web --output=jsonpath={.spec.clusterIP}");
    let field = |path: &str| json!({"fieldRef": {"fieldPath": path}});
    let resource = |name: &str| json!({"resourceFieldRef": {"resource": name}});
    let env = json!([
        {"name": "PLAIN", "value": "a"}, {"name": "TWICE", "value": "$(PLAIN)$(PLAIN)$(LATER)$$(PLAIN)"}, {"name": "LATER", "value": "x"},
        {"name": "OF_CONFIG", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "ONE"}}}, {"name": "OF_SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}},
        {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "absent", "optional": true}}},
        {"name": "POD", "valueFrom": field("metadata.name")}, {"name": "SPACE", "valueFrom": field("metadata.namespace")}, {"name": "LABEL", "valueFrom": field("metadata.labels['app']")},
        {"name": "NODE", "valueFrom": field("spec.nodeName")}, {"name": "ACCOUNT", "valueFrom": field("spec.serviceAccountName")},
        {"name": "IP", "valueFrom": field("status.podIP")}, {"name": "HOST_IP", "valueFrom": field("status.hostIP")}, {"name": "POD_UID", "valueFrom": field("metadata.uid")},
        {"name": "CPU", "valueFrom": resource("limits.cpu")}, {"name": "MEMORY", "valueFrom": resource("requests.memory")}, {"name": "PP_ONE", "value": "over"},
    ]);
    let more = json!({"env": env, "envFrom": [{"configMapRef": {"name": "c"}, "prefix": "PP_"}, {"secretRef": {"name": "absent", "optional": true}}],
        "resources": {"limits": {"cpu": "500m", "memory": "64Mi"}, "requests": {"memory": "32Mi", "cpu": "100m"}}});
    let script = r#"
is TWICE 'aa$(LATER)$(PLAIN)' "$TWICE"
is OF_CONFIG 1 "$OF_CONFIG"
is OF_SECRET word "$OF_SECRET"
is NONE unset "${NONE-unset}"
is POD 'variables default variables node1 default' "$POD $SPACE $LABEL $NODE $ACCOUNT"
is IP "$IP" "$(ip -o -4 address show | grep -v ' lo ' | sed 's/.*inet \([0-9.]*\).*/\1/')"
is HOST_IP 10.77.0.11 "$HOST_IP"
works test ${#POD_UID} = 36
is CPU 1 "$CPU"
is MEMORY 33554432 "$MEMORY"
is PP_ONE over "$PP_ONE"
is PP_DEEP '$(ONE)' "$PP_DEEP"
is odd 1 "$(tr '\0' '\n' < /proc/1/environ | grep -c '^PP_not-a-name.x=odd$')"
is service SERVICE:80 "$MY_WEB_SERVICE_HOST:$MY_WEB_SERVICE_PORT"
is port 81 "$MY_WEB_SERVICE_PORT_OTHER"
is link udp://SERVICE:81 "$MY_WEB_PORT_81_UDP"
is kubernetes 443 "$KUBERNETES_SERVICE_PORT"
is HOSTNAME variables "$HOSTNAME"
"#;
    let without = checking_container(
        "main",
        json!({}),
        "is none '' \"$(env | grep MY_WEB)\"\nis kubernetes 443 \"$KUBERNETES_SERVICE_PORT\"",
    );
    // Without a limit, the node's allocatable resources count.
    let memory =
        cluster.shell("kubectl get node node1 --output=jsonpath={.status.allocatable.memory}");
    let number = |suffix: &str| memory.strip_suffix(suffix)?.parse::<u64>().ok();
    let memory = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("", 0)]
        .iter()
        .find_map(|(suffix, shift)| Some(number(suffix)? << shift))
        .unwrap_or_else(|| panic!("{memory}"));
    let unlimited = json!({"env": [
        {"name": "MEMORY", "valueFrom": resource("limits.memory")},
        {"name": "CPU", "valueFrom": resource("requests.cpu")}]});
    let unlimited = checking_container(
        "main",
        unlimited,
        &format!("is MEMORY {memory} \"$MEMORY\"\nis CPU 0 \"$CPU\""),
    );
    let missing = json!({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "x"}}}]});
    cluster.create_objects(&[
        pod("variables", json!({}), &[checking_container("main", more, &script.replace("SERVICE:", &format!("{service}:")))]),
        pod("no-links", json!({"enableServiceLinks": false}), &[without]),
        pod("unlimited", json!({}), &[unlimited]),
        pod("no-secret", json!({}), &[checking_container("main", missing, "true")]),
        pod("no-key", json!({}), &[checking_container("main", json!({"env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "absent"}}}]}), "true")]),
    ]);
    cluster.assert_checks_pass(&["variables", "no-links", "unlimited"]);
    for (name, expected) in [
        ("no-secret", "secret \"absent\" not found"),
        ("no-key", "couldn't find key absent in ConfigMap default/c"),
    ] {
        let status = cluster.pod_until(name, "rejected", |pod| {
            pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"]
                == "CreateContainerConfigError"
        });
        assert_eq!(
            container_status(&status, "main")["state"]["waiting"]["message"],
            expected
        );
    }
    // Once the missing object exists, the pod starts.
    cluster.shell("kubectl create secret generic absent --from-literal=x=y");
    cluster.wait_for_phase("no-secret", "Succeeded");
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn persistent_volumes_keep_data_between_pods() {
    let lab = Lab::acquire();
    let mut cluster = cluster_of(&lab, "user1");
    lab.sh("mkdir -p pv/host pv/local").run().succeeded();
    let claim = |name: &str, class: &str, volume: &str| {
        let mut spec = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}, "volumeName": volume});
        if class != "default" {
            spec["storageClassName"] = json!(class);
        }
        object("PersistentVolumeClaim", name, json!({"spec": spec}))
    };
    let volume = |name: &str, source: Value| {
        let spec = json!({"capacity": {"storage": "1Mi"}, "accessModes": ["ReadWriteOnce"], "persistentVolumeReclaimPolicy": "Retain", "storageClassName": "", "volumeMode": "Filesystem"});
        object(
            "PersistentVolume",
            name,
            json!({"spec": merged(spec, source)}),
        )
    };
    let here = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node1"]}]}]}});
    let using = |name: &str, script: &str| {
        let names = ["host", "local", "shared", "scratch"];
        let volumes: Vec<Value> = names
            .iter()
            .map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": name}}))
            .collect();
        let mounts: Vec<Value> = names
            .iter()
            .map(|name| json!({"name": name, "mountPath": format!("/{name}")}))
            .collect();
        mounting(name, Value::from(volumes), Value::from(mounts), script)
    };
    cluster.create_objects(&[
        volume("host", json!({"hostPath": {"path": "/home/user1/pv/host"}})),
        volume(
            "local",
            json!({"local": {"path": "/home/user1/pv/local"}, "nodeAffinity": here}),
        ),
        claim("host", "", "host"),
        claim("local", "", "local"),
        claim("shared", "default", ""),
        claim("scratch", "local", ""),
        using(
            "writer",
            "for v in host local shared scratch; do works sh -c \"echo $v > /$v/file\"; done",
        ),
    ]);
    cluster.assert_checks_pass(&["writer"]);
    cluster.create_objects(&[using(
        "reader",
        "for v in host local shared scratch; do is $v $v \"$(cat /$v/file)\"; done",
    )]);
    cluster.assert_checks_pass(&["reader"]);
    lab.sh("cat pv/*/file")
        .run()
        .succeeded()
        .stdout_is("host\nlocal");
    let classes = cluster.shell("kubectl get pvc shared scratch --no-headers -o custom-columns=C:.spec.storageClassName,S:.status.phase");
    assert_eq!(classes, "shared   Bound\nlocal    Bound");
    let path = cluster.shell("kubectl get pv $(kubectl get pvc shared -o jsonpath={.spec.volumeName}) -o jsonpath={.spec.hostPath.path}{.spec.local.path}{.spec.nfs.path}");
    assert!(
        path.starts_with("/home/user1/.local/share/coracle/volumes/"),
        "{path}"
    );
    lab.sh(&format!("ls {path}"))
        .user("user2")
        .run()
        .exited_with(2);
    cluster.shell("kubectl delete pod writer reader --wait --timeout=50s && kubectl delete pvc shared scratch --wait --timeout=50s");
    wait_until(20, "the directory of a deleted claim is removed", || {
        lab.sh(&format!("test -e {path}")).run().code != 0
    });
    wait_until(20, "its volume is removed", || {
        cluster.shell("kubectl get pv -o name | sort")
            == "persistentvolume/host\npersistentvolume/local"
    });
    cluster.exit(0);
    lab.remove("pv");
    lab.assert_nothing_left();
}

#[test]
fn links_cannot_lead_out_of_a_volume() {
    let lab = Lab::acquire();
    let mut cluster = cluster_of(&lab, "user1");
    let volumes = json!({"volumes": [{"name": "v", "emptyDir": {}}],
        "initContainers": [checking_container("links", json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]}), "ln -s /etc /v/absolute; ln -s ../../.. /v/up; mkdir /v/dir; ln -s dir /v/inside")]});
    let through = |name: &str, sub: &str| {
        checking_pod(
            name,
            volumes.clone(),
            json!({"volumeMounts": [{"name": "v", "mountPath": "/sub", "subPath": sub}]}),
            "ls /sub",
        )
    };
    cluster.create_objects(&[
        through("absolute", "absolute"),
        through("up", "up"),
        through("below", "absolute/ssh"),
    ]);
    for name in ["absolute", "up", "below"] {
        let state = eventually(Duration::from_secs(20), || {
            let state = cluster.pod(name)["status"]["containerStatuses"][0]["state"].to_string();
            state.contains("subPath").then_some(state)
        });
        assert!(state.is_some(), "{name}: {:#}", cluster.pod(name)["status"]);
    }
    cluster.create_objects(&[through("inside", "inside")]);
    cluster.assert_checks_pass(&["inside"]);
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn shared_volumes_span_nodes_and_full_ones_evict() {
    let lab = Lab::acquire();
    for user in ["user1", "user2"] {
        lab.load_busybox_for(user);
        let mut cluster = TestCluster::start_as(&lab, user, &["srun", "-N2", "coracle", "run"]);
        let on = |name: &str, node: &str, source: Value, script: &str| {
            let spec = json!({"nodeName": node, "volumes": [merged(json!({"name": "v"}), source)]});
            let mounts = json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]});
            checking_pod(name, spec, mounts, script)
        };
        let many = json!({"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Mi"}}});
        let claim = |read_only: bool| json!({"persistentVolumeClaim": {"claimName": "many", "readOnly": read_only}});
        let template = json!({"ephemeral": {"volumeClaimTemplate": {"spec": many}}});
        let small = json!({"emptyDir": {"sizeLimit": "1Mi"}});
        cluster.create_objects(&[
            object("PersistentVolumeClaim", "many", json!({"spec": many})),
            on(
                "first",
                "node1",
                claim(false),
                "works sh -c 'echo hello > /v/file'",
            ),
            on("own", "node1", template, "works touch /v/x"),
            on(
                "full",
                "node1",
                small,
                "dd if=/dev/zero of=/v/big bs=1M count=3 2> /dev/null; exec sleep 1003",
            ),
        ]);
        cluster.assert_checks_pass(&["first", "own"]);
        cluster.create_objects(&[on(
            "second",
            "node2",
            claim(true),
            "is file hello \"$(cat /v/file)\"\nfails touch /v/x",
        )]);
        cluster.assert_checks_pass(&["second"]);
        let claimed = cluster
            .shell("kubectl get pvc own-v --output=jsonpath={.metadata.ownerReferences[0].kind}");
        assert_eq!(claimed, "Pod");
        let full = cluster.wait_for_phase("full", "Failed");
        assert_eq!(full["status"]["reason"], "Evicted", "{full:#}");
        let message = full["status"]["message"].as_str().unwrap_or_default();
        assert!(
            message.contains("EmptyDir volume \"v\" exceeds the limit \"1Mi\""),
            "{message}"
        );
        // Once is enough: the scheduler's decision does not depend on the user.
        if user == "user1" {
            assert_local_claims_follow_their_first_pod(&lab, &mut cluster);
        }
        cluster.exit(0);
    }
    // The directories of claims are removed with their cluster.
    lab.root(
        "login",
        "find /home/user?/.local/share/coracle/volumes/ -mindepth 1",
    )
    .stdout_is("");
    lab.assert_nothing_left();
}

/// A local volume is provisioned when its first pod is scheduled. Later pods are scheduled to the same node.
#[track_caller]
fn assert_local_claims_follow_their_first_pod(lab: &Lab, cluster: &mut TestCluster) {
    let using = |name: &str, more: Value, script: &str| {
        let volumes =
            json!({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "near"}}]});
        let mounts = json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]});
        checking_pod(name, merged(volumes, more), mounts, script)
    };
    let on = |node: &str| json!({"nodeSelector": {"kubernetes.io/hostname": node}});
    let spec = json!({"storageClassName": "local", "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}});
    let near = object("PersistentVolumeClaim", "near", json!({"spec": spec}));
    cluster.create_objects(&[near]);
    cluster.wait_for_event(
        "near",
        "waiting for first consumer to be created before binding",
    );
    let waiting = cluster.json("get pvc near");
    assert_eq!(waiting["status"]["phase"], "Pending", "{waiting:#}");
    assert_eq!(waiting["spec"]["volumeName"], Value::Null, "{waiting:#}");

    let write = "works sh -c 'echo near > /v/file'";
    cluster.create_objects(&[using("pinned", on("node2"), write)]);
    cluster.assert_checks_pass(&["pinned"]);
    let volume = cluster.json("get pv $(kubectl get pvc near -o jsonpath={.spec.volumeName})");
    let here = json!([{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node2"]}]}]);
    let required = &volume["spec"]["nodeAffinity"]["required"];
    assert_eq!(required["nodeSelectorTerms"], here, "{volume:#}");
    let path = volume["spec"]["local"]["path"].as_str().expect("a path");
    lab.root("node2", &format!("cat {path}/file"))
        .stdout_is("near");
    lab.root("node1", &format!("test ! -e {path}")).succeeded();

    // Without the volume, the scheduler would spread three pods over both nodes.
    let later = ["later-1", "later-2", "later-3"];
    let read = "is file near \"$(cat /v/file)\"";
    let mut pods = later.map(|name| using(name, json!({}), read)).to_vec();
    pods.push(using("elsewhere", on("node1"), "true"));
    cluster.create_objects(&pods);
    cluster.assert_checks_pass(&later);
    for name in later {
        assert_eq!(cluster.pod(name)["spec"]["nodeName"], "node2", "{name}");
    }
    cluster.wait_for_event("elsewhere", "didn't match PersistentVolume's node affinity");
    assert_eq!(cluster.pod("elsewhere")["status"]["phase"], "Pending");

    let all = "kubectl delete pod pinned elsewhere later-1 later-2 later-3 --wait --timeout=50s";
    cluster.shell(all);
    cluster.shell("kubectl delete pvc near --wait --timeout=50s");
    wait_until(30, "the node removes the directory", || {
        lab.root("node2", &format!("test ! -e {path}")).code == 0
    });
}

#[test]
fn volumes_can_be_mounted_anywhere() {
    let lab = Lab::acquire();
    // Many images have such a link, and every pod's token is mounted below it.
    lab.load_image(
        "coracle.test/linked:1",
        json!({"Env": ["PATH=/bin"]}),
        "mkdir -p run var real etc && ln -s /run var/run && ln -s ../../../real etc/climbing && echo old > etc/file && tar --create run var real etc/climbing etc/file",
    );
    // Links as mount points, some of them dangling.
    lab.load_image(
        "coracle.test/links:1",
        json!({"Env": ["PATH=/bin"], "Volumes": {"/data": {}}}),
        "mkdir -p run var srv etc && ln -s /run var/run && ln -s srv data && echo old > srv/file && ln -s ../run/none/stub.conf etc/resolv.conf && ln -s /new/place etc/link && tar --create run var srv data etc/resolv.conf etc/link",
    );
    let mut cluster = cluster_of(&lab, "user1");
    let volumes = json!([{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}, {"name": "m", "emptyDir": {"medium": "Memory"}}, {"name": "c", "configMap": {"name": "c"}}]);
    let mounts = json!([
        {"name": "b", "mountPath": "/over/deep/er"}, {"name": "a", "mountPath": "/over"}, {"name": "m", "mountPath": "/dev/shm"},
        {"name": "c", "mountPath": "/etc/hosts", "subPath": "hosts"}, {"name": "c", "mountPath": "/etc/file", "subPath": "file"},
        {"name": "c", "mountPath": "/etc/new/file", "subPath": "file"}, {"name": "a", "mountPath": "/var/run/mine"},
        {"name": "a", "mountPath": "/etc/climbing/in", "subPath": "sub"}, {"name": "c", "mountPath": "/tmp"},
    ]);
    let own = json!({"image": "coracle.test/linked:1", "volumeMounts": mounts, "securityContext": {"readOnlyRootFilesystem": true}});
    let script = r#"
works busybox touch /over/x /over/deep/er/y /dev/shm/z /var/run/mine/w /real/in/v
works test -e /over/w -a -e /run/mine/x -a -e /over/sub/v
is hosts '192.0.2.1 mine' "$(cat /etc/hosts)"
is file new "$(cat /etc/file)"
is 'new file' new "$(cat /etc/new/file)"
is directory 'file hosts' "$(echo $(ls /tmp))"
works test -s /run/secrets/kubernetes.io/serviceaccount/token
works test -s /var/run/secrets/kubernetes.io/serviceaccount/ca.crt
fails busybox touch /x
"#;
    let on_links = json!({"image": "coracle.test/links:1", "volumeMounts": [{"name": "a", "mountPath": "/var/run"}, {"name": "b", "mountPath": "/etc/link"}]});
    let links = r#"
works busybox touch /var/run/x /etc/link/y /data/z
works test -e /run/x -a -e /new/place/y -a -e /srv/z
is volume old "$(cat /data/file)"
works grep -q 192.0.2.53 /etc/resolv.conf
works test -s /run/secrets/kubernetes.io/serviceaccount/token
"#;
    let two = json!({"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}],
        "dnsPolicy": "None", "dnsConfig": {"nameservers": ["192.0.2.53"]}});
    let over_etc = json!({"volumeMounts": [{"name": "a", "mountPath": "/etc"}]});
    let etc = r#"
works touch /etc/mine
works grep -q over-etc /etc/hosts
is hostname over-etc "$(cat /etc/hostname)"
works grep -q 192.0.2.53 /etc/resolv.conf
"#;
    cluster.create_objects(&[
        object(
            "ConfigMap",
            "c",
            json!({"data": {"hosts": "192.0.2.1 mine\n", "file": "new"}}),
        ),
        checking_pod("links", two.clone(), on_links, links),
        checking_pod("over-etc", two, over_etc, etc),
        checking_pod("anywhere", json!({"volumes": volumes}), own, script),
        checking_pod(
            "no-token",
            json!({"automountServiceAccountToken": false}),
            json!({}),
            "fails test -e /var/run/secrets/kubernetes.io",
        ),
    ]);
    cluster.assert_checks_pass(&["anywhere", "links", "over-etc", "no-token"]);
    cluster.exit(0);
    lab.assert_nothing_left();
}
