//! Exec, attach and port-forward sessions.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::rc::Rc;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Container;
use linux::async_fd::OutputReader;
use pod_protocol::streams::{FrameKind, FrameStream, SessionEnd, encode_frame, skip_bytes};
use pod_protocol::{AttachQuery, ExecQuery, LogQuery, RequestError};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::exec_stream::{ExecOutput, ExecStream};
use super::inner::message::{InnerError, InnerRequest};
use super::inner_client::InnerProcess;
use super::logs::LogWriter;
use super::output_subscribers::{OutputSubscribers, OutputSubscription, Tee};
use super::stdio::{StdioPipes, StdioStreams};
use super::streams::{ClientSession, ContainerStdin, SessionInput, SharedStdin};
use super::{LinuxRuntime, RunningContainer, env};
use crate::container_runtime::ContainerRuntime;
use crate::node_services::NodeServices;

/// The streams of a container that clients attach to.
pub struct Attachable {
    /// Clients that are attached to its output.
    pub subscribers: Rc<OutputSubscribers>,
    /// Its standard input, if it has one.
    pub stdin: Option<Rc<ContainerStdin>>,
    /// Its terminal, if it has one.
    pub terminal: Option<Rc<OwnedFd>>,
    /// `stdinOnce`: its standard input is closed with that of the first client.
    pub stdin_once: bool,
}

impl<S: NodeServices> LinuxRuntime<S> {
    /// Starts an exec session.
    pub async fn open_exec(&self, query: ExecQuery) -> Result<ClientSession, RequestError> {
        let (serial, mut process, container_exit) = {
            let containers = self.containers.borrow();
            let container = find(&containers, &query.container)?;
            (
                container.serial,
                container.plan.clone(),
                container.alive.subscribe(),
            )
        };
        process.args = query.command;
        process.terminal = query.tty;
        if query.tty {
            env::set_default(&mut process.env, "TERM", "xterm");
        }
        let failed = |error: io::Error| {
            RequestError::failed(format!("cannot create the command's streams: {error}"))
        };
        let pipes = StdioPipes::new(query.tty, query.stdin).map_err(failed)?;
        let request = InnerRequest::Exec {
            container: serial,
            process: Box::new(process),
        };
        let started = self.inner.start_process(request, &pipes.theirs()).await;
        let InnerProcess {
            descriptors, exit, ..
        } = started.map_err(exec_error)?;
        let mut descriptors = descriptors.into_iter();
        let process = descriptors
            .next()
            .ok_or_else(|| RequestError::failed("the inner process sent no pidfd".to_owned()))?;
        let streams = pipes
            .open(descriptors.next(), query.stdin)
            .map_err(failed)?;
        let output = |wanted: bool| move |reader| ExecOutput { reader, wanted };
        let command = ExecStream {
            stdout: streams.stdout.map(output(query.stdout)),
            stderr: streams.stderr.map(output(query.stderr)),
            process,
            exit,
            container: container_exit,
        };
        Ok(ClientSession {
            input: streams.stdin.map(SessionInput::Process),
            frames: command.frames(),
            terminal: streams.terminal,
            // As in CRI-O and containerd, a command goes on when its client disconnects. With a terminal it gets SIGHUP.
            survives_disconnect: !query.tty,
        })
    }

    /// Starts an attach session.
    pub async fn open_attach(&self, query: &AttachQuery) -> Result<ClientSession, RequestError> {
        find(&self.containers.borrow(), &query.container)?;
        // Opening the log does not suspend this task, so no output is missing or repeated between the log and the subscription.
        let unseen = match query.log_bytes_seen {
            Some(seen) => self.unseen_log(&query.container, seen, false).await,
            None => stream::empty().boxed_local(),
        };
        let containers = self.containers.borrow();
        let Attachable {
            subscribers,
            stdin,
            terminal,
            stdin_once,
        } = &find(&containers, &query.container)?.attachable;
        let shared = match stdin {
            // A terminal cannot be half closed, so there stdinOnce has no effect.
            Some(stdin) if query.stdin => Some(SharedStdin::new(
                stdin.clone(),
                *stdin_once && terminal.is_none(),
            )),
            _ => None,
        };
        let (input, detached) = shared.unzip();
        let subscription = subscribers.subscribe(query.stdout, query.stderr && terminal.is_none());
        Ok(ClientSession {
            input: input.map(SessionInput::Container),
            frames: unseen
                .chain(attach_frames(subscription, detached))
                .boxed_local(),
            terminal: terminal.clone(),
            survives_disconnect: false,
        })
    }

