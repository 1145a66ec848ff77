//! Pods that run scripts, and clients of exec, attach and port-forward.

use serde_json::{Value, json};

use crate::{BUSYBOX, TestCluster, merged, pod};

/// A script that runs until SIGTERM and then exits with 0.
pub const WAIT_FOR_SIGTERM: &str = "trap 'exit 0' TERM; sleep 1000 & wait";

/// A client that implements every version of the protocols of exec, attach and port-forward.
const CLIENT: &str = "/usr/bin/python3 /opt/coracle-src/tests/clients/streams.py";

/// A container that runs a script; `more` has further fields of the container.
pub fn script_container(name: &str, script: &str, more: Value) -> Value {
    let own = json!({"name": name, "image": BUSYBOX, "command": ["sh", "-c", script]});
    merged(own, more)
}

/// A pod with one container, `main`.
pub fn script_pod(name: &str, script: &str, more: Value) -> Value {
    pod(name, json!({}), &[script_container("main", script, more)])
}

/// A command that reads one line and whose standard input stays open until it ends. Needed for containers with `stdin` and without
/// `stdinOnce`: a client whose input ends is disconnected.
pub fn with_open_input(line: &str, command: &str) -> String {
    format!(
        "exec 3< <(echo {line}; exec sleep 55); holder=$!; {command} <&3; code=$?; kill $holder; exit $code"
    )
}

impl TestCluster {
    /// Creates pods, and waits until they run.
    #[track_caller]
    pub fn create_running(&mut self, objects: &[Value]) {
        self.create_objects(objects);
        for object in objects {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            self.wait_for(name, "jsonpath={.status.phase}=Running");
        }
    }

    /// The name of the first node.
    #[track_caller]
    pub fn first_node(&mut self) -> String {
        self.shell("kubectl get nodes --output=jsonpath={.items[0].metadata.name}")
    }

    /// Runs tests/clients/streams.py with these arguments; returns its report. `input` is a shell command whose output the client
    /// sends.
    #[track_caller]
    pub fn stream_client(&mut self, input: &str, args: &str) -> Value {
        let text = self.shell(&format!("{input} | timeout 55 {CLIENT} {args}"));
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{args}: {error}: {text}"))
    }

    /// Runs several of these clients in parallel; returns their reports in the same order.
    #[track_caller]
    pub fn stream_clients(&mut self, input: &str, clients: &[String]) -> Vec<Value> {
        let mut script = "dir=$(mktemp -d); ".to_owned();
        for (number, args) in clients.iter().enumerate() {
            script += &format!("({input} | timeout 55 {CLIENT} {args}) > $dir/{number} 2>&1 & ");
        }
        script += "wait; ";
        for number in 0..clients.len() {
            script += &format!("cat $dir/{number} | tr '\\n' ' '; echo; ");
        }
        let text = self.shell(&format!("{script} rm -r $dir"));
        let reports = text.lines().map(|line| {
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}: {text}"))
        });
        reports.collect()
    }

    /// Warnings and errors that this node's kubelet has logged about its API.
    #[track_caller]
    pub fn kubelet_api_warnings(&mut self, node: &str) -> Vec<String> {
        let log = self.shell(&format!(
            "kubectl get --raw \"/api/v1/nodes/{node}/proxy/logs/?query=kubelet\""
        ));
        let marks = [" WARN kubelet_api", "ERROR kubelet_api", "panicked"];
        let is_warning = |line: &&str| marks.iter().any(|mark| line.contains(mark));
        log.lines().filter(is_warning).map(str::to_owned).collect()
    }
}
