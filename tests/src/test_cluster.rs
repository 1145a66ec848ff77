//! A running cluster. Its workload is a shell, to which the test sends commands.

use std::time::Duration;

use crate::{Lab, Output, Role, Running, eventually, wait_until};

/// A running cluster.
#[derive(Debug)]
pub struct TestCluster {
    /// The command whose workload is the shell.
    pub run: Running,
    /// How many commands were sent to the shell.
    commands: u32,
    /// How many bytes of the shell's output belong to earlier commands.
    consumed: usize,
}

impl TestCluster {
    /// `srun -N2 coracle run bash`, as `user1`.
    #[track_caller]
    pub fn start(lab: &Lab) -> Self {
        Self::start_as(lab, "user1", &["srun", "-N2", "coracle", "run"])
    }

    /// Starts a cluster of another user or with other options. `args` is the command line without the workload.
    #[track_caller]
    pub fn start_as(lab: &Lab, user: &str, args: &[&str]) -> Self {
        Self::from_command(lab.command(&[args, &["bash"]].concat()).user(user).start())
    }

    /// Wraps a running command whose workload is `bash`.
    #[track_caller]
    pub fn from_command(run: Running) -> Self {
        let mut cluster = Self {
            run,
            commands: 0,
            consumed: 0,
        };
        cluster.shell("true");
        cluster
    }

    /// Runs a command in the cluster's shell, which must succeed; returns its stdout and stderr.
    #[track_caller]
    pub fn shell(&mut self, command: &str) -> String {
        let (code, text) = self.try_shell(command);
        assert_eq!(code, 0, "{command}: {text}\n{}", self.run.stderr());
        text
    }

    /// Runs a command in the cluster's shell; returns its exit code, and its stdout and stderr.
    #[track_caller]
    pub fn try_shell(&mut self, command: &str) -> (i32, String) {
        self.commands += 1;
        let end_mark = format!("--- end of command {} ", self.commands);
        // Run the command in its own shell, with /dev/null as standard input.
        let quoted = command.replace('\'', r"'\''");
        self.run.write(&format!(
            "bash -c '{quoted}' </dev/null 2>&1; echo \"{end_mark}$?\"\n"
        ));
        let result = eventually(Duration::from_secs(60), || {
            let exited = self.run.has_exited();
            // Not the whole output, which grows to many megabytes.
            let (new, end) = self.run.stdout_from(self.consumed);
            match new
                .split_once(&end_mark)
                .filter(|(_, rest)| rest.contains('\n'))
            {
                Some((text, rest)) => {
                    let code = rest
                        .lines()
                        .next()
                        .and_then(|code| code.trim().parse().ok());
                    self.consumed = end;
                    Some((code.unwrap_or(-1), text.trim_end().to_owned()))
                }
                None => exited.then(|| (-1, "the cluster has ended".to_owned())),
            }
        });
        result.unwrap_or_else(|| {
            panic!(
                "timed out: {command}\n{}\n{}",
                self.run.stdout(),
                self.run.stderr()
            )
        })
    }

    /// Whether there are exactly `count` nodes and all are Ready.
    pub fn has_ready_nodes(&mut self, count: usize) -> bool {
        let (_, text) = self.try_shell("kubectl get nodes --no-headers");
        let states: Vec<_> = text
            .lines()
            .filter_map(|line| line.split_whitespace().nth(1))
            .collect();
        states.len() == count && states.iter().all(|state| *state == "Ready")
    }

    /// Kills the agent of node2, and waits until its replacement runs and both nodes are Ready.
    #[track_caller]
    pub fn replace_agent(&mut self, lab: &Lab) {
        let agent = lab.find("node2", Role::Agent);
        lab.kill("node2", "KILL", &agent);
        wait_until(30, "a new agent runs", || {
            lab.find("node2", Role::Agent).pid != agent.pid
        });
        wait_until(30, "both nodes are Ready", || self.has_ready_nodes(2));
    }

    /// Runs kubectl with `--output=json` and parses its output.
    #[track_caller]
    pub fn json(&mut self, kubectl: &str) -> serde_json::Value {
        let text = self.shell(&format!("kubectl {kubectl} --output=json"));
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Ends the shell with this code; the cluster must end with the same code.
    #[track_caller]
    pub fn exit(mut self, code: i32) -> Output {
        self.run.write(&format!("exit {code}\n"));
        self.run.wait(Duration::from_secs(30)).exited_with(code)
    }

    /// Waits until the cluster has ended without a command from the test.
    #[track_caller]
    pub fn ends_within(self, seconds: u64) -> Output {
        self.run.wait(Duration::from_secs(seconds))
    }
}
