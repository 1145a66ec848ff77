//! `coracle image …` with a store of its own, for tests of images.

use serde_json::Value;

use crate::{Call, Lab};

/// In the home directory of `user1`: what a test needs, and the store.
pub const DIR: &str = "images-test";

/// A lab without what a failed test may have left.
#[track_caller]
pub fn ready() -> Lab {
    let lab = Lab::ready();
    lab.remove(DIR);
    lab.remove(".docker");
    lab
}

/// `coracle image …`, in [`DIR`] and with the store there.
pub fn image(lab: &Lab, words: &str) -> Call {
    shell(lab, &format!("coracle image {words}"))
}

/// A script, in [`DIR`] and with the store there.
pub fn shell(lab: &Lab, script: &str) -> Call {
    lab.sh(&format!(
        "mkdir -p ~/{DIR} && cd ~/{DIR} && export CORACLE_IMAGES=$PWD/store && set -o pipefail && {script}"
    ))
}

/// The images of a store, all of them whole.
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
