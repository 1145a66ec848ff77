//! Invalid input and broken environments: an error message with a hint, a documented exit code, and no leftovers.

use std::time::Duration;

use e2e::{Lab, Output, Role, eventually, wait_until};

/// Runs `coracle run WORDS…` on one node, and expects an error with a hint.
#[track_caller]
fn fails(lab: &Lab, words: &[&str], code: i32) -> Output {
    let output = lab
        .call(&[&["srun", "-N1", "-wnode1", "coracle", "run"], words].concat())
        .run();
    output.ended_with(code).says(&["error: ", "hint: "])
}

/// The same outside of a job.
#[track_caller]
fn fails_outside(lab: &Lab, words: &[&str], code: i32) -> Output {
    let output = lab.call(&[&["coracle", "run"], words].concat()).run();
    output.ended_with(code).says(&["error: "])
}

#[test]
fn invalid_command_line_exits_with_64() {
    let lab = Lab::ready();
    for words in [
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
            .call(&[&["coracle"], words].concat())
            .run()
            .ended_with(64);
        assert!(!output.stderr.is_empty(), "{words:?}");
    }
    for (variable, hint) in [
        ("CORACLE_ROOTFS=paper", "it may be overlay"),
        ("CORACLE_STREAM_IDLE=soon", "is not like 90s"),
        ("CORACLE_IMAGE_GC=high=200", "high above 100"),
        ("CORACLE_IMAGE_LIMITS=size=1", "has no \"size\""),
    ] {
        let output = lab.call(&["env", variable, "coracle", "run", "-N1", "true"]);
        let name = variable.split('=').next().unwrap_or_default();
        output
            .run()
            .ended_with(64)
            .says(&["error: ", name, hint, "hint: "]);
    }
    lab.write("a.yaml", "");
    fails_outside(&lab, &["a.yaml", "more"], 64).says(&["manifests take no arguments", "hint: "]);
    lab.remove("a.yaml");
    lab.nothing_left();
}

#[test]
fn missing_workload_exits_with_66() {
    let lab = Lab::ready();
    for name in [
        "nowhere.yaml",
        "./nowhere",
        "no-such-program",
        "/nowhere/at/all",
    ] {
        fails_outside(&lab, &["-N2", name], 66).says(&[name, "hint: "]);
    }
    fails(&lab, &["nowhere.yaml"], 66).says(&["nowhere.yaml"]);
    lab.nothing_left();
}

#[test]
fn unreadable_or_not_executable_workload_exits_with_66() {
    let lab = Lab::ready();
    lab.write("secret.yaml", "a: b");
    lab.write("notes.txt", "hello");
    lab.write("broken", "#!/no/such/interpreter\n");
    lab.sh("chmod 000 secret.yaml; chmod +x broken; mkdir -m 000 closed")
        .run()
        .succeeded();
    fails_outside(&lab, &["-N1", "secret.yaml"], 66).says(&["secret.yaml", "permission", "hint: "]);
    fails_outside(&lab, &["-N1", "closed"], 66).says(&["closed", "hint: "]);
    fails_outside(&lab, &["-N1", "notes.txt"], 66)
        .says(&["neither a manifest nor a program", "hint: "]);
    fails(&lab, &["./broken"], 66).says(&["broken"]);
    for file in ["secret.yaml", "notes.txt", "broken", "closed"] {
        lab.remove(file);
    }
    lab.nothing_left();
}

#[test]
fn missing_slurm_exits_with_69() {
    let lab = Lab::ready();
    let output = lab
        .sh("PATH=/nowhere /opt/coracle/bin/coracle run -N1 /bin/true")
        .run();
    output.ended_with(69).says(&["error: ", "srun", "hint: "]);
    lab.nothing_left();
}

#[test]
fn unreachable_slurm_exits_with_69() {
    let lab = Lab::ready();
    let services = "/opt/coracle-src/lab/lib/services";
    lab.root("login", &format!("{services} stop-controller"))
        .succeeded();
    let output = lab.call(&["coracle", "run", "-N1", "true"]).run();
    lab.root("login", &format!("{services} controller"))
        .succeeded();
    wait_until(60, "the nodes are back", || lab.queue_is_empty());
    output.ended_with(69).says(&["error: ", "hint: "]);
    lab.nothing_left();
}

