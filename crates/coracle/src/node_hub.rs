//! The hub of a node, as an agent or a pod-job uses it: starts the hub, adopts that of an earlier agent, restarts it in the same
//! namespaces if it exits or hangs, and sends it the desired state of the network.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use network::hub::{HubNamespaces, NetworkState, StateConnection};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{Mutex, watch};

use crate::back_off::ProcessBackOff;
use crate::node_dir;
use crate::process_limit;
use crate::roles::hub::{HubConfig, READY};

/// Time-out of the hub's start. It is long because the hub runs `newuidmap`, which may wait for the site's directory service, and every
/// pod of the node needs the hub.
const HUB_START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time-out of the hub's shutdown.
const HUB_STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// Back-off if the hub cannot be started or does not send its namespaces.
const RETRY_BACK_OFF: ProcessBackOff =
    ProcessBackOff::new(Duration::from_millis(200), Duration::from_secs(10));

/// Retry interval of connecting to the hub while it is restarted.
const STATE_RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Time that the hub has to apply a state of the network. It may have to restart its process inside meanwhile.
const STATE_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval of the requests by which the agent notices that the hub hangs, and the time that the hub has to respond.
const HUB_CHECK_INTERVAL: Duration = Duration::from_secs(5);
const HUB_RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// A hub that has not responded to so many requests in a row is killed. More than one, because the time-out of a request also ends if
/// Slurm has suspended the job, hub and agent, meanwhile.
const MAX_UNANSWERED: u32 = 3;

/// The node's hub, started on demand.
pub struct NodeHub {
    config: HubConfig,
    /// The socket of the hub's process outside.
    socket: PathBuf,
    check_interval: Duration,
    response_timeout: Duration,
    state: Mutex<HubState>,
}

#[derive(Default)]
struct HubState {
    /// The hub's process, if this agent started it.
    child: Option<Child>,
    /// Kept open so that pods keep their network if all of the hub's processes are killed.
    namespaces: Option<HubNamespaces>,
    /// `namespaces` are those of the running hub.
    namespaces_are_current: bool,
    /// The number of requests in a row to which the hub has not responded.
    unanswered: u32,
}

impl NodeHub {
    /// A hub for pods with addresses in `pod_cidr`, which is not started yet.
    pub fn new(dir: &Path, pod_cidr: &str) -> Self {
        Self {
            socket: node_dir::hub_sockets(dir).outside,
            config: HubConfig {
                dir: dir.to_owned(),
                pod_cidr: pod_cidr.to_owned(),
                process_limit: linux::process_limit::current().map(process_limit::pods_limit),
            },
            check_interval: HUB_CHECK_INTERVAL,
            response_timeout: HUB_RESPONSE_TIMEOUT,
            state: Mutex::default(),
        }
    }

    /// Starts the hub if it does not run.
    pub async fn ensure_running(&self) -> anyhow::Result<()> {
        let mut state = self.state.lock().await;
        let socket = &self.socket;
        // The hub may be that of an earlier agent.
        if !run_blocking(socket, network::hub::is_listening).await? {
            if state.namespaces.is_none() {
                state.namespaces = run_blocking(&self.config.dir, find_namespaces).await?;
            }
            state.child = Some(self.spawn(state.namespaces.as_ref()).await?);
            state.namespaces_are_current = false;
            state.unanswered = 0;
        }
        if !state.namespaces_are_current {
            self.request_namespaces(&mut state).await?;
        }
        Ok(())
    }

    /// Requests the hub's namespaces. Kills the hub's process outside if it hangs; the one inside continues, and keeps the pods' network.
    async fn request_namespaces(&self, state: &mut HubState) -> anyhow::Result<()> {
        let timeout = self.response_timeout;
        let request = move |socket: &Path| HubNamespaces::of_hub(socket, timeout);
        match run_blocking(&self.socket, request).await? {
            Ok(namespaces) => {
                state.namespaces = Some(namespaces);
                state.namespaces_are_current = true;
                state.unanswered = 0;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot get the hub's namespaces");
                state.namespaces_are_current = false;
                if error.kind() == io::ErrorKind::WouldBlock {
                    state.unanswered += 1;
                }
            }
        }
        if state.unanswered >= MAX_UNANSWERED {
            match run_blocking(&self.socket, network::hub::kill_listener).await? {
                Some(pid) => tracing::warn!(pid, "killed the hub, which does not respond"),
                None => tracing::warn!("cannot kill the hub, which does not respond"),
            }
            state.unanswered = 0;
        }
        Ok(())
    }

    /// Returns as soon as the hub fails to respond.
    async fn check_responses(&self) {
        loop {
            tokio::time::sleep(self.check_interval).await;
            let mut state = self.state.lock().await;
            if let Err(error) = self.request_namespaces(&mut state).await {
                tracing::warn!(error = format!("{error:#}"), "cannot check the hub");
            }
            if !state.namespaces_are_current {
                return;
            }
        }
    }

