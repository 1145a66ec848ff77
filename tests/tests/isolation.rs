//! Isolation of clusters on the same nodes: of two users, and of one user.

use e2e::{HOSTS, Lab, Role, TestCluster};

#[test]
fn clusters_of_two_users_share_nodes() {
    assert_clusters_share_nodes("user1", "user2");
}

#[test]
fn clusters_of_one_user_share_nodes() {
    assert_clusters_share_nodes("user1", "user1");
}

fn assert_clusters_share_nodes(first: &str, second: &str) {
    let lab = Lab::acquire();
    let args = ["srun", "-N2", "-wnode[1-2]", "coracle", "run"];
    let mut one = TestCluster::start_as(&lab, first, &args);
    let mut two = TestCluster::start_as(&lab, second, &args);
    assert_separate(&mut one, &mut two);
    one.exit(0);
    assert!(
        two.has_ready_nodes(2),
        "the end of one cluster does not affect the other"
    );
    two.exit(0);
    lab.assert_nothing_left();
}

fn assert_separate(one: &mut TestCluster, two: &mut TestCluster) {
    one.shell("kubectl create configmap first");
    two.shell("kubectl create configmap second");
    assert_eq!(
        one.shell("kubectl get configmap -o name | grep -v kube-root"),
        "configmap/first"
    );
    assert_eq!(
        two.shell("kubectl get configmap -o name | grep -v kube-root"),
        "configmap/second"
    );
    assert!(one.has_ready_nodes(2) && two.has_ready_nodes(2));
    // Credentials of one cluster are invalid in the other.
    let token = one.shell("echo $K8S_CLUSTER_API_TOKEN");
    let code = two.shell(&format!("curl -sk -o /dev/null -w %{{http_code}} -H 'Authorization: Bearer {token}' $K8S_CLUSTER_API/api"));
    assert_eq!(code, "401");
}

#[test]
fn another_user_cannot_read_files_environment_or_api() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    let api = cluster.shell("echo $K8S_CLUSTER_API");
    let config = cluster.shell("echo $KUBECONFIG");
    let first = lab.find("node1", Role::ControlPlaneFirst);
    let as_user2 = |script: &str| {
        lab.command(&["bash", "-c", script])
            .user("user2")
            .on("node1")
            .run()
    };
    assert!(
        config.contains(&format!("/proc/{}/root/", first.pid)),
        "{config}"
    );
    as_user2(&format!("cat {config}"))
        .exited_with(1)
        .stderr_has(&["Permission denied"]);
    as_user2(&format!("ls /proc/{}/root/tmp", first.pid))
        .exited_with(2)
        .stderr_has(&["Permission denied"]);
    for process in lab.processes_of("node1", "user1") {
        as_user2(&format!("cat /proc/{}/environ", process.pid)).exited_with(1);
        let fds = as_user2(&format!("ls /proc/{}/fd", process.pid));
        assert_ne!(fds.code, 0, "{fds}");
    }
    for path in ["/api", "/healthz", "/readyz", "/version", "/metrics"] {
        let code = as_user2(&format!(
            "curl -sk -o /dev/null -w %{{http_code}} {api}{path}"
        ));
        code.succeeded().stdout_is("401");
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn no_secret_is_on_a_command_line() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start_as(&lab, "user1", &["coracle", "run", "-N2"]);
    let token = cluster.shell("echo $K8S_CLUSTER_API_TOKEN");
    assert!(token.len() >= 32, "{token}");
    for host in HOSTS {
        for process in lab.processes(host) {
            for secret in [token.as_str(), "PRIVATE KEY", "BEGIN CERT"] {
                assert!(!process.args.contains(secret), "{host}: {process:?}");
            }
        }
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn every_port_requires_credentials() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    let version = cluster.shell("coracle --version").replace("coracle ", "");
    let (mut of_api_server, mut of_coracle) = (0, 0);
    for host in ["node1", "node2"] {
        // The response of each port of user1's processes to an unauthenticated client. Ports of srun are Slurm's.
        let users: Vec<u32> = lab
            .processes_of(host, "user1")
            .iter()
            .map(|p| p.pid)
            .collect();
        let listening = lab.root(host, "ss -H -l -t -n -p").stdout;
        for line in listening.lines() {
            let pid = line
                .split("pid=")
                .nth(1)
                .and_then(|rest| rest.split([',', ')']).next());
            if !pid
                .and_then(|pid| pid.parse().ok())
                .is_some_and(|pid| users.contains(&pid))
                || line.contains("\"srun\"")
            {
                continue;
            }
            let address = line.split_whitespace().nth(3).unwrap();
            assert!(
                !address.starts_with("127."),
                "a listener on the loopback address: {line}"
            );
            let port = address.rsplit(':').next().unwrap();
            let unauthenticated =
                |script: &str| lab.command(&["bash", "-c", script]).user("user2").run();
            let got = unauthenticated(&format!(
                "curl -sk -m 15 -o /dev/null -w %{{http_code}} https://{host}:{port}/pods"
            ));
            if line.contains("\"kube-apiserver\"") {
                of_api_server += 1;
                assert_eq!(got.stdout, "401", "{line}");
                continue;
            }
            of_coracle += 1;
            // Kubelets answer 401 without a client certificate. The others close the connection.
            assert!(
                ["000", "401"].contains(&got.stdout.as_str()),
                "an unauthenticated client gets a response: {line}{got}"
            );
            // The leader's enrolment listener rejects an agent with a wrong token.
            let hello = format!(
                r#"{{"hello":{{"version":"{version}","node":"node2","token":"0","client_key_pem":"","server_key_pem":"","addresses":[]}}}}"#
            );
            let response = unauthenticated(&format!(
                "echo '{hello}' | timeout 15 openssl s_client -quiet -connect {host}:{port} 2>&1"
            ));
            assert_ne!(
                response.code, 124,
                "the connection is closed: {line}{response}"
            );
            assert!(!response.stdout.contains("welcome"), "{line}{response}");
        }
    }
    // The enrolment listener, metrics.k8s.io, and two kubelets.
    assert_eq!((of_api_server, of_coracle), (1, 4));
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn only_the_user_can_read_keys_and_certificates() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    let files = cluster.shell("find $(dirname $KUBECONFIG)/pki -type f | wc -l");
    assert!(files.trim().parse::<u32>().unwrap() > 10, "{files}");
    let open = cluster.shell("find $(dirname $KUBECONFIG)/ -maxdepth 2 -type f -not -path '*/seed/*' -not -path '*/programs/*' -perm /077; echo end");
    assert_eq!(open.trim(), "end");
    cluster.exit(0);
    lab.assert_nothing_left();
}
