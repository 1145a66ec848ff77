//! A running cluster from other terminals: `coracle kubectl`, `coracle shell`, `coracle kubeconfig`.

use e2e::{Lab, TestCluster, wait_until};

#[test]
fn running_cluster_is_found_from_any_host() {
    let lab = Lab::acquire();
    lab.sh("rm -rf ~/cluster.conf ~/.cache/coracle/kubectl")
        .run();
    let get_nodes = ["coracle", "kubectl", "get", "nodes", "--output=name"];
    lab.command(&get_nodes)
        .run()
        .exited_with(66)
        .stderr_has(&["no running cluster found", "hint: "]);

    let mut cluster = TestCluster::start(&lab);
    let nodes = cluster.shell("kubectl get nodes --output=name");
    let nodes = format!("{nodes}\n");
    for host in ["login", "node1", "node2", "node3"] {
        let found = lab.command(&get_nodes).on(host).run().succeeded();
        assert_eq!(found.stdout, nodes, "{host}");
    }
    // kubectl's options and exit codes are its own.
    lab.command(&["coracle", "kubectl", "-n", "default", "get", "pod", "nope"])
        .run()
        .exited_with(1)
        .stderr_has(&["pods \"nope\" not found"]);

    // The shell's kubectl uses the cluster, and its prompt shows the name.
    let name = cluster.shell("echo $K8S_CLUSTER_NAME");
    let script = "kubectl get nodes --output=name; echo $K8S_CLUSTER_NAME; exit 3";
    let shell = lab.command(&["coracle", "shell"]).stdin(script).run();
    assert_eq!(
        (shell.code, &shell.stdout),
        (3, &format!("{nodes}{name}\n"))
    );
    let shell = "export SHELL=/bin/bash HISTFILE=/dev/null; { sleep 2; echo exit; } | script --quiet --return --command 'coracle shell' /dev/null";
    let terminal = lab.sh(shell).run().succeeded();
    assert!(
        terminal.stdout.contains(&format!("({name}) ")),
        "{terminal}"
    );

    // Only the user can read the file, and Slurm refuses the step of another user.
    lab.command(&["coracle", "kubeconfig", "--output", "cluster.conf"])
        .run()
        .succeeded()
        .stderr_has(&[&name]);
    let used = lab.sh("stat -c %a cluster.conf; KUBECONFIG=cluster.conf kubectl get nodes --output=name; rm -r cluster.conf ~/.kube");
    assert_eq!(used.run().succeeded().stdout, format!("600\n{nodes}"));
    let job = name.split('-').nth(1).unwrap().to_owned();
    let other = lab.command(&["coracle", "kubectl", "--job", &job, "get", "nodes"]);
    let other = other.user("user2").run();
    assert!(other.code != 0 && other.stdout.is_empty(), "{other}");

    // A second cluster in the same job.
    cluster.shell("(coracle run sleep 1000 > ~/second.out 2>&1; echo ended >> ~/second.out) &");
    let second_output = |cluster: &mut TestCluster| cluster.shell("cat ~/second.out");
    wait_until(60, "a second cluster", || {
        second_output(&mut cluster).contains("is ready after")
    });
    let output = second_output(&mut cluster);
    let warning = format!("this starts another cluster inside of {name}");
    assert!(output.contains(&warning), "{output}");
    let second = output.split_whitespace().find(|word| {
        word.starts_with(&format!("coracle-{job}-")) && word.trim_end_matches([';', ',']) != name
    });
    let second = second.unwrap().to_owned();
    lab.command(&["coracle", "logs", "--job", &job])
        .run()
        .exited_with(64)
        .stderr_has(&[&name, &second, "--name "]);
    for name in [&name, &second] {
        let log = lab.command(&["coracle", "logs", "--name", name]);
        log.run().succeeded().stdout_has(&[name]);
        let script = "echo $K8S_CLUSTER_NAME";
        let shell = lab.command(&["coracle", "shell", "--name", name]);
        assert_eq!(shell.stdin(script).run().succeeded().stdout.trim(), name);
    }
    // Inside of a workload, its own cluster is meant.
    let own = cluster.shell("echo 'echo $K8S_CLUSTER_NAME' | coracle shell");
    assert_eq!(own, name);
    cluster.shell("pkill -TERM -f '^[^ ]*coracle run sleep 1000'");
    wait_until(60, "the end of the second cluster", || {
        second_output(&mut cluster).contains("ended")
    });
    cluster.shell("rm ~/second.out");
    cluster.exit(0);
    lab.sh("rm -rf ~/.cache/coracle/kubectl; rmdir -p ~/.cache/coracle")
        .run();
    lab.assert_nothing_left();
}
