//! Admission of pods by a node, rejections with upstream's reasons, and host ports.

use std::time::Duration;

use e2e::{
    BUSYBOX, Lab, TestCluster, condition, container_status, eventually, merged, pod, wait_until,
};
use serde_json::{Value, json};

const ONE: &[&str] = &["srun", "-N1", "-wnode1", "coracle", "run"];

/// A pod with `nodeName` set, so that only the node itself decides.
fn bound(name: &str, spec: Value, more: Value) -> Value {
    let own = json!({"name": "c", "image": BUSYBOX, "command": ["sh", "-c", "trap exit TERM; while true; do sleep 0.2; done"]});
    let here = merged(json!({"nodeName": "node1"}), spec);
    pod(name, here, &[merged(own, more)])
}

fn with_requests(requests: Value) -> Value {
    json!({"resources": {"requests": requests}})
}

#[track_caller]
fn assert_rejected(cluster: &mut TestCluster, name: &str, reason: &str, expected: &str) {
    let pod = cluster.wait_for_phase(name, "Failed");
    let status = &pod["status"];
    assert_eq!(status["reason"], reason, "{name}: {status:#}");
    let message = status["message"].as_str().unwrap_or_default();
    assert!(
        message.starts_with("Pod was rejected: ") && message.contains(expected),
        "{name}: {message}"
    );
    assert!(status["containerStatuses"].is_null(), "{name}: {status:#}");
    assert!(status["startTime"].is_string(), "{name}: {status:#}");
    cluster.wait_for_event(name, &format!("Warning {reason} "));
}

/// Pods that the node must reject, with the reasons and messages.
fn rejected_pods() -> Vec<(Value, &'static str, &'static str)> {
    let affinity = |operator: &str, values: Value| {
        let term = json!({"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": operator, "values": values}]});
        json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}})
    };
    let none = || json!({});
    let mut windows = bound("label-os", none(), none());
    windows["metadata"]["labels"]["kubernetes.io/os"] = json!("windows");
    let claims = json!({"resourceClaims": [{"name": "d", "resourceClaimName": "none"}]});
    let device =
        json!({"volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "none"}}]});
    let profile = json!({"securityContext": {"appArmorProfile": {"type": "Localhost", "localhostProfile": "p"}}});
    vec![
        (
            bound("cpu", none(), with_requests(json!({"cpu": "1k"}))),
            "OutOfcpu",
            "enough resource: cpu, requested: 1000000, used: ",
        ),
        (
            bound("memory", none(), with_requests(json!({"memory": "10Ti"}))),
            "OutOfmemory",
            "enough resource: memory, ",
        ),
        (
            bound(
                "storage",
                none(),
                with_requests(json!({"ephemeral-storage": "10Pi"})),
            ),
            "OutOfephemeral-storage",
            "ephemeral-storage",
        ),
        (
            bound(
                "selector",
                json!({"nodeSelector": {"some": "label"}}),
                none(),
            ),
            "NodeAffinity",
            "node affinity/selector",
        ),
        (
            bound("affinity", affinity("In", json!(["node2"])), none()),
            "NodeAffinity",
            "node affinity/selector",
        ),
        (
            bound("anti-affinity", affinity("NotIn", json!(["node1"])), none()),
            "NodeAffinity",
            "node affinity/selector",
        ),
        (
            bound("os", json!({"os": {"name": "windows"}}), none()),
            "PodOSNotSupported",
            "OS field",
        ),
        (
            windows,
            "PodOSSelectorNodeLabelDoesNotMatch",
            "kubernetes.io/os",
        ),
        (
            bound("app-armor", none(), profile),
            "AppArmor",
            "without root",
        ),
        (
            bound(
                "claims",
                claims,
                json!({"resources": {"claims": [{"name": "d"}]}}),
            ),
            "PodFeatureUnsupported",
            "resourceClaims",
        ),
        (
            bound(
                "device",
                device,
                json!({"volumeDevices": [{"name": "d", "devicePath": "/d"}]}),
            ),
            "PodFeatureUnsupported",
            "volumeDevices",
        ),
    ]
}

fn bytes(quantity: &Value) -> u64 {
    let text = quantity.as_str().unwrap_or_default();
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match &text[digits.len()..] {
        "Ki" => 10,
        "Mi" => 20,
        "Gi" => 30,
        _ => 0,
    };
    digits.parse::<u64>().expect("a number") << shift
}

#[test]
fn node_rejects_pods_with_upstreams_reasons() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start_as(&lab, "user1", ONE);
    let rejected = rejected_pods();
    let objects: Vec<_> = rejected.iter().map(|(pod, ..)| pod.clone()).collect();
    cluster.create_objects(&objects);
    for (pod, reason, expected) in &rejected {
        let name = pod["metadata"]["name"].as_str().expect("a name");
        assert_rejected(&mut cluster, name, reason, expected);
    }

    // A pod is rejected while another one holds the resource, and admitted once it is free.
    let node = cluster.json("get node node1");
    let amount = bytes(&node["status"]["allocatable"]["memory"]) * 6 / 10;
    let large_pod = |name: &str| {
        bound(
            name,
            json!({}),
            with_requests(json!({"memory": amount.to_string()})),
        )
    };
    cluster.create_objects(&[large_pod("first")]);
    cluster.wait_for("first", "condition=Ready");
    cluster.create_objects(&[large_pod("second")]);
    assert_rejected(
        &mut cluster,
        "second",
        "OutOfmemory",
        &format!("requested: {amount}, used: {amount}"),
    );
    cluster.shell("kubectl delete pod first second");
    cluster.create_objects(&[large_pod("third")]);
    cluster.wait_for("third", "condition=Ready");

    assert_number_of_pods_is_limited(&mut cluster, &node);
    assert_taints_are_respected(&mut cluster);
    cluster.exit(0);
    lab.assert_nothing_left();
}

