//! Streams into pods with old and new clients: every version of the protocols, the oldest kubectl that Debian ships, and
//! misbehaving clients.

use std::time::Duration;

use e2e::{Cluster, Lab, Role, WAITS, eventually, runs, simple, wait_until};
use serde_json::{Value, json};

const POD: &str = "/api/v1/namespaces/default/pods/p";
/// The letters `AB` when port-forward's little-endian port prefix is read as text.
const PORT: u16 = u16::from_le_bytes(*b"AB");
/// Kubelets accept only the API server's certificate, and tokens.
const TOKEN: &str = "--token $(cat /tmp/streams/token)";
/// Installed by `scripts/install-tools tests`.
const OLD_KUBECTL: &str = "${XDG_CACHE_HOME:-$HOME/.cache}/coracle/debian-kubectl/usr/bin/kubectl";

#[track_caller]
fn cluster(lab: &Lab, options: &[&str]) -> Cluster {
    lab.load_busybox();
    let words = [options, &["srun", "-N1", "coracle", "run"]].concat();
    let mut cluster = Cluster::start_as(lab, "user1", &words);
    cluster.ask(
        "rm -rf /tmp/streams; mkdir /tmp/streams; kubectl create serviceaccount streams && \
         kubectl create clusterrolebinding streams --clusterrole=cluster-admin --serviceaccount=default:streams && \
         kubectl create token streams > /tmp/streams/token",
    );
    cluster
}

#[track_caller]
fn end(lab: &Lab, mut cluster: Cluster) {
    cluster.ask("rm -rf /tmp/streams");
    cluster.exit(0);
    lab.nothing_left();
}

/// A pod that serves HTTP on [`PORT`] of its loopback address, with a file of four million bytes.
fn serving() -> Value {
    let script = format!(
        "mkdir /www; echo hello > /www/hello; head -c 3000000 /dev/urandom | base64 -w 0 > /www/file; httpd -f -p 127.0.0.1:{PORT} -h /www"
    );
    simple("p", &script, json!({}))
}

