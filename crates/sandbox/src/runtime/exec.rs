//! What reaches into a pod that runs: signals, commands, connections from within its network.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::process::Signal;
use tokio::net::TcpStream;

use super::inside::Inside;
use super::{LinuxRuntime, output};
use crate::inner::message::Request;
use crate::seams::{ExecResult, World};
use pod_protocol::Problem;

impl<W: World> LinuxRuntime<W> {
    pub(super) fn send_signal(&self, id: &str, signal: i32) {
        let process = self.containers.borrow().get(id).map(|running| {
            if signal == Signal::KILL.as_raw() {
                running.memory.we_kill();
            }
            running.process.clone()
        });
        if let Some(process) = process {
            // Gone already is as good.
            let _ = linux::signal::send(process.as_fd(), signal);
        }
    }

    pub(super) async fn run_command(
        &self,
        id: &str,
        command: &[String],
        timeout: Duration,
    ) -> Result<ExecResult, Problem> {
        let gone = || Problem {
            reason: "ExecError".to_owned(),
            message: "the container is not running".to_owned(),
        };
        let (container, mut process) = {
            let containers = self.containers.borrow();
            let running = containers.get(id).ok_or_else(gone)?;
            (running.serial, running.plan.clone())
        };
        process.args = command.to_vec();
        process.terminal = false;
        let request = Request::Exec {
            container,
            process: Box::new(process),
        };
        output::exec(&self.inside, request, timeout).await
    }

    pub(super) async fn connect_from_pod(
        &self,
        address: IpAddr,
        port: u16,
    ) -> std::io::Result<TcpStream> {
        connect(&self.inside, SocketAddr::new(address, port)).await
    }
}

/// Connects from within the pod's network.
pub(super) async fn connect(inside: &Inside, to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = socket(inside, to, false).await?;
    let socket = tokio::net::TcpSocket::from_std_stream(socket.into());
    socket.connect(to).await
}

/// A socket of the pod's network that can speak with `to`: a stream's, or one for datagrams.
pub(super) async fn socket(
    inside: &Inside,
    to: SocketAddr,
    datagrams: bool,
) -> std::io::Result<OwnedFd> {
    let request = Request::Socket {
        v6: to.is_ipv6(),
        datagrams,
    };
    let made = inside.ask(request).await;
    let mut made = made.map_err(|refusal| std::io::Error::other(refusal.message))?;
    made.pop()
        .ok_or_else(|| std::io::Error::other("no socket came"))
}
