//! The lifecycle of containers as kubectl shows it: start, exit, restart.

use e2e::{Lab, TestCluster, condition, container_status};
use serde_json::Value;

const ORDER: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: order}
spec:
  restartPolicy: Never
  volumes: [{name: v, emptyDir: {}}]
  initContainers:
  - name: first
    image: IMAGE
    command: [sh, -c, 'sleep 0.5; echo first >> /v/order']
    volumeMounts: [{name: v, mountPath: /v}]
  - name: sidecar
    restartPolicy: Always
    image: IMAGE
    command: [sh, -c, 'trap "exit 0" TERM; sleep 0.5; echo sidecar >> /v/order; touch /v/up; sleep 1000 & wait']
    startupProbe: {exec: {command: [test, -e, /v/up]}, periodSeconds: 1, failureThreshold: 30}
    volumeMounts: [{name: v, mountPath: /v}]
  - name: second
    image: IMAGE
    command: [sh, -c, 'echo second >> /v/order']
    volumeMounts: [{name: v, mountPath: /v}]
  containers:
  - name: main
    image: IMAGE
    command: [sh, -c, 'echo main >> /v/order; cat /v/order']
    volumeMounts: [{name: v, mountPath: /v}]
---
apiVersion: v1
kind: Pod
metadata: {name: init-fails}
spec:
  restartPolicy: Never
  initContainers: [{name: first, image: IMAGE, command: [sh, -c, 'exit 3']}]
  containers: [{name: main, image: IMAGE, command: [echo, never]}]
---
apiVersion: v1
kind: Pod
metadata: {name: init-again}
spec:
  restartPolicy: OnFailure
  volumes: [{name: v, emptyDir: {}}]
  initContainers:
  - name: first
    image: IMAGE
    command: [sh, -c, 'test -e /v/second || { touch /v/second; exit 3; }']
    volumeMounts: [{name: v, mountPath: /v}]
  containers: [{name: main, image: IMAGE, command: [echo, at last]}]
"#;

#[test]
fn init_containers_run_in_order_and_sidecars_stay() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    cluster.create(&lab, ORDER);

    let order = cluster.wait_for_phase("order", "Succeeded");
    let logs = cluster.logs("order", "main");
    assert_eq!(logs, "first\nsidecar\nsecond\nmain");
    for name in ["first", "second", "sidecar", "main"] {
        let ended = &container_status(&order, name)["state"]["terminated"];
        assert_eq!(ended["exitCode"], 0, "{name}: {order:#}");
        assert_eq!(ended["reason"], "Completed", "{name}: {order:#}");
        assert_eq!(container_status(&order, name)["restartCount"], 0, "{name}");
    }
    for (kind, expected) in [
        ("PodScheduled", "True"),
        ("Initialized", "True PodCompleted"),
        ("Ready", "False PodCompleted"),
        ("ContainersReady", "False PodCompleted"),
    ] {
        assert_eq!(condition(&order, kind), expected, "{kind}: {order:#}");
    }
    for reason in ["Scheduled", "Pulled", "Created", "Started"] {
        cluster.wait_for_event("order", &format!("Normal {reason} "));
    }

    let failed = cluster.wait_for_phase("init-fails", "Failed");
    let first = &container_status(&failed, "first")["state"]["terminated"];
    assert_eq!(first["exitCode"], 3, "{failed:#}");
    let main = &container_status(&failed, "main")["state"]["waiting"];
    assert_eq!(main["reason"], "PodInitializing", "{failed:#}");
    let initialized = condition(&failed, "Initialized");
    assert_eq!(initialized, "False ContainersNotInitialized");

    let again = cluster.wait_for_phase("init-again", "Succeeded");
    assert_eq!(
        container_status(&again, "first")["restartCount"],
        1,
        "{again:#}"
    );
    assert_eq!(cluster.logs("init-again", "main"), "at last");
    cluster.exit(0);
    lab.assert_nothing_left();
}

const EXITING: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: never}
spec:
  restartPolicy: Never
  containers:
  - {name: seven, image: IMAGE, command: [sh, -c, 'exit 7']}
  - {name: zero, image: IMAGE, command: ['true']}
