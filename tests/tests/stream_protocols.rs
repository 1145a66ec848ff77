//! Streams into pods with old and new clients: every version of the protocols, the oldest kubectl that Debian ships, and
//! misbehaving clients.

use std::time::Duration;

use e2e::{
    Lab, Role, TestCluster, WAIT_FOR_SIGTERM, eventually, script_container, script_pod, wait_until,
};
use serde_json::{Value, json};

const POD: &str = "/api/v1/namespaces/default/pods/p";
/// The letters `AB` when port-forward's little-endian port prefix is read as text.
const PORT: u16 = u16::from_le_bytes(*b"AB");
/// Kubelets accept only the API server's certificate, and tokens.
const TOKEN: &str = "--token $(cat /tmp/streams/token)";
/// Installed by `scripts/install-tools tests`.
const OLD_KUBECTL: &str = "${XDG_CACHE_HOME:-$HOME/.cache}/coracle/debian-kubectl/usr/bin/kubectl";

#[track_caller]
fn cluster(lab: &Lab, options: &[&str]) -> TestCluster {
    lab.load_busybox();
    let args = [options, &["srun", "-N1", "coracle", "run"]].concat();
    let mut cluster = TestCluster::start_as(lab, "user1", &args);
    cluster.shell(
        "rm -rf /tmp/streams; mkdir /tmp/streams; kubectl create serviceaccount streams && \
         kubectl create clusterrolebinding streams --clusterrole=cluster-admin --serviceaccount=default:streams && \
         kubectl create token streams > /tmp/streams/token",
    );
    cluster
}

#[track_caller]
fn clean_up(lab: &Lab, mut cluster: TestCluster) {
    cluster.shell("rm -rf /tmp/streams");
    cluster.exit(0);
    lab.assert_nothing_left();
}

/// A pod that serves HTTP on [`PORT`] of its loopback address, with a file of four million bytes.
fn web_server() -> Value {
    let script = format!(
        "mkdir /www; echo hello > /www/hello; head -c 3000000 /dev/urandom | base64 -w 0 > /www/file; httpd -f -p 127.0.0.1:{PORT} -h /www"
    );
    script_pod("p", &script, json!({}))
}

#[track_caller]
fn wait_for_server(cluster: &mut TestCluster) {
    wait_until(40, "the web server responds", || {
        let fetch = format!("kubectl exec p -- wget -qO- http://127.0.0.1:{PORT}/hello");
        cluster.try_shell(&fetch).0 == 0
    });
}

/// Path and query of an exec with all streams, for the API server.
fn exec(script: &str) -> String {
    let script = script
        .replace(' ', "+")
        .replace(';', "%3B")
        .replace('&', "%26")
        .replace('>', "%3E");
    format!(
        "'{POD}/exec?container=main&command=sh&command=-c&command={script}&stdin=true&stdout=true&stderr=true'"
    )
}

/// The same for the kubelet.
fn kubelet_exec(node: &str, script: &str) -> String {
    let query = exec(script);
    let query = query.split_once('?').map_or("", |(_, query)| query);
    let query = query
        .replace("stdin=true", "input=1")
        .replace("stdout=true", "output=1")
        .replace("stderr=true", "error=1");
    format!("'/exec/default/p/main?{query} --kubelet {node} {TOKEN}")
}

const COMMAND: &str = "head -c 5; echo; echo wrong >&2; exit 7";

/// Checks the output of [`COMMAND`]. The names are those of stdout, stderr and the error stream.
#[track_caller]
fn assert_complete(report: &Value, protocol: &str, names: [&str; 3], json_status: bool) {
    let [stdout, stderr, error] = names;
    assert_eq!(report["status"], 101, "{protocol}: {report}");
    assert_eq!(
        report["protocol"].as_str().unwrap_or("-"),
        protocol,
        "{report}"
    );
    assert_eq!(report[stdout], "hello\n", "{protocol}: {report}");
    assert_eq!(report[stderr], "wrong\n", "{protocol}: {report}");
    let error = report[error].as_str().unwrap_or_default();
    if json_status {
        let status: Value = serde_json::from_str(error).unwrap_or_default();
        assert_eq!(status["reason"], "NonZeroExitCode", "{protocol}: {report}");
        assert_eq!(status["details"]["causes"][0]["message"], "7", "{report}");
    } else {
        let expected =
            "command terminated with non-zero exit code: command terminated with exit code 7";
        assert_eq!(error, expected, "{protocol}: {report}");
    }
}

