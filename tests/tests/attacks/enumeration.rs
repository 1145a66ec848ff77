//! A second user lists every socket of the hosts, and every file that another user's cluster creates, and tries to access each.
//!
//! second_user.rs attacks known names. This test needs none: it compares the hosts before and after the start of the cluster. A
//! decoy, which the victim makes accessible to all users, proves that the attacker would find an accessible object.

use std::collections::{BTreeMap, BTreeSet};

use e2e::{BUSYBOX, Lab, Running, SmallDisk, TestCluster, pod, script_container};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::second_user::{
    assert_foreign_credentials_are_rejected, assert_sockets_are_inaccessible, attack, listeners,
    open_files, operations, processes,
};

const NODES: [&str; 2] = ["node1", "node2"];
const SEARCHED_DIRS: [&str; 6] = [
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    "/dev/mqueue",
    "/run",
    "/home/user1",
];
const USER1: &str = "2001";

/// Accessible to all users: a web server, a UDP socket, an abstract socket, a file, a directory.
const DECOY: &str = r#"
import http.server, os, socket, threading
os.umask(0)
os.mkdir("/tmp/decoy-dir")
open("/dev/shm/decoy-file", "w").close()
unix, datagrams = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
unix.bind("\0decoy"); unix.listen(); datagrams.bind(("", 0))
server = http.server.HTTPServer(("", 0), http.server.SimpleHTTPRequestHandler)
print(server.server_port, datagrams.getsockname()[1], flush=True)
server.serve_forever()
"#;
/// The operations on the decoy's files and abstract socket that succeed for the second user.
const DECOY_OPERATIONS: [(&str, &str); 6] = [
    ("connect", "@decoy"),
    ("create", "/tmp/decoy-dir"),
    ("list", "/tmp/decoy-dir"),
    ("read", "/dev/shm/decoy-file"),
    ("remove", "/tmp/decoy-dir"),
    ("write", "/dev/shm/decoy-file"),
];

#[test]
fn second_user_cannot_access_anything_of_a_cluster() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let disks = NODES.map(|node| SmallDisk::on(&lab, node, "clean", "/tmp", "mode=1777"));
    let start = lab.command(&["srun", "-N2", "-wnode[1-2]", "coracle", "run", "bash"]);
    assert_everything_is_inaccessible(&lab, || TestCluster::from_command(start.start()));
    drop(disks);
    lab.assert_nothing_left();
}

#[test]
fn second_user_cannot_access_anything_of_carried_cluster() {
    let lab = Lab::create(
        "/run/coracle-lab-attacks-enumeration",
        &["--private-homes"],
        2,
    );
    lab.sh(
        "mkdir -p .local/share/coracle/kubernetes && cp /opt/coracle/bin/coracle . &&
         cp -a /opt/coracle/lib/coracle/kubernetes/v1.37.1 .local/share/coracle/kubernetes",
    )
    .run()
    .succeeded();
    for node in NODES {
        lab.load_busybox_on(node, "user1", BUSYBOX);
    }
    let start = lab.sh("./coracle run -N2 bash");
    assert_everything_is_inaccessible(&lab, || {
        let cluster = TestCluster::from_command(start.start());
        let stderr = cluster.run.stderr();
        assert!(stderr.contains("carried coracle"), "{stderr}");
        cluster
    });
}

/// Starts a cluster with pods, and attacks everything that it created.
fn assert_everything_is_inaccessible(lab: &Lab, start: impl FnOnce() -> TestCluster) {
    // Some sites let users read each other's home directories.
    let mode = lab.root("login", "stat -c %a /home/user1").stdout;
    for host in lab.hosts() {
        lab.root(host, "chmod 755 /home/user1").succeeded();
    }
    let before = lab
        .hosts()
        .iter()
        .map(|host| (host.clone(), list(lab, host)));
    let before: BTreeMap<_, _> = before.collect();
    let mut cluster = start();
    cluster.create_objects(&workload());
    for node in NODES {
        cluster.wait_for(&format!("victim-{node}"), "condition=Ready");
    }
    let known = listeners(lab);
    for host in lab.hosts() {
        assert_sockets_are_inaccessible(lab, host, &processes(lab, host));
    }

    let (decoy, ports) = start_decoy(lab);
    let mut kinds = BTreeSet::new();
    for host in lab.hosts() {
        let created: BTreeSet<_> = list(lab, host).difference(&before[host]).cloned().collect();
        kinds.extend(created.iter().map(|(kind, _)| kind.clone()));
        assert_only_decoy_is_accessible(lab, host, &created);
    }
    assert_eq!(
        kinds,
        BTreeSet::from(["file", "tcp", "udp", "unix"].map(str::to_owned))
    );
    for host in lab.hosts() {
        let mut wanted: BTreeSet<String> = known
            .iter()
            .filter(|listener| listener.host == host)
            .map(|listener| format!("tcp {}", listener.port))
            .collect();
        if host == "node1" {
            wanted.extend([format!("tcp {}", ports.0), format!("udp {}", ports.1)]);
        }
        assert_eq!(ports_of_user1(lab, host), wanted, "{host}");
    }
    assert_anonymous_requests_are_rejected(lab, &known, &ports.0);
    assert_foreign_credentials_are_rejected(lab, &mut cluster, &known);

    decoy.signal(Signal::TERM);
    drop(decoy);
    lab.root("node1", "rm -r /tmp/decoy-dir /dev/shm/decoy-file")
        .succeeded();
    cluster.shell("kubectl delete pod --all --grace-period=1");
    cluster.exit(0);
    for host in lab.hosts() {
        lab.root(host, &format!("chmod {} /home/user1", mode.trim()))
            .succeeded();
    }
}

