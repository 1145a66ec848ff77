//! A second user lists every socket of the hosts, and every file that a cluster of another user makes, and tries each.
//!
//! What second_user.rs attacks by name is found here without knowing any: by the difference that the cluster makes. A decoy of the
//! victim's own, which is open to all users, shows that the test finds what is open.

use std::collections::{BTreeMap, BTreeSet};

use e2e::{Cluster, Lab, Running, SmallDisk, pod, runs};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::second_user::{
    attack, credentials_of_another_cluster_open_nothing, listeners, open_files, processes,
    sockets_are_closed, ways,
};

const NODES: [&str; 2] = ["node1", "node2"];
const PLACES: [&str; 6] = [
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    "/dev/mqueue",
    "/run",
    "/home/user1",
];
const USER1: &str = "2001";

/// Open to all users: a web server, a socket for datagrams, an abstract one, a file, a directory.
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
/// What the second user can do to its files and its abstract socket.
const OPEN_DECOY: [(&str, &str); 6] = [
    ("connect", "@decoy"),
    ("create", "/tmp/decoy-dir"),
    ("list", "/tmp/decoy-dir"),
    ("read", "/dev/shm/decoy-file"),
    ("remove", "/tmp/decoy-dir"),
    ("write", "/dev/shm/decoy-file"),
];

#[test]
fn what_a_cluster_makes_is_closed() {
    let lab = Lab::ready();
    lab.load_busybox();
    let disks = NODES.map(|node| SmallDisk::on(&lab, node, "clean", "/tmp", "mode=1777"));
    let start = lab.call(&["srun", "-N2", "-wnode[1-2]", "coracle", "run", "bash"]);
    everything_is_closed(&lab, || Cluster::hold(start.start()));
    drop(disks);
    lab.nothing_left();
}

#[test]
fn what_a_carried_cluster_makes_is_closed() {
    let lab = Lab::make(
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
        lab.load_busybox_on(node, "user1");
    }
    let start = lab.sh("./coracle run -N2 bash");
    everything_is_closed(&lab, || {
        let cluster = Cluster::hold(start.start());
        let said = cluster.run.stderr();
        assert!(said.contains("carried coracle"), "{said}");
        cluster
    });
}

/// Starts a cluster with pods, and attacks all that it made.
fn everything_is_closed(lab: &Lab, start: impl FnOnce() -> Cluster) {
    // As at sites where users see each other's home directories.
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
        sockets_are_closed(lab, host, &processes(lab, host));
    }

    let (decoy, ports) = start_decoy(lab);
    let mut kinds = BTreeSet::new();
    for host in lab.hosts() {
        let made: BTreeSet<_> = list(lab, host).difference(&before[host]).cloned().collect();
        kinds.extend(made.iter().map(|(kind, _)| kind.clone()));
        files_and_names(lab, host, &made);
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
    without_a_certificate(lab, &known, &ports.0);
    credentials_of_another_cluster_open_nothing(lab, &mut cluster, &known);

    decoy.signal(Signal::TERM);
    drop(decoy);
    lab.root("node1", "rm -r /tmp/decoy-dir /dev/shm/decoy-file")
        .succeeded();
    cluster.ask("kubectl delete pod --all --grace-period=1");
    cluster.exit(0);
    for host in lab.hosts() {
        lab.root(host, &format!("chmod {} /home/user1", mode.trim()))
            .succeeded();
    }
}

/// Pods with what a sandbox makes for them.
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
        let main = runs("c", script, json!({"volumeMounts": mounts}));
        pod(&format!("victim-{node}"), spec, &[main])
    };
    std::iter::once(secret).chain(NODES.map(victim)).collect()
}

/// Starts the decoy on node1; the ports of its web server and of its datagrams.
fn start_decoy(lab: &Lab) -> (Running, (String, String)) {
    let words = ["/usr/bin/python3", "-c", DECOY];
    let mut decoy = lab.call(&words).on("node1").start();
    decoy.until_stdout("\n");
    let said = decoy.stdout();
    let (web, datagrams) = said.trim().split_once(' ').expect("two ports");
    let ports = (web.to_owned(), datagrams.to_owned());
    (decoy, ports)
}

