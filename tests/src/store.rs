//! `coracle image …` with a separate store, for tests of images.

use serde_json::Value;

use crate::{HostCommand, Lab};

/// The directory of a test's files and its store, in the home directory of `user1`.
pub const DIR: &str = "images-test";

/// Acquires a shared lab, and removes files of failed tests.
#[track_caller]
pub fn acquire_lab() -> Lab {
    let lab = Lab::acquire();
    lab.remove(DIR);
    lab.remove(".docker");
    lab
}

/// `coracle image …`, run in [`DIR`] and with its store.
pub fn image(lab: &Lab, args: &str) -> HostCommand {
    shell(lab, &format!("coracle image {args}"))
}

/// A script, run in [`DIR`] and with its store.
pub fn shell(lab: &Lab, script: &str) -> HostCommand {
    lab.sh(&format!(
        "mkdir -p ~/{DIR} && cd ~/{DIR} && export CORACLE_IMAGES=$PWD/store && set -o pipefail && {script}"
    ))
}

/// The references of all images in a store; all must be complete.
#[track_caller]
pub fn listed(lab: &Lab, store: &str) -> Vec<String> {
    let listed = image(lab, &format!("ls --json --store {store}"));
    let all: Value = serde_json::from_str(&listed.run().succeeded().stdout).expect("JSON");
    let all = all.as_array().expect("a list").iter();
    all.map(|image| {
        assert_eq!(image["complete"], true, "{image}");
        image["reference"].as_str().expect("a name").to_owned()
    })
    .collect()
}
