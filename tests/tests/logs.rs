//! Logs of a cluster's components, and error messages when one fails.

use e2e::Lab;

#[test]
fn dash_v_shows_logs_of_components() {
    let lab = Lab::ready();
    let output = lab
        .call(&["srun", "-N1", "coracle", "run", "-v", "true"])
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
        .call(&["srun", "-N1", "coracle", "run", "true"])
        .run()
        .succeeded();
    assert!(!quiet.stderr.contains("[etcd]"), "{quiet}");
    lab.nothing_left();
}

#[test]
fn logs_are_kept_in_the_users_directory() {
    let lab = Lab::ready();
    lab.call(&[
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
    kept.printed("etcd.log 600\nkube-apiserver.log 600\nkube-controller-manager.log 600\nkube-scheduler.log 600");
    lab.remove("logs");
    lab.nothing_left();
}

#[test]
fn failed_component_is_named_with_its_last_log_lines() {
    let lab = Lab::ready();
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
    .shows(&["etcd", "VERSION"]);
    let words = [
        "srun",
        "-N2",
        "coracle",
        "run",
        "--kubernetes",
        "broken",
        "true",
    ];
    let output = lab.call(&words).run();
    lab.remove("broken");
    output.ended_with(75).says(&[
        "error: kube-apiserver failed",
        "exit status: 3",
        "  | no keel",
        "hint: ",
    ]);
    lab.nothing_left();
}
