//! Authentication and authorisation of the kubelet's API: certificates, tokens and RBAC.

use e2e::{Cluster, Lab, Role, WAITS, pod, runs, simple, wait_until};
use rustix::process::Signal;
use serde_json::{Value, json};

const DIR: &str = "/tmp/kubelet-access";

/// Credentials of a client, as options of curl.
const NOTHING: &str = "";

/// Sends a request to a kubelet; returns the status (0 if the handshake failed) and the body.
#[track_caller]
fn ask(cluster: &mut Cluster, shown: &str, url: &str) -> (u32, String) {
    let (_, text) = cluster.try_ask(&format!(
        "curl --silent --insecure --max-time 40 --write-out '\\n%{{http_code}}' {shown} '{url}'"
    ));
    let (body, code) = text.rsplit_once('\n').unwrap_or(("", &text));
    let code = code.parse().unwrap_or_else(|_| panic!("{url}: {text}"));
    (code, body.trim_end().to_owned())
}

/// Creates a service account with these rights on nodes; returns the options of curl with its token.
fn account(cluster: &mut Cluster, name: &str, verbs: &str, resources: &str) -> String {
    cluster.ask(&format!("kubectl create serviceaccount {name}"));
    if !resources.is_empty() {
        cluster.ask(&format!(
            "kubectl create clusterrole {name} --verb={verbs} --resource={resources} && \
             kubectl create clusterrolebinding {name} --clusterrole={name} --serviceaccount=default:{name}"
        ));
    }
    let token = cluster.ask(&format!("kubectl create token {name}"));
    format!("--header 'Authorization: Bearer {token}'")
}

#[test]
fn kubelet_requires_authentication_and_authorisation() {
    let lab = Lab::ready();
    lab.load_busybox();
    let mut cluster = Cluster::start_as(&lab, "user1", &["srun", "-N1", "coracle", "run"]);
    cluster.ask(&format!("rm -rf {DIR}; mkdir {DIR}"));
    cluster.create_running(&[simple("p", &format!("echo hello; {WAITS}"), json!({}))]);
    let node: Value = cluster.json("get nodes")["items"][0].clone();
    let address = node["status"]["addresses"][0]["address"]
        .as_str()
        .unwrap_or_default();
    let port = &node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"];
    let base = format!("https://{address}:{port}");

    strangers_learn_nothing(&lab, &mut cluster, &base);
    a_crowd_of_strangers_keeps_nobody_out(&lab, &mut cluster, address, &port.to_string());
    // Unauthenticated clients cause no warnings in the log either.
    let node = cluster.first_node();
    assert_eq!(cluster.complaints(&node), Vec::<String>::new());
    certificates_of_the_api_are_none_of_kubelets(&mut cluster, &base);
    rbac_decides_about_tokens(&mut cluster, &base);
    the_api_server_asks_true_kubelets_only(&mut cluster, address);
    cluster.ask(&format!("rm -rf {DIR}"));
    cluster.exit(0);
    lab.nothing_left();
}

fn strangers_learn_nothing(lab: &Lab, cluster: &mut Cluster, base: &str) {
    let paths = [
        "/healthz",
        "/pods",
        "/metrics",
        "/stats/summary",
        "/logs/",
        "/containerLogs/default/p/main",
        "/exec/default/p/main?command=id&output=1",
        "/run/default/p/main?cmd=id",
        "/there/is/no/such/path",
    ];
    let unauthorised = (401, "Unauthorized".to_owned());
    for path in paths {
        let url = format!("{base}{path}");
        assert_eq!(ask(cluster, NOTHING, &url), unauthorised, "{path}");
        let wrong = "--header 'Authorization: Bearer not.a.token'";
        assert_eq!(ask(cluster, wrong, &url), unauthorised, "{path}");
        let basic = "--user admin:admin";
        assert_eq!(ask(cluster, basic, &url), unauthorised, "{path}");
    }
    // Another user of the machine is unauthenticated as well.
    let asked = lab
        .call(&["curl", "--silent", "--insecure", &format!("{base}/pods")])
        .user("user2")
        .on("node1")
        .run();
    assert_eq!(asked.stdout, "Unauthorized", "{asked}");
    // A certificate may have any name, so only its CA counts.
    cluster.ask(&format!(
        "cd {DIR} && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 \
         -subj /O=system:masters/CN=kube-apiserver-kubelet-client -keyout false.key -out false.crt 2> /dev/null"
    ));
    let shown = format!("--cert {DIR}/false.crt --key {DIR}/false.key");
    assert_eq!(ask(cluster, &shown, &format!("{base}/pods")).0, 0);
}

/// Opens connections and holds them: silent from the start, silent after the handshake, or in the middle of a request.
const CROWD: &str = "import resource, socket, ssl, sys, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
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
        print('here', flush=True)
    time.sleep(0.005)