---
apiVersion: v1
kind: Pod
metadata: {name: signals}
spec:
  restartPolicy: Never
  shareProcessNamespace: true
  containers:
  - {name: kill, image: IMAGE, command: [sh, -c, 'kill -KILL $$$$']}
  - {name: term, image: IMAGE, command: [sh, -c, 'kill -TERM $$$$']}
---
apiVersion: v1
kind: Pod
metadata: {name: on-failure}
spec:
  restartPolicy: OnFailure
  volumes: [{name: v, emptyDir: {}}]
  containers:
  - name: c
    image: IMAGE
    command: [sh, -c, 'test -e /v/second || { touch /v/second; exit 5; }']
    volumeMounts: [{name: v, mountPath: /v}]
---
apiVersion: v1
kind: Pod
metadata: {name: always}
spec:
  containers: [{name: c, image: IMAGE, command: [echo, round]}]
---
apiVersion: v1
kind: Pod
metadata: {name: own-policy}
spec:
  restartPolicy: Never
  volumes: [{name: v, emptyDir: {}}]
  containers:
  - name: c
    image: IMAGE
    restartPolicy: OnFailure
    command: [sh, -c, 'test -e /v/second || { touch /v/second; exit 5; }']
    volumeMounts: [{name: v, mountPath: /v}]
---
apiVersion: v1
kind: Pod
metadata: {name: messages}
spec:
  restartPolicy: Never
  containers:
  - name: file
    image: IMAGE
    command: [sh, -c, 'echo -n all is well > /dev/termination-log']
  - name: elsewhere
    image: IMAGE
    terminationMessagePath: /tmp/last
    command: [sh, -c, 'echo -n from elsewhere > /tmp/last; exit 1']
  - name: from-logs
    image: IMAGE
    terminationMessagePolicy: FallbackToLogsOnError
    command: [sh, -c, 'echo one; echo last line; exit 1']
  - name: well
    image: IMAGE
    terminationMessagePolicy: FallbackToLogsOnError
    command: [sh, -c, 'echo no message']
---
apiVersion: v1
kind: Pod
metadata: {name: deadline}
spec:
  activeDeadlineSeconds: 2
  terminationGracePeriodSeconds: 1
  containers: [{name: c, image: IMAGE, command: [sleep, '1000']}]
---
apiVersion: v1
kind: Pod
metadata: {name: no-program}
spec:
  restartPolicy: Never
  containers: [{name: c, image: IMAGE, command: [/no/such/program]}]
---
apiVersion: v1
kind: Pod
metadata: {name: no-image}
spec:
  containers: [{name: c, image: '127.0.0.1:1/none:1'}]
---
apiVersion: v1
kind: Pod
metadata: {name: never-pull}
spec:
  containers: [{name: c, image: 'coracle.test/none:1', imagePullPolicy: Never}]
---
apiVersion: v1
kind: Pod
metadata: {name: no-secret}
spec:
  restartPolicy: Never
  containers: [{name: c, image: IMAGE, command: [sh, -c, 'echo $VALUE'], env: [{name: VALUE, valueFrom: {secretKeyRef: {name: late, key: value}}}]}]
"#;