#[track_caller]
fn wait_for_server(cluster: &mut Cluster) {
    wait_until(40, "it serves", || {
        let asked = format!("kubectl exec p -- wget -qO- http://127.0.0.1:{PORT}/hello");
        cluster.try_ask(&asked).0 == 0
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

const ANSWERS: &str = "head -c 5; echo; echo wrong >&2; exit 7";

/// Checks the output of [`ANSWERS`]. The names are those of stdout, stderr and the error stream.
#[track_caller]
fn answered(told: &Value, protocol: &str, names: [&str; 3], json_status: bool) {
    let [stdout, stderr, error] = names;
    assert_eq!(told["status"], 101, "{protocol}: {told}");
    assert_eq!(told["protocol"].as_str().unwrap_or("-"), protocol, "{told}");
    assert_eq!(told[stdout], "hello\n", "{protocol}: {told}");
    assert_eq!(told[stderr], "wrong\n", "{protocol}: {told}");
    let words = told[error].as_str().unwrap_or_default();
    if json_status {
        let status: Value = serde_json::from_str(words).unwrap_or_default();
        assert_eq!(status["reason"], "NonZeroExitCode", "{protocol}: {told}");
        assert_eq!(status["details"]["causes"][0]["message"], "7", "{told}");
    } else {
        let expected =
            "command terminated with non-zero exit code: command terminated with exit code 7";
        assert_eq!(words, expected, "{protocol}: {told}");
    }
}

#[test]
fn all_websocket_versions_are_supported() {
    let lab = Lab::ready();
    let mut cluster = cluster(&lab, &[]);
    cluster.create_running(&[serving()]);
    let node = cluster.first_node();
    web_sockets(&mut cluster, &node);
    end(&lab, cluster);
}

#[test]
fn all_spdy_versions_and_port_forward_protocols_are_supported() {
    let lab = Lab::ready();
    let mut cluster = cluster(&lab, &[]);
    let reads = json!({"stdin": true, "stdinOnce": true});
    let reader = |name: &str| simple(name, "read line; echo got $line; exit 3", reads.clone());
    cluster.create_running(&[serving(), reader("reads"), reader("reads-too")]);
    let node = cluster.first_node();
    spdy(&mut cluster, &node);
    attached(&mut cluster);
    forwarded(&mut cluster, &node);
    end(&lab, cluster);
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

fn web_sockets(cluster: &mut Cluster, node: &str) {
    for (protocol, json_status) in WEB_SOCKETS {
        for way in [exec(ANSWERS), kubelet_exec(node, ANSWERS)] {
            let told = cluster.talk("printf hello", &format!("websocket {protocol} {way}"));
            answered(&told, protocol, ["1", "2", "3"], json_status);
            assert_eq!(told["close"], 1000, "{protocol}: {told}");
        }
        // Much data in both directions at once.
        let way = exec("head -c 2000000");
        let told = cluster.talk(
            "yes | head -c 2000000",
            &format!("websocket {protocol} {way}"),
        );
        let length = told["1"].as_str().unwrap_or_default().len();
        assert_eq!(length, 2_000_000, "{protocol}");
    }
    // Only v5 can signal the end of the input.
    let told = cluster.talk(
        "echo text",
        &format!("websocket v5.channel.k8s.io {}", exec("cat; echo end")),
    );
    assert_eq!(told["1"], "text\nend\n", "{told}");
    // Of several subprotocols, the first supported one is selected.
    let told = cluster.talk(
        "printf hello",
        &format!(
            "websocket v9.channel.k8s.io,v4.channel.k8s.io {}",
            kubelet_exec(node, ANSWERS)
        ),
    );
    answered(&told, "v4.channel.k8s.io", ["1", "2", "3"], true);
    let told = cluster.talk(
        "true",
        &format!("websocket v9.channel.k8s.io {}", kubelet_exec(node, "true")),
    );
    assert_eq!(told["status"], 403, "{told}");
    let told = cluster.talk(
        "true",
        &format!("websocket v4.channel.k8s.io {}", exec("kill -9 $$")),
    );
    assert!(
        told["3"]
            .as_str()
            .is_some_and(|words| words.contains("exit code 137")),
        "{told}"
    );
}

fn spdy(cluster: &mut Cluster, node: &str) {
    let versions = [
        ("v4.channel.k8s.io", true),
        ("v3.channel.k8s.io", false),
        ("v2.channel.k8s.io", false),
        ("channel.k8s.io", false),
    ];
    for (protocol, json_status) in versions {
        for way in [exec(ANSWERS), kubelet_exec(node, ANSWERS)] {
            let told = cluster.talk("printf hello", &format!("spdy {protocol} {way}"));
            answered(&told, protocol, ["stdout", "stderr", "error"], json_status);
            assert_eq!(told["open"], json!([]), "{protocol}: {told}");
        }
        // End of input is passed on, and later output still arrives.
        let way = exec("cat; echo end");
        let told = cluster.talk("yes | head -c 2000000", &format!("spdy {protocol} {way}"));
        let stdout = told["stdout"].as_str().unwrap_or_default();
        assert_eq!(stdout.len(), 2_000_004, "{protocol}");
        assert!(stdout.ends_with("end\n"), "{protocol}");
    }
    let told = cluster.talk(
        "true",
        &format!("spdy v5.channel.k8s.io {}", kubelet_exec(node, "true")),
    );
    assert_eq!(told["status"], 403, "{told}");
    let words = told["body"].as_str().unwrap_or_default();
    assert!(words.contains("unable to negotiate protocol: client supports [v5.channel.k8s.io], server accepts [v4.channel.k8s.io v3"), "{told}");
    let told = cluster.talk("true", &format!("spdy - {}", kubelet_exec(node, "true")));
    assert_eq!(told["status"], 400, "{told}");
    // Without an upgrade, exec is rejected, but /run works.
    let (code, words) = cluster.try_ask(&format!(
        "kubectl get --raw '/api/v1/nodes/{node}/proxy/exec/default/p/main?command=true&output=1'"
    ));
    assert!(code != 0 && words.contains("BadRequest"), "{words}");
    let run = |command: &str| {
        format!(
            "kubectl create --raw '/api/v1/nodes/{node}/proxy/run/default/p/main?cmd={command}' --filename=/dev/null"
        )
    };
    assert_eq!(cluster.ask(&run("echo+one+two")), "one two");
    let (code, words) = cluster.try_ask(&run("false"));
    assert!(code != 0 && words.contains("exited with 1"), "{words}");
}

fn attached(cluster: &mut Cluster) {
    let attach = |pod: &str| {
        format!("'/api/v1/namespaces/default/pods/{pod}/attach?stdin=true&stdout=true&stderr=true'")
    };
    let told = cluster.talk(
        "echo word",
        &format!("websocket v4.channel.k8s.io {}", attach("reads")),
    );
    assert_eq!(told["1"], "got word\n", "{told}");
    let told = cluster.talk(
        "echo word",
        &format!("spdy v3.channel.k8s.io {}", attach("reads-too")),
    );
    assert_eq!(told["stdout"], "got word\n", "{told}");
}

/// With WebSockets disabled, kubectl uses raw SPDY: see below.
fn forwarded(cluster: &mut Cluster, node: &str) {
    wait_for_server(cluster);
    let ask = "printf 'GET /hello HTTP/1.0\\r\\n\\r\\n'";
    let mut through = Vec::new();
    for protocol in ["v4.channel.k8s.io", "v4.base64.channel.k8s.io", "-"] {
        through.push((protocol, format!("'{POD}/portforward?ports={PORT}'")));
        through.push((
            protocol,
            format!("'/portForward/default/p?port={PORT}' --kubelet {node} {TOKEN}"),
        ));
    }
    for (protocol, way) in through {
        let told = cluster.talk(ask, &format!("websocket {protocol} {way}"));
        assert_eq!(told["protocol"].as_str().unwrap_or("-"), protocol, "{told}");
        let data = told["0"].as_str().unwrap_or_default();
        // Each channel begins with its port.
        assert!(
            data.starts_with("ABHTTP/1.1 200 OK") && data.ends_with("hello\n"),
            "{told}"
        );
        assert_eq!(told["1"], "AB", "{told}");
    }
    let told = cluster.talk("true", &format!("forward '{POD}/portforward?ports=81'"));
    let words = told["1"].as_str().unwrap_or_default();
    assert!(
        words.contains("error forwarding port 81 to pod p") && words.contains("connection refused"),
        "{told}"
    );
    let through = [
        format!("tunnel {PORT} {POD}/portforward"),
        format!("tunnel {PORT} /portForward/default/p --kubelet {node} {TOKEN}"),
        format!("raw {PORT} {POD}/portforward"),
        format!("raw {PORT} /portForward/default/p --kubelet {node} {TOKEN}"),
    ];
    for way in through {
        let told = cluster.talk(ask, &way);
        let protocol = match way.starts_with("tunnel") {
            true => "SPDY/3.1+portforward.k8s.io",
            false => "portforward.k8s.io",
        };
        assert_eq!(told["protocol"], protocol, "{told}");
        let data = told["data"].as_str().unwrap_or_default();
        assert!(
            data.starts_with("HTTP/1.1 200 OK") && data.ends_with("hello\n"),
            "{told}"
        );
        assert!(told["error"].is_null(), "{told}");
        let told = cluster.talk("printf 'GET /file HTTP/1.0\\r\\n\\r\\n'", &way);
        assert!(
            told["data"]
                .as_str()
                .is_some_and(|data| data.len() > 4_000_000)
        );
    }
    let told = cluster.talk("true", &format!("tunnel 81 {POD}/portforward"));
    assert!(
        told["error"]
            .as_str()
            .is_some_and(|words| words.contains("connection refused")),
        "{told}"
    );
}

#[test]
fn old_and_new_kubectl_work() {
    let lab = Lab::ready();
    let mut cluster = cluster(&lab, &[]);
    let home = lab.dir().join("home/user1");
    let old = format!("{}/old-kubectl", home.display());
    let copied = lab.machine(&format!(
        "install --mode=755 \"{OLD_KUBECTL}\" '{old}' 2>&1"
    ));
    assert_eq!(copied, "", "scripts/install-tools tests has not been run");
    let reads = json!({"stdin": true});
    let reader = "while read line; do echo got $line; done";
    cluster.create_running(&[serving(), simple("reads", reader, reads)]);
    wait_for_server(&mut cluster);
    cluster.ask("head -c 5000000 /dev/urandom > /tmp/streams/file");

    let version = cluster.ask("~/old-kubectl version --client --short");
    assert!(version.contains("v1.20."), "{version}");
    every_command(&mut cluster, "~/old-kubectl");
    // The current kubectl with SPDY, as behind a proxy that does not support WebSockets.
    every_command(
        &mut cluster,
        "KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false KUBECTL_PORT_FORWARD_WEBSOCKETS=false kubectl",
    );
    // Another version, if this machine has one.
    if cluster.try_ask("/usr/bin/kubectl version --client").0 == 0 {
        every_command(&mut cluster, "/usr/bin/kubectl");
    }
    // kubectl caches the API's discovery documents.
    cluster.ask("rm -r ~/old-kubectl ~/.kube");
    end(&lab, cluster);
}

fn every_command(cluster: &mut Cluster, kubectl: &str) {
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
    let asked: [(&str, i32, &str); 13] = [
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
    for (command, code, text) in asked {
        let command = command.replace("env KUBECTL", &format!("env {kubectl}"));
        let (ended, said) = cluster.try_ask(&with(&command));
        assert_eq!(said, text, "{kubectl}: {command}");
        // If a pipe is closed or a follower is killed, only the output counts.
        assert!(code == -1 || ended == code, "{kubectl}: {command}: {ended}");
    }
    let (code, said) = cluster.try_ask(&format!(
        "script --quiet --return --command 'env {kubectl} exec -it p -- sh -c tty' /dev/null"
    ));
    assert!(
        code == 0 && said.contains("/dev/pts/0"),
        "{kubectl}: {said}"
    );
}

#[test]
fn misbehaving_clients_affect_only_themselves() {
    let lab = Lab::ready();
    // Much shorter than upstream's four hours, and yet longer than any delay on a busy machine.
    let mut cluster = cluster(&lab, &["env", "CORACLE_STREAM_IDLE=15s"]);
    let quiet = [runs("main", WAITS, json!({}))];
    cluster.create_running(&[e2e::pod("p", json!({}), &quiet)]);
    let node = cluster.first_node();
    let config = cluster.ask(&format!(
        "kubectl get --raw /api/v1/nodes/{node}/proxy/configz"
    ));
    assert!(
        config.contains(r#""streamingConnectionIdleTimeout":"15s""#),
        "{config}"
    );

    garbage_ends_only_its_own_connection(&mut cluster, &node);
    who_reads_too_little_is_no_news(&mut cluster, &node);
    silence_ends_a_stream(&mut cluster, &node);
    slow_readers_cost_little(&lab, &mut cluster);
    assert_eq!(cluster.complaints(&node), Vec::<String>::new());
    end(&lab, cluster);
}

fn garbage_ends_only_its_own_connection(cluster: &mut Cluster, node: &str) {
    let target = kubelet_exec(node, "sleep 1000");
    for way in [
        format!("garbage websocket v5.channel.k8s.io {target}"),
        format!("garbage websocket v4.base64.channel.k8s.io {target}"),
        format!("garbage spdy v4.channel.k8s.io {target}"),
        format!(
            "garbage websocket SPDY/3.1+portforward.k8s.io /portForward/default/p --kubelet {node} {TOKEN}"
        ),
        format!("garbage spdy portforward.k8s.io /portForward/default/p --kubelet {node} {TOKEN}"),
    ] {
        let told = cluster.talk("true", &way);
        assert_eq!(told["status"], 101, "{way}: {told}");
        assert!(
            told["end"] == "closed"
                || told["end"] == "ConnectionResetError"
                || told["end"] == "SSLEOFError",
            "{way}: {told}"
        );
    }
    assert_eq!(cluster.ask("kubectl exec p -- echo well"), "well");
}

/// Programs that stop reading their input and clients that stop reading output are normal, and not logged.
fn who_reads_too_little_is_no_news(cluster: &mut Cluster, node: &str) {
    cluster.ask("head -c 50000000 /dev/zero > /tmp/streams/big");
    for kubectl in [
        "kubectl",
        "env KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false kubectl",
    ] {
        let (code, text) = cluster.try_ask(&format!(
            "cd /tmp/streams; {kubectl} exec -i p -- sh -c 'head -c 5 > /dev/null; echo enough' < big 2> /dev/null"
        ));
        // Ignore stderr: kubectl may report that the rest was not read.
        assert_eq!((code, text.as_str()), (0, "enough"), "{kubectl}");
        cluster.try_ask(&format!(
            "{kubectl} exec p -- timeout 20 cat /dev/zero | head -c 5 > /dev/null"
        ));
        cluster.try_ask(&format!(
            "timeout --signal=KILL 1 {kubectl} exec -i p -- cat"
        ));
    }
    assert_eq!(cluster.complaints(node), Vec::<String>::new());
}

fn silence_ends_a_stream(cluster: &mut Cluster, node: &str) {
    let silent = kubelet_exec(node, "cat");
    // A stream with occasional data outlives the idle time-out.
    cluster.ask("cd /tmp/streams; (kubectl exec p -- sh -c 'for i in $(seq 10); do echo $i; sleep 3; done; echo end' > talks 2>&1; echo code $? >> talks) > /dev/null 2>&1 &");
    // httpd waits a minute for a request.
    let httpd = format!("kubectl exec p -- httpd -p 127.0.0.1:{PORT} -h /tmp");
    cluster.ask(&httpd);
    let forward = format!("--kubelet {node} {TOKEN}");
    let clients = [
        format!("--idle websocket v5.channel.k8s.io {silent}"),
        format!("--idle spdy v4.channel.k8s.io {silent}"),
        format!("--idle raw {PORT} /portForward/default/p {forward}"),
        format!("--idle tunnel {PORT} /portForward/default/p {forward}"),
        format!("--idle forward '/portForward/default/p?port={PORT}' {forward}"),
    ];
    let told = cluster.talk_at_once("true", &clients);
    for (client, told) in clients.iter().zip(&told) {
        assert_eq!(told["status"], 101, "{client}: {told}");
        let seconds = told["seconds"].as_u64().unwrap_or_default();
        assert!((14..50).contains(&seconds), "{client}: {told}");
    }
    // Only the idle time-out has ended them: the pod's side was still open, and there was no error.
    for told in &told[2..4] {
        assert_eq!(told["open"], json!(["data", "error"]), "{told}");
        assert!(told["error"].is_null() && told["data"].is_null(), "{told}");
    }
    assert_eq!(told[4]["0"], "AB", "{told:?}");
    assert_eq!(told[4]["1"], "AB", "{told:?}");
    wait_until(60, "the talkative stream has ended", || {
        cluster.ask("cat /tmp/streams/talks").contains("code")
    });
    let said = cluster.ask("tail -n 2 /tmp/streams/talks");
    assert_eq!(said, "end\ncode 0");
}

fn slow_readers_cost_little(lab: &Lab, cluster: &mut Cluster) {
    let agent = lab.find("node1", Role::Agent);
    let resident = || {
        let status = lab.root("node1", &format!("grep VmRSS /proc/{}/status", agent.pid));
        let kilobytes = status.stdout.split_whitespace().nth(1);
        kilobytes
            .and_then(|number| number.parse::<u64>().ok())
            .unwrap_or_default()
    };
    cluster.try_ask("kubectl exec p -- killall cat");
    let before = resident();
    cluster.ask(
        "for i in $(seq 20); do (kubectl exec p -- timeout 60 cat /dev/zero | sleep 30) > /dev/null 2>&1 & done",
    );
    let running = eventually(Duration::from_secs(40), || {
        let (_, count) = cluster.try_ask("kubectl exec p -- sh -c 'pidof cat | wc -w'");
        (count == "20").then_some(())
    });
    assert!(running.is_some(), "20 commands never ran");
    let mut most = 0;
    eventually::<()>(Duration::from_secs(5), || {
        most = most.max(resident());
        None
    });
    // Unbuffered, the commands could write gigabytes in this time.
    assert!(most < before + 60_000, "{before} kB, then {most} kB");
    cluster.ask("kubectl exec p -- killall cat");
}
