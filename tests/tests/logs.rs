//! Logs of a cluster's components, and error messages when one fails.

use e2e::Lab;

#[test]
fn dash_v_shows_logs_of_components() {
    let lab = Lab::acquire();
    let output = lab
        .command(&["srun", "-N1", "coracle", "run", "-v", "true"])
        .run()
        .succeeded();
    for component in [
        "etcd",
        "kube-apiserver",
        "kube-scheduler",
        "kube-controller-manager",
    ] {
        let line = format!("coracle: [{component}] ");
        assert!(output.stderr.contains(&line), "{line}");
    }
    let quiet = lab
        .command(&["srun", "-N1", "coracle", "run", "true"])
        .run()
        .succeeded();
    assert!(!quiet.stderr.contains("[etcd]"), "{quiet}");
    lab.assert_nothing_left();
}

#[test]
fn logs_are_kept_in_the_users_directory() {
    let lab = Lab::acquire();
    lab.command(&[
        "srun",
        "-N1",
        "coracle",
        "run",
        "--logs",
        "logs/here",
        "true",
    ])
    .run()
    .succeeded();
    let kept = lab
        .sh("cd logs/here && stat -c '%n %a' * && test -s kube-apiserver.log")
        .run()
        .succeeded();
    kept.stdout_is("etcd.log 600\nkube-apiserver.log 600\nkube-controller-manager.log 600\nkube-scheduler.log 600");
    lab.remove("logs");
    lab.assert_nothing_left();
}

#[test]
fn failed_component_is_named_with_last_log_lines() {
    let lab = Lab::acquire();
    // A release with one broken program.
    let release = "/opt/coracle/lib/coracle/kubernetes/v1.37.1";
    lab.write(
        "broken/kube-apiserver",
        "#!/bin/sh\necho no keel >&2\nexit 3\n",
    );
    lab.sh(&format!(
        "cd broken && chmod +x * && ln -s {release}/[!s]* . 2> /dev/null; ls"
    ))
    .run()
    .succeeded()
    .stdout_has(&["etcd", "VERSION"]);
    let args = [
        "srun",
        "-N2",
        "coracle",
        "run",
        "--kubernetes",
        "broken",
        "true",
    ];
    let output = lab.command(&args).run();
    lab.remove("broken");
    output.exited_with(75).stderr_has(&[
        "error: kube-apiserver failed",
        "exit status: 3",
        "  | no keel",
        "hint: ",
    ]);
    lab.assert_nothing_left();
}
