//! Resource usage of nodes and pods, as kubectl, autoscalers and dashboards request it; and logs of components.

use std::time::Duration;

use e2e::{Lab, TestCluster, eventually};
use serde_json::{Value, json};

/// One container uses CPU time, one holds memory, one writes.
const BUSY: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: busy, labels: {app: busy}}
spec:
  terminationGracePeriodSeconds: 1
  volumes: [{name: v, emptyDir: {}}, {name: m, emptyDir: {medium: Memory, sizeLimit: 64Mi}}]
  containers:
  - {name: works, image: IMAGE, command: [sh, -c, 'while :; do :; done']}
  - name: holds
    image: IMAGE
    command: [sh, -c, 'x=$(head -c 24000000 /dev/zero | tr "\0" x); echo ${#x}; sleep 1000; :']
    resources: {requests: {memory: 32Mi}, limits: {memory: 128Mi}}
  - name: writes
    image: IMAGE
    command: [sh, -c, 'head -c 3000000 /dev/zero > /file; head -c 5000000 /dev/zero > /v/file; head -c 2000000 /dev/zero > /m/file; echo done; sleep 1000']
    volumeMounts: [{name: v, mountPath: /v}, {name: m, mountPath: /m}]
---
apiVersion: v1
kind: Pod
metadata: {name: idle, labels: {app: idle}}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: IMAGE, command: [sleep, '1000'], readinessProbe: {exec: {command: ['true']}, periodSeconds: 1}}]
"#;

const MB: u64 = 1_000_000;

#[test]
fn usage_of_pods_and_nodes_is_accurate() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    cluster.create(&lab, BUSY);
    for pod in ["busy", "idle"] {
        cluster.wait_for(pod, "condition=Ready");
    }
    assert!(
        eventually(Duration::from_secs(30), || {
            let written = cluster.logs("busy", "writes").contains("done");
            (written && cluster.logs("busy", "holds").contains("24000000")).then_some(())
        })
        .is_some()
    );

    assert_summary_is_accurate(&mut cluster);
    assert_metrics_have_upstreams_names(&mut cluster);
    assert_metrics_are_accurate(&mut cluster);
    assert_kubectl_top_is_accurate(&mut cluster);
    assert_node_endpoints_respond(&mut cluster);
    cluster.exit(0);
    lab.assert_nothing_left();
}

fn node_of(cluster: &mut TestCluster, pod: &str) -> String {
    let pod = cluster.pod(pod);
    pod["spec"]["nodeName"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

fn raw(cluster: &mut TestCluster, node: &str, path: &str) -> String {
    cluster.shell(&format!(
        "kubectl get --raw \"/api/v1/nodes/{node}/proxy/{path}\""
    ))
}

fn summary(cluster: &mut TestCluster, node: &str, query: &str) -> Value {
    raw_json(cluster, node, &format!("stats/summary{query}"))
}

fn raw_json(cluster: &mut TestCluster, node: &str, path: &str) -> Value {
    let text = raw(cluster, node, path);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}: {text}"))
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("no number: {value}"))
}

fn find(list: &Value, matches: impl Fn(&Value) -> bool) -> &Value {
    let all = list.as_array().into_iter().flatten();
    all.into_iter()
        .find(|item| matches(item))
        .unwrap_or_else(|| panic!("not among {list:#}"))
}

