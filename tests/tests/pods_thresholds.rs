//! Thresholds of probes, stop signals and grace periods of containers, and the order in which sidecars stop.

use e2e::{BUSYBOX, Lab, TestCluster, checking_pod, container_status, merged, pod};
use serde_json::{Value, json};

const SIGNALLED: &str = "coracle.test/signalled:1";
const SECURE: &str = "coracle.test/secure:1";

/// The machine's own openssl, with a self-signed certificate.
const SECURE_LAYER: &str = r"
set -eu
cp --parents --dereference /usr/bin/openssl .
ldd /usr/bin/openssl | grep --only-matching '/[^ ]*' | xargs cp --parents --dereference --target-directory=.
mkdir -p srv usr/lib/ssl
touch usr/lib/ssl/openssl.cnf
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=nobody -keyout srv/key.pem -out srv/cert.pem 2> /dev/null
chmod 644 srv/key.pem
tar --owner=0 --group=0 --create usr lib* srv
";

/// A pod whose container fails its liveness probe, so that it is restarted.
fn failing_liveness(name: &str, more: Value, container: Value, script: &str) -> Value {
    let probe = json!({"exec": {"command": ["sh", "-c", "exit 1"]}, "initialDelaySeconds": 1, "periodSeconds": 1, "failureThreshold": 1});
    let own = json!({"name": "c", "image": BUSYBOX, "command": ["sh", "-c", script], "livenessProbe": probe});
    let spec = json!({"restartPolicy": "Always", "terminationGracePeriodSeconds": 60});
    pod(name, merged(spec, more), &[merged(own, container)])
}

/// Exits with a different code for each signal.
const SIGNALS: &str = "trap 'exit 11' USR1; trap 'exit 15' TERM; while true; do sleep 0.1; done";

fn stopping_pods() -> Vec<Value> {
    let ignores_sigterm = "trap '' TERM; while true; do sleep 0.1; done";
    let short_grace = json!({"livenessProbe": {"exec": {"command": ["sh", "-c", "exit 1"]}, "initialDelaySeconds": 1, "periodSeconds": 1,
        "failureThreshold": 1, "terminationGracePeriodSeconds": 1}});
    let http_hook =
        json!({"lifecycle": {"preStop": {"httpGet": {"port": 8080, "path": "/cgi-bin/stop"}}}});
    let server = r#"trap 'cat /tmp/requested; exit 15' TERM; mkdir -p /www/cgi-bin
        printf '#!/bin/sh\necho requested > /tmp/requested; printf "Content-Type: text/plain\\r\\n\\r\\n"\n' > /www/cgi-bin/stop; chmod 755 /www/cgi-bin/stop
        httpd -p 8080 -h /www; while true; do sleep 0.1; done"#;
    let failing_hook =
        json!({"lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", "echo no; exit 3"]}}}});
    vec![
        failing_liveness(
            "image-signal",
            json!({}),
            json!({"image": SIGNALLED, "imagePullPolicy": "Never"}),
            SIGNALS,
        ),
        failing_liveness("short-grace", json!({}), short_grace, ignores_sigterm),
        failing_liveness("http-hook", json!({}), http_hook, server),
        failing_liveness("failing-hook", json!({}), failing_hook, SIGNALS),
    ]
}

fn probe_pods() -> Vec<Value> {
    let volume = json!({"volumes": [{"name": "v", "emptyDir": {}}], "restartPolicy": "Always", "terminationGracePeriodSeconds": 1});
    let mount = json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]});
    // Prints the number of probes before the restart.
    let thrice = merged(
        json!({"name": "c", "image": BUSYBOX, "command": ["sh", "-c", "test -e /v/probes && wc -l < /v/probes; exec sleep 10000"],
            "livenessProbe": {"exec": {"command": ["sh", "-c", "echo >> /v/probes; exit 1"]}, "initialDelaySeconds": 1, "periodSeconds": 1,
                "failureThreshold": 3}}),
        mount,
    );
    let ready = |more: Value| {
        let probe = json!({"exec": {"command": ["true"]}, "periodSeconds": 3});
        json!({"name": "c", "image": BUSYBOX, "command": ["sleep", "10000"], "readinessProbe": merged(probe, more)})
    };
    let serve =
        "exec openssl s_server -quiet -www -accept 8443 -cert /srv/cert.pem -key /srv/key.pem";
    let secure = |scheme: &str| {
        let get = json!({"port": 8443, "path": "/", "scheme": scheme});
        json!({"name": "c", "image": SECURE, "imagePullPolicy": "Never", "command": ["sh", "-c", serve],
            "readinessProbe": {"httpGet": get, "periodSeconds": 1}})
    };
    vec![
        pod("thrice", volume, &[thrice]),
        pod("once", json!({}), &[ready(json!({}))]),
        pod("twice", json!({}), &[ready(json!({"successThreshold": 2}))]),
        pod("https", json!({}), &[secure("HTTPS")]),
        pod("no-https", json!({}), &[secure("HTTP")]),
    ]
}

/// Sidecars write their names on SIGTERM. The first one is stopped last and prints the order.
fn sidecar_pod() -> Value {
    let side = |name: &str, last: &str| {
        let script = format!("trap '{last}; exit' TERM; while true; do sleep 0.1; done");
        json!({"name": name, "image": BUSYBOX, "restartPolicy": "Always", "command": ["sh", "-c", script],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}]})
    };
    let more = json!({"terminationGracePeriodSeconds": 20, "volumes": [{"name": "v", "emptyDir": {}}], "initContainers": [
        side("first", "cat /v/order"),
        side("second", "sleep 0.2; echo second >> /v/order"),
        side("third", "sleep 0.7; echo third >> /v/order"),
    ]});
    let main = json!({"name": "main", "image": BUSYBOX, "command": ["sleep", "1"]});
    pod("sidecars", more, &[main])
}

