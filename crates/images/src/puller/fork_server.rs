//! The process of a fork server.

use std::fs::File;
use std::io::{self, BufReader};
use std::os::fd::{AsFd, OwnedFd};

use linux::clone::{CloneResult, NewNamespaces};
use linux::packet;
use linux::signal::ChildExitFd;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, Signal, WaitOptions};

use super::{REQUEST_PULL, REQUEST_SERVER, pull_process};

/// Runs a fork server until the sandbox exits.
pub(super) fn run(sandbox: Pid, socket: OwnedFd) -> ! {
    let served = linux::process::set_parent_death_signal(Some(sandbox), Signal::KILL)
        .and_then(|()| serve(sandbox, socket));
    std::process::exit(i32::from(served.is_err()))
}

fn serve(sandbox: Pid, socket: OwnedFd) -> io::Result<()> {
    let ends = ChildExitFd::open()?;
    let server = rustix::process::getpid();
    loop {
        let mut watched = [
            PollFd::new(&socket, PollFlags::IN),
            PollFd::new(&ends, PollFlags::IN),
        ];
        match rustix::event::poll(&mut watched, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [has_request, child_exited] = watched.map(|fd| !fd.revents().is_empty());
        if child_exited {
            ends.clear();
            while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
        }
        if !has_request {
            continue;
        }
        let Some(message) = packet::receive(&socket)? else {
            return Ok(());
        };
        let forked = match (&message.text[..], message.descriptors) {
            (REQUEST_PULL, mut streams) if streams.len() == 2 => {
                match linux::clone::fork_into(NewNamespaces::default()) {
                    Ok(CloneResult::Parent(_, process)) => Ok(process),
                    Ok(CloneResult::Child) => {
                        // The sandbox detects the death of a fork server by its closed socket, so the child must not keep it open.
                        drop((socket, ends));
                        let output = streams.remove(1);
                        pull(server, streams.remove(0), output)
                    }
                    Err(error) => Err(error),
                }
            }
            // The new fork server becomes a child of the sandbox, because it must survive this one.
            (REQUEST_SERVER, mut sockets) if sockets.len() == 1 => {
                match linux::clone::fork_sibling() {
                    Ok(CloneResult::Parent(_, process)) => Ok(process),
                    Ok(CloneResult::Child) => {
                        drop((socket, ends));
                        run(sandbox, sockets.remove(0))
                    }
                    Err(error) => Err(error),
                }
            }
            _ => Err(io::Error::other(
                "unknown request, or one without its descriptors",
            )),
        };
        match forked {
            Ok(process) => packet::send(&socket, 0, &[], &[process.as_fd()])?,
            Err(error) => packet::send(&socket, 0, error.to_string().as_bytes(), &[])?,
        }
    }
}

/// Pulls one image and exits.
fn pull(server: Pid, input: OwnedFd, output: OwnedFd) -> ! {
    let pull = || -> io::Result<()> {
        linux::process::set_parent_death_signal(Some(server), Signal::KILL)?;
        linux::signal::unblock_all()?;
        let input = BufReader::new(File::from(input));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let pulled = runtime.block_on(pull_process::run(input, File::from(output)));
        runtime.shutdown_background();
        pulled
    };
    if let Err(error) = pull() {
        tracing::warn!(%error, "cannot pull an image");
    }
    std::process::exit(0)
}