/// Fills the node up to its maximum number of pods. Most have a RuntimeClass without a handler: they count, but start no process.
#[track_caller]
fn assert_number_of_pods_is_limited(cluster: &mut TestCluster, node: &Value) {
    let max_pods: usize = node["status"]["allocatable"]["pods"]
        .as_str()
        .and_then(|count| count.parse().ok())
        .expect("a number");
    let class = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "none"}, "handler": "none"});
    let filler = |i: usize| {
        bound(
            &format!("filler-{i}"),
            json!({"runtimeClassName": "none"}),
            json!({}),
        )
    };
    // One pod already runs.
    let fillers = (1..max_pods).map(filler);
    cluster.create_objects(&[class]);
    cluster.create_objects(&fillers.collect::<Vec<_>>());
    cluster.create_objects(&[bound("too-many", json!({}), json!({}))]);
    assert_rejected(
        cluster,
        "too-many",
        "OutOfpods",
        &format!("requested: 1, used: {max_pods}, capacity: {max_pods}"),
    );
    cluster.shell("kubectl delete pod filler-1");
    cluster.create_objects(&[bound("not-too-many", json!({}), json!({}))]);
    cluster.wait_for("not-too-many", "condition=Ready");
    cluster.shell(
        "kubectl get pods --output=name | grep /filler- | xargs kubectl delete --wait=false",
    );
}

#[track_caller]
fn assert_taints_are_respected(cluster: &mut TestCluster) {
    let tolerations = json!({"tolerations": [{"key": "away", "operator": "Exists"}]});
    // NoSchedule does not matter at admission, only to the scheduler.
    cluster.shell("kubectl taint node node1 away=yes:NoSchedule");
    cluster.create_objects(&[bound("not-scheduled", tolerations.clone(), json!({}))]);
    cluster.wait_for("not-scheduled", "condition=Ready");
    cluster.shell("kubectl taint node node1 away=yes:NoExecute");
    // The node learns its taints through a separate watch, so it may admit a pod first; such a pod is evicted later.
    let mut attempts = 0;
    let seen = eventually(Duration::from_secs(40), || {
        attempts += 1;
        let name = format!("tainted-{attempts}");
        cluster.create_objects(&[bound(&name, json!({}), json!({}))]);
        let expected = "Warning TaintToleration Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate";
        eventually(Duration::from_secs(8), || {
            cluster.events(&name).contains(expected).then_some(())
        })
    });
    assert!(seen.is_some(), "no pod was rejected");
    cluster.create_objects(&[bound("tolerant", tolerations, json!({}))]);
    cluster.wait_for("tolerant", "condition=Ready");
    let stays = cluster.pod("not-scheduled");
    assert_eq!(condition(&stays, "Ready"), "True", "{stays:#}");
}

/// A web server with host ports, which serves its own name.
fn web_server(name: &str, ports: Value) -> Value {
    let script = format!(
        "mkdir /www; echo {name} > /www/index.html; trap exit TERM; httpd -f -p 80 -h /www & wait"
    );
    bound(
        name,
        json!({}),
        json!({"ports": ports, "command": ["sh", "-c", script]}),
    )
}