/// The resolver depends on `dnsPolicy` and `hostNetwork`.
fn resolver_pods(cluster: &mut TestCluster, lab: &Lab) -> Vec<Value> {
    let host = lab
        .root("node1", "echo $(grep -v '^#' /etc/resolv.conf)")
        .stdout;
    let host = host.trim();
    let dns = cluster.shell("kubectl get service --namespace=kube-system kube-dns --output=jsonpath={.spec.clusterIP} 2> /dev/null || true");
    let of_cluster = if dns.is_empty() {
        format!("is resolver '{host}' \"$(echo $(cat /etc/resolv.conf))\"")
    } else {
        format!(
            "works grep -q '^nameserver {dns}' /etc/resolv.conf\nworks grep -q '^search default.svc.cluster.local svc.cluster.local cluster.local' /etc/resolv.conf\nworks grep -q ndots:5 /etc/resolv.conf"
        )
    };
    let of_host = format!("is resolver '{host}' \"$(echo $(cat /etc/resolv.conf))\"");
    vec![
        checking_pod(
            "names-cluster",
            json!({"dnsPolicy": "ClusterFirst"}),
            json!({}),
            &of_cluster,
        ),
        checking_pod(
            "names-default",
            json!({"dnsPolicy": "Default"}),
            json!({}),
            &of_host,
        ),
        checking_pod(
            "names-host",
            json!({"dnsPolicy": "ClusterFirst", "hostNetwork": true}),
            json!({}),
            &of_host,
        ),
        checking_pod(
            "names-both",
            json!({"dnsPolicy": "ClusterFirstWithHostNet", "hostNetwork": true}),
            json!({}),
            &of_cluster,
        ),
    ]
}

/// Asserts the exit code of the previous run of a restarted container.
#[track_caller]
fn assert_restarted_after_exit(cluster: &mut TestCluster, name: &str, code: i32) {
    let again = cluster.pod_until(name, "restarted", |pod| {
        pod["status"]["containerStatuses"][0]["restartCount"].as_u64() >= Some(1)
    });
    let last = &container_status(&again, "c")["lastState"]["terminated"];
    assert_eq!(last["exitCode"], code, "{name}: {again:#}");
}

/// Seconds between two timestamps of the API, modulo an hour.
fn seconds_between(from: &Value, to: &Value) -> i64 {
    let seconds = |time: &Value| {
        let text = time.as_str().unwrap_or_default();
        let clock: Vec<i64> = text[11..19]
            .split(':')
            .map(|part| part.parse().unwrap_or_default())
            .collect();
        clock[1] * 60 + clock[2]
    };
    (seconds(to) - seconds(from)).rem_euclid(3600)
}

#[test]
fn thresholds_signals_and_sidecar_order_follow_the_spec() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let config =
        |signal: &str| json!({"Env": ["PATH=/usr/bin:/bin"], "Cmd": ["sh"], "StopSignal": signal});
    lab.load_image(SIGNALLED, config("SIGUSR1"), e2e::EMPTY_LAYER);
    lab.load_image(SECURE, config(""), SECURE_LAYER);
    let mut cluster = TestCluster::start_as(&lab, "user1", &["srun", "-N1", "coracle", "run"]);
    let crashing = json!({"name": "c", "image": BUSYBOX, "command": ["false"]});
    let mut objects = vec![
        pod("crashing", json!({"restartPolicy": "Always"}), &[crashing]),
        sidecar_pod(),
    ];
    objects.extend(stopping_pods());
    objects.extend(probe_pods());
    objects.extend(resolver_pods(&mut cluster, &lab));
    cluster.create_objects(&objects);

    assert_restarted_after_exit(&mut cluster, "image-signal", 11);
    assert_restarted_after_exit(&mut cluster, "short-grace", 137);
    assert_restarted_after_exit(&mut cluster, "http-hook", 15);
    assert_eq!(
        cluster.shell("kubectl logs http-hook --previous"),
        "requested"
    );
    assert_restarted_after_exit(&mut cluster, "failing-hook", 15);
    cluster.wait_for_event(
        "failing-hook",
        "Warning FailedPreStopHook PreStopHook failed",
    );

    cluster.wait_for_phase("sidecars", "Succeeded");
    assert_eq!(cluster.logs("sidecars", "first"), "third\nsecond");

    assert_restarted_after_exit(&mut cluster, "thrice", 137);
    assert_eq!(cluster.logs("thrice", "c"), "3");
    let took = ["once", "twice"].map(|name| {
        cluster.wait_for(name, "condition=Ready");
        let pod = cluster.pod(name);
        let conditions = pod["status"]["conditions"].as_array().unwrap();
        let ready = conditions
            .iter()
            .find(|condition| condition["type"] == "Ready");
        let started = &container_status(&pod, "c")["state"]["running"]["startedAt"];
        seconds_between(started, &ready.unwrap()["lastTransitionTime"])
    });
    assert!(took[1] >= 2 && took[1] > took[0], "{took:?}");
    cluster.wait_for("https", "condition=Ready");
    cluster.wait_for_event("no-https", "Warning Unhealthy Readiness probe failed: ");
    cluster.assert_checks_pass(&["names-cluster", "names-default", "names-host", "names-both"]);

    for delay in ["back-off 10s ", "back-off 20s "] {
        cluster.pod_until("crashing", delay, |pod| {
            let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"];
            waiting
                .as_str()
                .is_some_and(|message| message.starts_with(delay))
        });
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}
