//! A subset of upstream's e2e suite. `make conformance` runs more of it (docs/conformance.md).
//!
//! `conformance/quick.txt` lists about two dozen short tests from `conformance/passing.txt`.

use std::collections::BTreeSet;
use std::process::Command;

use e2e::Lab;

const DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/conformance");

#[test]
fn quick_subset_of_upstreams_suite_passes() {
    let lab = Lab::acquire();
    let run = Command::new(format!("{DIR}/run"))
        .args(["-l", &format!("{DIR}/quick.txt"), "-t", "10"])
        .env("CORACLE_LAB_DIR", lab.dir())
        .output()
        .expect("the suite can be started");
    let summary = String::from_utf8_lossy(&run.stdout);
    assert!(
        run.status.success(),
        "{summary}\n{}",
        String::from_utf8_lossy(&run.stderr)
    );
    let passed = summary
        .lines()
        .filter(|line| line.starts_with("passed ") && line.contains("[sig-"));
    assert_eq!(passed.count(), list("quick.txt").len(), "{summary}");
    lab.assert_nothing_left();
}

#[test]
fn quick_subset_is_part_of_passing_tests() {
    let (quick, passing) = (list("quick.txt"), list("passing.txt"));
    let unknown: Vec<_> = quick.difference(&passing).collect();
    assert!(unknown.is_empty(), "not in passing.txt: {unknown:#?}");
}

#[test]
fn lists_are_sorted_and_unique() {
    for name in ["passing.txt", "one-node.txt"] {
        let text = std::fs::read_to_string(format!("{DIR}/{name}")).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert!(
            lines.is_sorted_by(|a, b| a < b),
            "run `LC_ALL=C sort -u` on {name}"
        );
    }
    let twice: Vec<_> = list("one-node.txt")
        .intersection(&list("passing.txt"))
        .cloned()
        .collect();
    assert!(twice.is_empty(), "in both lists: {twice:#?}");
}

fn list(name: &str) -> BTreeSet<String> {
    let file = format!("{DIR}/{name}");
    let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}"));
    text.lines().map(str::to_owned).collect()
}
