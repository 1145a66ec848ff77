//! Authentication and authorisation of the kubelet's API: certificates, tokens and RBAC.

use e2e::{
    Lab, Role, TestCluster, WAIT_FOR_SIGTERM, pod, script_container, script_pod, wait_until,
};
use rustix::process::Signal;
use serde_json::{Value, json};

const DIR: &str = "/tmp/kubelet-access";

/// Sends a request to a kubelet, with these credentials as options of curl; returns the status (0 if the handshake failed) and the
/// body.
#[track_caller]
fn request(cluster: &mut TestCluster, credentials: &str, url: &str) -> (u32, String) {
    let (_, text) = cluster.try_shell(&format!(
        "curl --silent --insecure --max-time 40 --write-out '\\n%{{http_code}}' {credentials} '{url}'"
    ));
    let (body, code) = text.rsplit_once('\n').unwrap_or(("", &text));
    let code = code.parse().unwrap_or_else(|_| panic!("{url}: {text}"));
    (code, body.trim_end().to_owned())
}

/// Creates a service account with these rights on nodes; returns the options of curl with its token.
fn account(cluster: &mut TestCluster, name: &str, verbs: &str, resources: &str) -> String {
    cluster.shell(&format!("kubectl create serviceaccount {name}"));
    if !resources.is_empty() {
        cluster.shell(&format!(
            "kubectl create clusterrole {name} --verb={verbs} --resource={resources} && \
             kubectl create clusterrolebinding {name} --clusterrole={name} --serviceaccount=default:{name}"
        ));
    }
    let token = cluster.shell(&format!("kubectl create token {name}"));
    format!("--header 'Authorization: Bearer {token}'")
}

#[test]
fn kubelet_requires_authentication_and_authorisation() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start_as(&lab, "user1", &["srun", "-N1", "coracle", "run"]);
    cluster.shell(&format!("rm -rf {DIR}; mkdir {DIR}"));
    cluster.create_running(&[script_pod(
        "p",
        &format!("echo hello; {WAIT_FOR_SIGTERM}"),
        json!({}),
    )]);
    let node: Value = cluster.json("get nodes")["items"][0].clone();
    let address = node["status"]["addresses"][0]["address"]
        .as_str()
        .unwrap_or_default();
    let port = &node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"];
    let base = format!("https://{address}:{port}");

    assert_unauthenticated_clients_are_rejected(&lab, &mut cluster, &base);
    assert_idle_connections_do_not_block_clients(&lab, &mut cluster, address, &port.to_string());
    // Unauthenticated clients cause no warnings in the log either.
    let node = cluster.first_node();
    assert_eq!(cluster.kubelet_api_warnings(&node), Vec::<String>::new());
    assert_api_certificates_are_rejected(&mut cluster, &base);
    assert_rbac_applies_to_tokens(&mut cluster, &base);
    assert_api_server_rejects_false_kubelets(&mut cluster, address);
    cluster.shell(&format!("rm -rf {DIR}"));
    cluster.exit(0);
    lab.assert_nothing_left();
}

fn assert_unauthenticated_clients_are_rejected(lab: &Lab, cluster: &mut TestCluster, base: &str) {
    let paths = [
        "/healthz",
        "/pods",
        "/metrics",
        "/stats/summary",
        "/logs/",
        "/containerLogs/default/p/main",
        "/exec/default/p/main?command=id&output=1",
        "/run/default/p/main?cmd=id",
        "/no/such/path",
    ];
    let unauthorised = (401, "Unauthorized".to_owned());
    for path in paths {
        let url = format!("{base}{path}");
        assert_eq!(request(cluster, "", &url), unauthorised, "{path}");
        let wrong = "--header 'Authorization: Bearer not.a.token'";
        assert_eq!(request(cluster, wrong, &url), unauthorised, "{path}");
        let basic = "--user admin:admin";
        assert_eq!(request(cluster, basic, &url), unauthorised, "{path}");
    }
    // Another user of the machine is unauthenticated as well.
    let response = lab
        .command(&["curl", "--silent", "--insecure", &format!("{base}/pods")])
        .user("user2")
        .on("node1")
        .run();
    assert_eq!(response.stdout, "Unauthorized", "{response}");
    // A certificate may have any name, so only its CA counts.
    cluster.shell(&format!(
        "cd {DIR} && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 \
         -subj /O=system:masters/CN=kube-apiserver-kubelet-client -keyout false.key -out false.crt 2> /dev/null"
    ));
    let credentials = format!("--cert {DIR}/false.crt --key {DIR}/false.key");
    assert_eq!(request(cluster, &credentials, &format!("{base}/pods")).0, 0);
}