    /// Restarts the hub whenever it exits or hangs, until this future is dropped: running pods need it too, not only new ones.
    pub async fn supervise(&self) {
        let mut back_off = RETRY_BACK_OFF;
        loop {
            let ready = self.ensure_running().await;
            if let Err(error) = &ready {
                tracing::warn!(error = format!("{error:#}"), "the node has no hub");
            }
            // Until the agent holds the namespaces, pods lose their network if the hub dies.
            if ready.is_ok() && self.state.lock().await.namespaces_are_current {
                back_off.reset();
                tokio::select! {
                    exited = network::hub::wait_for_exit(&self.socket) => {
                        if exited.is_ok() {
                            tracing::warn!("the hub has exited");
                        }
                    }
                    () = self.check_responses() => {}
                }
            }
            tokio::time::sleep(back_off.next_delay()).await;
        }
    }

    /// Sends the desired state of the network to the hub, complete, on each change and to each new process of the hub, until this
    /// future is dropped.
    pub async fn send_states(&self, mut states: watch::Receiver<NetworkState>) {
        loop {
            if let Err(error) = self.send_states_once(&mut states).await {
                tracing::debug!(%error, "cannot send the state of the network to the hub");
            }
            tokio::time::sleep(STATE_RETRY_INTERVAL).await;
        }
    }

    async fn send_states_once(&self, states: &mut watch::Receiver<NetworkState>) -> io::Result<()> {
        let connection = StateConnection::open(&self.socket).await?;
        loop {
            let state = states.borrow_and_update().clone();
            connection.apply(&state, STATE_TIMEOUT).await?;
            tokio::select! {
                changed = states.changed() => changed.map_err(io::Error::other)?,
                () = connection.hub_exited() => return Ok(()),
            }
        }
    }

    /// The process limit of each container, if the user has a limit here.
    pub async fn container_process_limit(&self) -> Option<u64> {
        let pods_limit = self.config.process_limit?;
        let user = {
            let state = self.state.lock().await;
            let user = state.namespaces.as_ref()?.user();
            user.try_clone_to_owned().ok()?
        };
        let count = move || linux::process_limit::threads_outside(user.as_fd());
        let counted = tokio::task::spawn_blocking(count).await;
        let outside = counted
            .map_err(io::Error::other)
            .flatten()
            .inspect_err(|error| tracing::warn!(%error, "cannot count processes"))
            .ok()?;
        if process_limit::is_scarce(pods_limit, outside) {
            tracing::warn!(
                pods_limit,
                outside,
                "few processes are left for pods: the process limit of the job (`ulimit -u`) counts all of the user's processes on this node"
            );
        }
        Some(process_limit::container_limit(pods_limit, outside))
    }

    async fn spawn(&self, previous: Option<&HubNamespaces>) -> anyhow::Result<Child> {
        let (agent_socket, hub_socket) = linux::packet::pair()?;
        let mut child = Command::new("/proc/self/exe")
            .args(["internal", "hub"])
            .stdin(Stdio::from(hub_socket))
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("cannot start the node's hub")?;
        let output = child.stdout.take().context("the node's hub has no pipe")?;
        let config = serde_json::to_vec(&self.config)?;
        let descriptors = previous.map(HubNamespaces::descriptors).unwrap_or_default();
        let descriptors = descriptors.iter().map(BorrowedFd::try_clone_to_owned);
        let descriptors: Vec<OwnedFd> = descriptors.collect::<io::Result<_>>()?;
        let send = move || {
            let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            linux::packet::send(&agent_socket, 0, &config, &descriptors)
        };
        tokio::task::spawn_blocking(send).await??;
        let ready = wait_until_ready(output, HUB_START_TIMEOUT).await;
        if ready.is_err() {
            let _ = child.start_kill();
        }
        ready.map(|()| child)
    }

    /// Shuts down the hub, and thereby the pods' network. An earlier agent may have started it.
    pub async fn shut_down(&self) {
        let socket = &self.socket;
        let exited = async {
            while matches!(
                run_blocking(socket, network::hub::shut_down).await,
                Ok(Ok(()))
            ) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(HUB_STOP_TIMEOUT, exited)
            .await
            .is_err()
        {
            tracing::warn!("the node's hub does not exit");
        }
        if let Some(mut child) = self.state.lock().await.child.take() {
            let _ = tokio::time::timeout(HUB_STOP_TIMEOUT, child.wait()).await;
        }
    }
}

/// Runs `work` on another thread, because the hub and the disk may be slow and the agent has a single thread.
async fn run_blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce(&Path) -> T + Send + 'static,
) -> anyhow::Result<T> {
    let path = path.to_owned();
    Ok(tokio::task::spawn_blocking(move || work(&path)).await?)
}

/// Finds the user namespace of the running pods through a sandbox, if the hub died before this agent started. The new hub must be in
/// that namespace to reach them.
fn find_namespaces(dir: &Path) -> Option<HubNamespaces> {
    let pods = std::fs::read_dir(dir.join("pods")).ok()?;
    pods.flatten()
        .find_map(|pod| HubNamespaces::of_sandbox(&pod.path()).ok())
}