";

/// Any user of the host can open connections and leave them idle.
fn a_crowd_of_strangers_keeps_nobody_out(
    lab: &Lab,
    cluster: &mut Cluster,
    address: &str,
    port: &str,
) {
    let shown = account(cluster, "crowded", "get", "nodes/healthz");
    let node = cluster.first_node();
    let agent = lab.find(&node, Role::Agent);
    let descriptors = || {
        let counted = lab.root(&node, &format!("ls /proc/{}/fd | wc -l", agent.pid));
        let count = counted.succeeded().stdout.trim().parse::<u32>();
        count.expect("a number")
    };
    let before = descriptors();
    let mut crowd = lab
        .call(&["/usr/bin/python3", "-c", CROWD, address, port])
        .user("user2")
        .start();
    crowd.until_stdout("here");
    for _ in 0..5 {
        assert_eq!(cluster.ask("kubectl logs p"), "hello");
        assert_eq!(cluster.ask("kubectl exec p -- echo inside"), "inside");
        let healthy = ask(
            cluster,
            &shown,
            &format!("https://{address}:{port}/healthz"),
        );
        assert_eq!(healthy, (200, "ok".to_owned()));
        let now = descriptors();
        assert!(now < before + 200, "{before} descriptors, then {now}");
    }
    assert!(!crowd.has_ended(), "the crowd was there all the time");
    crowd.signal(Signal::KILL);
    drop(crowd);
    for stray in lab.processes_of("login", "user2") {
        lab.kill("login", "KILL", &stray);
    }
}

/// Users of the API may get certificates of any name. So the API server's certificate for kubelets is of another CA.
fn certificates_of_the_api_are_none_of_kubelets(cluster: &mut Cluster, base: &str) {
    cluster.ask(&format!(
        "cd {DIR}; for part in certificate key; do \
         kubectl config view --raw --output=jsonpath=\"{{.users[0].user.client-$part-data}}\" | base64 --decode > own.$part; done; \
         test -s own.certificate && test -s own.key"
    ));
    let own = format!("--cert {DIR}/own.certificate --key {DIR}/own.key");
    assert_eq!(ask(cluster, &own, &format!("{base}/healthz")).0, 0);
    cluster.ask(&format!(
        "cd {DIR} && openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=kube-apiserver-kubelet-client \
         -keyout signed.key -out signed.csr 2> /dev/null && kubectl create --filename=- <<END\n\
         {{\"apiVersion\": \"certificates.k8s.io/v1\", \"kind\": \"CertificateSigningRequest\", \"metadata\": {{\"name\": \"signed\"}}, \
         \"spec\": {{\"request\": \"$(base64 --wrap=0 < signed.csr)\", \"signerName\": \"kubernetes.io/kube-apiserver-client\", \"usages\": [\"client auth\"]}}}}\n\
         END\n\
         kubectl certificate approve signed"
    ));
    wait_until(40, "the certificate is signed", || {
        let asked = format!(
            "cd {DIR}; kubectl get csr signed --output=jsonpath={{.status.certificate}} | base64 --decode > signed.crt; test -s signed.crt"
        );
        cluster.try_ask(&asked).0 == 0
    });
    let signed = format!("--cert {DIR}/signed.crt --key {DIR}/signed.key");
    assert_eq!(ask(cluster, &signed, &format!("{base}/healthz")).0, 0);
}

