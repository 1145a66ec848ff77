//! A watch on pods from outside of the job, until the API server stops.

use serde_json::Value;

use crate::{Lab, Running, TestCluster};

/// A watch on pods, with all events so far.
#[derive(Debug)]
pub struct PodWatch {
    running: Running,
}

impl TestCluster {
    /// Watches the pods of the default namespace from `login`, by a program outside of the cluster.
    #[track_caller]
    pub fn watch_pods(&mut self, lab: &Lab) -> PodWatch {
        let access = self.shell("echo \"$K8S_CLUSTER_API $K8S_CLUSTER_API_TOKEN\"");
        let (api, token) = access.split_once(' ').expect("an address and a token");
        let address = format!("{api}/api/v1/namespaces/default/pods?watch=1");
        // curl reads the token from standard input, so that it is on no command line.
        let options = ["--silent", "--no-buffer", "--insecure", "--header", "@-"];
        let args = [&["curl"], &options[..], &[&address]].concat();
        let mut running = lab.command(&args).start();
        running.write(&format!("Authorization: Bearer {token}\n"));
        running.close_stdin();
        PodWatch { running }
    }
}

impl PodWatch {
    /// All states of a pod so far, in order.
    pub fn states_of(&self, pod: &str) -> Vec<Value> {
        let text = self.running.stdout();
        let events = text
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        let objects = events.map(|mut event: Value| event["object"].take());
        objects
            .filter(|object| object["metadata"]["name"] == pod)
            .collect()
    }

    /// The latest state of a pod.
    #[track_caller]
    pub fn latest_of(&self, pod: &str) -> Value {
        let latest = self.states_of(pod).pop();
        latest.unwrap_or_else(|| panic!("no watch event of {pod}: {}", self.running.stdout()))
    }
}
