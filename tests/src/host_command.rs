//! A command to be run on a host of the lab.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::{Output, Running};

/// See [`HostCommand::within`].
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// A command with its host, user and standard input.
#[derive(Debug, Clone)]
pub struct HostCommand {
    lab_dir: PathBuf,
    args: Vec<String>,
    host: String,
    user: String,
    stdin: Option<String>,
    timeout: Duration,
}

impl HostCommand {
    /// `args` are the program and its arguments; `lab_dir` is the lab's state directory.
    pub(crate) fn new(lab_dir: &Path, args: &[&str]) -> Self {
        Self {
            lab_dir: lab_dir.to_owned(),
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            host: "login".to_owned(),
            user: "user1".to_owned(),
            stdin: None,
            timeout: DEFAULT_TIMEOUT,
        }
    }

    /// Runs the command on this host instead of `login`.
    pub fn on(mut self, host: &str) -> Self {
        self.host = host.to_owned();
        self
    }

    /// Runs the command as this user instead of `user1`.
    pub fn user(mut self, user: &str) -> Self {
        self.user = user.to_owned();
        self
    }

    /// Sets the standard input of [`HostCommand::run`]. End-of-file follows the text.
    pub fn stdin(mut self, text: &str) -> Self {
        self.stdin = Some(text.to_owned());
        self
    }

    /// Sets the time-out of [`HostCommand::run`].
    pub fn within(mut self, seconds: u64) -> Self {
        self.timeout = Duration::from_secs(seconds);
        self
    }

    /// Runs the command and waits for its exit.
    #[track_caller]
    pub fn run(self) -> Output {
        let timeout = self.timeout;
        let stdin = self.stdin.clone().unwrap_or_default();
        let mut running = self.start();
        running.write(&stdin);
        running.close_stdin();
        running.wait(timeout)
    }

    /// Starts the command. Its standard input stays open.
    #[track_caller]
    pub fn start(self) -> Running {
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../lab/on"));
        command
            .args([&self.host, &self.user])
            .args(&self.args)
            .env("CORACLE_LAB_DIR", &self.lab_dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let name = format!("{}@{}: {}", self.user, self.host, self.args.join(" "));
        Running::new(name, command.spawn().expect("lab/on can be started"))
    }
}