fn rbac_decides_about_tokens(cluster: &mut Cluster, base: &str) {
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
    // The accounts that have access, and the subresources that RBAC is asked for.
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
    for (path, may, asked) in paths {
        for (name, shown) in all {
            let (code, body) = ask(cluster, shown, &format!("{base}{path}"));
            if may.contains(&name) {
                assert_eq!(code, 200, "{name}: {path}: {body}");
            } else {
                let words = format!(
                    "Forbidden (user=system:serviceaccount:default:{name}, verb=get, resource=nodes, subresource(s)=[{asked}])"
                );
                assert_eq!((code, body), (403, words), "{name}: {path}");
            }
        }
    }
    let (_, log) = ask(
        cluster,
        &proxy,
        &format!("{base}/containerLogs/default/p/main"),
    );
    assert_eq!(log, "hello");
    let missing = (404, "404 page not found".to_owned());
    let asked = ask(cluster, &proxy, &format!("{base}/there/is/no/such/path"));
    assert_eq!(asked, missing);
    // A POST has another verb.
    let post = format!("{proxy} --request POST");
    let (code, body) = ask(cluster, &post, &format!("{base}/run/default/p/main?cmd=id"));
    let words = "Forbidden (user=system:serviceaccount:default:proxy, verb=create, resource=nodes, subresource(s)=[proxy])";
    assert_eq!((code, body.as_str()), (403, words));
    let (code, body) = ask(cluster, &post, &format!("{base}/checkpoint/default/p/main"));
    assert!(
        code == 403 && body.contains("verb=create") && body.contains("[checkpoint]"),
        "{code}: {body}"
    );
    let runs = account(cluster, "runs", "create", "nodes/proxy,nodes/checkpoint");
    let post = format!("{runs} --request POST");
    let (code, body) = ask(
        cluster,
        &post,
        &format!("{base}/run/default/p/main?cmd=id+-u"),
    );
    assert_eq!((code, body.as_str()), (200, "0"));
    let (code, body) = ask(cluster, &post, &format!("{base}/checkpoint/default/p/main"));
    assert!(
        code == 501 && body.contains("cannot checkpoint containers"),
        "{code}: {body}"
    );

    // Streams are authorised too.
    let node = cluster.first_node();
    let path = format!("'/exec/default/p/main?command=id&command=-u&output=1' --kubelet {node}");
    let token = |shown: &str| {
        shown
            .split("Bearer ")
            .nth(1)
            .unwrap_or_default()
            .trim_end_matches('\'')
            .to_owned()
    };
    let told = cluster.talk(
        "true",
        &format!(
            "--token {} websocket v5.channel.k8s.io {path}",
            token(&stats)
        ),
    );
    assert_eq!(told["status"], 403, "{told}");
    // A WebSocket begins with a GET, but is authorised as `create`.
    let attach = format!("'/attach/default/p/main?output=1' --kubelet {node}");
    let forward = format!("'/portForward/default/p?ports=80' --kubelet {node}");
    for (name, path) in [("v5", &path), ("v5", &attach), ("v4", &forward)] {
        let told = cluster.talk(
            "true",
            &format!(
                "--token {} websocket {name}.channel.k8s.io {path}",
                token(&proxy)
            ),
        );
        assert_eq!(told["status"], 403, "{path}: {told}");
    }
    let told = cluster.talk(
        "true",
        &format!(
            "--token {} websocket v5.channel.k8s.io {path}",
            token(&runs)
        ),
    );
    assert_eq!(
        (&told["status"], &told["1"]),
        (&json!(101), &json!("0\n")),
        "{told}"
    );
    let told = cluster.talk(
        "true",
        &format!("--token {} spdy v4.channel.k8s.io {path}", token(&proxy)),
    );
    assert_eq!(told["status"], 403, "{told}");
    let told = cluster.talk(
        "true",
        &format!("--token {} spdy v4.channel.k8s.io {path}", token(&runs)),
    );
    assert_eq!(
        (&told["status"], &told["stdout"]),
        (&json!(101), &json!("0\n")),
        "{told}"
    );
}

/// A TLS server that prints `asked` for a request, and `left:` for a client that rejects its certificate.
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
                print('asked', flush=True)
    except OSError as error:
        print('left:', error, flush=True)
";

/// A false kubelet at a Node's address: its certificate has the right name, but is of an unknown CA.
fn the_api_server_asks_true_kubelets_only(cluster: &mut Cluster, address: &str) {
    let port = cluster.ask(&format!(
        "cd {DIR} && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=false-node \
         -addext subjectAltName=IP:{address},DNS:false-node -keyout kubelet.key -out kubelet.crt 2> /dev/null && \
         cat > server.py <<'END'\n{SERVER}END\n\
         cd {DIR}; (exec /usr/bin/python3 server.py > heard 2>&1) & echo $! > pid; \
         until [ -s port ]; do sleep 0.1; done; cat port"
    ));
    let port: u16 = port.parse().unwrap_or_else(|_| panic!("{port}"));
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "false-node"}, "status": {
        "addresses": [{"type": "InternalIP", "address": address}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }});
    let pod = pod(
        "asks-false",
        json!({"nodeName": "false-node"}),
        &[runs("main", WAITS, json!({}))],
    );
    cluster.create_objects(&[node, pod]);
    for command in [
        "kubectl logs asks-false",
        "kubectl exec asks-false -- id",
        "kubectl get --raw /api/v1/nodes/false-node/proxy/healthz",
    ] {
        let (code, words) = cluster.try_ask(&format!("timeout 50 {command}"));
        let why = "x509: certificate signed by unknown authority";
        assert!(code != 0 && words.contains(why), "{command}: {words}");
    }
    cluster.ask("kubectl delete pod asks-false --force --grace-period=0 2> /dev/null; kubectl delete node false-node");
    let heard = cluster.ask(&format!("kill $(cat {DIR}/pid); cat {DIR}/heard"));
    assert!(
        heard.contains("left:") && !heard.contains("asked"),
        "{heard}"
    );
    // A real kubelet still gets requests.
    assert_eq!(cluster.ask("kubectl logs p"), "hello");
}