#[test]
fn all_websocket_versions_are_supported() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab, &[]);
    cluster.create_running(&[web_server()]);
    let node = cluster.first_node();
    assert_websockets_work(&mut cluster, &node);
    clean_up(&lab, cluster);
}

#[test]
fn all_spdy_and_port_forward_protocols_are_supported() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab, &[]);
    let reads = json!({"stdin": true, "stdinOnce": true});
    let reader = |name: &str| script_pod(name, "read line; echo got $line; exit 3", reads.clone());
    cluster.create_running(&[web_server(), reader("reads"), reader("reads-too")]);
    let node = cluster.first_node();
    assert_spdy_works(&mut cluster, &node);
    assert_attach_works(&mut cluster);
    assert_port_forward_works(&mut cluster, &node);
    clean_up(&lab, cluster);
}

/// Subprotocols, and whether the error channel has JSON.
const WEB_SOCKETS: [(&str, bool); 6] = [
    ("v5.channel.k8s.io", true),
    ("v4.channel.k8s.io", true),
    ("v4.base64.channel.k8s.io", true),
    ("channel.k8s.io", false),
    ("base64.channel.k8s.io", false),
    ("-", false),
];

fn assert_websockets_work(cluster: &mut TestCluster, node: &str) {
    for (protocol, json_status) in WEB_SOCKETS {
        for target in [exec(COMMAND), kubelet_exec(node, COMMAND)] {
            let report =
                cluster.stream_client("printf hello", &format!("websocket {protocol} {target}"));
            assert_complete(&report, protocol, ["1", "2", "3"], json_status);
            assert_eq!(report["close"], 1000, "{protocol}: {report}");
        }
        // Much data in both directions at once.
        let target = exec("head -c 2000000");
        let report = cluster.stream_client(
            "yes | head -c 2000000",
            &format!("websocket {protocol} {target}"),
        );
        let length = report["1"].as_str().unwrap_or_default().len();
        assert_eq!(length, 2_000_000, "{protocol}");
    }
    // Only v5 can signal the end of the input.
    let report = cluster.stream_client(
        "echo text",
        &format!("websocket v5.channel.k8s.io {}", exec("cat; echo end")),
    );
    assert_eq!(report["1"], "text\nend\n", "{report}");
    // Of several subprotocols, the first supported one is selected.
    let report = cluster.stream_client(
        "printf hello",
        &format!(
            "websocket v9.channel.k8s.io,v4.channel.k8s.io {}",
            kubelet_exec(node, COMMAND)
        ),
    );
    assert_complete(&report, "v4.channel.k8s.io", ["1", "2", "3"], true);
    let report = cluster.stream_client(
        "true",
        &format!("websocket v9.channel.k8s.io {}", kubelet_exec(node, "true")),
    );
    assert_eq!(report["status"], 403, "{report}");
    let report = cluster.stream_client(
        "true",
        &format!("websocket v4.channel.k8s.io {}", exec("kill -9 $$")),
    );
    assert!(
        report["3"]
            .as_str()
            .is_some_and(|error| error.contains("exit code 137")),
        "{report}"
    );
}