/// A UDP echo server, which runs the node's Python because the image has none. It requests an SCTP host port as well.
fn udp_echo_server(name: &str) -> Value {
    let script = "import signal, socket, sys\n\
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n\
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
        server.bind((\"\", 5300))\n\
        while True:\n    \
            data, sender = server.recvfrom(65535)\n    \
            server.sendto(b\"echo \" + data, sender)\n";
    bound(
        name,
        json!({"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}),
        json!({
            "command": ["chroot", "/host", "/usr/bin/python3", "-c", script],
            "volumeMounts": [{"name": "host", "mountPath": "/host"}],
            "ports": [
                {"containerPort": 5300, "hostPort": 18080, "protocol": "UDP"},
                {"containerPort": 5301, "hostPort": 18084, "protocol": "SCTP"},
            ],
        }),
    )
}

/// Twenty clients in parallel, each of which must receive its own text.
const DATAGRAMS: &str = "import socket
clients = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(20)]
for number, client in enumerate(clients):
    client.settimeout(5)
    client.sendto(str(number).encode() + b'x' * 1000, ('10.77.0.11', 18080))
print(sum(client.recv(2000) == f'echo {number}'.encode() + b'x' * 1000 for number, client in enumerate(clients)))
";

#[test]
fn host_ports_are_forwarded_to_pods() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start_as(&lab, "user1", ONE);
    let port =
        |port: u16, more: Value| merged(json!({"containerPort": 80, "hostPort": port}), more);
    // Another user's process that holds the port.
    let other = "import socket, time; s = socket.create_server(('', 18083)); print('listens', flush=True); time.sleep(1000)";
    let mut other = lab
        .command(&["python3", "-c", other])
        .user("user2")
        .on("node1")
        .start();
    other.wait_for_stdout("listens");
    cluster.create_objects(&[
        web_server(
            "web",
            json!([
                port(18080, json!({})),
                port(18081, json!({"hostIP": "127.0.0.1"}))
            ]),
        ),
        web_server(
            "other-address",
            json!([port(18081, json!({"hostIP": "127.0.0.2"}))]),
        ),
        udp_echo_server("other-protocol"),
        web_server("taken", json!([port(18083, json!({}))])),
        web_server("forbidden", json!([port(81, json!({}))])),
    ]);
    for name in ["web", "other-address", "other-protocol"] {
        cluster.wait_for(name, "condition=Ready");
    }
    cluster.create_objects(&[web_server(
        "clash",
        json!([port(18080, json!({"hostIP": "10.77.0.11"}))]),
    )]);
    assert_rejected(&mut cluster, "clash", "NodePorts", "free ports");

    let get = |host: &str, address: &str| {
        let request = lab.command(&[
            "curl",
            "--silent",
            "--max-time",
            "20",
            &format!("http://{address}/"),
        ]);
        let response = request.on(host).run();
        (response.code, response.stdout.trim().to_owned())
    };
    let page = |name: &str| (0, name.to_owned());
    wait_until(20, "the web server responds", || {
        get("login", "10.77.0.11:18080") == page("web")
    });
    assert_eq!(get("node1", "127.0.0.1:18081"), page("web"));
    wait_until(20, "the other web server responds", || {
        get("node1", "127.0.0.2:18081") == page("other-address")
    });
    assert_ne!(get("login", "10.77.0.11:18081").0, 0);
    // Many connections in parallel.
    let many = "for i in $(seq 20); do curl --silent --max-time 30 http://10.77.0.11:18080/ & done | sort | uniq -c | awk '{ print $1, $2 }'";
    lab.sh(many).run().stdout_is("20 web");

    // UDP is forwarded too, but datagrams may be lost. SCTP is not forwarded, which an event reports.
    wait_until(60, "datagrams are answered", || {
        let answered = lab.command(&["python3", "-c", DATAGRAMS]).run();
        answered.stdout.trim() == "20"
    });
    let expected = "Warning HostPortNotSupported host port 18084/SCTP is closed";
    cluster.wait_for_event("other-protocol", expected);

    // If another process holds the port, the pod reports it and starts once the port is free.
    let expected = "Warning FailedCreatePodSandBox Failed to create pod sandbox: host port 18083: ";
    cluster.wait_for_event("taken", expected);
    let waiting = cluster.pod("taken");
    assert_eq!(waiting["status"]["phase"], "Pending", "{waiting:#}");
    let state = &container_status(&waiting, "c")["state"]["waiting"];
    assert_eq!(state["reason"], "ContainerCreating", "{waiting:#}");
    cluster.wait_for_event("forbidden", "host port 81: ");
    drop(other);
    cluster.wait_for("taken", "condition=Ready");
    wait_until(20, "its web server responds", || {
        get("login", "10.77.0.11:18083") == page("taken")
    });

    cluster.shell("kubectl delete pod web");
    assert_ne!(get("login", "10.77.0.11:18080").0, 0);
    cluster.create_objects(&[web_server("again", json!([port(18080, json!({}))]))]);
    cluster.wait_for("again", "condition=Ready");
    wait_until(20, "the next web server responds", || {
        get("login", "10.77.0.11:18080") == page("again")
    });
    cluster.exit(0);
    lab.assert_nothing_left();
}