/// Opens connections and holds them: idle from the start, idle after the handshake, or in the middle of a request.
const IDLE_CONNECTIONS: &str = "import resource, socket, ssl, sys, time
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
context = ssl.create_default_context()
context.check_hostname = False
context.verify_mode = ssl.CERT_NONE
held = []
for number in range(100000):
    try:
        connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
        if number % 3:
            connection = context.wrap_socket(connection)
        if number % 3 == 2:
            connection.sendall(b'GET /pods HTTP/1.1\\r\\n')
        held.append(connection)
        del held[:-900]
    except OSError:
        pass
    if number == 600:
        print('connected', flush=True)
    time.sleep(0.005)
";

/// Any user of the host can open connections and leave them idle.
fn assert_idle_connections_do_not_block_clients(
    lab: &Lab,
    cluster: &mut TestCluster,
    address: &str,
    port: &str,
) {
    let credentials = account(cluster, "healthz", "get", "nodes/healthz");
    let node = cluster.first_node();
    let agent = lab.find(&node, Role::Agent);
    let descriptors = || {
        let counted = lab.root(&node, &format!("ls /proc/{}/fd | wc -l", agent.pid));
        let count = counted.succeeded().stdout.trim().parse::<u32>();
        count.expect("a number")
    };
    let before = descriptors();
    let mut attacker = lab
        .command(&["/usr/bin/python3", "-c", IDLE_CONNECTIONS, address, port])
        .user("user2")
        .start();
    attacker.wait_for_stdout("connected");
    for _ in 0..5 {
        assert_eq!(cluster.shell("kubectl logs p"), "hello");
        assert_eq!(cluster.shell("kubectl exec p -- echo inside"), "inside");
        let healthy = request(
            cluster,
            &credentials,
            &format!("https://{address}:{port}/healthz"),
        );
        assert_eq!(healthy, (200, "ok".to_owned()));
        let now = descriptors();
        assert!(now < before + 200, "{before} descriptors, then {now}");
    }
    assert!(!attacker.has_exited(), "the attack lasts until here");
    attacker.signal(Signal::KILL);
    drop(attacker);
    for stray in lab.processes_of("login", "user2") {
        lab.kill("login", "KILL", &stray);
    }
}

/// Users of the API may get certificates of any name. So the API server's certificate for kubelets is of another CA.
fn assert_api_certificates_are_rejected(cluster: &mut TestCluster, base: &str) {
    cluster.shell(&format!(
        "cd {DIR}; for part in certificate key; do \
         kubectl config view --raw --output=jsonpath=\"{{.users[0].user.client-$part-data}}\" | base64 --decode > own.$part; done; \
         test -s own.certificate && test -s own.key"
    ));
    let own = format!("--cert {DIR}/own.certificate --key {DIR}/own.key");
    assert_eq!(request(cluster, &own, &format!("{base}/healthz")).0, 0);
    cluster.shell(&format!(
        "cd {DIR} && openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=kube-apiserver-kubelet-client \
         -keyout signed.key -out signed.csr 2> /dev/null && kubectl create --filename=- <<END\n\
         {{\"apiVersion\": \"certificates.k8s.io/v1\", \"kind\": \"CertificateSigningRequest\", \"metadata\": {{\"name\": \"signed\"}}, \
         \"spec\": {{\"request\": \"$(base64 --wrap=0 < signed.csr)\", \"signerName\": \"kubernetes.io/kube-apiserver-client\", \"usages\": [\"client auth\"]}}}}\n\
         END\n\
         kubectl certificate approve signed"
    ));
    wait_until(40, "the certificate is signed", || {
        let command = format!(
            "cd {DIR}; kubectl get csr signed --output=jsonpath={{.status.certificate}} | base64 --decode > signed.crt; test -s signed.crt"
        );
        cluster.try_shell(&command).0 == 0
    });
    let signed = format!("--cert {DIR}/signed.crt --key {DIR}/signed.key");
    assert_eq!(request(cluster, &signed, &format!("{base}/healthz")).0, 0);
}