#[test]
fn containers_are_restarted_by_policy() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    cluster.create(&lab, EXITING);

    let never = cluster.wait_for_phase("never", "Failed");
    assert_terminated(&never, "seven", 7, "Error");
    assert_terminated(&never, "zero", 0, "Completed");
    let id = container_status(&never, "seven")["containerID"]
        .as_str()
        .unwrap();
    assert!(id.starts_with("coracle://"), "{id}");
    let image = container_status(&never, "seven")["imageID"]
        .as_str()
        .unwrap();
    assert!(image.contains("sha256:"), "{image}");

    let signals = cluster.wait_for_phase("signals", "Failed");
    assert_terminated(&signals, "kill", 137, "Error");
    assert_terminated(&signals, "term", 143, "Error");

    for name in ["on-failure", "own-policy"] {
        let pod = cluster.wait_for_phase(name, "Succeeded");
        assert_terminated(&pod, "c", 0, "Completed");
        let status = container_status(&pod, "c");
        assert_eq!(status["restartCount"], 1, "{pod:#}");
        let last = &status["lastState"]["terminated"];
        assert_eq!(last["exitCode"], 5, "{pod:#}");
    }

    let messages = cluster.wait_for_phase("messages", "Failed");
    let message =
        |name: &str| container_status(&messages, name)["state"]["terminated"]["message"].clone();
    assert_eq!(message("file"), "all is well");
    assert_eq!(message("elsewhere"), "from elsewhere");
    assert_eq!(message("from-logs"), "one\nlast line\n");
    assert_eq!(message("well"), Value::Null);

    let deadline = cluster.wait_for_phase("deadline", "Failed");
    assert_eq!(deadline["status"]["reason"], "DeadlineExceeded");
    let message = "Pod was active on the node longer than the specified deadline";
    assert_eq!(deadline["status"]["message"], message);

    let no_program = cluster.wait_for_phase("no-program", "Failed");
    assert_terminated(&no_program, "c", 128, "StartError");
    let message = container_status(&no_program, "c")["state"]["terminated"]["message"].to_string();
    assert!(message.contains("/no/such/program"), "{message}");

    let waits = |pod: &Value, reason: &str| {
        container_status(pod, "c")["state"]["waiting"]["reason"] == reason
    };
    cluster.pod_until("never-pull", "refused", |pod| {
        waits(pod, "ErrImageNeverPull")
    });
    cluster.wait_for_event(
        "no-image",
        "Warning Failed Failed to pull image \"127.0.0.1:1/none:1\"",
    );
    let no_image = cluster.pod_until("no-image", "backed off", |pod| {
        waits(pod, "ImagePullBackOff")
    });
    let message = container_status(&no_image, "c")["state"]["waiting"]["message"].to_string();
    assert!(message.contains("Back-off pulling image"), "{message}");

    cluster.pod_until("no-secret", "waiting for its secret", |pod| {
        waits(pod, "CreateContainerConfigError")
    });
    cluster.shell("kubectl create secret generic late --from-literal=value=arrived");
    cluster.wait_for_phase("no-secret", "Succeeded");
    assert_eq!(cluster.logs("no-secret", "c"), "arrived");

    let always = cluster.pod_until("always", "backed off", |pod| waits(pod, "CrashLoopBackOff"));
    let uid = always["metadata"]["uid"].as_str().unwrap();
    let status = container_status(&always, "c");
    let waiting = status["state"]["waiting"]["message"].as_str().unwrap();
    let expected = format!("s restarting failed container=c pod=always_default({uid})");
    assert!(
        waiting.starts_with("back-off ") && waiting.ends_with(&expected),
        "{waiting}"
    );
    assert!(status["restartCount"].as_u64() >= Some(1), "{always:#}");
    assert_eq!(status["lastState"]["terminated"]["exitCode"], 0);
    assert_eq!(always["status"]["phase"], "Running");
    assert_eq!(condition(&always, "Ready"), "False ContainersNotReady");
    cluster.wait_for_event(
        "always",
        "Warning BackOff Back-off restarting failed container c in pod always_default(",
    );
    let before = cluster.shell("kubectl logs always --previous");
    assert_eq!(before, "round");
    cluster.exit(0);
    lab.assert_nothing_left();
}

const PROBES: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: ready-exec}
spec:
  containers:
  - name: c
    image: IMAGE
    command: [sh, -c, 'sleep 1; touch /tmp/ready; sleep 5; rm /tmp/ready; sleep 1000']
    readinessProbe: {exec: {command: [cat, /tmp/ready]}, periodSeconds: 1, failureThreshold: 1}
---
apiVersion: v1
kind: Pod
metadata: {name: ready-net}
spec:
  containers:
  - name: http
    image: IMAGE
    command: [sh, -c, 'mkdir /www; echo hello > /www/index.html; exec httpd -f -p 8080 -h /www']
    ports: [{name: web, containerPort: 8080}]
    readinessProbe: {httpGet: {port: web, path: /}, periodSeconds: 1}
    livenessProbe: {httpGet: {port: 8080}, periodSeconds: 1}
  - name: tcp
    image: IMAGE
    command: [httpd, -f, -p, '8081']
    readinessProbe: {tcpSocket: {port: 8081}, periodSeconds: 1}