/// Pods for which a sandbox creates files and sockets of all kinds.
fn workload() -> Vec<Value> {
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "precious"}, "stringData": {"key": "value"}});
    let script =
        "echo hello | tee /empty/file /dev/shm/file; trap exit TERM; while true; do sleep 1; done";
    let mounts = json!([{"name": "empty", "mountPath": "/empty"}, {"name": "memory", "mountPath": "/memory"},
        {"name": "secret", "mountPath": "/secret"}]);
    let volumes = json!([{"name": "empty", "emptyDir": {}}, {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {"name": "secret", "secret": {"secretName": "precious", "defaultMode": 0o444}}]);
    let victim = |node: &str| {
        let spec = json!({"nodeName": node, "volumes": volumes});
        let main = script_container("c", script, json!({"volumeMounts": mounts}));
        pod(&format!("victim-{node}"), spec, &[main])
    };
    std::iter::once(secret).chain(NODES.map(victim)).collect()
}

/// Starts the decoy on node1; returns the ports of its web server and of its UDP socket.
fn start_decoy(lab: &Lab) -> (Running, (String, String)) {
    let args = ["/usr/bin/python3", "-c", DECOY];
    let mut decoy = lab.command(&args).on("node1").start();
    decoy.wait_for_stdout("\n");
    let stdout = decoy.stdout();
    let (web, datagrams) = stdout.trim().split_once(' ').expect("two ports");
    let ports = (web.to_owned(), datagrams.to_owned());
    (decoy, ports)
}

/// All sockets and files of a host, except for those in image layers: no other user can enter their directory.
fn list(lab: &Lab, host: &str) -> BTreeSet<(String, String)> {
    let listed = attack(
        lab,
        host,
        "root",
        "enumerate",
        &json!({"paths": SEARCHED_DIRS}),
    );
    let is_ignored = |name: &str| {
        name.contains("/layers/") || name.starts_with("/run/coracle") || name.contains("slurm")
    };
    listed
        .into_iter()
        .filter(|(_, name)| !is_ignored(name))
        .collect()
}

/// Of these files and named sockets, the second user can access only the decoy's. The owner can access all.
fn assert_only_decoy_is_accessible(lab: &Lab, host: &str, created: &BTreeSet<(String, String)>) {
    let names = created
        .iter()
        .filter(|(kind, _)| kind == "file" || kind == "unix");
    // A hub renames its socket after bind(2); the kernel keeps the original name.
    let names = names
        .map(|(_, name)| name.replace("/hub.new", "/hub.sock"))
        .map(|name| name.replace("/hub-inside.new", "/hub-inside.sock"));
    let names: Vec<String> = names.collect();
    let accessible = open_files(lab, host, &names);
    let decoy =
        DECOY_OPERATIONS.map(|(operation, object)| (operation.to_owned(), object.to_owned()));
    let expected = match host {
        "node1" => BTreeSet::from(decoy),
        _ => BTreeSet::new(),
    };
    assert_eq!(accessible, expected, "{host}");
    if NODES.contains(&host) {
        let targets = json!({"paths": names});
        let possible = attack(lab, host, "user1", "files", &targets);
        let own: BTreeSet<_> = possible.difference(&expected).cloned().collect();
        let all = ["connect", "create", "list", "read", "remove", "write"];
        assert_eq!(operations(&own), BTreeSet::from(all), "{host}");
    }
}

/// The ports of `user1` and its pods that the second user can list, without those of Slurm's processes.
fn ports_of_user1(lab: &Lab, host: &str) -> BTreeSet<String> {
    let of_slurm = lab
        .root(host, "ss -H -l -t -u -n -p | grep '\"srun\"'")
        .stdout;
    let is_of_slurm = |port: &str| {
        let local = of_slurm
            .lines()
            .filter_map(|line| line.split_whitespace().nth(4));
        local
            .filter_map(|local| local.rsplit(':').next())
            .any(|other| other == port)
    };
    let listed = attack(lab, host, "user2", "enumerate", &json!({"paths": []}));
    let mut found = BTreeSet::new();
    for (kind, socket) in listed
        .iter()
        .filter(|(kind, _)| kind == "tcp" || kind == "udp")
    {
        let fields: Vec<&str> = socket.split(' ').collect();
        let [_, port, owner] = fields[..] else {
            panic!("{host}: {socket}");
        };
        let is_of_user1 = owner == USER1
            || owner
                .parse()
                .is_ok_and(|id: u32| (200_000..265_536).contains(&id));
        if is_of_user1 && !is_of_slurm(port) {
            found.insert(format!("{kind} {port}"));
        }
    }
    found
}

/// With and without TLS, no listener but the decoy's serves a client without credentials.
fn assert_anonymous_requests_are_rejected(
    lab: &Lab,
    known: &[crate::second_user::Listener],
    decoy: &str,
) {
    let status = |scheme: &str, host: &str, port: &str, path: &str| {
        let command =
            format!("curl -sk -m 15 -o /dev/null -w %{{http_code}} {scheme}://{host}:{port}{path}");
        lab.sh(&command).user("user2").on("node2").run().stdout
    };
    for listener in known {
        for path in ["/", "/api", "/healthz", "/metrics", "/pods", "/apis"] {
            let got = status("https", listener.host, &listener.port, path);
            assert!(
                ["000", "401"].contains(&got.as_str()),
                "{listener:?}: {path}: {got}"
            );
            let got = status("http", listener.host, &listener.port, path);
            // The API server answers plain HTTP with 400.
            assert!(
                ["000", "400"].contains(&got.as_str()),
                "{listener:?}: {path}: {got}"
            );
        }
    }
    assert_eq!(status("http", "node1", decoy, "/"), "200");
}
