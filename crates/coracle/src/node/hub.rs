//! The agent's side of the node's hub: it starts it, finds that of an agent before it, and starts it again in the same
//! namespaces if both of its processes were killed.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use network::hub::HubNamespaces;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

use super::process_limit;
use crate::handover::POD_MARK;
use crate::hub_role::Start;
use crate::sandbox_role;

/// What it may take to be ready. It waits for programs of the host (`newuidmap`), and these perhaps for a server that knows the
/// site's users; every pod of the node waits for it.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// What it may take to be gone.
const LAST_BREATH: Duration = Duration::from_secs(2);

/// The shortest and the longest wait before a hub that can't be started is tried again.
const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));

/// The node's hub, which there is as soon as somebody needs it.
pub struct NodeHub {
    start: Start,
    running: Mutex<Running>,
}

#[derive(Default)]
struct Running {
    /// The process that we started, if we did.
    child: Option<Child>,
    /// Held so that pods keep their network when all of the hub's processes are killed.
    namespaces: Option<HubNamespaces>,
}

impl NodeHub {
    /// A hub for pods with addresses of `range`; `mark` is for its environment.
    pub fn new(dir: &Path, socket: PathBuf, range: &str, mark: &str) -> Self {
        Self {
            start: Start {
                dir: dir.to_owned(),
                socket,
                range: range.to_owned(),
                mark: mark.to_owned(),
                processes: linux::process_limit::current().map(process_limit::of_pods),
            },
            running: Mutex::default(),
        }
    }

    /// Makes sure that it is there.
    pub async fn ready(&self) -> anyhow::Result<()> {
        let mut running = self.running.lock().await;
        // Perhaps one of an agent before us; and if our child has ended, its other process listens.
        if !network::hub::is_listening(&self.start.socket) {
            if running.namespaces.is_none() {
                running.namespaces = self.find_namespaces();
            }
            running.child = Some(self.spawn(running.namespaces.as_ref()).await?);
            running.namespaces = None;
        }
        if running.namespaces.is_none() {
            let socket = self.start.socket.clone();
            let asked = tokio::task::spawn_blocking(move || HubNamespaces::of_hub(&socket)).await?;
            match asked {
                Ok(namespaces) => running.namespaces = Some(namespaces),
                Err(error) => tracing::warn!(%error, "cannot hold the hub's namespaces"),
            }
        }
        Ok(())
    }

    /// Makes sure that it is there, until this is dropped: pods that run need it too, and not only those that start.
    pub async fn keep_up(&self) {
        let (first, most) = RETRY;
        let mut wait = first;
        loop {
            match self.ready().await {
                Ok(()) => {
                    wait = first;
                    if network::hub::wait_for_exit(&self.start.socket)
                        .await
                        .is_ok()
                    {
                        tracing::warn!("the hub's worker has ended");
                    }
                }
                Err(error) => {
                    tracing::warn!(error = format!("{error:#}"), "the node has no hub");
                    wait = (wait * 2).min(most);
                }
            }
            tokio::time::sleep(wait).await;
        }
    }

    /// How many processes each container may have, if the user has a limit here.
    pub async fn processes_of_containers(&self) -> Option<u64> {
        let of_pods = self.start.processes?;
        let running = self.running.lock().await;
        let user = running.namespaces.as_ref()?.user();
        let outside = linux::process_limit::threads_outside(user)
            .inspect_err(|error| tracing::warn!(%error, "cannot count processes"))
            .ok()?;
        if process_limit::is_scarce(of_pods, outside) {
            tracing::warn!(
                of_pods,
                outside,
                "pods can have few processes: the limit of the job (`ulimit -u`) counts all that you have on this node"
            );
        }
        Some(process_limit::of_containers(of_pods, outside))
    }

    /// The user namespace of pods that run, if we came after their hub had died: a new hub must be in it to reach them.
    fn find_namespaces(&self) -> Option<HubNamespaces> {
        let pods = std::fs::read_dir(self.start.dir.join("pods")).ok()?;
        let sandboxes = pods
            .flatten()
            .filter_map(|pod| sandbox_role::lock::holder(&pod.path()));
        sandboxes
            .filter_map(|sandbox| HubNamespaces::of_sandbox(sandbox).ok())
            .next()
    }

    async fn spawn(&self, before: Option<&HubNamespaces>) -> anyhow::Result<Child> {
        let (ours, theirs) = linux::packet::pair()?;
        let mut child = Command::new("/proc/self/exe")
            .args(["internal", "hub"])
            .arg(format!("{POD_MARK}={}", self.start.mark))
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("cannot start the node's hub")?;
        let output = child.stdout.take().context("the node's hub has no pipe")?;
        let descriptors = before.map(HubNamespaces::descriptors).unwrap_or_default();
        let start = serde_json::to_vec(&self.start)?;
        linux::packet::send(&ours, 0, &start, &descriptors)?;
        let ready = until_ready(output, START_PATIENCE).await;
        if ready.is_err() {
            let _ = child.start_kill();
        }
        ready.map(|()| child)
    }

    /// Ends it, and with it the pods' network. It may be that of an agent before us.
    pub async fn end(&self) {
        let socket = &self.start.socket;
        let gone = async {
            while network::hub::shut_down(socket).is_ok() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(LAST_BREATH, gone).await.is_err() {
            tracing::warn!("the node's hub does not end");
        }
        if let Some(mut child) = self.running.lock().await.child.take() {
            let _ = tokio::time::timeout(LAST_BREATH, child.wait()).await;
        }
    }
}

/// Waits for the hub's word that it is ready, or why not.
async fn until_ready(output: impl AsyncRead + Unpin, patience: Duration) -> anyhow::Result<()> {
    let mut answer = String::new();
    let mut output = BufReader::new(output);
    tokio::time::timeout(patience, output.read_line(&mut answer))
        .await
        .with_context(|| {
            let seconds = patience.as_secs();
            format!("the node's hub was not ready within {seconds} s")
        })??;
    match answer.trim() {
        "ready" => Ok(()),
        "" => bail!("the node's hub ended before it was ready"),
        problem => bail!("{problem}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_hub_says_that_it_is_ready_or_why_not_or_is_given_up() {
        let patience = Duration::from_millis(20);
        let said = |words: &'static str| until_ready(words.as_bytes(), patience);
        said("ready\n").await.unwrap();
        let problem = |ready: anyhow::Result<()>| ready.unwrap_err().to_string();
        assert_eq!(problem(said("no namespaces\n").await), "no namespaces");
        assert!(problem(said("").await).contains("ended before"));
        let (silent, _held) = tokio::io::duplex(16);
        assert!(problem(until_ready(silent, patience).await).contains("not ready"));
    }
}
