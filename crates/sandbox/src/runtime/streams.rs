//! Streams into the pod's containers and network.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::rc::Rc;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Container;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::inside::{Process, Refusal};
use super::output::{Ends, Pipes, Reader};
use super::process_output::{ProcessOutput, Source};
use super::taps::{Tapped, Taps, Tee};
use super::{LinuxRuntime, Running, env};
use crate::inner::message::Request;
use crate::logs::LogWriter;
use crate::seams::{Runtime, World};
use crate::streams::{Input, Session, SharedInput, Stdin};
use pod_protocol::streams::{Ending, Frames, Kind};
use pod_protocol::{AttachQuery, ExecQuery, Problem};

/// How clients reach a container's own streams.
pub struct Attachable {
    /// Its output.
    pub taps: Rc<Taps>,
    /// Its input, if it has one.
    pub stdin: Option<Rc<Stdin>>,
    /// Its terminal, if it has one.
    pub terminal: Option<Rc<OwnedFd>>,
    /// Its input ends with that of the first client.
    pub stdin_once: bool,
}

impl<W: World> LinuxRuntime<W> {
    /// Runs a command in a container, for a client.
    pub async fn open_exec(&self, query: ExecQuery) -> Result<Session, Problem> {
        let (container, mut process, container_end) = {
            let containers = self.containers.borrow();
            let running = find(&containers, &query.container)?;
            (
                running.serial,
                running.plan.clone(),
                running.alive.subscribe(),
            )
        };
        process.args = query.command;
        process.terminal = query.tty;
        if query.tty {
            env::set_default(&mut process.env, "TERM", "xterm");
        }
        let failed =
            |error: io::Error| problem("InternalError", format!("streams for a command: {error}"));
        let pipes = Pipes::new(query.tty, query.stdin).map_err(failed)?;
        let request = Request::Exec {
            container,
            process: Box::new(process),
        };
        let started = self.inside.start(request, &pipes.theirs()).await;
        let Process {
            descriptors, end, ..
        } = started.map_err(not_started)?;
        let mut descriptors = descriptors.into_iter();
        let process = descriptors.next().ok_or_else(|| {
            problem(
                "InternalError",
                "the inner process told of no process".to_owned(),
            )
        })?;
        let ends = pipes
            .open(descriptors.next(), query.stdin)
            .map_err(failed)?;
        let wanted = |wanted: bool| move |from| Source { from, wanted };
        let command = ProcessOutput {
            output: ends.output.map(wanted(query.stdout)),
            errors: ends.errors.map(wanted(query.stderr)),
            process,
            end,
            container: container_end,
        };
        Ok(Session {
            input: ends.input.map(Input::Own),
            frames: command.frames(),
            terminal: ends.terminal,
            // As CRI-O does it, and containerd: whoever runs a long command over a bad line finds that it went on. A terminal
            // that is gone tells its processes so, as it would anywhere.
            lingers: !query.tty,
        })
    }

    /// Connects a client to a container's own streams, from now on.
    pub fn open_attach(&self, query: &AttachQuery) -> Result<Session, Problem> {
        let containers = self.containers.borrow();
        let Attachable {
            taps,
            stdin,
            terminal,
            stdin_once,
        } = &find(&containers, &query.container)?.attachable;
        let shared = match stdin {
            // A terminal can't be half closed: there the client just leaves.
            Some(stdin) if query.stdin => Some(SharedInput::new(
                stdin.clone(),
                *stdin_once && terminal.is_none(),
            )),
            _ => None,
        };
        let (input, detached) = shared.unzip();
        let tapped = taps.add(query.stdout, query.stderr && terminal.is_none());
        Ok(Session {
            input: input.map(Input::Shared),
            frames: attached(tapped, detached),
            terminal: terminal.clone(),
            lingers: false,
        })
    }

    /// Connects to a port of the pod, at its loopback address.
    pub async fn open_port(&self, port: u16) -> Result<TcpStream, Problem> {
        let first = match self.connect(Ipv4Addr::LOCALHOST.into(), port).await {
            Ok(connection) => return Ok(connection),
            Err(error) => error,
        };
        let second = match self.connect(IpAddr::from(Ipv6Addr::LOCALHOST), port).await {
            Ok(connection) => return Ok(connection),
            Err(error) => error,
        };
        let words = crate::probe::target::words;
        Err(problem(
            "PortForwardError",
            format!(
                "failed to connect to localhost:{port} inside the pod's network, IPv4: dial tcp4 127.0.0.1:{port}: connect: {} \
                 IPv6: dial tcp6 [::1]:{port}: connect: {}",
                words(&first),
                words(&second)
            ),
        ))
    }
}

/// Has a container's output copied to its log and to whoever is attached. The task ends when the container, and whoever
/// inherited its streams, has closed them.
pub fn connect(
    pipes: Pipes,
    terminal: Option<OwnedFd>,
    container: &Container,
    log: LogWriter,
) -> (Attachable, JoinHandle<()>) {
    let with_input = container.stdin == Some(true);
    let ends = pipes.open(terminal, with_input).unwrap_or_else(|error| {
        tracing::warn!(container = container.name, %error, "a container's output is lost");
        Ends::default()
    });
    let taps = Rc::<Taps>::default();
    let tee = |from: Reader, kind| Tee::new(from, kind, taps.clone());
    let output = ends.output.map(|from| tee(from, Kind::Output));
    let errors = ends.errors.map(|from| tee(from, Kind::Errors));
    let copying = tokio::task::spawn_local(async move {
        if let Some(output) = output {
            log.copy(output, errors).await;
        }
    });
    let attachable = Attachable {
        taps,
        stdin: ends.input.map(Stdin::new),
        terminal: ends.terminal,
        stdin_once: container.stdin_once == Some(true),
    };
    (attachable, copying)
}

/// What an attached client is shown: until the container ends, or the client's input does and nothing waits for that.
fn attached(tapped: Tapped, detached: Option<oneshot::Receiver<()>>) -> Frames {
    let left = async move {
        let left = match detached {
            Some(detached) => detached.await.is_ok(),
            None => false,
        };
        if !left {
            std::future::pending().await
        }
    };
    let state = Some((tapped, Box::pin(left)));
    stream::unfold(state, |state| async move {
        let (mut tapped, mut left) = state?;
        let ending = tokio::select! {
            biased;
            frame = tapped.next() => match frame {
                Some(frame) => return Some((frame, Some((tapped, left)))),
                None if tapped.was_too_slow() => {
                    Ending::Failed("the container writes faster than this client reads".to_owned())
                }
                None => Ending::Code(0),
            },
            () = &mut left => Ending::Code(0),
        };
        Some((ending.frame(), None))
    })
    .boxed_local()
}

fn find<'a>(containers: &'a HashMap<String, Running>, name: &str) -> Result<&'a Running, Problem> {
    let found = containers.values().find(|running| running.name == name);
    found.ok_or_else(|| problem("NotFound", format!("container not found ({name:?})")))
}

/// In the words that people know from other runtimes, and look for.
fn not_started(refusal: Refusal) -> Problem {
    let message = format!(
        "failed to exec in container: OCI runtime exec failed: exec failed: unable to start container process: {}",
        refusal.message
    );
    problem("ExecError", message)
}

fn problem(reason: &str, message: String) -> Problem {
    Problem {
        reason: reason.to_owned(),
        message,
    }
}