fn assert_spdy_works(cluster: &mut TestCluster, node: &str) {
    let versions = [
        ("v4.channel.k8s.io", true),
        ("v3.channel.k8s.io", false),
        ("v2.channel.k8s.io", false),
        ("channel.k8s.io", false),
    ];
    for (protocol, json_status) in versions {
        for target in [exec(COMMAND), kubelet_exec(node, COMMAND)] {
            let report =
                cluster.stream_client("printf hello", &format!("spdy {protocol} {target}"));
            assert_complete(
                &report,
                protocol,
                ["stdout", "stderr", "error"],
                json_status,
            );
            assert_eq!(report["open"], json!([]), "{protocol}: {report}");
        }
        // End of input is passed on, and later output still arrives.
        let target = exec("cat; echo end");
        let report = cluster.stream_client(
            "yes | head -c 2000000",
            &format!("spdy {protocol} {target}"),
        );
        let stdout = report["stdout"].as_str().unwrap_or_default();
        assert_eq!(stdout.len(), 2_000_004, "{protocol}");
        assert!(stdout.ends_with("end\n"), "{protocol}");
    }
    let report = cluster.stream_client(
        "true",
        &format!("spdy v5.channel.k8s.io {}", kubelet_exec(node, "true")),
    );
    assert_eq!(report["status"], 403, "{report}");
    let body = report["body"].as_str().unwrap_or_default();
    assert!(body.contains("unable to negotiate protocol: client supports [v5.channel.k8s.io], server accepts [v4.channel.k8s.io v3"), "{report}");
    let report = cluster.stream_client("true", &format!("spdy - {}", kubelet_exec(node, "true")));
    assert_eq!(report["status"], 400, "{report}");
    // Without an upgrade, exec is rejected, but /run works.
    let (code, output) = cluster.try_shell(&format!(
        "kubectl get --raw '/api/v1/nodes/{node}/proxy/exec/default/p/main?command=true&output=1'"
    ));
    assert!(code != 0 && output.contains("BadRequest"), "{output}");
    let run = |command: &str| {
        format!(
            "kubectl create --raw '/api/v1/nodes/{node}/proxy/run/default/p/main?cmd={command}' --filename=/dev/null"
        )
    };
    assert_eq!(cluster.shell(&run("echo+one+two")), "one two");
    let (code, output) = cluster.try_shell(&run("false"));
    assert!(code != 0 && output.contains("exited with 1"), "{output}");
}

fn assert_attach_works(cluster: &mut TestCluster) {
    let attach = |pod: &str| {
        format!("'/api/v1/namespaces/default/pods/{pod}/attach?stdin=true&stdout=true&stderr=true'")
    };
    let report = cluster.stream_client(
        "echo word",
        &format!("websocket v4.channel.k8s.io {}", attach("reads")),
    );
    assert_eq!(report["1"], "got word\n", "{report}");
    let report = cluster.stream_client(
        "echo word",
        &format!("spdy v3.channel.k8s.io {}", attach("reads-too")),
    );
    assert_eq!(report["stdout"], "got word\n", "{report}");
}

/// With WebSockets disabled, kubectl uses raw SPDY: see below.
fn assert_port_forward_works(cluster: &mut TestCluster, node: &str) {
    wait_for_server(cluster);
    let request = "printf 'GET /hello HTTP/1.0\\r\\n\\r\\n'";
    let mut targets = Vec::new();
    for protocol in ["v4.channel.k8s.io", "v4.base64.channel.k8s.io", "-"] {
        targets.push((protocol, format!("'{POD}/portforward?ports={PORT}'")));
        targets.push((
            protocol,
            format!("'/portForward/default/p?port={PORT}' --kubelet {node} {TOKEN}"),
        ));
    }
    for (protocol, target) in targets {
        let report = cluster.stream_client(request, &format!("websocket {protocol} {target}"));
        assert_eq!(
            report["protocol"].as_str().unwrap_or("-"),
            protocol,
            "{report}"
        );
        let data = report["0"].as_str().unwrap_or_default();
        // Each channel begins with its port.
        assert!(
            data.starts_with("ABHTTP/1.1 200 OK") && data.ends_with("hello\n"),
            "{report}"
        );
        assert_eq!(report["1"], "AB", "{report}");
    }
    let report = cluster.stream_client("true", &format!("forward '{POD}/portforward?ports=81'"));
    let error = report["1"].as_str().unwrap_or_default();
    assert!(
        error.contains("error forwarding port 81 to pod p") && error.contains("connection refused"),
        "{report}"
    );
    let clients = [
        format!("tunnel {PORT} {POD}/portforward"),
        format!("tunnel {PORT} /portForward/default/p --kubelet {node} {TOKEN}"),
        format!("raw {PORT} {POD}/portforward"),
        format!("raw {PORT} /portForward/default/p --kubelet {node} {TOKEN}"),
    ];
    for args in clients {
        let report = cluster.stream_client(request, &args);
        let protocol = match args.starts_with("tunnel") {
            true => "SPDY/3.1+portforward.k8s.io",
            false => "portforward.k8s.io",
        };
        assert_eq!(report["protocol"], protocol, "{report}");
        let data = report["data"].as_str().unwrap_or_default();
        assert!(
            data.starts_with("HTTP/1.1 200 OK") && data.ends_with("hello\n"),
            "{report}"
        );
        assert!(report["error"].is_null(), "{report}");
        let report = cluster.stream_client("printf 'GET /file HTTP/1.0\\r\\n\\r\\n'", &args);
        assert!(
            report["data"]
                .as_str()
                .is_some_and(|data| data.len() > 4_000_000)
        );
    }
    let report = cluster.stream_client("true", &format!("tunnel 81 {POD}/portforward"));
    assert!(
        report["error"]
            .as_str()
            .is_some_and(|error| error.contains("connection refused")),
        "{report}"
    );
}