    /// An attach session to a container that has ended: the rest of its log.
    pub async fn replay_log(&self, container: &str, seen: u64) -> ClientSession {
        // Its output may still be on its way to the log.
        let unseen = self.unseen_log(container, seen, true).await;
        let end = async { SessionEnd::Code(0).to_frame() };
        ClientSession {
            input: None,
            frames: unseen.chain(stream::once(end)).boxed_local(),
            terminal: None,
            survives_disconnect: false,
        }
    }

    /// The frames of a container's log without its first `seen` bytes. Both streams are sent as standard output, as in `kubectl logs`.
    async fn unseen_log(&self, container: &str, seen: u64, follow: bool) -> FrameStream {
        let query = LogQuery {
            container: container.to_owned(),
            follow,
            ..LogQuery::default()
        };
        match self.logs.read(&query).await {
            Ok(log) => skip_bytes(log, seen)
                .filter_map(|bytes| async move { bytes.ok() })
                .map(|bytes| encode_frame(FrameKind::Stdout, &bytes))
                .boxed_local(),
            Err(problem) => {
                tracing::debug!(container, problem.message, "cannot read the log for attach");
                stream::empty().boxed_local()
            }
        }
    }

    /// Connects to a port of the pod on its loopback address, for port-forward.
    pub async fn open_port(&self, port: u16) -> Result<TcpStream, RequestError> {
        let first = match self.connect(Ipv4Addr::LOCALHOST.into(), port).await {
            Ok(connection) => return Ok(connection),
            Err(error) => error,
        };
        let second = match self.connect(IpAddr::from(Ipv6Addr::LOCALHOST), port).await {
            Ok(connection) => return Ok(connection),
            Err(error) => error,
        };
        let text = crate::lifecycle::probe::target::connect_error_text;
        Err(RequestError::failed(format!(
            "failed to connect to localhost:{port} inside the pod's network, IPv4: dial tcp4 127.0.0.1:{port}: connect: {} \
                 IPv6: dial tcp6 [::1]:{port}: connect: {}",
            text(&first),
            text(&second)
        )))
    }
}

/// Copies a container's output to its log and to attached clients. The task ends when all processes that hold the streams have
/// closed them.
pub fn connect(
    pipes: StdioPipes,
    terminal: Option<OwnedFd>,
    container: &Container,
    log: LogWriter,
) -> (Attachable, JoinHandle<()>) {
    let with_stdin = container.stdin == Some(true);
    let streams = pipes.open(terminal, with_stdin).unwrap_or_else(|error| {
        tracing::warn!(container = container.name, %error, "cannot read container output");
        StdioStreams::default()
    });
    let subscribers = Rc::<OutputSubscribers>::default();
    let tee = |from: OutputReader, kind| Tee::new(from, kind, subscribers.clone());
    let stdout = streams.stdout.map(|from| tee(from, FrameKind::Stdout));
    let stderr = streams.stderr.map(|from| tee(from, FrameKind::Stderr));
    let copying = tokio::task::spawn_local(async move {
        if let Some(stdout) = stdout {
            log.copy(stdout, stderr).await;
        }
    });
    let attachable = Attachable {
        subscribers,
        stdin: streams.stdin.map(ContainerStdin::new),
        terminal: streams.terminal,
        stdin_once: container.stdin_once == Some(true),
    };
    (attachable, copying)
}

/// The frames of an attach session. It ends with the container, or when the client's input ends without closing the container's.
fn attach_frames(
    subscription: OutputSubscription,
    detached: Option<oneshot::Receiver<()>>,
) -> FrameStream {
    let detached = async move {
        let is_detached = match detached {
            Some(detached) => detached.await.is_ok(),
            None => false,
        };
        if !is_detached {
            std::future::pending().await
        }
    };
    let state = Some((subscription, Box::pin(detached)));
    stream::unfold(state, |state| async move {
        let (mut subscription, mut detached) = state?;
        let ending = tokio::select! {
            biased;
            frame = subscription.next() => match frame {
                Some(frame) => return Some((frame, Some((subscription, detached)))),
                None if subscription.was_overrun() => {
                    SessionEnd::Failed("the container writes faster than this client reads".to_owned())
                }
                None => SessionEnd::Code(0),
            },
            () = &mut detached => SessionEnd::Code(0),
        };
        Some((ending.to_frame(), None))
    })
    .boxed_local()
}

fn find<'a>(
    containers: &'a HashMap<String, RunningContainer>,
    name: &str,
) -> Result<&'a RunningContainer, RequestError> {
    let mut running = containers.values();
    let found = running.find(|container| container.name == name);
    found.ok_or_else(|| RequestError::not_found(format!("container not found ({name:?})")))
}

/// The text of containerd and runc, which users search for.
fn exec_error(error: InnerError) -> RequestError {
    let message = format!(
        "failed to exec in container: OCI runtime exec failed: exec failed: unable to start container process: {}",
        error.message
    );
    RequestError::failed(message)
}
