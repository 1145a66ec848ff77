//! Corner cases in which the kubelet must behave like upstream's: deadlines without a sandbox, runtime classes, termination
//! messages, groups, OOM scores.

use e2e::{BUSYBOX, Cluster, Lab, condition, container, looking_pod, merged, pod};
use serde_json::{Value, json};

const GROUPS: &str = "coracle.test/groups:1";

fn main_container(more: Value) -> Value {
    merged(json!({"name": "main", "image": BUSYBOX}), more)
}

fn shell(script: &str) -> Value {
    json!({"command": ["sh", "-c", script]})
}

fn class(name: &str, handler: &str, more: Value) -> Value {
    let own = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": handler});
    merged(own, more)
}

#[test]
fn corner_cases_match_upstream() {
    let lab = Lab::ready();
    lab.load_busybox();
    lab.load_image(
        GROUPS,
        json!({"Env": ["PATH=/bin"]}),
        "mkdir etc && echo app:x:1000:1000::/:/bin/sh > etc/passwd && echo extra:x:50000:app > etc/group && tar --create etc",
    );
    let mut cluster = Cluster::start_as(&lab, "user1", &["srun", "-N1", "coracle", "run"]);
    let node = cluster.json("get nodes")["items"][0].clone();
    let name = node["metadata"]["name"].clone();

    // Features and handlers in the Node's status.
    assert_eq!(node["status"]["features"]["supplementalGroupsPolicy"], true);
    let handlers = node["status"]["runtimeHandlers"].as_array().cloned();
    let handlers: Vec<Value> = handlers.unwrap_or_default();
    for handler in &handlers {
        assert_eq!(
            handler["features"],
            json!({"recursiveReadOnlyMounts": true, "userNamespaces": true})
        );
    }
    assert_eq!(handlers.len(), 2, "{handlers:?}");

    cluster.create_objects(&[
        class("theirs", "kata", json!({})),
        class(
            "ours",
            "coracle",
            json!({"overhead": {"podFixed": {"cpu": "10m"}}}),
        ),
        class(
            "fat",
            "coracle",
            json!({"overhead": {"podFixed": {"cpu": "1000"}}}),
        ),
    ]);
    let long = "head -c 5000 /dev/zero | tr '\\0' x > /dev/termination-log; printf end >> /dev/termination-log";
    let four: Vec<Value> = ["a", "b", "c", "d"]
        .map(|name| merged(main_container(shell(long)), json!({"name": name})))
        .into();
    let strict = |policy: &str| {
        let context =
            json!({"runAsUser": 1000, "runAsGroup": 1000, "supplementalGroupsPolicy": policy});
        let mut id = main_container(json!({"command": ["id", "-G"]}));
        id["image"] = json!(GROUPS);
        pod(
            &policy.to_lowercase(),
            json!({"securityContext": context}),
            &[id],
        )
    };
    let request = 64_u64 << 20;
    let score = merged(
        shell("cat /proc/self/oom_score_adj"),
        json!({"resources": {"requests": {"memory": request.to_string()}}}),
    );
    let written = json!({
        "volumes": [{"name": "v", "emptyDir": {}}],
        "initContainers": [merged(
            main_container(shell("printf \"COLOR='blue \\$(X)'\\n\" > /v/env")),
            json!({"name": "writer", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}),
        )],
    });
    let from_file = |key: &str| json!({"fileKeyRef": {"volumeName": "v", "path": "env", "key": key, "optional": key == "NONE"}});
    let reader = json!({"env": [
        {"name": "X", "value": "x"},
        {"name": "COLOR", "valueFrom": from_file("COLOR")},
        {"name": "NONE", "valueFrom": from_file("NONE")},
        {"name": "ALL", "value": "$(X) $(COLOR)"},
    ]});
    cluster.create_objects(&[
        pod(
            "late",
            json!({"activeDeadlineSeconds": 3, "volumes": [{"name": "v", "configMap": {"name": "none"}}]}),
            &[main_container(json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]}))],
        ),
        pod("bound", json!({"nodeName": name}), &[main_container(shell("true"))]),
        pod("talkative", json!({}), &[main_container(shell(long))]),
        pod("talkative-4", json!({}), &four),
        pod("kata", json!({"runtimeClassName": "theirs"}), &[main_container(shell("true"))]),
        pod("ours", json!({"runtimeClassName": "ours"}), &[main_container(shell("true"))]),
        pod(
            "fat",
            json!({"runtimeClassName": "fat", "nodeName": name}),
            &[main_container(shell("true"))],
        ),
        strict("Strict"),
        strict("Merge"),
        pod("burstable", json!({}), &[main_container(score)]),
        pod(
            "best-effort",
            json!({}),
            &[main_container(shell("cat /proc/self/oom_score_adj"))],
        ),
        looking_pod(
            "file",
            written,
            reader,
            "is COLOR 'blue $(X)' \"$COLOR\"; is ALL 'x blue $(X)' \"$ALL\"; is NONE unset \"${NONE-unset}\"",
        ),
        pod("no-program", json!({}), &[main_container(json!({"command": ["/none"]}))]),
    ]);

    let late = cluster.in_phase("late", "Failed");
    assert_eq!(
        late["status"]["reason"], "DeadlineExceeded",
        "{:#}",
        late["status"]
    );
    cluster.event(
        "late",
        "Normal DeadlineExceeded Pod was active on the node longer",
    );
    let bound = cluster.in_phase("bound", "Succeeded");
    assert_eq!(condition(&bound, "PodScheduled"), "True");

    let last_words = |pod: &Value, name: &str| {
        let ended = &container(pod, name)["state"]["terminated"];
        ended["message"].as_str().unwrap_or_default().to_owned()
    };
    let one = cluster.in_phase("talkative", "Succeeded");
    let said = last_words(&one, "main");
    assert!(
        said.len() == 4096 && said.ends_with("xend"),
        "{}",
        said.len()
    );
    let four = cluster.in_phase("talkative-4", "Succeeded");
    for name in ["a", "b", "c", "d"] {
        assert_eq!(last_words(&four, name).len(), 3072);
    }

    cluster.event("kata", "no runtime for \"kata\" is configured");
    cluster.event(
        "kata",
        "Warning FailedCreatePodSandBox Failed to create pod sandbox",
    );
    assert_eq!(cluster.pod("kata")["status"]["phase"], "Pending");
    cluster.in_phase("ours", "Succeeded");
    let fat = cluster.in_phase("fat", "Failed");
    assert_eq!(fat["status"]["reason"], "OutOfcpu", "{:#}", fat["status"]);
    let (code, said) = cluster.try_ask(&format!(
        "kubectl run classless --image={BUSYBOX} --overrides=\"{{\\\"spec\\\":{{\\\"runtimeClassName\\\":\\\"none\\\"}}}}\""
    ));
    assert!(
        code != 0 && said.contains("RuntimeClass \"none\" not found"),
        "{said}"
    );

    cluster.in_phase("strict", "Succeeded");
    assert_eq!(cluster.logs("strict", "main"), "1000");
    cluster.in_phase("merge", "Succeeded");
    assert_eq!(cluster.logs("merge", "main"), "1000 50000");

    let capacity = node["status"]["capacity"]["memory"]
        .as_str()
        .unwrap_or_default();
    let digits = capacity.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match &capacity[digits.len()..] {
        "Ki" => 10,
        "Mi" => 20,
        "Gi" => 30,
        _ => 0,
    };
    let capacity = digits.parse::<u64>().expect("a number") << shift;
    cluster.in_phase("burstable", "Succeeded");
    let expected = (1000 - 1000 * request / capacity).min(999);
    assert_eq!(cluster.logs("burstable", "main"), expected.to_string());
    cluster.in_phase("best-effort", "Succeeded");
    assert_eq!(cluster.logs("best-effort", "main"), "1000");

    cluster.find_all_right(&["file"]);
    let none = cluster.in_phase("no-program", "Failed");
    let status = container(&none, "main");
    let id = status["containerID"].as_str().unwrap_or_default();
    assert!(id.starts_with("coracle://") && id.len() == 74, "{status:#}");
    assert_eq!(status["state"]["terminated"]["containerID"], id);
    assert_eq!(status["state"]["terminated"]["reason"], "StartError");

    cluster.exit(0);
    lab.sh(&format!("coracle image rm {GROUPS}"))
        .run()
        .succeeded();
    lab.nothing_left();
}