/// Waits until the hub reports that it is ready, or why it failed.
async fn wait_until_ready(output: impl AsyncRead + Unpin, timeout: Duration) -> anyhow::Result<()> {
    let mut line = String::new();
    let mut output = BufReader::new(output);
    tokio::time::timeout(timeout, output.read_line(&mut line))
        .await
        .with_context(|| {
            let seconds = timeout.as_secs();
            format!("the node's hub was not ready within {seconds} s")
        })??;
    match line.trim() {
        READY => Ok(()),
        "" => bail!("the node's hub exited before it was ready"),
        problem => bail!("{problem}"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::process::ExitStatusExt;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Instant;

    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

    use super::*;

    /// Environment variable for a process that hangs: the socket at which it listens.
    const HUNG_HUB: &str = "CORACLE_TEST_HUNG_HUB";

    fn listen(socket: &Path) -> OwnedFd {
        let (unix, packets) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let listener = rustix::net::socket_with(unix, packets, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(socket).unwrap()).unwrap();
        rustix::net::listen(&listener, 16).unwrap();
        listener
    }

    /// A hub that sends no namespaces before the third request. Returns the number of requests.
    fn fake_hub(socket: &Path) -> Arc<AtomicU32> {
        let listener = listen(socket);
        let requests = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&requests);
        std::thread::spawn(move || {
            while let Ok(connection) = rustix::net::accept(&listener) {
                let count = Arc::clone(&count);
                std::thread::spawn(move || {
                    // Liveness checks connect and close without a request.
                    while let Ok(Some(_)) = linux::packet::receive(&connection) {
                        let descriptor = connection.as_fd();
                        let namespaces = match count.fetch_add(1, Ordering::SeqCst) {
                            0 | 1 => vec![],
                            _ => vec![descriptor, descriptor],
                        };
                        linux::packet::send(&connection, 0, &[], &namespaces).unwrap();
                    }
                });
            }
        });
        requests
    }

    #[tokio::test]
    async fn agent_requests_namespaces_until_it_holds_them() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("hub.sock");
        let requests = fake_hub(&socket);
        let hub = NodeHub::new(dir.path(), "100.64.0.0/24");
        let held = async {
            while hub.state.lock().await.namespaces.is_none() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! {
            () = hub.supervise() => {}
            held = tokio::time::timeout(Duration::from_secs(10), held) => held.unwrap(),
        }
        assert_eq!(requests.load(Ordering::SeqCst), 3);
    }

    /// The process that hangs is this program, with this test alone.
    #[tokio::test]
    async fn hub_that_hangs_is_killed() {
        if let Some(socket) = std::env::var_os(HUNG_HUB) {
            let _listener = listen(Path::new(&socket));
            eprint!("ready");
            let _ = std::io::stdin().read(&mut [0]);
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let mut hub = NodeHub::new(dir.path(), "100.64.0.0/24");
        hub.check_interval = Duration::from_millis(10);
        hub.response_timeout = Duration::from_millis(50);
        let test = "node_hub::tests::hub_that_hangs_is_killed";
        let mut process = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", test])
            .env(HUNG_HUB, &hub.socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = process.stderr.take().unwrap();
        output.read_exact(&mut [0; 5]).unwrap();

        for _ in 0..MAX_UNANSWERED {
            assert!(process.try_wait().unwrap().is_none());
            let check = hub.check_responses();
            let checked = tokio::time::timeout(Duration::from_secs(60), check).await;
            checked.expect("the hub does not respond");
        }
        drop(process.stdin.take());
        assert_eq!(process.wait().unwrap().signal(), Some(9));
    }

    #[tokio::test]
    async fn slow_sandbox_does_not_block_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let pod = dir.path().join("pods/uid");
        std::fs::create_dir_all(&pod).unwrap();
        let socket = listen(&pod.join("namespaces.sock"));
        // A sandbox that closes the connection late, without a response.
        let slow = Duration::from_secs(1);
        let sandbox = std::thread::spawn(move || {
            let connection = rustix::net::accept(&socket).unwrap();
            std::thread::sleep(slow);
            drop(connection);
        });
        let began = Instant::now();
        let other_work = async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            began.elapsed()
        };
        let (found, waited) = tokio::join!(run_blocking(dir.path(), find_namespaces), other_work);
        assert!(found.unwrap().is_none());
        assert!(began.elapsed() >= slow && waited < slow, "{waited:?}");
        sandbox.join().unwrap();
    }

    #[tokio::test]
    async fn start_of_hub_succeeds_fails_or_times_out() {
        let timeout = Duration::from_millis(20);
        let wait_for_output = |output: &'static str| wait_until_ready(output.as_bytes(), timeout);
        wait_for_output("ready\n").await.unwrap();
        let problem = |ready: anyhow::Result<()>| ready.unwrap_err().to_string();
        assert_eq!(
            problem(wait_for_output("no namespaces\n").await),
            "no namespaces"
        );
        assert!(problem(wait_for_output("").await).contains("exited before"));
        let (silent, _held) = tokio::io::duplex(16);
        assert!(problem(wait_until_ready(silent, timeout).await).contains("not ready"));
    }
}