fn assert_rbac_applies_to_tokens(cluster: &mut TestCluster, base: &str) {
    let none = account(cluster, "none", "", "");
    let stats = account(cluster, "stats", "get", "nodes/stats");
    let metrics = account(cluster, "metrics", "get", "nodes/metrics");
    let log = account(cluster, "log", "get", "nodes/log");
    let pods = account(cluster, "pods", "get", "nodes/pods,nodes/healthz");
    let proxy = account(cluster, "proxy", "get", "nodes/proxy");
    let all = [
        ("none", &none),
        ("stats", &stats),
        ("metrics", &metrics),
        ("log", &log),
        ("pods", &pods),
        ("proxy", &proxy),
    ];
    // Path, the accounts that have access, and the subresources that the kubelet checks.
    let paths: [(&str, &[&str], &str); 12] = [
        ("/stats/summary", &["stats"], "stats"),
        ("/metrics", &["metrics"], "metrics"),
        ("/metrics/resource", &["metrics"], "metrics"),
        ("/metrics/cadvisor", &["metrics"], "metrics"),
        ("/metrics/probes", &["metrics"], "metrics"),
        ("/logs/", &["log"], "log"),
        ("/logs/?query=kubelet", &["log"], "log"),
        ("/pods", &["pods", "proxy"], "pods proxy"),
        ("/runningpods/", &["pods", "proxy"], "pods proxy"),
        ("/healthz", &["pods", "proxy"], "healthz proxy"),
        ("/configz", &["proxy"], "configz proxy"),
        ("/containerLogs/default/p/main", &["proxy"], "proxy"),
    ];
    for (path, allowed, subresources) in paths {
        for (name, credentials) in all {
            let (code, body) = request(cluster, credentials, &format!("{base}{path}"));
            if allowed.contains(&name) {
                assert_eq!(code, 200, "{name}: {path}: {body}");
            } else {
                let expected = format!(
                    "Forbidden (user=system:serviceaccount:default:{name}, verb=get, resource=nodes, subresource(s)=[{subresources}])"
                );
                assert_eq!((code, body), (403, expected), "{name}: {path}");
            }
        }
    }
    let (_, log) = request(
        cluster,
        &proxy,
        &format!("{base}/containerLogs/default/p/main"),
    );
    assert_eq!(log, "hello");
    let missing = (404, "404 page not found".to_owned());
    let response = request(cluster, &proxy, &format!("{base}/no/such/path"));
    assert_eq!(response, missing);
    // A POST has another verb.
    let post = format!("{proxy} --request POST");
    let (code, body) = request(cluster, &post, &format!("{base}/run/default/p/main?cmd=id"));
    let expected = "Forbidden (user=system:serviceaccount:default:proxy, verb=create, resource=nodes, subresource(s)=[proxy])";
    assert_eq!((code, body.as_str()), (403, expected));
    let (code, body) = request(cluster, &post, &format!("{base}/checkpoint/default/p/main"));
    assert!(
        code == 403 && body.contains("verb=create") && body.contains("[checkpoint]"),
        "{code}: {body}"
    );
    let runs = account(cluster, "runs", "create", "nodes/proxy,nodes/checkpoint");
    let post = format!("{runs} --request POST");
    let (code, body) = request(
        cluster,
        &post,
        &format!("{base}/run/default/p/main?cmd=id+-u"),
    );
    assert_eq!((code, body.as_str()), (200, "0"));
    let (code, body) = request(cluster, &post, &format!("{base}/checkpoint/default/p/main"));
    assert!(
        code == 501 && body.contains("cannot checkpoint containers"),
        "{code}: {body}"
    );

    // Streams are authorised too.
    let node = cluster.first_node();
    let path = format!("'/exec/default/p/main?command=id&command=-u&output=1' --kubelet {node}");
    let token = |credentials: &str| {
        credentials
            .split("Bearer ")
            .nth(1)
            .unwrap_or_default()
            .trim_end_matches('\'')
            .to_owned()
    };
    let report = cluster.stream_client(
        "true",
        &format!(
            "--token {} websocket v5.channel.k8s.io {path}",
            token(&stats)
        ),
    );
    assert_eq!(report["status"], 403, "{report}");
    // A WebSocket begins with a GET, but is authorised as `create`.
    let attach = format!("'/attach/default/p/main?output=1' --kubelet {node}");
    let forward = format!("'/portForward/default/p?ports=80' --kubelet {node}");
    for (name, path) in [("v5", &path), ("v5", &attach), ("v4", &forward)] {
        let report = cluster.stream_client(
            "true",
            &format!(
                "--token {} websocket {name}.channel.k8s.io {path}",
                token(&proxy)
            ),
        );
        assert_eq!(report["status"], 403, "{path}: {report}");
    }
    let report = cluster.stream_client(
        "true",
        &format!(
            "--token {} websocket v5.channel.k8s.io {path}",
            token(&runs)
        ),
    );
    assert_eq!(
        (&report["status"], &report["1"]),
        (&json!(101), &json!("0\n")),
        "{report}"
    );
    let report = cluster.stream_client(
        "true",
        &format!("--token {} spdy v4.channel.k8s.io {path}", token(&proxy)),
    );
    assert_eq!(report["status"], 403, "{report}");
    let report = cluster.stream_client(
        "true",
        &format!("--token {} spdy v4.channel.k8s.io {path}", token(&runs)),
    );
    assert_eq!(
        (&report["status"], &report["stdout"]),
        (&json!(101), &json!("0\n")),
        "{report}"
    );
}

