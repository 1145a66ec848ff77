//! Invalid input and broken environments: an error message with a hint, a documented exit code, and no leftovers.

use std::time::Duration;

use e2e::{Lab, Output, Role, eventually, wait_until};

/// Runs `coracle run ARGS…` on one node, and expects an error with a hint.
#[track_caller]
fn fails(lab: &Lab, args: &[&str], code: i32) -> Output {
    let output = lab
        .command(&[&["srun", "-N1", "-wnode1", "coracle", "run"], args].concat())
        .run();
    output.exited_with(code).stderr_has(&["error: ", "hint: "])
}

/// The same outside of a job.
#[track_caller]
fn fails_outside(lab: &Lab, args: &[&str], code: i32) -> Output {
    let output = lab.command(&[&["coracle", "run"], args].concat()).run();
    output.exited_with(code).stderr_has(&["error: "])
}

#[test]
fn invalid_command_line_exits_with_64() {
    let lab = Lab::acquire();
    for args in [
        &["run"][..],
        &["run", "-N"],
        &["run", "-N2"],
        &["bogus"],
        &[],
        &["run", "--api-port", "x", "true"],
        &["run", "--api-port=70000", "true"],
        &["run", "--service-cidr=nonsense", "true"],
        &["run", "--pod-cidr=10.0.0.1/8", "true"],
        &["run", "--pod-cidr=10.0.0.0/25", "true"],
    ] {
        let output = lab
            .command(&[&["coracle"], args].concat())
            .run()
            .exited_with(64);
        assert!(!output.stderr.is_empty(), "{args:?}");
    }
    for (variable, hint) in [
        ("CORACLE_ROOTFS=paper", "it may be overlay"),
        ("CORACLE_STREAM_IDLE=soon", "is not like 90s"),
        ("CORACLE_IMAGE_GC=high=200", "high above 100"),
        ("CORACLE_IMAGE_LIMITS=size=1", "has no \"size\""),
    ] {
        let output = lab.command(&["env", variable, "coracle", "run", "-N1", "true"]);
        let name = variable.split('=').next().unwrap_or_default();
        output
            .run()
            .exited_with(64)
            .stderr_has(&["error: ", name, hint, "hint: "]);
    }
    lab.write("a.yaml", "");
    fails_outside(&lab, &["a.yaml", "more"], 64)
        .stderr_has(&["manifests take no arguments", "hint: "]);
    lab.remove("a.yaml");
    lab.assert_nothing_left();
}

#[test]
fn missing_workload_exits_with_66() {
    let lab = Lab::acquire();
    for name in [
        "nowhere.yaml",
        "./nowhere",
        "no-such-program",
        "/nowhere/at/all",
    ] {
        fails_outside(&lab, &["-N2", name], 66).stderr_has(&[name, "hint: "]);
    }
    fails(&lab, &["nowhere.yaml"], 66).stderr_has(&["nowhere.yaml"]);
    lab.assert_nothing_left();
}

#[test]
fn unreadable_or_not_executable_workload_exits_with_66() {
    let lab = Lab::acquire();
    lab.write("secret.yaml", "a: b");
    lab.write("notes.txt", "hello");
    lab.write("broken", "#!/no/such/interpreter\n");
    lab.sh("chmod 000 secret.yaml; chmod +x broken; mkdir -m 000 closed")
        .run()
        .succeeded();
    fails_outside(&lab, &["-N1", "secret.yaml"], 66).stderr_has(&[
        "secret.yaml",
        "permission",
        "hint: ",
    ]);
    fails_outside(&lab, &["-N1", "closed"], 66).stderr_has(&["closed", "hint: "]);
    fails_outside(&lab, &["-N1", "notes.txt"], 66)
        .stderr_has(&["neither a manifest nor a program", "hint: "]);
    fails(&lab, &["./broken"], 66).stderr_has(&["broken"]);
    for file in ["secret.yaml", "notes.txt", "broken", "closed"] {
        lab.remove(file);
    }
    lab.assert_nothing_left();
}

#[test]
fn missing_slurm_exits_with_69() {
    let lab = Lab::acquire();
    let output = lab
        .sh("PATH=/nowhere /opt/coracle/bin/coracle run -N1 /bin/true")
        .run();
    output
        .exited_with(69)
        .stderr_has(&["error: ", "srun", "hint: "]);
    lab.assert_nothing_left();
}

#[test]
fn unreachable_slurm_exits_with_69() {
    let lab = Lab::acquire();
    let services = "/opt/coracle-src/lab/lib/services";
    lab.root("login", &format!("{services} stop-controller"))
        .succeeded();
    let output = lab.command(&["coracle", "run", "-N1", "true"]).run();
    lab.root("login", &format!("{services} controller"))
        .succeeded();
    wait_until(60, "the nodes are idle", || lab.queue_is_empty());
    output.exited_with(69).stderr_has(&["error: ", "hint: "]);
    lab.assert_nothing_left();
}

