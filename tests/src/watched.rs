//! A watch on pods from outside of the job, until the API server stops.

use serde_json::Value;

use crate::{Cluster, Lab, Running};

/// The watch events of pods.
#[derive(Debug)]
pub struct Watched {
    running: Running,
}

impl Cluster {
    /// Watches the pods of the default namespace from `login`, by a program outside of the cluster.
    #[track_caller]
    pub fn watch_pods(&mut self, lab: &Lab) -> Watched {
        let access = self.ask("echo \"$K8S_CLUSTER_API $K8S_CLUSTER_API_TOKEN\"");
        let (api, token) = access.split_once(' ').expect("an address and a token");
        let address = format!("{api}/api/v1/namespaces/default/pods?watch=1");
        // curl reads the token from standard input, so that it is on no command line.
        let words = ["--silent", "--no-buffer", "--insecure", "--header", "@-"];
        let words = [&["curl"], &words[..], &[&address]].concat();
        let mut running = lab.call(&words).start();
        running.write(&format!("Authorization: Bearer {token}\n"));
        running.close_stdin();
        Watched { running }
    }
}

impl Watched {
    /// All states of a pod so far, in order.
    pub fn of(&self, pod: &str) -> Vec<Value> {
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
    pub fn last_of(&self, pod: &str) -> Value {
        let told = self.of(pod).pop();
        told.unwrap_or_else(|| panic!("nothing was told of {pod}: {}", self.running.stdout()))
    }
}
