//! Without a shared file system: program, release and workload are in the home directory of the login host, which no node can read.
//! All of it is carried to the nodes and removed afterwards.

use std::time::Duration;

use e2e::{Lab, Role, wait_until};
use rustix::process::Signal;

const NODES: usize = 2;

/// A lab whose hosts share no home directory. `~/coracle` and a release are on `login` only.
fn lab(name: &str) -> Lab {
    let lab = Lab::create(name, &["--private-homes"], NODES);
    lab.sh(
        "mkdir -p .local/share/coracle/kubernetes && cp /opt/coracle/bin/coracle . &&
         cp -a /opt/coracle/lib/coracle/kubernetes/v1.37.1 .local/share/coracle/kubernetes",
    )
    .run()
    .succeeded();
    lab.write(
        "work.sh",
        "#!/bin/bash\necho \"$1\" on $(hostname)\ncat\nkubectl get nodes -o name\nexit 3\n",
    );
    lab.write("odd.sh", "#!/no/such\n");
    lab.sh("chmod +x *.sh").run().succeeded();
    lab.write(
        "app/map.yaml",
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: mine}\n",
    );
    // Include these files on the login host in the snapshot.
    lab.with_new_snapshot()
}

/// Asserts that nothing is left on the nodes of such a lab.
#[track_caller]
fn assert_nothing_is_left(lab: &Lab) {
    lab.assert_nothing_left();
    for node in ["node1", "node2"] {
        lab.root(node, "ls -A /tmp /home/user1 | grep -i coracle")
            .exited_with(1);
    }
}

#[test]
fn program_release_and_workload_are_carried() {
    let lab = lab("/run/coracle-lab-carry");
    // A script with standard input, in a new job.
    let output = lab
        .sh("./coracle run -N2 ./work.sh 'it is'")
        .stdin("piped in\n")
        .within(120)
        .run()
        .exited_with(3);
    let expected = "it is on node1\npiped in\nnode/node1\nnode/node2";
    output
        .stdout_is(expected)
        .stderr_has(&["carried coracle, Kubernetes v1.37.1, work.sh to node1"]);
    assert_nothing_is_left(&lab);

    // A directory of manifests, in an allocation, from the login host.
    lab.sh("salloc --quiet -N2 ./coracle run app")
        .within(120)
        .run()
        .succeeded()
        .stderr_has(&["configmap/mine applied", "with 2 nodes is ready"]);
    assert_nothing_is_left(&lab);

    // With a terminal, the program cannot be requested through standard error.
    lab.sh("script -qec './coracle run -N2 bash -c \"tty; kubectl get nodes -o name; exit 5\"' /dev/null")
        .within(120)
        .run()
        .exited_with(5)
        .stdout_has(&["/dev/pts/", "node/node1", "node/node2"]);
    assert_nothing_is_left(&lab);
}

#[test]
fn carried_files_are_removed() {
    let lab = lab("/run/coracle-lab-carry-ends");
    // Without a release.
    lab.sh("./coracle run -N2 --kubernetes /nowhere ./work.sh")
        .run()
        .exited_with(72)
        .stderr_has(&["error: ", "hint: "]);
    assert_nothing_is_left(&lab);
    // A script whose interpreter the node does not have.
    lab.sh("./coracle run -N2 ./odd.sh")
        .within(120)
        .run()
        .exited_with(66)
        .stderr_has(&["cannot run", "hint: "]);
    assert_nothing_is_left(&lab);
    // Without enough space on the node.
    lab.root(
        "node1",
        "mount --no-mtab -t tmpfs -o size=64M,mode=1777 small /tmp",
    )
    .succeeded();
    let full = lab.sh("./coracle run -N1 -wnode1 true").within(120).run();
    // Lazily: a process of Slurm may still use it.
    lab.root("node1", "ls -A /tmp; umount --no-mtab --lazy /tmp")
        .succeeded()
        .stdout_is("");
    full.exited_with(73)
        .stderr_has(&["error: cannot carry coracle", "space in /tmp", "hint: "]);
    assert_nothing_is_left(&lab);

    // The submitting process gets SIGKILL and then SIGINT during the transfer. Then leader and guard are killed in a running
    // cluster.
    for (signal, code) in [(Signal::KILL, 137), (Signal::INT, 130)] {
        let running = lab.sh("exec ./coracle run -N2 sleep 60").start();
        wait_until(60, "the release arrives on the node", || {
            let listed = lab.root("node1", "ls -d /tmp/coracle-carried.*/kubernetes/v1.37.1");
            listed.code == 0
        });
        let processes = lab.processes_of("login", "user1");
        let mut processes = processes.iter();
        let submitter = processes.find(|p| p.args.starts_with("./coracle run"));
        let submitter = submitter.expect("the command runs on login");
        lab.kill("login", &signal.as_raw().to_string(), submitter);
        running.wait(Duration::from_secs(60)).exited_with(code);
        assert_nothing_is_left(&lab);
    }
    let mut running = lab
        .sh("./coracle run -N2 bash -c 'echo up; sleep 60'")
        .start();
    running.wait_for_stdout("up");
    let (worker, guard) = (
        lab.find("node1", Role::LeaderWorker),
        lab.find("node1", Role::LeaderGuard),
    );
    lab.root("node1", &format!("kill -KILL {} {}", worker.pid, guard.pid));
    let output = running.wait(Duration::from_secs(60));
    assert_ne!(output.code, 0, "{output}");
    assert_nothing_is_left(&lab);
}

#[test]
fn only_the_program_is_carried_if_sufficient() {
    let lab = lab("/run/coracle-lab-carry-agents");
    // The node on which `doctor` runs cannot read the program.
    let output = lab.sh("./coracle doctor --json -p main").run().succeeded();
    assert!(output.stdout.contains("\"host\": \"node"), "{output}");
    assert_nothing_is_left(&lab);
    // The leader's node can read the program, the other one cannot.
    lab.root(
        "node1",
        "install -d -o user1 /var/tmp/only && cp /opt/coracle/bin/coracle /var/tmp/only/",
    )
    .succeeded();
    let script = "salloc --quiet -N2 srun -N1 -n1 -wnode1 --overlap --chdir=/ /var/tmp/only/coracle run \
                  --kubernetes /opt/coracle/lib/coracle/kubernetes kubectl get nodes -o name";
    let output = lab.sh(script).run();
    lab.root("node1", "rm -r /var/tmp/only").succeeded();
    output.succeeded().stdout_is("node/node1\nnode/node2");
    assert_nothing_is_left(&lab);
}
