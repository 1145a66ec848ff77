//! The agent's side of the node's hub: it starts it, finds that of an agent before it, and starts it again in the same
//! namespaces if both of its processes were killed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use network::hub::Namespaces;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

use super::process_limit;
use crate::back_off::BackOff;
use crate::hub_role::Start;

/// What it may take to be ready. It waits for programs of the host (`newuidmap`), and these perhaps for a server that knows the
/// site's users; every pod of the node waits for it.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// What it may take to be gone.
const LAST_BREATH: Duration = Duration::from_secs(2);

/// The waits before a hub that can't be started, or sends no namespaces, is tried again.
const RETRIES: BackOff = BackOff::new(Duration::from_millis(200), Duration::from_secs(10));

/// The node's hub, which there is as soon as somebody needs it.
pub struct NodeHub {
    start: Start,
    /// What marks its processes.
    mark_argument: String,
    running: Mutex<Running>,
}

#[derive(Default)]
struct Running {
    /// The process that we started, if we did.
    child: Option<Child>,
    /// Held so that pods keep their network when all of the hub's processes are killed.
    namespaces: Option<Namespaces>,
    /// They are those of the hub that runs now.
    are_current: bool,
}

impl NodeHub {
    /// A hub for pods with addresses of `range`.
    pub fn new(dir: &Path, socket: PathBuf, range: &str, mark_argument: String) -> Self {
        Self {
            mark_argument,
            start: Start {
                dir: dir.to_owned(),
                socket,
                range: range.to_owned(),
                processes: linux::process_limit::current().map(process_limit::of_pods),
            },
            running: Mutex::default(),
        }
    }

    /// Makes sure that it is there.
    pub async fn ready(&self) -> anyhow::Result<()> {
        let mut running = self.running.lock().await;
        let socket = &self.start.socket;
        // Perhaps one of an agent before us; and if our child has ended, its other process listens.
        if !with(socket, network::hub::is_there).await? {
            if running.namespaces.is_none() {
                running.namespaces = with(&self.start.dir, find_namespaces).await?;
            }
            running.child = Some(self.spawn(running.namespaces.as_ref()).await?);
            running.are_current = false;
        }
        if !running.are_current {
            match with(socket, Namespaces::of_hub).await? {
                Ok(namespaces) => {
                    running.namespaces = Some(namespaces);
                    running.are_current = true;
                }
                Err(error) => tracing::warn!(%error, "cannot hold the hub's namespaces"),
            }
        }
        Ok(())
    }

    /// Makes sure that it is there, until this is dropped: pods that run need it too, and not only those that start.
    pub async fn keep_up(&self) {
        let mut retries = RETRIES;
        loop {
            let ready = self.ready().await;
            if let Err(error) = &ready {
                tracing::warn!(error = format!("{error:#}"), "the node has no hub");
            }
            // As long as its namespaces are not held, pods lose their network with the hub.
            if ready.is_ok() && self.running.lock().await.are_current {
                retries.reset();
                if network::hub::lost(&self.start.socket).await.is_ok() {
                    tracing::warn!("the hub's worker has ended");
                }
            }
            tokio::time::sleep(retries.wait()).await;
        }
    }