fn assert_summary_is_accurate(cluster: &mut TestCluster) {
    let node = node_of(cluster, "busy");
    let first = summary(cluster, &node, "");
    let busy = find(&first["pods"], |pod| pod["podRef"]["name"] == "busy").clone();
    let container = |name: &str| find(&busy["containers"], |found| found["name"] == name).clone();

    let (works, holds, writes) = (container("works"), container("holds"), container("writes"));
    let (work, rest) = (
        number(&works["cpu"]["usageCoreNanoSeconds"]),
        number(&writes["cpu"]["usageCoreNanoSeconds"]),
    );
    assert!(work > 100_000_000 && work > 2 * rest, "{work} {rest}");
    assert!(number(&busy["cpu"]["usageCoreNanoSeconds"]) >= work);
    let held = number(&holds["memory"]["workingSetBytes"]);
    assert!((20 * MB..200 * MB).contains(&held), "{held}");
    assert!(number(&holds["memory"]["availableBytes"]) > 60 * MB);
    assert!(number(&busy["memory"]["workingSetBytes"]) >= held);
    let root = number(&writes["rootfs"]["usedBytes"]);
    assert!((3 * MB..5 * MB).contains(&root), "{root}");
    assert!(number(&writes["rootfs"]["capacityBytes"]) > root);
    assert!(number(&writes["logs"]["usedBytes"]) > 0);
    let volume = |name: &str| find(&busy["volume"], |found| found["name"] == name).clone();
    let on_disk = number(&volume("v")["usedBytes"]);
    assert!((5 * MB..7 * MB).contains(&on_disk), "{on_disk}");
    let in_memory = number(&volume("m")["usedBytes"]);
    assert!((2 * MB..4 * MB).contains(&in_memory), "{in_memory}");
    let ephemeral = number(&busy["ephemeral-storage"]["usedBytes"]);
    assert!((8 * MB..12 * MB).contains(&ephemeral), "{ephemeral}");
    assert_eq!(busy["network"]["name"], "eth0");
    assert!(number(&busy["process_stats"]["process_count"]) >= 3);

    let of_node = &first["node"];
    assert_eq!(of_node["nodeName"], node.as_str());
    let node_memory = number(&of_node["memory"]["workingSetBytes"]);
    assert!(node_memory > held, "{node_memory}");
    assert!(number(&of_node["cpu"]["usageCoreNanoSeconds"]) >= work);
    assert!(number(&of_node["fs"]["capacityBytes"]) > 0);
    let kubelet = find(&of_node["systemContainers"], |found| {
        found["name"] == "kubelet"
    });
    assert!(number(&kubelet["memory"]["workingSetBytes"]) > MB);

    // Counters increase, and only the working container's by much.
    std::thread::sleep(Duration::from_secs(2));
    let second = summary(cluster, &node, "?only_cpu_and_memory=true");
    let later = find(&second["pods"], |pod| pod["podRef"]["name"] == "busy");
    let used = |name: &str| {
        let found = find(&later["containers"], |found| found["name"] == name);
        number(&found["cpu"]["usageCoreNanoSeconds"])
    };
    assert!(
        used("works") > work + 200_000_000,
        "{work} {}",
        used("works")
    );
    assert!(
        used("writes") < rest + 200_000_000,
        "{rest} {}",
        used("writes")
    );
    assert!(later["network"].is_null() && second["node"]["fs"].is_null());
    assert_network_bytes_are_counted(cluster, &node, &busy["network"]);
}

/// Pings the pod's gateway: 50 packets of 8000 bytes are sent and returned.
fn assert_network_bytes_are_counted(cluster: &mut TestCluster, node: &str, before: &Value) {
    let address = cluster.pod("busy")["status"]["podIP"].clone();
    let (network, _) = address
        .as_str()
        .and_then(|ip| ip.rsplit_once('.'))
        .expect("an address");
    cluster.shell(&format!(
        "kubectl exec busy -c writes -- ping -A -q -c 50 -s 8000 {network}.1"
    ));
    let summary = summary(cluster, node, "");
    let after = &find(&summary["pods"], |pod| pod["podRef"]["name"] == "busy")["network"];
    for direction in ["rxBytes", "txBytes"] {
        let grown = number(&after[direction]) - number(&before[direction]);
        assert!((400_000..800_000).contains(&grown), "{direction}: {grown}");
    }
}