/// Runs on a disk so small that one pod can fill it.
#[test]
fn pod_that_fills_the_disk_is_evicted() {
    let lab = Lab::ready();
    lab.load_busybox();
    lab.root(
        "node1",
        "mount --no-mtab -t tmpfs -o size=512M,mode=1777 small /tmp",
    )
    .succeeded();
    let mut cluster =
        Cluster::start_as(&lab, "user1", &["srun", "-N1", "-wnode1", "coracle", "run"]);
    let scratch = json!({"volumes": [{"name": "v", "emptyDir": {}}]});
    let mounted = json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]});
    let writer = merged(
        shell("dd if=/dev/zero of=/v/fill bs=1048576 count=490; sleep 10000"),
        mounted.clone(),
    );
    cluster.create_objects(&[
        pod(
            "quiet",
            scratch.clone(),
            &[main_container(merged(shell("sleep 10000"), mounted))],
        ),
        pod("writer", scratch, &[main_container(writer)]),
    ]);
    cluster.wait_for("quiet", "condition=Ready");
    cluster.ask("kubectl wait node/node1 --for=condition=DiskPressure --timeout=40s");
    let evicted = cluster.pod_until("writer", "evicted", |pod| {
        pod["status"]["phase"] == "Failed"
    });
    let status = &evicted["status"];
    assert_eq!(status["reason"], "Evicted", "{status:#}");
    let message = status["message"].as_str().unwrap_or_default();
    assert!(
        message
            .starts_with("The node was low on resource: ephemeral-storage. Threshold quantity: "),
        "{message}"
    );
    assert_eq!(
        condition(&evicted, "DisruptionTarget"),
        "True TerminationByKubelet"
    );
    cluster.event("writer", "Warning Evicted The node was low on resource");
    cluster.ask("kubectl wait node/node1 --for=condition=DiskPressure=False --timeout=40s");
    assert_eq!(cluster.pod("quiet")["status"]["phase"], "Running");
    cluster.exit(0);
    lab.root("node1", "umount --no-mtab /tmp").succeeded();
    lab.nothing_left();
}