#[test]
fn rejection_by_slurm_exits_with_69_and_message() {
    let lab = Lab::acquire();
    fails_outside(&lab, &["-N1", "-p", "nope", "true"], 69)
        .stderr_has(&["nvalid partition", "hint: "]);
    // The message once, and a hint about accounts, not partitions.
    let output = fails_outside(&lab, &["-N1", "-A", "nobody", "true"], 69)
        .stderr_has(&["lists your accounts", "hint: "]);
    let count = output.stderr.matches("Invalid account").count();
    assert_eq!(count, 1, "{output}");
    assert!(!output.stderr.contains("sinfo"), "{output}");
    lab.assert_nothing_left();
}

#[test]
fn port_in_use_exits_with_71() {
    let lab = Lab::acquire();
    // The port of slurmd.
    fails(&lab, &["--api-port", "6818", "true"], 71).stderr_has(&["port 6818", "--api-port"]);
    lab.assert_nothing_left();
}

#[test]
fn requested_free_port_is_used() {
    let lab = Lab::acquire();
    let args = [
        "srun",
        "-N1",
        "-wnode1",
        "coracle",
        "run",
        "--api-port=36443",
        "sh",
        "-c",
        "echo $K8S_CLUSTER_API",
    ];
    lab.command(&args)
        .run()
        .succeeded()
        .stdout_is("https://10.77.0.11:36443");
    lab.assert_nothing_left();
}

#[test]
fn missing_kubernetes_release_exits_with_72() {
    let lab = Lab::acquire();
    fails(&lab, &["--kubernetes", "/nonexistent", "true"], 72).stderr_has(&["/nonexistent"]);
    lab.assert_nothing_left();
}

#[test]
fn unwritable_logs_directory_exits_with_73() {
    let lab = Lab::acquire();
    fails(&lab, &["--logs", "/root/logs", "true"], 73).stderr_has(&["/root/logs"]);
    fails(&lab, &["--logs", "/etc/passwd/logs", "true"], 73);
    // A directory that exists, but is not the user's.
    fails(&lab, &["--logs", "/usr", "true"], 73).stderr_has(&["/usr"]);
    lab.assert_nothing_left();
}

#[test]
fn full_home_is_only_a_warning() {
    let lab = Lab::acquire();
    lab.root(
        "node1",
        "mkdir /run/full && mount --no-mtab -t tmpfs -o size=64k,uid=2001,mode=700 full /run/full",
    )
    .succeeded();
    let args = [
        "env",
        "XDG_CACHE_HOME=/run/full",
        "srun",
        "-N1",
        "-wnode1",
        "coracle",
        "run",
        // A range for which there is no seed.
        "--service-cidr=100.97.0.0/16",
        "kubectl",
        "get",
        "nodes",
        "-o",
        "name",
    ];
    let output = lab.command(&args).run();
    let left = lab.root(
        "node1",
        "find /run/full -type f; umount --no-mtab /run/full && rmdir /run/full",
    );
    output
        .succeeded()
        .stdout_is("node/node1")
        .stderr_has(&["warning: "]);
    left.succeeded().stdout_is("");
    lab.assert_nothing_left();
}

#[test]
fn cluster_starts_with_full_tmp() {
    let lab = Lab::acquire();
    lab.root("node1", "mount --no-mtab -t tmpfs -o size=4k,mode=1777 full /tmp && ! head -c 1M /dev/zero > /tmp/fill").succeeded();
    let output = lab
        .command(&[
            "srun", "-N1", "-wnode1", "coracle", "run", "kubectl", "get", "nodes", "-o", "name",
        ])
        .run();
    lab.root("node1", "umount --no-mtab /tmp").succeeded();
    output.succeeded().stdout_is("node/node1");
    lab.assert_nothing_left();
}

#[test]
fn node_lost_during_start_is_named() {
    let mut lab = Lab::acquire();
    let args = [
        "srun",
        "-N2",
        "-wnode[1-2]",
        "coracle",
        "run",
        "--start-timeout",
        "15",
        "sleep",
        "20",
    ];
    let mut running = lab.command(&args).start();
    lab.find("node1", Role::LeaderWorker);
    lab.lab_command("kill-host", &["node2"]).succeeded();
    running.wait_for_stderr("hint: ");
    let stderr = running.stderr();
    assert!(stderr.contains("error: "), "{stderr}");
    let error = stderr.lines().find(|line| line.contains("error: "));
    assert!(error.is_some_and(|line| line.contains("node2")), "{stderr}");
    // Slurm notices the loss of the node after 28 to 35 s. Then the user's srun must exit.
    let exited = eventually(Duration::from_secs(60), || {
        running.has_exited().then_some(())
    });
    lab.start_host("node2");
    wait_until(60, "all nodes are idle", || lab.queue_is_empty());
    assert!(
        exited.is_some(),
        "did not exit while the node was down\n{stderr}"
    );
    // The hint must not suggest a problem with slurmctld.
    assert!(!stderr.contains("scontrol ping"), "{stderr}");
    let output = running.wait(Duration::from_secs(1));
    assert_ne!(output.code, 0, "{output}");
    lab.assert_nothing_left();
}

