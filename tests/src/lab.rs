//! A lab, which a test uses exclusively.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::lab_state::LabState;
use crate::{HostCommand, Output, eventually};

/// The hosts that the tests use.
pub const HOSTS: [&str; 4] = ["login", "node1", "node2", "node3"];

/// Time in which Slurm notices that its jobs have ended.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(20);
/// Time in which processes and files disappear after the command that they belonged to.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(3);
/// Time that a job takes to complete after its processes were killed without Slurm: proctrack/linuxproc polls after 1, 2, 4 … 64 s.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(130);

/// The directory of a lab that tests share. There may be two more, `…-2` and `…-3`, for tests that run in parallel.
fn shared_dir() -> PathBuf {
    let first = std::env::var_os("CORACLE_LAB_DIR")
        .map_or_else(|| "/run/coracle-lab".into(), PathBuf::from);
    let slot = std::env::var("NEXTEST_TEST_GROUP_SLOT").ok();
    let slot: u32 = slot.and_then(|slot| slot.parse().ok()).unwrap_or(0);
    let mut name = first.clone().into_os_string();
    name.push(format!("-{}", slot + 1));
    let of_slot = PathBuf::from(name);
    if of_slot.join("ready").exists() {
        of_slot
    } else {
        first
    }
}

/// A lab, and a snapshot of its state at the start of the test.
#[derive(Debug)]
pub struct Lab {
    dir: PathBuf,
    hosts: Vec<String>,
    before: LabState,
    /// Whether the test created this lab, which is destroyed on drop.
    created: bool,
    /// Lock on a shared lab for the whole test: other tests may be started at the same time.
    _lock: Option<File>,
}

impl Lab {
    /// Waits for a free shared lab, cleans it and locks it.
    #[track_caller]
    pub fn acquire() -> Self {
        let dir = shared_dir();
        let lock = File::create(dir.with_extension("e2e.lock")).expect("tests run as root");
        lock.lock().expect("the lab can be locked");
        let mut lab = Self {
            dir,
            hosts: HOSTS.map(str::to_owned).to_vec(),
            before: LabState::default(),
            created: false,
            _lock: Some(lock),
        };
        lab.assert_up();
        lab.clean_up();
        lab.before = lab.inspect();
        lab
    }

    /// Creates a lab beside the shared ones, which is destroyed on drop.
    #[track_caller]
    pub fn create(dir: &str, options: &[&str], nodes: usize) -> Self {
        let mut lab = Self {
            dir: dir.into(),
            hosts: std::iter::once("login".to_owned())
                .chain((1..=nodes).map(|i| format!("node{i}")))
                .collect(),
            before: LabState::default(),
            created: true,
            _lock: None,
        };
        let up = lab.lab_command("up", &[options, &[&nodes.to_string()]].concat());
        assert!(up.code == 0, "lab/up {options:?} {nodes}{up}");
        lab.before = lab.inspect();
        lab
    }

    /// Takes the snapshot again, after the test has prepared the lab.
    pub fn with_new_snapshot(mut self) -> Self {
        self.before = self.inspect();
        self
    }

    /// Starts a host after a loss of power. It has new namespaces, which are added to the snapshot.
    pub fn start_host(&mut self, host: &str) {
        self.lab_command("start-host", &[host]).succeeded();
        let namespaces = format!("{host}: namespace: ");
        self.before.add(&self.inspect(), &namespaces);
    }

    /// The lab's state directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The lab's hosts.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// A command, by default on `login` and as `user1`.
    pub fn command(&self, args: &[&str]) -> HostCommand {
        HostCommand::new(&self.dir, args)
    }

    /// A shell script, by default on `login` and as `user1`.
    pub fn sh(&self, script: &str) -> HostCommand {
        self.command(&["bash", "-c", script])
    }

    /// Runs a shell script as root on a host.
    pub fn root(&self, host: &str, script: &str) -> Output {
        self.command(&["sh", "-c", script])
            .user("root")
            .on(host)
            .run()
    }

