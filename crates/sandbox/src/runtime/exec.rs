//! Signals to containers, commands in them, and connections from the pod's network.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use pod_protocol::Problem;
use rustix::process::Signal;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::TcpStream;

use super::LinuxRuntime;
use super::inner::message::{InnerRequest, ProcessExit};
use super::inner_client::InnerClient;
use super::stdio::{StdioPipes, StdioStreams};
use crate::container_runtime::ExecResult;
use crate::node_services::NodeServices;

/// How much of a command's output is kept.
const MAX_EXEC_OUTPUT: u64 = 10 << 10;

impl<S: NodeServices> LinuxRuntime<S> {
    pub(super) fn send_signal(&self, id: &str, signal: i32) {
        let process = self.containers.borrow().get(id).map(|container| {
            if signal == Signal::KILL.as_raw() {
                container.oom.set_killed_by_runtime();
            }
            container.process.clone()
        });
        if let Some(process) = process {
            // Already exited: ignore.
            let _ = linux::signal::send_to_pidfd(process.as_fd(), signal);
        }
    }

    /// Runs a command in a container and collects its output.
    pub(super) async fn exec_sync(
        &self,
        id: &str,
        command: &[String],
        timeout: Duration,
    ) -> Result<ExecResult, Problem> {
        let (container, mut process) = {
            let containers = self.containers.borrow();
            let container = containers
                .get(id)
                .ok_or_else(|| exec_problem("the container is not running".to_owned()))?;
            (container.serial, container.plan.clone())
        };
        process.args = command.to_vec();
        process.terminal = false;
        let request = InnerRequest::Exec {
            container,
            process: Box::new(process),
        };
        exec_sync(&self.inner, request, timeout).await
    }

    pub(super) async fn connect_from_pod(
        &self,
        address: IpAddr,
        port: u16,
    ) -> io::Result<TcpStream> {
        connect(&self.inner, SocketAddr::new(address, port)).await
    }
}

/// Connects from the pod's network.
pub(super) async fn connect(inner: &InnerClient, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = create_socket(inner, to, false).await?;
    let socket = tokio::net::TcpSocket::from_std_stream(socket.into());
    socket.connect(to).await
}

/// Creates a socket in the pod's network namespace, of the address family of `to`.
pub(super) async fn create_socket(
    inner: &InnerClient,
    to: SocketAddr,
    udp: bool,
) -> io::Result<OwnedFd> {
    let request = InnerRequest::CreateSocket {
        ipv6: to.is_ipv6(),
        udp,
    };
    let created = inner.request(request).await;
    let mut created = created.map_err(|error| io::Error::other(error.message))?;
    created
        .pop()
        .ok_or_else(|| io::Error::other("the inner process sent no socket"))
}

async fn exec_sync(
    inner: &InnerClient,
    request: InnerRequest,
    timeout: Duration,
) -> Result<ExecResult, Problem> {
    let failed = |error: io::Error| exec_problem(error.to_string());
    let pipes = StdioPipes::new(false, false).map_err(failed)?;
    let mut text = Vec::new();
    // The timeout includes the start: the working directory may be on a file server that does not respond.
    let exited = tokio::time::timeout(timeout, async {
        let started = inner.start_process(request, &pipes.theirs()).await;
        let mut process = started.map_err(|error| exec_problem(error.message))?;
        let StdioStreams { stdout, stderr, .. } = pipes.open(None, false).map_err(failed)?;
        // Also if this future is dropped: a cancelled probe leaves no process.
        let _kill = KillOnDrop(process.descriptors.drain(..).next());
        if let (Some(mut stdout), Some(mut stderr)) = (stdout, stderr) {
            let mut errors = Vec::new();
            tokio::try_join!(
                read_and_discard_rest(&mut stdout, &mut text),
                read_and_discard_rest(&mut stderr, &mut errors)
            )
            .map_err(failed)?;
            text.append(&mut errors);
        }
        let exit = (&mut process.exit).await;
        Ok::<_, Problem>(exit.unwrap_or(ProcessExit::SIGKILL).code)
    });
    let code = exited.await.ok().transpose()?;
    text.truncate(MAX_EXEC_OUTPUT as usize);
    Ok(ExecResult {
        code,
        output: String::from_utf8_lossy(&text).into_owned(),
    })
}

struct KillOnDrop(Option<OwnedFd>);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if let Some(process) = &self.0 {
            let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
        }
    }
}

/// Keeps the first [`MAX_EXEC_OUTPUT`] bytes. Reads and discards the rest, so that the command does not block.
async fn read_and_discard_rest(
    from: &mut (impl AsyncRead + Unpin),
    into: &mut Vec<u8>,
) -> io::Result<()> {
    let mut head = from.take(MAX_EXEC_OUTPUT);
    head.read_to_end(into).await?;
    tokio::io::copy(head.into_inner(), &mut tokio::io::sink()).await?;
    Ok(())
}

fn exec_problem(message: String) -> Problem {
    Problem::new("ExecError", message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::inner::message::ProcessPlan;

    /// The inner process does not reply, as if the command's working directory were on a file server that does not respond.
    #[tokio::test(start_paused = true)]
    async fn timeout_includes_start_of_command() {
        let (ours, _theirs) = linux::packet::pair().unwrap();
        let exec = async {
            let inner = InnerClient::new(ours).unwrap();
            let request = InnerRequest::Exec {
                container: 1,
                process: Box::new(ProcessPlan::default()),
            };
            exec_sync(&inner, request, Duration::from_secs(3)).await
        };
        let result = tokio::task::LocalSet::new().run_until(exec).await.unwrap();
        assert_eq!((result.code, result.output.as_str()), (None, ""));
    }
}
