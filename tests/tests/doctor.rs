//! `coracle doctor` on a login host and on a node.

use e2e::Lab;
use serde_json::Value;

/// Stable identifiers: scripts rely on them.
const IDS: [&str; 17] = [
    "kernel",
    "user-namespaces",
    "process-namespaces",
    "subordinate-ids",
    "cgroup-delegation",
    "hidden-processes",
    "bridge-and-veth",
    "local-scratch",
    "overlayfs",
    "fuse",
    "root-file-systems",
    "shared-home",
    "shared-program",
    "slurm-commands",
    "slurm-controller",
    "slurm-partitions",
    "slurm-job",
];

#[test]
fn doctor_reports_on_this_host() {
    let lab = Lab::acquire();
    for user in ["user1", "user2"] {
        let output = lab
            .command(&["coracle", "doctor"])
            .user(user)
            .run()
            .succeeded();
        // One line for what is in order, none of it in detail.
        let ok: Vec<&str> = output
            .stdout
            .lines()
            .filter(|line| line.trim_start().starts_with("ok"))
            .collect();
        assert!(
            matches!(ok[..], [line] if line.contains("user namespaces, ")),
            "{output}"
        );
        let verbose = lab.command(&["coracle", "doctor", "-v"]).user(user).run();
        verbose
            .succeeded()
            .stdout_has(&["  ok        user namespaces ", "effect"]);
    }
    // This user has none.
    lab.command(&["coracle", "doctor"])
        .user("user2")
        .run()
        .succeeded()
        .stdout_has(&["degraded  subordinate ids", "next step"]);
    lab.assert_nothing_left();
}

#[test]
fn doctor_reports_on_a_node_of_a_partition() {
    let lab = Lab::acquire();
    let output = lab
        .command(&["coracle", "doctor", "--json", "-p", "long"])
        .run()
        .succeeded();
    let report: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!(report["schema"], 1);
    assert_eq!(report["podsCanRun"], true);
    assert!(
        report["host"].to_string().contains("node"),
        "{}",
        report["host"]
    );
    let findings = report["findings"].as_array().unwrap();
    let ids: Vec<&str> = findings.iter().filter_map(|f| f["id"].as_str()).collect();
    assert_eq!(ids, IDS);
    for finding in findings {
        for field in ["id", "area", "title", "status", "found"] {
            assert!(finding[field].is_string(), "{field} in {finding}");
        }
    }
    lab.assert_nothing_left();
}

#[test]
fn missing_partition_is_slurms_error() {
    let lab = Lab::acquire();
    lab.command(&["coracle", "doctor", "-p", "nope"])
        .run()
        .exited_with(69)
        .stderr_has(&["nope"]);
    lab.assert_nothing_left();
}

#[test]
fn missing_requirement_of_pods_exits_with_1() {
    let lab = Lab::acquire();
    // A user namespace in which no further ones are allowed, like on a host whose administrator forbids them.
    let script = "unshare --user --map-root-user sh -c \
                  'echo 0 > /proc/sys/user/max_user_namespaces && exec coracle doctor --json'";
    let output = lab.sh(script).on("node1").run().exited_with(1);
    let report: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!(report["podsCanRun"], false);
    let findings = report["findings"].as_array().unwrap();
    let missing = findings.iter().find(|f| f["status"] == "missing").unwrap();
    assert_eq!(missing["id"], "user-namespaces");
    assert!(missing["next"].is_string(), "{missing}");
    lab.assert_nothing_left();
}