fn assert_metrics_have_upstreams_names(cluster: &mut TestCluster) {
    let node = node_of(cluster, "busy");
    let resource = raw(cluster, &node, "metrics/resource");
    for line in [
        "# TYPE node_cpu_usage_seconds_total counter",
        "container_cpu_usage_seconds_total{container=\"works\",namespace=\"default\",pod=\"busy\"} ",
        "container_memory_working_set_bytes{container=\"holds\",namespace=\"default\",pod=\"busy\"} ",
        "container_start_time_seconds{container=\"works\",namespace=\"default\",pod=\"busy\"} ",
        "pod_cpu_usage_seconds_total{namespace=\"default\",pod=\"busy\"} ",
        "pod_memory_working_set_bytes{namespace=\"default\",pod=\"busy\"} ",
        "resource_scrape_error 0",
    ] {
        assert!(resource.contains(line), "no {line}\n{resource}");
    }
    let cadvisor = raw(cluster, &node, "metrics/cadvisor");
    for name in [
        "machine_cpu_cores{",
        "machine_memory_bytes{",
        "container_memory_rss{container=\"holds\"",
        "container_memory_usage_bytes{container=\"holds\"",
        "container_fs_usage_bytes{container=\"writes\"",
        "container_spec_memory_limit_bytes{container=\"holds\"",
        "container_last_seen{container=\"works\"",
        "container_network_receive_bytes_total{container=\"\"",
    ] {
        assert!(cadvisor.contains(name), "no {name}\n{cadvisor}");
    }
    let limit = "container_spec_memory_limit_bytes{container=\"holds\"";
    let line = cadvisor.lines().find(|line| line.starts_with(limit));
    assert!(
        line.is_some_and(|line| line.ends_with(" 134217728")),
        "{line:?}"
    );
    let idle = node_of(cluster, "idle");
    let probes = raw(cluster, &idle, "metrics/probes");
    let ready = |line: &&str| {
        line.starts_with("prober_probe_total{container=\"main\",namespace=\"default\",pod=\"idle\"")
            && line.contains("probe_type=\"Readiness\",result=\"successful\"}")
    };
    let count = probes
        .lines()
        .find(ready)
        .and_then(|line| line.split(' ').next_back());
    let count: Option<u64> = count.and_then(|count| count.parse().ok());
    assert!(count.is_some_and(|count| count > 0), "{probes}");
    let own = raw(cluster, &node, "metrics");
    for name in [
        "kubelet_running_pods ",
        "kubelet_running_containers{container_state=\"running\"} ",
        "process_cpu_seconds_total ",
        "process_resident_memory_bytes ",
    ] {
        assert!(own.contains(name), "no {name}\n{own}");
    }
}

/// The value of the sample with this name and all of these labels, including their quotes.
#[track_caller]
fn value(text: &str, name: &str, labels: &[&str]) -> f64 {
    let wanted = |line: &&str| {
        let rest = line.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with('{'))
            && labels.iter().all(|label| line.contains(label))
    };
    let line = text.lines().find(wanted);
    let number = line.and_then(|line| line.rsplit_once("} ")?.1.split(' ').next());
    number
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("no {name} of {labels:?}\n{text}"))
}

fn assert_metrics_are_accurate(cluster: &mut TestCluster) {
    let node = node_of(cluster, "busy");
    let resource = raw(cluster, &node, "metrics/resource");
    let cadvisor = raw(cluster, &node, "metrics/cadvisor");
    let held = 20_000_000.0..200_000_000.0;
    for (text, name) in [
        (&resource, "container_memory_working_set_bytes"),
        (&cadvisor, "container_memory_working_set_bytes"),
        (&cadvisor, "container_memory_rss"),
    ] {
        let bytes = value(text, name, &["container=\"holds\"", "pod=\"busy\""]);
        assert!(held.contains(&bytes), "{name}: {bytes}");
    }
    let swapped = value(&cadvisor, "container_memory_swap", &["container=\"holds\""]);
    assert!(swapped < held.end, "{swapped}");
    // 3 MB to its root and 5 MB to a volume went to a disk, 2 MB to memory.
    let written = |container: &str| {
        let labels = [container, "pod=\"busy\""];
        value(&cadvisor, "container_fs_writes_bytes_total", &labels)
    };
    let (writes, works) = (
        written("container=\"writes\""),
        written("container=\"works\""),
    );
    assert!((8e6..30e6).contains(&writes), "{writes}");
    assert!(works < 5e6, "{works}");

    // The working container's counter increases.
    let labels = ["container=\"works\"", "pod=\"busy\""];
    for path in ["metrics/resource", "metrics/cadvisor"] {
        let name = "container_cpu_usage_seconds_total";
        let first = value(&raw(cluster, &node, path), name, &labels);
        let grew = eventually(Duration::from_secs(60), || {
            let now = value(&raw(cluster, &node, path), name, &labels);
            (now > first + 0.2).then_some(())
        });
        assert!(grew.is_some(), "{path}: never more than {first}");
    }
}

