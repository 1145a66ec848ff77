//! `coracle doctor` on a login host and on a node.

use e2e::Lab;
use serde_json::Value;

#[test]
fn it_reports_on_this_host() {
    let lab = Lab::ready();
    for user in ["user1", "user2"] {
        let output = lab
            .call(&["coracle", "doctor"])
            .user(user)
            .run()
            .succeeded();
        assert!(!output.stdout.trim().is_empty(), "{output}");
    }
    lab.nothing_left();
}

#[test]
fn it_reports_on_a_node_of_a_partition() {
    let lab = Lab::ready();
    let output = lab
        .call(&["coracle", "doctor", "--json", "-p", "long"])
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
    for finding in findings {
        for field in ["id", "area", "title", "status", "found"] {
            assert!(finding[field].is_string(), "{field} in {finding}");
        }
    }
    lab.nothing_left();
}

#[test]
fn a_partition_that_is_not_there_is_slurms_error() {
    let lab = Lab::ready();
    lab.call(&["coracle", "doctor", "-p", "nope"])
        .run()
        .ended_with(69)
        .says(&["nope"]);
    lab.nothing_left();
}