/// A TLS server that prints `received` for a request, and `closed:` for a client that rejects its certificate.
const SERVER: &str = "import os, socket, ssl
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain('kubelet.crt', 'kubelet.key')
server = socket.create_server(('', 0))
with open('port.new', 'w') as file:
    file.write(str(server.getsockname()[1]))
os.rename('port.new', 'port')
while True:
    connection, _ = server.accept()
    try:
        with context.wrap_socket(connection, server_side=True) as client:
            if client.recv(100):
                print('received', flush=True)
    except OSError as error:
        print('closed:', error, flush=True)
";

/// A false kubelet at a Node's address: its certificate has the right name, but is of an unknown CA.
fn assert_api_server_rejects_false_kubelets(cluster: &mut TestCluster, address: &str) {
    let port = cluster.shell(&format!(
        "cd {DIR} && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=false-node \
         -addext subjectAltName=IP:{address},DNS:false-node -keyout kubelet.key -out kubelet.crt 2> /dev/null && \
         cat > server.py <<'END'\n{SERVER}END\n\
         cd {DIR}; (exec /usr/bin/python3 server.py > server.log 2>&1) & echo $! > pid; \
         until [ -s port ]; do sleep 0.1; done; cat port"
    ));
    let port: u16 = port.parse().unwrap_or_else(|_| panic!("{port}"));
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "false-node"}, "status": {
        "addresses": [{"type": "InternalIP", "address": address}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }});
    let pod = pod(
        "on-false-node",
        json!({"nodeName": "false-node"}),
        &[script_container("main", WAIT_FOR_SIGTERM, json!({}))],
    );
    cluster.create_objects(&[node, pod]);
    for command in [
        "kubectl logs on-false-node",
        "kubectl exec on-false-node -- id",
        "kubectl get --raw /api/v1/nodes/false-node/proxy/healthz",
    ] {
        let (code, output) = cluster.try_shell(&format!("timeout 50 {command}"));
        let expected = "x509: certificate signed by unknown authority";
        assert!(
            code != 0 && output.contains(expected),
            "{command}: {output}"
        );
    }
    cluster.shell("kubectl delete pod on-false-node --force --grace-period=0 2> /dev/null; kubectl delete node false-node");
    let log = cluster.shell(&format!("kill $(cat {DIR}/pid); cat {DIR}/server.log"));
    assert!(
        log.contains("closed:") && !log.contains("received"),
        "{log}"
    );
    // A real kubelet still gets requests.
    assert_eq!(cluster.shell("kubectl logs p"), "hello");
}