#[test]
fn old_and_new_kubectl_work() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab, &[]);
    let home = lab.dir().join("home/user1");
    let old = format!("{}/old-kubectl", home.display());
    let copied = lab.machine(&format!(
        "install --mode=755 \"{OLD_KUBECTL}\" '{old}' 2>&1"
    ));
    assert_eq!(copied, "", "scripts/install-tools tests has not been run");
    let reads = json!({"stdin": true});
    let reader = "while read line; do echo got $line; done";
    cluster.create_running(&[web_server(), script_pod("reads", reader, reads)]);
    wait_for_server(&mut cluster);
    cluster.shell("head -c 5000000 /dev/urandom > /tmp/streams/file");

    let version = cluster.shell("~/old-kubectl version --client --short");
    assert!(version.contains("v1.20."), "{version}");
    assert_every_command_works(&mut cluster, "~/old-kubectl");
    // The current kubectl with SPDY, as behind a proxy that does not support WebSockets.
    assert_every_command_works(
        &mut cluster,
        "KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false KUBECTL_PORT_FORWARD_WEBSOCKETS=false kubectl",
    );
    // Another version, if this machine has one.
    if cluster.try_shell("/usr/bin/kubectl version --client").0 == 0 {
        assert_every_command_works(&mut cluster, "/usr/bin/kubectl");
    }
    // kubectl caches the API's discovery documents.
    cluster.shell("rm -r ~/old-kubectl ~/.kube");
    clean_up(&lab, cluster);
}

fn assert_every_command_works(cluster: &mut TestCluster, kubectl: &str) {
    // A shell function, so that environment variables can be set for it anywhere.
    let with = |script: &str| {
        format!("cd /tmp/streams; set -o pipefail; k() {{ env {kubectl} \"$@\"; }}; {script}")
    };
    let port_forward = format!(
        "rm -f ports; env {kubectl} port-forward pod/p :{PORT} > ports 2> errors & forward=$!; \
         until grep -qs Forwarding ports; do sleep 0.1; kill -0 $forward || {{ cat errors; exit 9; }}; done; \
         port=$(sed -n 's/.*127.0.0.1:\\([0-9]*\\) .*/\\1/p' ports); \
         curl -sS http://127.0.0.1:$port/hello && curl -sS http://127.0.0.1:$port/file | wc -c; \
         code=$?; kill $forward; wait $forward; exit $code"
    );
    let cases: [(&str, i32, &str); 13] = [
        ("k exec p -- echo hello", 0, "hello"),
        ("k exec p -- sh -c 'exit 7' 2> /dev/null", 7, ""),
        (
            "k exec p -- sh -c 'echo out; echo err >&2' 2> /dev/null",
            0,
            "out",
        ),
        (
            "k exec p -- sh -c 'echo out; echo err >&2' 2>&1 > /dev/null",
            0,
            "err",
        ),
        (
            "echo text | k exec -i p -- sh -c 'cat; echo end'",
            0,
            "text\nend",
        ),
        (
            "k exec -i p -- sha256sum < file | cmp - <(sha256sum < file)",
            0,
            "",
        ),
        ("k exec -i p -- cat < file | cmp - file", 0, ""),
        (
            "k cp file p:/tmp/copy && k cp p:/tmp/copy back > /dev/null && cmp file back",
            0,
            "",
        ),
        ("k exec p -- rm /tmp/copy", 0, ""),
        (
            "{ echo word; sleep 2; } | timeout 20 env KUBECTL attach -i reads 2> /dev/null | grep -o 'got word'",
            -1,
            "got word",
        ),
        ("k logs reads --tail=1", 0, "got word"),
        (
            "timeout 20 env KUBECTL logs -f reads | head -n 1",
            -1,
            "got word",
        ),
        (&port_forward, 0, "hello\n4000000"),
    ];
    for (command, code, text) in cases {
        let command = command.replace("env KUBECTL", &format!("env {kubectl}"));
        let (exit_code, output) = cluster.try_shell(&with(&command));
        assert_eq!(output, text, "{kubectl}: {command}");
        // If a pipe is closed or a follower is killed, only the output counts.
        assert!(
            code == -1 || exit_code == code,
            "{kubectl}: {command}: {exit_code}"
        );
    }
    let (code, output) = cluster.try_shell(&format!(
        "script --quiet --return --command 'env {kubectl} exec -it p -- sh -c tty' /dev/null"
    ));
    assert!(
        code == 0 && output.contains("/dev/pts/0"),
        "{kubectl}: {output}"
    );
}