fn assert_kubectl_top_is_accurate(cluster: &mut TestCluster) {
    let mut last = String::new();
    let shown = eventually(Duration::from_secs(60), || {
        let (code, text) = cluster.try_shell("kubectl top pods --containers --no-headers");
        last = text;
        let works = last
            .lines()
            .find(|line| line.split_whitespace().nth(1) == Some("works"))?;
        let milli: u64 = works
            .split_whitespace()
            .nth(2)?
            .strip_suffix('m')?
            .parse()
            .ok()?;
        (code == 0 && milli > 100).then_some(())
    });
    assert!(shown.is_some(), "never more than 100m CPU:\n{last}");
    let holds = last
        .lines()
        .find(|line| line.contains("holds"))
        .unwrap_or_default();
    let memory = holds
        .split_whitespace()
        .last()
        .and_then(|text| text.strip_suffix("Mi"));
    let memory: u64 = memory.and_then(|text| text.parse().ok()).unwrap_or(0);
    assert!((20..200).contains(&memory), "{last}");

    let nodes = cluster.shell("kubectl top nodes --no-headers");
    assert_eq!(nodes.lines().count(), 2, "{nodes}");
    assert!(!nodes.contains("unknown"), "{nodes}");
    let selected = cluster.shell("kubectl top pods --selector=app=idle --no-headers");
    assert!(
        selected.starts_with("idle ") && selected.lines().count() == 1,
        "{selected}"
    );
    let one = cluster.shell("kubectl top pod busy --no-headers");
    assert!(one.starts_with("busy "), "{one}");
    let status = cluster.shell("kubectl get apiservice v1beta1.metrics.k8s.io --output=jsonpath={.status.conditions[0].status}");
    assert_eq!(status, "True");
    // `view` on pods includes their metrics. Without it, access is denied.
    let can_list = |user: &str| format!("kubectl auth can-i list pods.metrics.k8s.io --as={user}");
    cluster.shell("kubectl create rolebinding reader --clusterrole=view --user=reader");
    assert_eq!(cluster.shell(&can_list("reader")), "yes");
    assert_eq!(cluster.try_shell(&can_list("other")).1, "no");
}

fn assert_node_endpoints_respond(cluster: &mut TestCluster) {
    let node = node_of(cluster, "busy");
    for check in ["healthz", "healthz/ping", "healthz/syncloop"] {
        assert_eq!(raw(cluster, &node, check), "ok", "{check}");
    }
    let config = raw_json(cluster, &node, "configz");
    assert_eq!(config["kubeletconfig"]["kind"], "KubeletConfiguration");
    let pods = raw_json(cluster, &node, "pods");
    find(&pods["items"], |pod| pod["metadata"]["name"] == "busy");
    let checkpoint = format!(
        "kubectl create --raw /api/v1/nodes/{node}/proxy/checkpoint/default/busy/works --filename=/dev/null"
    );
    let (code, output) = cluster.try_shell(&checkpoint);
    assert!(
        code != 0 && output.contains("cannot checkpoint containers"),
        "{output}"
    );

    assert!(raw(cluster, &node, "logs/").contains("kubelet.log"));
    let log = raw(cluster, &node, "logs/?query=kubelet");
    assert!(log.contains("node registered"), "{log}");
    let one = raw(cluster, &node, "logs/?query=kubelet&tailLines=1");
    assert_eq!(one.lines().count(), 1, "{one}");
    let found = raw(
        cluster,
        &node,
        "logs/?query=kubelet&pattern=node.registered",
    );
    assert_eq!(found.lines().count(), 1, "{found}");
    let path = format!("/api/v1/nodes/{node}/proxy/logs/?query=kubelet&sinceTime=yesterday");
    let (code, output) = cluster.try_shell(&format!("kubectl get --raw \"{path}\""));
    assert!(code != 0 && output.contains("BadRequest"), "{output}");
    assert_log_query_filters_by_time(cluster, &node);
}

fn assert_log_query_filters_by_time(cluster: &mut TestCluster, node: &str) {
    let now = "date --utc +%Y-%m-%dT%H:%M:%S.%NZ";
    let between = cluster.shell(now);
    // A request without credentials is rejected and logged.
    let status = cluster.json(&format!("get node {node}"))["status"].clone();
    let address = status["addresses"][0]["address"]
        .as_str()
        .unwrap_or_default();
    let port = &status["daemonEndpoints"]["kubeletEndpoint"]["Port"];
    cluster.shell(&format!(
        "curl --silent --insecure --max-time 40 https://{address}:{port}/unauthenticated"
    ));
    let after = cluster.shell(now);
    let (earlier, later) = ("node registered", "/unauthenticated");
    for (times, has_earlier, has_later) in [
        (format!("sinceTime={between}"), false, true),
        (format!("untilTime={between}"), true, false),
        (
            format!("sinceTime={between}&untilTime={after}"),
            false,
            true,
        ),
        (
            format!("sinceTime=2020-01-01T00:00:00Z&untilTime={after}"),
            true,
            true,
        ),
        (format!("sinceTime={after}"), false, false),
        ("untilTime=2020-01-01T00:00:00Z".to_owned(), false, false),
    ] {
        let text = raw(cluster, node, &format!("logs/?query=kubelet&{times}"));
        let found = (text.contains(earlier), text.contains(later));
        assert_eq!(found, (has_earlier, has_later), "{times}: {text}");
    }
}