    /// Runs a shell script on the machine itself; returns its output.
    pub fn machine(&self, script: &str) -> String {
        let output = Command::new("sh").args(["-c", script]).output();
        let output = output.expect("there is a shell");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Writes a file in the home directory of `user1`; returns its path. [`Lab::remove`] removes it.
    pub fn write(&self, name: &str, text: &str) -> String {
        let path = format!("/home/user1/{name}");
        let script = format!("mkdir -p \"$(dirname '{path}')\" && cat > '{path}'");
        self.sh(&script).stdin(text).run().succeeded();
        path
    }

    /// Copies a program of this machine to the home directory of `user1`. [`Lab::remove`] removes it.
    pub fn install(&self, program: &str, name: &str) {
        let (dir, on) = (
            self.dir.display(),
            concat!(env!("CARGO_MANIFEST_DIR"), "/../lab/on"),
        );
        self.machine(&format!(
            "CORACLE_LAB_DIR={dir} {on} login user1 sh -c 'cat > ~/{name} && chmod +x ~/{name}' < {program}"
        ));
    }

    /// Removes a file or directory from the home directory of `user1`.
    pub fn remove(&self, name: &str) {
        self.sh(&format!("chmod -R u+rwX ~/'{name}'; rm -rf ~/'{name}'"))
            .run()
            .succeeded();
    }

    /// `lab/NAME ARGS…`
    pub fn lab_command(&self, name: &str, args: &[&str]) -> Output {
        let scripts = concat!(env!("CARGO_MANIFEST_DIR"), "/../lab/");
        let output = Command::new(format!("{scripts}{name}"))
            .args(args)
            .env("CORACLE_LAB_DIR", &self.dir)
            .output()
            .expect("the lab's commands can be started");
        Output {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Fails unless the state of every host is that of the snapshot.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        let queue = eventually(QUEUE_TIMEOUT, || self.queue_is_empty().then_some(()));
        assert!(
            queue.is_some(),
            "Slurm still has jobs:\n{}",
            self.lab_command("status", &[]).stdout
        );
        let mut left = Vec::new();
        let clean = eventually(CLEANUP_TIMEOUT, || {
            left = self.inspect().beyond(&self.before);
            left.is_empty().then_some(())
        });
        assert!(clean.is_some(), "left behind:\n{}", left.join("\n"));
    }

    /// Whether Slurm has no job, not even a completing one, and all nodes are idle.
    pub fn queue_is_empty(&self) -> bool {
        let listed = self.root(
            "login",
            "squeue -h; sinfo -h -N -p main -o %T | grep -vx idle",
        );
        listed.stdout.trim().is_empty()
    }

    fn inspect(&self) -> LabState {
        LabState::inspect(self)
    }

    #[track_caller]
    fn assert_up(&self) {
        let status = self.lab_command("status", &[]);
        let up = |host: &&str| {
            let line = status
                .stdout
                .lines()
                .find(|line| line.split_whitespace().next() == Some(host));
            line.is_some_and(|line| line.ends_with(" up"))
        };
        let all_up = HOSTS.iter().all(up);
        assert!(
            all_up,
            "the lab is not up with three nodes: run lab/up 3{status}"
        );
    }

    /// Removes the leftovers of a failed or timed-out test: all processes and files of the lab's two users.
    #[track_caller]
    fn clean_up(&self) {
        let is_clean =
            || (self.queue_is_empty() && self.inspect().leftovers().is_empty()).then_some(());
        if eventually(Duration::from_secs(2), is_clean).is_some() {
            return;
        }
        self.root("login", "scancel --user=user1; scancel --user=user2");
        for host in self.hosts() {
            let is_of_lab = |user: &str| user == "user1" || user == "user2";
            for process in self
                .processes(host)
                .iter()
                .filter(|process| is_of_lab(&process.user))
            {
                self.kill(host, "KILL", process);
            }
            // Recursively: files of pods in these directories have other owners.
            self.root(host, "find /tmp /var/tmp /dev/shm -mindepth 1 -maxdepth 1 '(' -user user1 -o -user user2 ')' -exec rm -rf {} +");
        }
        let cleaned = eventually(COMPLETION_TIMEOUT, is_clean);
        let status = self.lab_command("status", &[]);
        assert!(
            cleaned.is_some(),
            "cannot clean up the lab: {:?}{status}",
            self.inspect().leftovers()
        );
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.created {
            self.lab_command("down", &[]);
        }
    }
}