    /// How many processes each container may have, if the user has a limit here.
    pub async fn processes_of_containers(&self) -> Option<u64> {
        let of_pods = self.start.processes?;
        let user = {
            let running = self.running.lock().await;
            let user = running.namespaces.as_ref()?.user();
            user.try_clone_to_owned().ok()?
        };
        let count = move || linux::process_limit::threads_outside(user.as_fd());
        let counted = tokio::task::spawn_blocking(count).await;
        let outside = counted
            .map_err(io::Error::other)
            .flatten()
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

    async fn spawn(&self, before: Option<&Namespaces>) -> anyhow::Result<Child> {
        let (ours, theirs) = linux::packet::pair()?;
        let mut child = Command::new("/proc/self/exe")
            .args(["internal", "hub"])
            .arg(&self.mark_argument)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("cannot start the node's hub")?;
        let output = child.stdout.take().context("the node's hub has no pipe")?;
        let start = serde_json::to_vec(&self.start)?;
        let descriptors = before.map(Namespaces::descriptors).unwrap_or_default();
        let descriptors = descriptors.iter().map(BorrowedFd::try_clone_to_owned);
        let descriptors: Vec<OwnedFd> = descriptors.collect::<io::Result<_>>()?;
        let send = move || {
            let beside: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            linux::packet::send(&ours, 0, &start, &beside)
        };
        tokio::task::spawn_blocking(send).await??;
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
            while matches!(with(socket, network::hub::end).await, Ok(Ok(()))) {
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

/// Does something with a path on another thread. The hub may be slow to answer, and so may the disk; this thread is the agent's only
/// one.
async fn with<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce(&Path) -> T + Send + 'static,
) -> anyhow::Result<T> {
    let path = path.to_owned();
    Ok(tokio::task::spawn_blocking(move || work(&path)).await?)
}

/// The user namespace of pods that run in a node's directory, if we came after their hub had died: a new hub must be in it to reach
/// them.
fn find_namespaces(dir: &Path) -> Option<Namespaces> {
    let pods = std::fs::read_dir(dir.join("pods")).ok()?;
    pods.flatten()
        .find_map(|pod| Namespaces::of_sandbox(&pod.path()).ok())
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
    use std::os::unix::ffi::OsStrExt;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Instant;

    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

    use super::*;

    /// A hub that sends no namespaces until it is asked for the third time. Returns how often it was asked.
    fn fake_hub(socket: &Path) -> Arc<AtomicU32> {
        let (unix, packets) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let listener = rustix::net::socket_with(unix, packets, SocketFlags::CLOEXEC, None).unwrap();
        let address = SocketAddrUnix::new(socket.as_os_str().as_bytes()).unwrap();
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 16).unwrap();
        let asked = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&asked);
        std::thread::spawn(move || {
            while let Ok(connection) = rustix::net::accept(&listener) {
                let count = Arc::clone(&count);
                std::thread::spawn(move || {
                    // Until the peer closes: a liveness check connects and sends nothing.
                    while let Ok(Some(_)) = linux::packet::receive(&connection) {
                        let own = connection.as_fd();
                        let namespaces = match count.fetch_add(1, Ordering::SeqCst) {
                            0 | 1 => vec![],
                            _ => vec![own, own],
                        };
                        linux::packet::send(&connection, 0, &[], &namespaces).unwrap();
                    }
                });
            }
        });
        asked
    }

    #[tokio::test]
    async fn hub_is_asked_until_its_namespaces_are_held() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("hub.sock");
        let asked = fake_hub(&socket);
        let hub = NodeHub::new(dir.path(), socket, "100.64.0.0/24", "mark=m".to_owned());
        let held = async {
            while hub.running.lock().await.namespaces.is_none() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! {
            () = hub.keep_up() => {}
            held = tokio::time::timeout(Duration::from_secs(10), held) => held.unwrap(),
        }
        assert_eq!(asked.load(Ordering::SeqCst), 3);
    }

    #[tokio::test]
    async fn slow_sandbox_does_not_hold_up_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let pod = dir.path().join("pods/uid");
        std::fs::create_dir_all(&pod).unwrap();
        let address = SocketAddrUnix::new(pod.join("namespaces.sock")).unwrap();
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        let socket = socket.unwrap();
        rustix::net::bind(&socket, &address).unwrap();
        rustix::net::listen(&socket, 1).unwrap();
        // It answers late, and with nothing.
        let slow = Duration::from_secs(1);
        let sandbox = std::thread::spawn(move || {
            let connection = rustix::net::accept(&socket).unwrap();
            std::thread::sleep(slow);
            drop(connection);
        });
        let begun = Instant::now();
        let other_work = async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            begun.elapsed()
        };
        let (found, waited) = tokio::join!(with(dir.path(), find_namespaces), other_work);
        assert!(found.unwrap().is_none());
        assert!(begun.elapsed() >= slow && waited < slow, "{waited:?}");
        sandbox.join().unwrap();
    }

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
