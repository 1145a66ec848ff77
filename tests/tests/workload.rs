//! The environment of a workload that is a program, and its exit code.

use e2e::{Lab, TestCluster};

fn run(lab: &Lab, script: &str) -> e2e::Output {
    lab.command(&["srun", "-N1", "coracle", "run", "bash", "-c", script])
        .run()
}

#[test]
fn exit_code_is_the_workloads() {
    let lab = Lab::acquire();
    run(&lab, "exit 0").exited_with(0);
    run(&lab, "exit 7").exited_with(7);
    run(&lab, "exit 255").exited_with(255);
    lab.assert_nothing_left();
}

#[test]
fn exit_code_outside_a_job_is_the_workloads() {
    let lab = Lab::acquire();
    lab.command(&["coracle", "run", "-N2", "bash", "-c", "exit 7"])
        .run()
        .exited_with(7);
    let killed = lab
        .command(&["coracle", "run", "-N2", "bash", "-c", "kill -KILL $$"])
        .run();
    killed.exited_with(128 + 9);
    lab.assert_nothing_left();
}

#[test]
fn killed_workload_exits_with_128_plus_signal() {
    let lab = Lab::acquire();
    run(&lab, "kill -TERM $$").exited_with(128 + 15);
    run(&lab, "kill -SEGV $$").exited_with(128 + 11);
    lab.assert_nothing_left();
}

#[test]
fn arguments_are_passed_unchanged() {
    let lab = Lab::acquire();
    for start in [
        &["srun", "-N1", "coracle", "run"][..],
        &["coracle", "run", "-N1"],
    ] {
        let workload = [
            "printf", "<%s>\\n", "a b", "", "it's", "*", "$HOME", "-N7", "--", "--logs",
        ];
        let output = lab
            .command(&[start, &workload[..]].concat())
            .run()
            .succeeded();
        output.stdout_is("<a b>\n<>\n<it's>\n<*>\n<$HOME>\n<-N7>\n<-->\n<--logs>");
    }
    lab.assert_nothing_left();
}

#[test]
fn standard_input_is_passed_to_the_workload() {
    let lab = Lab::acquire();
    for start in [
        &["srun", "-N2", "coracle", "run"][..],
        &["coracle", "run", "-N2"],
    ] {
        let text = "one\ntwo\n".repeat(2000);
        lab.command(&[start, &["cat"]].concat())
            .stdin(&text)
            .run()
            .succeeded()
            .stdout_is(&text);
    }
    lab.assert_nothing_left();
}

#[test]
fn script_runs_without_executable_permission() {
    let lab = Lab::acquire();
    lab.write("my script", "#!/bin/bash -e\necho \"$1 in $PWD\"\n");
    for mode in ["700", "600"] {
        let output = lab
            .sh(&format!(
                "chmod {mode} 'my script'; srun -N1 coracle run './my script' x"
            ))
            .run();
        output.succeeded().stdout_is("x in /home/user1");
    }
    lab.remove("my script");
    lab.assert_nothing_left();
}

#[test]
fn variables_of_ksi_are_set_and_work() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    let env = cluster.shell("env");
    for name in [
        "KUBECONFIG=",
        "K8S_CLUSTER_NAME=coracle-",
        "K8S_CLUSTER_API=https://10.77.0.11:",
        "K8S_CLUSTER_API_TOKEN=",
        "K8S_PORT=3",
    ] {
        assert!(
            env.lines().any(|line| line.starts_with(name)),
            "{name} in {env}"
        );
    }
    // As in KSI's examples.
    let nodes = cluster.shell(
        r#"curl --silent --insecure --header "Authorization: Bearer $K8S_CLUSTER_API_TOKEN" "$K8S_CLUSTER_API/api/v1/nodes" | jq -r ".items[].metadata.name""#,
    );
    assert_eq!(nodes, "node1\nnode2");
    let context = cluster.shell(r#"kubectl --context "$K8S_CLUSTER_NAME" get nodes -o name"#);
    assert_eq!(context, "node/node1\nnode/node2");
    let port = cluster.shell("echo $K8S_PORT").parse::<u16>().unwrap();
    assert!((30000..=32767).contains(&port), "{port}");
    cluster.shell("kubectl create service nodeport web --tcp=80 --node-port=$K8S_PORT");
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn workload_may_change_the_kubeconfig() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    cluster.shell("kubectl config set-context --current --namespace=kube-system");
    cluster.shell("kubectl get configmap extension-apiserver-authentication");
    cluster.shell("test $(stat -c %a $KUBECONFIG) = 600");
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn kubectl_is_on_the_path_of_every_workload() {
    let lab = Lab::acquire();
    let script =
        "PATH=/usr/bin:/bin srun -N1 /opt/coracle/bin/coracle run kubectl get nodes -o name";
    lab.sh(script).run().succeeded().stdout_is("node/node1");
    let script = "PATH=/usr/bin:/bin srun -N1 /opt/coracle/bin/coracle run sh -c 'kubectl get nodes -o name'";
    lab.sh(script).run().succeeded().stdout_is("node/node1");
    lab.assert_nothing_left();
}

#[test]
fn service_account_and_schedulable_nodes_exist_at_once() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    cluster.shell("kubectl get serviceaccount default");
    cluster.shell("kubectl run it --image=none --restart=Never");
    let bound = cluster.shell("kubectl wait pod/it --for=jsonpath={.spec.nodeName} --timeout=10s");
    assert!(bound.contains("condition met"), "{bound}");
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn kubectl_leaves_no_cache_in_home() {
    let lab = Lab::acquire();
    run(&lab, "kubectl api-resources > /dev/null").succeeded();
    lab.sh("ls -A ~/.kube").run().exited_with(2);
    lab.assert_nothing_left();
}