/// All sockets and files of a host; those of the layers of images are left out, where nobody gets.
fn list(lab: &Lab, host: &str) -> BTreeSet<(String, String)> {
    let listed = attack(lab, host, "root", "enumerate", &json!({"paths": PLACES}));
    let is_noise = |what: &str| {
        what.contains("/layers/") || what.starts_with("/run/coracle") || what.contains("slurm")
    };
    listed
        .into_iter()
        .filter(|(_, what)| !is_noise(what))
        .collect()
}

/// What the second user gets of these files, and of sockets with a name, is the decoy's; the owner gets at them.
fn files_and_names(lab: &Lab, host: &str, made: &BTreeSet<(String, String)>) {
    let names = made
        .iter()
        .filter(|(kind, _)| kind == "file" || kind == "unix");
    // A hub renames its socket into place; the kernel keeps the name at which it was bound.
    let names = names.map(|(_, name)| name.replace("/hub.new", "/hub.sock"));
    let names: Vec<String> = names.collect();
    let got = open_files(lab, host, &names);
    let decoy = OPEN_DECOY.map(|(way, what)| (way.to_owned(), what.to_owned()));
    let expected = match host {
        "node1" => BTreeSet::from(decoy),
        _ => BTreeSet::new(),
    };
    assert_eq!(got, expected, "{host}");
    if NODES.contains(&host) {
        let order = json!({"paths": names});
        let possible = attack(lab, host, "user1", "files", &order);
        let own: BTreeSet<_> = possible.difference(&expected).cloned().collect();
        let all = ["connect", "create", "list", "read", "remove", "write"];
        assert_eq!(ways(&own), BTreeSet::from(all), "{host}");
    }
}

/// The ports of `user1` and its pods that the second user sees, but for Slurm's own.
fn ports_of_user1(lab: &Lab, host: &str) -> BTreeSet<String> {
    let slurms = lab
        .root(host, "ss -H -l -t -u -n -p | grep '\"srun\"'")
        .stdout;
    let is_slurms = |port: &str| {
        let local = slurms
            .lines()
            .filter_map(|line| line.split_whitespace().nth(4));
        local
            .filter_map(|local| local.rsplit(':').next())
            .any(|other| other == port)
    };
    let listed = attack(lab, host, "user2", "enumerate", &json!({"paths": []}));
    let mut found = BTreeSet::new();
    for (kind, what) in listed
        .iter()
        .filter(|(kind, _)| kind == "tcp" || kind == "udp")
    {
        let words: Vec<&str> = what.split(' ').collect();
        let [_, port, owner] = words[..] else {
            panic!("{host}: {what}");
        };
        let is_theirs = owner == USER1
            || owner
                .parse()
                .is_ok_and(|id: u32| (200_000..265_536).contains(&id));
        if is_theirs && !is_slurms(port) {
            found.insert(format!("{kind} {port}"));
        }
    }
    found
}

/// With and without TLS, nobody but the decoy answers a client that shows nothing.
fn without_a_certificate(lab: &Lab, known: &[crate::second_user::Listener], decoy: &str) {
    let ask = |scheme: &str, host: &str, port: &str, path: &str| {
        let command =
            format!("curl -sk -m 15 -o /dev/null -w %{{http_code}} {scheme}://{host}:{port}{path}");
        lab.sh(&command).user("user2").on("node2").run().stdout
    };
    for listener in known {
        for path in ["/", "/api", "/healthz", "/metrics", "/pods", "/apis"] {
            let got = ask("https", listener.host, &listener.port, path);
            assert!(
                ["000", "401"].contains(&got.as_str()),
                "{listener:?}: {path}: {got}"
            );
            let got = ask("http", listener.host, &listener.port, path);
            // Upstream's server says that it wants TLS.
            assert!(
                ["000", "400"].contains(&got.as_str()),
                "{listener:?}: {path}: {got}"
            );
        }
    }
    assert_eq!(ask("http", "node1", decoy, "/"), "200");
}
