//! Corner cases in which the kubelet must behave like upstream's: deadlines without a sandbox, runtime classes, termination
//! messages, groups, OOM scores.

use e2e::{BUSYBOX, Lab, TestCluster, checking_pod, condition, container_status, merged, pod};
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
    let lab = Lab::acquire();
    lab.load_busybox();
    lab.load_image(
        GROUPS,
        json!({"Env": ["PATH=/bin"]}),
        "mkdir etc && echo app:x:1000:1000::/:/bin/sh > etc/passwd && echo extra:x:50000:app > etc/group && tar --create etc",
    );
    let mut cluster = TestCluster::start_as(&lab, "user1", &["srun", "-N1", "coracle", "run"]);
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
        class("unknown-handler", "kata", json!({})),
        class(
            "own-handler",
            "coracle",
            json!({"overhead": {"podFixed": {"cpu": "10m"}}}),
        ),
        class(
            "large-overhead",
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
            "deadline",
            json!({"activeDeadlineSeconds": 3, "volumes": [{"name": "v", "configMap": {"name": "none"}}]}),
            &[main_container(json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]}))],
        ),
        pod("bound", json!({"nodeName": name}), &[main_container(shell("true"))]),
        pod("long-message", json!({}), &[main_container(shell(long))]),
        pod("long-messages", json!({}), &four),
        pod("kata", json!({"runtimeClassName": "unknown-handler"}), &[main_container(shell("true"))]),
        pod("own-handler", json!({"runtimeClassName": "own-handler"}), &[main_container(shell("true"))]),
        pod(
            "large-overhead",
            json!({"runtimeClassName": "large-overhead", "nodeName": name}),
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
        checking_pod(
            "file",
            written,
            reader,
            "is COLOR 'blue $(X)' \"$COLOR\"; is ALL 'x blue $(X)' \"$ALL\"; is NONE unset \"${NONE-unset}\"",
        ),
        pod("no-program", json!({}), &[main_container(json!({"command": ["/none"]}))]),
    ]);

    let deadline = cluster.wait_for_phase("deadline", "Failed");
    assert_eq!(
        deadline["status"]["reason"], "DeadlineExceeded",
        "{:#}",
        deadline["status"]
    );
    cluster.wait_for_event(
        "deadline",
        "Normal DeadlineExceeded Pod was active on the node longer",
    );
    let bound = cluster.wait_for_phase("bound", "Succeeded");
    assert_eq!(condition(&bound, "PodScheduled"), "True");

    let termination_message = |pod: &Value, name: &str| {
        let terminated = &container_status(pod, name)["state"]["terminated"];
        terminated["message"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    let one = cluster.wait_for_phase("long-message", "Succeeded");
    let message = termination_message(&one, "main");
    assert!(
        message.len() == 4096 && message.ends_with("xend"),
        "{}",
        message.len()
    );
    let four = cluster.wait_for_phase("long-messages", "Succeeded");
    for name in ["a", "b", "c", "d"] {
        assert_eq!(termination_message(&four, name).len(), 3072);
    }

    cluster.wait_for_event("kata", "no runtime for \"kata\" is configured");
    cluster.wait_for_event(
        "kata",
        "Warning FailedCreatePodSandBox Failed to create pod sandbox",
    );
    assert_eq!(cluster.pod("kata")["status"]["phase"], "Pending");
    cluster.wait_for_phase("own-handler", "Succeeded");
    let large = cluster.wait_for_phase("large-overhead", "Failed");
    assert_eq!(
        large["status"]["reason"], "OutOfcpu",
        "{:#}",
        large["status"]
    );
    let (code, output) = cluster.try_shell(&format!(
        "kubectl run classless --image={BUSYBOX} --overrides=\"{{\\\"spec\\\":{{\\\"runtimeClassName\\\":\\\"none\\\"}}}}\""
    ));
    assert!(
        code != 0 && output.contains("RuntimeClass \"none\" not found"),
        "{output}"
    );

    cluster.wait_for_phase("strict", "Succeeded");
    assert_eq!(cluster.logs("strict", "main"), "1000");
    cluster.wait_for_phase("merge", "Succeeded");
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
    cluster.wait_for_phase("burstable", "Succeeded");
    let expected = (1000 - 1000 * request / capacity).min(999);
    assert_eq!(cluster.logs("burstable", "main"), expected.to_string());
    cluster.wait_for_phase("best-effort", "Succeeded");
    assert_eq!(cluster.logs("best-effort", "main"), "1000");

    cluster.assert_checks_pass(&["file"]);
    let none = cluster.wait_for_phase("no-program", "Failed");
    let status = container_status(&none, "main");
    let id = status["containerID"].as_str().unwrap_or_default();
    assert!(id.starts_with("coracle://") && id.len() == 74, "{status:#}");
    assert_eq!(status["state"]["terminated"]["containerID"], id);
    assert_eq!(status["state"]["terminated"]["reason"], "StartError");

    cluster.exit(0);
    lab.sh(&format!("coracle image rm {GROUPS}"))
        .run()
        .succeeded();
    lab.assert_nothing_left();
}

/// Runs on a disk so small that one pod can fill it.
#[test]
fn pod_that_fills_the_disk_is_evicted() {
    let lab = Lab::acquire();
    lab.load_busybox();
    lab.root(
        "node1",
        "mount --no-mtab -t tmpfs -o size=512M,mode=1777 small /tmp",
    )
    .succeeded();
    let mut cluster =
        TestCluster::start_as(&lab, "user1", &["srun", "-N1", "-wnode1", "coracle", "run"]);
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
    cluster.shell("kubectl wait node/node1 --for=condition=DiskPressure --timeout=40s");
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
    cluster.wait_for_event("writer", "Warning Evicted The node was low on resource");
    cluster.shell("kubectl wait node/node1 --for=condition=DiskPressure=False --timeout=40s");
    assert_eq!(cluster.pod("quiet")["status"]["phase"], "Running");
    cluster.exit(0);
    lab.root("node1", "umount --no-mtab /tmp").succeeded();
    lab.assert_nothing_left();
}