#[test]
fn misbehaving_clients_affect_only_themselves() {
    let lab = Lab::acquire();
    // Much shorter than upstream's four hours, and yet longer than any delay on a busy machine.
    let mut cluster = cluster(&lab, &["env", "CORACLE_STREAM_IDLE=15s"]);
    let quiet = [script_container("main", WAIT_FOR_SIGTERM, json!({}))];
    cluster.create_running(&[e2e::pod("p", json!({}), &quiet)]);
    let node = cluster.first_node();
    let config = cluster.shell(&format!(
        "kubectl get --raw /api/v1/nodes/{node}/proxy/configz"
    ));
    assert!(
        config.contains(r#""streamingConnectionIdleTimeout":"15s""#),
        "{config}"
    );

    assert_garbage_ends_only_its_own_connection(&mut cluster, &node);
    assert_unread_data_is_not_logged(&mut cluster, &node);
    assert_idle_streams_are_closed(&mut cluster, &node);
    assert_slow_readers_use_little_memory(&lab, &mut cluster);
    assert_eq!(cluster.kubelet_api_warnings(&node), Vec::<String>::new());
    clean_up(&lab, cluster);
}

fn assert_garbage_ends_only_its_own_connection(cluster: &mut TestCluster, node: &str) {
    let target = kubelet_exec(node, "sleep 1000");
    for args in [
        format!("garbage websocket v5.channel.k8s.io {target}"),
        format!("garbage websocket v4.base64.channel.k8s.io {target}"),
        format!("garbage spdy v4.channel.k8s.io {target}"),
        format!(
            "garbage websocket SPDY/3.1+portforward.k8s.io /portForward/default/p --kubelet {node} {TOKEN}"
        ),
        format!("garbage spdy portforward.k8s.io /portForward/default/p --kubelet {node} {TOKEN}"),
    ] {
        let report = cluster.stream_client("true", &args);
        assert_eq!(report["status"], 101, "{args}: {report}");
        assert!(
            report["end"] == "closed"
                || report["end"] == "ConnectionResetError"
                || report["end"] == "SSLEOFError",
            "{args}: {report}"
        );
    }
    assert_eq!(cluster.shell("kubectl exec p -- echo works"), "works");
}

/// Programs that stop reading their input and clients that stop reading output are normal, and not logged.
fn assert_unread_data_is_not_logged(cluster: &mut TestCluster, node: &str) {
    cluster.shell("head -c 50000000 /dev/zero > /tmp/streams/big");
    for kubectl in [
        "kubectl",
        "env KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false kubectl",
    ] {
        let (code, text) = cluster.try_shell(&format!(
            "cd /tmp/streams; {kubectl} exec -i p -- sh -c 'head -c 5 > /dev/null; echo enough' < big 2> /dev/null"
        ));
        // Ignore stderr: kubectl may report that the rest was not read.
        assert_eq!((code, text.as_str()), (0, "enough"), "{kubectl}");
        cluster.try_shell(&format!(
            "{kubectl} exec p -- timeout 20 cat /dev/zero | head -c 5 > /dev/null"
        ));
        cluster.try_shell(&format!(
            "timeout --signal=KILL 1 {kubectl} exec -i p -- cat"
        ));
    }
    assert_eq!(cluster.kubelet_api_warnings(node), Vec::<String>::new());
}

fn assert_idle_streams_are_closed(cluster: &mut TestCluster, node: &str) {
    let silent = kubelet_exec(node, "cat");
    // A stream with occasional data outlives the idle time-out.
    cluster.shell("cd /tmp/streams; (kubectl exec p -- sh -c 'for i in $(seq 10); do echo $i; sleep 3; done; echo end' > active 2>&1; echo code $? >> active) > /dev/null 2>&1 &");
    // httpd waits a minute for a request.
    let httpd = format!("kubectl exec p -- httpd -p 127.0.0.1:{PORT} -h /tmp");
    cluster.shell(&httpd);
    let forward = format!("--kubelet {node} {TOKEN}");
    let clients = [
        format!("--idle websocket v5.channel.k8s.io {silent}"),
        format!("--idle spdy v4.channel.k8s.io {silent}"),
        format!("--idle raw {PORT} /portForward/default/p {forward}"),
        format!("--idle tunnel {PORT} /portForward/default/p {forward}"),
        format!("--idle forward '/portForward/default/p?port={PORT}' {forward}"),
    ];
    let reports = cluster.stream_clients("true", &clients);
    for (client, report) in clients.iter().zip(&reports) {
        assert_eq!(report["status"], 101, "{client}: {report}");
        let seconds = report["seconds"].as_u64().unwrap_or_default();
        assert!((14..50).contains(&seconds), "{client}: {report}");
    }
    // Only the idle time-out has ended them: the pod's side was still open, and there was no error.
    for report in &reports[2..4] {
        assert_eq!(report["open"], json!(["data", "error"]), "{report}");
        assert!(
            report["error"].is_null() && report["data"].is_null(),
            "{report}"
        );
    }
    assert_eq!(reports[4]["0"], "AB", "{reports:?}");
    assert_eq!(reports[4]["1"], "AB", "{reports:?}");
    wait_until(60, "the active stream has ended", || {
        cluster.shell("cat /tmp/streams/active").contains("code")
    });
    let last_lines = cluster.shell("tail -n 2 /tmp/streams/active");
    assert_eq!(last_lines, "end\ncode 0");
}

fn assert_slow_readers_use_little_memory(lab: &Lab, cluster: &mut TestCluster) {
    let agent = lab.find("node1", Role::Agent);
    let resident = || {
        let status = lab.root("node1", &format!("grep VmRSS /proc/{}/status", agent.pid));
        let kilobytes = status.stdout.split_whitespace().nth(1);
        kilobytes
            .and_then(|number| number.parse::<u64>().ok())
            .unwrap_or_default()
    };
    cluster.try_shell("kubectl exec p -- killall cat");
    let before = resident();
    cluster.shell(
        "for i in $(seq 20); do (kubectl exec p -- timeout 60 cat /dev/zero | sleep 30) > /dev/null 2>&1 & done",
    );
    let running = eventually(Duration::from_secs(40), || {
        let (_, count) = cluster.try_shell("kubectl exec p -- sh -c 'pidof cat | wc -w'");
        (count == "20").then_some(())
    });
    assert!(running.is_some(), "20 commands never ran at the same time");
    let mut peak = 0;
    eventually::<()>(Duration::from_secs(5), || {
        peak = peak.max(resident());
        None
    });
    // Unbuffered, the commands could write gigabytes in this time.
    assert!(peak < before + 60_000, "{before} kB, then {peak} kB");
    cluster.shell("kubectl exec p -- killall cat");
}