const SCALED: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 1
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: IMAGE
        command: [sh, -c, 'while :; do :; done']
        resources: {requests: {cpu: 50m}}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: web}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: web}
  minReplicas: 1
  maxReplicas: 3
  metrics: [{type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: 50}}}]
"#;

#[test]
fn autoscaler_scales_by_usage() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    cluster.create(&lab, SCALED);
    let mut last = Value::Null;
    let scaled = eventually(Duration::from_secs(150), || {
        last = cluster.json("get horizontalpodautoscaler web");
        (last["status"]["desiredReplicas"].as_u64()? == 3).then_some(())
    });
    assert!(scaled.is_some(), "never scaled: {:#}", last["status"]);
    let used = &last["status"]["currentMetrics"][0]["resource"]["current"]["averageUtilization"];
    assert!(number(used) > 50, "{last:#}");
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn component_logs_are_available_inside_and_outside_job() {
    let lab = Lab::acquire();
    let none = lab.command(&["coracle", "logs"]).run();
    assert!(
        none.code == 66 && none.stderr.contains("no running cluster found"),
        "{none}"
    );
    let unknown = lab.command(&["coracle", "logs", "scheduler"]).run();
    assert!(
        unknown.code == 64 && unknown.stderr.contains("kube-scheduler"),
        "{unknown}"
    );

    let mut cluster = TestCluster::start(&lab);
    // Inside the job and on the login host, the commands show the same logs.
    let inside = cluster.shell("coracle logs");
    let outside = lab.command(&["coracle", "logs"]).run().succeeded().stdout;
    for list in [&inside, &outside] {
        for name in [
            "etcd",
            "kube-apiserver",
            "kube-scheduler",
            "kube-controller-manager",
        ] {
            assert!(list.contains(name), "no {name}\n{list}");
        }
    }
    let log = cluster.shell("coracle logs kube-apiserver");
    assert!(log.lines().count() > 3, "{log}");
    let tail = lab
        .command(&["coracle", "logs", "-n", "2", "etcd"])
        .run()
        .succeeded()
        .stdout;
    assert_eq!(tail.lines().count(), 2, "{tail}");
    let node = cluster.shell("kubectl get nodes --output=jsonpath={.items[1].metadata.name}");
    let component = format!("kubelet/{node}");
    let agent = lab
        .command(&["coracle", "logs", &component])
        .run()
        .succeeded()
        .stdout;
    assert!(agent.contains("node registered"), "{agent}");
    let all = cluster.shell("coracle logs kubelet --tail=1");
    assert_eq!(all.lines().count(), 2, "{all}");
    lab.command(&["coracle", "logs", "kubelet/nope"])
        .run()
        .exited_with(64)
        .stderr_has(&["no node \"nope\"", &node]);
    lab.command(&["coracle", "logs", "--job", "4000000"])
        .run()
        .exited_with(66)
        .stderr_has(&["no job 4000000", "hint: "]);

    let mut follow = lab
        .command(&["coracle", "logs", "-f", "-n", "0", "kube-apiserver"])
        .start();
    let mut round = 0;
    let seen = eventually(Duration::from_secs(40), || {
        // The API server logs a line for each new kind.
        round += 1;
        cluster.create_objects(&[new_kind(&format!("round{round}"))]);
        let printed = follow.stdout().contains("round");
        (printed || follow.has_exited()).then_some(())
    });
    let output = (follow.stdout(), follow.stderr());
    assert!(seen.is_some() && !follow.has_exited(), "{output:?}");
    cluster.exit(0);
    // The log ends with the cluster, and so does `--follow`.
    follow.wait(Duration::from_secs(30));
    lab.assert_nothing_left();
}

fn new_kind(group: &str) -> Value {
    let group = format!("{group}.coracle.dev");
    let schema = json!({"openAPIV3Schema": {"type": "object"}});
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("things.{group}")},
        "spec": {
            "group": group,
            "scope": "Cluster",
            "names": {"plural": "things", "kind": "Thing"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": schema}],
        },
    })
}