#[test]
fn agent_reports_clock_difference() {
    let lab = Lab::acquire();
    let version = lab
        .command(&["coracle", "--version"])
        .run()
        .stdout
        .trim()
        .replace("coracle ", "");
    let script = format!(
        r#"echo "{{\"version\":\"{version}\",\"leader_addresses\":[],\"ca_pem\":\"\",\"token\":\"\",\"secret\":\"\",\"time\":$(($(date +%s) - 7200))}}" | coracle internal node"#
    );
    let output = lab.sh(&script).on("node1").run();
    assert_ne!(output.code, 0, "{output}");
    output.stderr_has(&["node1", "clock is 7200 s ahead of the leader's"]);
    lab.assert_nothing_left();
}

#[test]
fn agent_rejects_invalid_input() {
    let lab = Lab::acquire();
    for input in ["", "garbage\n", "{}\n", "\u{0}\u{1}\n"] {
        let output = lab
            .command(&["coracle", "internal", "node"])
            .on("node1")
            .stdin(input)
            .run();
        assert_ne!(output.code, 0, "{output}");
        output.stderr_has(&["cannot parse the join configuration"]);
    }
    lab.assert_nothing_left();
}

#[test]
fn missing_manifests_are_noticed_before_submission() {
    let lab = Lab::acquire();
    lab.sh("mkdir -p nothing/below && touch empty.yaml")
        .run()
        .succeeded();
    let outside = |args: &str| lab.sh(&format!("coracle run {args}")).run();
    outside("empty.yaml")
        .exited_with(66)
        .stderr_has(&["is empty"]);
    outside("nothing")
        .exited_with(66)
        .stderr_has(&["no manifests in nothing"]);
    lab.remove("nothing");
    lab.remove("empty.yaml");
    lab.assert_nothing_left();
}

#[test]
fn invalid_networks_are_rejected() {
    let lab = Lab::acquire();
    fails(&lab, &["--pod-cidr=100.96.0.0/16", "true"], 64).stderr_has(&["overlap"]);
    fails(&lab, &["--service-cidr=10.77.0.0/24", "true"], 64).stderr_has(&["address of this host"]);
    lab.assert_nothing_left();
}

#[test]
fn variables_of_a_nonexistent_job_are_named() {
    let lab = Lab::acquire();
    lab.sh("SLURM_JOB_ID=99999 coracle run true")
        .run()
        .exited_with(69)
        .stderr_has(&["unset SLURM_JOB_ID"]);
    lab.assert_nothing_left();
}

#[test]
fn option_that_consumed_the_workload_is_named() {
    let lab = Lab::acquire();
    fails_outside(&lab, &["--nodes", "true"], 64)
        .stderr_has(&["true was taken for the value of --nodes", "hint: "]);
    lab.assert_nothing_left();
}

#[test]
fn unknown_option_is_named() {
    let lab = Lab::acquire();
    for option in ["--frobnicate", "--frobnicate=1"] {
        fails_outside(&lab, &["-N1", option, "true"], 64)
            .stderr_has(&["unknown option --frobnicate", "hint: "]);
    }
    fails_outside(&lab, &["--pod-cdir=10.0.0.0/8", "true"], 64)
        .stderr_has(&["did you mean --pod-cidr?"]);
    fails_outside(&lab, &["--pod-cidr=foo", "true"], 64).stderr_has(&["--pod-cidr=100.64.0.0/11"]);
    lab.assert_nothing_left();
}

#[test]
fn too_small_address_space_limit_is_named() {
    let lab = Lab::acquire();
    lab.sh("ulimit -v 2000000; srun -N1 coracle run true")
        .run()
        .exited_with(71)
        .stderr_has(&["ulimit -v unlimited"]);
    lab.assert_nothing_left();
}

#[test]
fn host_without_ipv4_is_named() {
    let lab = Lab::acquire();
    // In a network namespace without an IPv4 address.
    let script = "srun -N1 unshare --user --map-root-user --net sh -c \
                  'ip link add one type veth peer name two && ip link set one up && ip link set two up &&
                   ip -6 addr add 2001:db8::1/64 dev one nodad && exec coracle run true'";
    lab.sh(script)
        .run()
        .exited_with(71)
        .stderr_has(&["no IPv4 address, only 2001:db8::1", "hint: "]);
    lab.assert_nothing_left();
}

#[test]
fn damaged_seed_is_replaced() {
    let lab = Lab::acquire();
    // With a service range of its own, so that no other test uses the seed.
    let run = || {
        let command = "srun -N1 coracle run --service-cidr=100.98.0.0/16 kubectl get nodes -o name";
        lab.sh(command).run().succeeded().stdout_is("node/node1")
    };
    run().stderr_has(&["prepared the store"]);
    let seeds = ".cache/coracle/seeds/*-100.98.0.0-16-*";
    lab.sh(&format!("truncate -s 100K {seeds}/store/member/snap/db"))
        .run()
        .succeeded();
    run().stderr_has(&[
        "warning: the prepared store",
        "is damaged",
        "prepared the store",
    ]);
    let undamaged = run();
    assert!(!undamaged.stderr.contains("store"), "{undamaged}");
    lab.sh(&format!("rm -r {seeds}")).run().succeeded();
    lab.assert_nothing_left();
}