---
apiVersion: v1
kind: Pod
metadata: {name: live}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: exec
    image: IMAGE
    command: [sleep, '1000']
    livenessProbe: {exec: {command: [sh, -c, 'echo not well; exit 1']}, periodSeconds: 1, failureThreshold: 1}
  - name: http
    image: IMAGE
    command: [httpd, -f, -p, '8080', -h, /etc]
    livenessProbe: {httpGet: {port: 8080, path: /missing}, initialDelaySeconds: 1, periodSeconds: 1, failureThreshold: 1}
  - name: tcp
    image: IMAGE
    command: [sleep, '1000']
    livenessProbe: {tcpSocket: {port: 8082}, periodSeconds: 1, failureThreshold: 1}
---
apiVersion: v1
kind: Pod
metadata: {name: startup}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: slow
    image: IMAGE
    command: [sh, -c, 'sleep 4; touch /tmp/up; exec sleep 1000']
    startupProbe: {exec: {command: [test, -e, /tmp/up]}, periodSeconds: 1, failureThreshold: 60}
    livenessProbe: {exec: {command: [test, -e, /tmp/up]}, periodSeconds: 1, failureThreshold: 1}
  - name: never
    image: IMAGE
    command: [sleep, '1000']
    startupProbe: {exec: {command: ['false']}, periodSeconds: 1, failureThreshold: 1}
---
apiVersion: v1
kind: Pod
metadata: {name: hooks}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: good
    image: IMAGE
    command: [sh, -c, 'until test -e /tmp/post; do sleep 0.1; done; echo hook was here; exec sleep 1000']
    lifecycle: {postStart: {exec: {command: [touch, /tmp/post]}}}
  - name: bad
    image: IMAGE
    command: [sleep, '1000']
    lifecycle: {postStart: {exec: {command: [sh, -c, 'echo no good; exit 9']}}}
---
apiVersion: v1
kind: Pod
metadata: {name: gate}
spec:
  readinessGates: [{conditionType: example.org/gate}]
  containers: [{name: c, image: IMAGE, command: [sleep, '1000'], resources: {limits: {cpu: 10m, memory: 8Mi}}}]
"#;

#[test]
fn probes_hooks_and_gates_control_readiness_and_restarts() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    cluster.create(&lab, PROBES);

    cluster.wait_for("ready-exec", "condition=Ready");
    cluster.wait_for("ready-exec", "condition=Ready=False");
    cluster.wait_for_event("ready-exec", "Warning Unhealthy Readiness probe failed: ");
    let pod = cluster.pod("ready-exec");
    assert_eq!(container_status(&pod, "c")["restartCount"], 0, "{pod:#}");

    cluster.wait_for("ready-net", "condition=Ready");
    let pod = cluster.pod("ready-net");
    for kind in [
        "PodReadyToStartContainers",
        "Initialized",
        "Ready",
        "ContainersReady",
        "PodScheduled",
    ] {
        assert_eq!(condition(&pod, kind), "True", "{kind}: {pod:#}");
    }
    let status = &pod["status"];
    assert_eq!(status["phase"], "Running");
    assert_eq!(status["qosClass"], "BestEffort");
    assert_eq!(status["podIP"], status["podIPs"][0]["ip"]);
    assert!(
        status["podIP"].as_str().unwrap().starts_with("100."),
        "{status:#}"
    );
    assert!(
        status["hostIP"].as_str().unwrap().starts_with("10.77.0."),
        "{status:#}"
    );
    assert!(status["startTime"].is_string(), "{status:#}");
    for name in ["http", "tcp"] {
        assert_eq!(container_status(&pod, name)["started"], true, "{status:#}");
        assert!(container_status(&pod, name)["state"]["running"]["startedAt"].is_string());
    }

    for (name, event) in [
        ("exec", "Liveness probe failed: not well"),
        (
            "http",
            "Liveness probe failed: HTTP probe failed with statuscode: 404",
        ),
        ("tcp", "Liveness probe failed: dial tcp "),
    ] {
        let restarted =
            |pod: &Value| container_status(pod, name)["restartCount"].as_u64() > Some(0);
        let pod = cluster.pod_until("live", "restarted", restarted);
        let last = &container_status(&pod, name)["lastState"]["terminated"];
        // As pid 1, busybox's httpd and sleep ignore SIGTERM.
        assert_eq!(last["exitCode"], 137, "{name}: {pod:#}");
        cluster.wait_for_event("live", &format!("Warning Unhealthy {event}"));
        cluster.wait_for_event(
            "live",
            &format!("Normal Killing Container {name} failed liveness probe, will be restarted"),
        );
    }

    let ready = |pod: &Value| container_status(pod, "slow")["ready"] == true;
    let pod = cluster.pod_until("startup", "started", ready);
    assert_eq!(container_status(&pod, "slow")["restartCount"], 0, "{pod:#}");
    let again = |pod: &Value| container_status(pod, "never")["restartCount"].as_u64() > Some(0);
    cluster.pod_until("startup", "restarted", again);
    cluster.wait_for_event("startup", "Warning Unhealthy Startup probe failed: ");
    cluster.wait_for_event(
        "startup",
        "Normal Killing Container never failed startup probe, will be restarted",
    );

    cluster.wait_for_event("hooks", "Warning FailedPostStartHook PostStartHook failed");
    let again = |pod: &Value| container_status(pod, "bad")["restartCount"].as_u64() > Some(0);
    cluster.pod_until("hooks", "restarted", again);
    assert_eq!(cluster.logs("hooks", "good"), "hook was here");

    let pod = cluster.pod_until("gate", "its containers are ready", |pod| {
        condition(pod, "ContainersReady") == "True"
    });
    assert_eq!(condition(&pod, "Ready"), "False ReadinessGatesNotReady");
    assert_eq!(pod["status"]["qosClass"], "Guaranteed");
    cluster.shell(r#"kubectl patch pod gate --subresource=status --patch="{\"status\":{\"conditions\":[{\"type\":\"example.org/gate\",\"status\":\"True\"}]}}""#);
    cluster.wait_for("gate", "condition=Ready");
    cluster.exit(0);
    lab.assert_nothing_left();
}