#[test]
fn rejection_by_slurm_exits_with_69_and_its_message() {
    let lab = Lab::ready();
    fails_outside(&lab, &["-N1", "-p", "nope", "true"], 69).says(&["nvalid partition", "hint: "]);
    fails_outside(&lab, &["-N1", "-A", "nobody", "true"], 69).says(&["account"]);
    fails_outside(&lab, &["--frobnicate=1", "true"], 69).says(&["frobnicate"]);
    lab.nothing_left();
}

#[test]
fn port_in_use_exits_with_71() {
    let lab = Lab::ready();
    // The port of slurmd.
    fails(&lab, &["--api-port", "6818", "true"], 71).says(&["port 6818", "--api-port"]);
    lab.nothing_left();
}

#[test]
fn requested_free_port_is_used() {
    let lab = Lab::ready();
    let words = [
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
    lab.call(&words)
        .run()
        .succeeded()
        .printed("https://10.77.0.11:36443");
    lab.nothing_left();
}

#[test]
fn missing_kubernetes_release_exits_with_72() {
    let lab = Lab::ready();
    fails(&lab, &["--kubernetes", "/nonexistent", "true"], 72).says(&["/nonexistent"]);
    lab.nothing_left();
}

#[test]
fn unwritable_logs_directory_exits_with_73() {
    let lab = Lab::ready();
    fails(&lab, &["--logs", "/root/logs", "true"], 73).says(&["/root/logs"]);
    fails(&lab, &["--logs", "/etc/passwd/logs", "true"], 73);
    // A directory that exists, but is not the user's.
    fails(&lab, &["--logs", "/usr", "true"], 73).says(&["/usr"]);
    lab.nothing_left();
}

#[test]
fn full_home_is_only_a_warning() {
    let lab = Lab::ready();
    lab.root(
        "node1",
        "mkdir /run/full && mount --no-mtab -t tmpfs -o size=64k,uid=2001,mode=700 full /run/full",
    )
    .succeeded();
    let words = [
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
    let output = lab.call(&words).run();
    let left = lab.root(
        "node1",
        "find /run/full -type f; umount --no-mtab /run/full && rmdir /run/full",
    );
    output
        .succeeded()
        .printed("node/node1")
        .says(&["warning: "]);
    left.succeeded().printed("");
    lab.nothing_left();
}

#[test]
fn full_tmp_does_not_matter() {
    let lab = Lab::ready();
    lab.root("node1", "mount --no-mtab -t tmpfs -o size=4k,mode=1777 full /tmp && ! head -c 1M /dev/zero > /tmp/fill").succeeded();
    let output = lab
        .call(&[
            "srun", "-N1", "-wnode1", "coracle", "run", "kubectl", "get", "nodes", "-o", "name",
        ])
        .run();
    lab.root("node1", "umount --no-mtab /tmp").succeeded();
    output.succeeded().printed("node/node1");
    lab.nothing_left();
}

#[test]
fn node_lost_during_start_is_named() {
    let mut lab = Lab::ready();
    let words = [
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
    let mut running = lab.call(&words).start();
    lab.find("node1", Role::LeaderWorker);
    lab.command("kill-host", &["node2"]).succeeded();
    running.until_stderr("hint: ");
    let said = running.stderr();
    assert!(said.contains("error: "), "{said}");
    let told = said.lines().find(|line| line.contains("error: "));
    assert!(told.is_some_and(|line| line.contains("node2")), "{said}");
    // Slurm notices the loss of the node after 28 to 35 s. Then nothing keeps the user's srun.
    let output = eventually(Duration::from_secs(60), || {
        running.has_ended().then_some(())
    });
    lab.start_host("node2");
    wait_until(60, "all nodes are idle", || lab.queue_is_empty());
    assert!(
        output.is_some(),
        "did not end while the node was down\n{said}"
    );
    // The hint must not suggest a problem with slurmctld.
    assert!(!said.contains("scontrol ping"), "{said}");
    let output = running.wait(Duration::from_secs(1));
    assert_ne!(output.code, 0, "{output}");
    lab.nothing_left();
}

#[test]
fn agent_reports_clock_difference() {
    let lab = Lab::ready();
    let version = lab
        .call(&["coracle", "--version"])
        .run()
        .stdout
        .trim()
        .replace("coracle ", "");
    let script = format!(
        r#"echo "{{\"version\":\"{version}\",\"leaders\":[],\"ca_pem\":\"\",\"token\":\"\",\"secret\":\"\",\"time\":$(($(date +%s) - 7200))}}" | coracle internal node"#
    );
    let output = lab.sh(&script).on("node1").run();
    assert_ne!(output.code, 0, "{output}");
    output.says(&["node1", "clock is 7200 s ahead of the leader's"]);
    lab.nothing_left();
}

#[test]
fn agent_rejects_invalid_input() {
    let lab = Lab::ready();
    for garbage in ["", "garbage\n", "{}\n", "\u{0}\u{1}\n"] {
        let output = lab
            .call(&["coracle", "internal", "node"])
            .on("node1")
            .stdin(garbage)
            .run();
        assert_ne!(output.code, 0, "{output}");
        output.says(&["what the leader hands over is not understood"]);
    }
    lab.nothing_left();
}

#[test]
fn missing_manifests_are_noticed_before_submission() {
    let lab = Lab::ready();
    lab.sh("mkdir -p nothing/below && touch empty.yaml")
        .run()
        .succeeded();
    let outside = |words: &str| lab.sh(&format!("coracle run {words}")).run();
    outside("empty.yaml").ended_with(66).says(&["is empty"]);
    outside("nothing")
        .ended_with(66)
        .says(&["no manifests in nothing"]);
    lab.remove("nothing");
    lab.remove("empty.yaml");
    lab.nothing_left();
}

#[test]
fn invalid_networks_are_rejected() {
    let lab = Lab::ready();
    fails(&lab, &["--pod-cidr=100.96.0.0/16", "true"], 64).says(&["overlap"]);
    fails(&lab, &["--service-cidr=10.77.0.0/24", "true"], 64).says(&["address of this host"]);
    lab.nothing_left();
}

#[test]
fn variables_of_a_nonexistent_job_are_named() {
    let lab = Lab::ready();
    lab.sh("SLURM_JOB_ID=99999 coracle run true")
        .run()
        .ended_with(69)
        .says(&["unset SLURM_JOB_ID"]);
    lab.nothing_left();
}

#[test]
fn option_that_consumed_the_workload_is_named() {
    let lab = Lab::ready();
    lab.sh("coracle run --frobnicate true")
        .run()
        .ended_with(64)
        .says(&["true was taken for the value of --frobnicate"]);
    lab.nothing_left();
}

#[test]
fn too_small_address_space_limit_is_named() {
    let lab = Lab::ready();
    lab.sh("ulimit -v 2000000; srun -N1 coracle run true")
        .run()
        .ended_with(71)
        .says(&["ulimit -v unlimited"]);
    lab.nothing_left();
}

#[test]
fn host_without_ipv4_is_named() {
    let lab = Lab::ready();
    // In a network namespace without an IPv4 address.
    let script = "srun -N1 unshare --user --map-root-user --net sh -c \
                  'ip link add one type veth peer name two && ip link set one up && ip link set two up &&
                   ip -6 addr add 2001:db8::1/64 dev one nodad && exec coracle run true'";
    lab.sh(script)
        .run()
        .ended_with(71)
        .says(&["no IPv4 address, only 2001:db8::1", "hint: "]);
    lab.nothing_left();
}

#[test]
fn damaged_seed_is_replaced() {
    let lab = Lab::ready();
    // With a service range of its own, so that no other test uses the seed.
    let run = || {
        let words = "srun -N1 coracle run --service-cidr=100.98.0.0/16 kubectl get nodes -o name";
        lab.sh(words).run().succeeded().printed("node/node1")
    };
    run().says(&["prepared the store"]);
    let seeds = ".cache/coracle/seeds/*-100.98.0.0-16-*";
    lab.sh(&format!("truncate -s 100K {seeds}/store/member/snap/db"))
        .run()
        .succeeded();
    run().says(&[
        "warning: the prepared store",
        "is damaged",
        "prepared the store",
    ]);
    let whole = run();
    assert!(!whole.stderr.contains("store"), "{whole}");
    lab.sh(&format!("rm -r {seeds}")).run().succeeded();
    lab.nothing_left();
}