const REJECTED: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: too-big}
spec:
  nodeName: node1
  containers: [{name: c, image: IMAGE, resources: {requests: {cpu: 1000}}}]
---
apiVersion: v1
kind: Pod
metadata: {name: elsewhere}
spec:
  nodeName: node1
  nodeSelector: {kubernetes.io/hostname: node2}
  containers: [{name: c, image: IMAGE}]
---
apiVersion: v1
kind: Pod
metadata: {name: port-2}
spec:
  nodeName: node1
  containers: [{name: c, image: IMAGE, command: [sleep, '1000'], ports: [{containerPort: 80, hostPort: 8999}]}]
"#;

const PORT: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: port-1}
spec:
  nodeName: node1
  containers: [{name: c, image: IMAGE, command: [sleep, '1000'], ports: [{containerPort: 80, hostPort: 8999}]}]
"#;

#[test]
fn node_rejects_pods_that_it_cannot_run() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    cluster.create(&lab, PORT);
    cluster.wait_for("port-1", "condition=Ready");
    cluster.create(&lab, REJECTED);
    for (name, reason) in [
        ("too-big", "OutOfcpu"),
        ("elsewhere", "NodeAffinity"),
        ("port-2", "NodePorts"),
    ] {
        let pod = cluster.wait_for_phase(name, "Failed");
        assert_eq!(pod["status"]["reason"], reason, "{pod:#}");
        let message = pod["status"]["message"].as_str().unwrap();
        assert!(message.starts_with("Pod was rejected: "), "{message}");
        assert_eq!(pod["status"]["containerStatuses"], Value::Null, "{pod:#}");
        cluster.wait_for_event(name, &format!("Warning {reason} "));
    }
    let first = cluster.pod("port-1");
    assert_eq!(condition(&first, "Ready"), "True");
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[track_caller]
fn assert_terminated(pod: &Value, name: &str, code: i32, reason: &str) {
    let terminated = &container_status(pod, name)["state"]["terminated"];
    assert_eq!(terminated["exitCode"], code, "{name}: {:#}", pod["status"]);
    assert_eq!(terminated["reason"], reason, "{name}: {:#}", pod["status"]);
    // A container that never started has no ID.
    if reason != "StartError" {
        assert!(
            terminated["containerID"].is_string(),
            "{name}: {terminated:#}"
        );
    }
}
