//! Ports that are ours before anybody listens on them.
//!
//! A port that is looked up as free and used a moment later may be taken in between. Here a socket
//! stays bound to it with SO_REUSEPORT, which the kernel shares only with processes of the same user
//! that ask for it too: `kube-apiserver --permit-port-sharing` does. A bound socket that doesn't listen
//! receives no connections, so the API server gets them all, also after a restart.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

/// A port of this host, reserved for as long as this lives.
#[derive(Debug)]
pub struct ReservedPort {
    port: u16,
    _socket: OwnedFd,
}

impl ReservedPort {
    /// Reserves `port`, or any free one for 0.
    pub fn new(port: u16) -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::INET,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        if port != 0 {
            // Without SO_REUSEPORT first: a port that another program of this very user shares
            // would look free otherwise.
            bind(&socket_without_sharing()?, port)?;
        }
        sockopt::set_socket_reuseport(&socket, true)?;
        bind(&socket, port)?;
        let bound = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
        Ok(Self {
            port: bound.port(),
            _socket: socket,
        })
    }

    /// The port's number.
    pub fn number(&self) -> u16 {
        self.port
    }
}

/// A TCP port that nobody uses now, out of `range`, tried in an order that differs from call to call.
///
/// It is not reserved: for ports that Kubernetes itself hands out later.
pub fn free_in(range: std::ops::RangeInclusive<u16>) -> io::Result<u16> {
    let mut seed = [0; 2];
    rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())?;
    let (first, size) = (*range.start(), range.end() - range.start() + 1);
    let offset = u16::from_ne_bytes(seed) % size;
    (0..size)
        .map(|i| first + (offset + i) % size)
        .find(|port| {
            socket_without_sharing()
                .and_then(|socket| bind(&socket, *port))
                .is_ok()
        })
        .ok_or_else(|| io::Error::new(io::ErrorKind::AddrInUse, "every port is taken"))
}

fn socket_without_sharing() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        flags,
        None,
    )?)
}

fn bind(socket: &OwnedFd, port: u16) -> io::Result<()> {
    rustix::net::bind(socket, &SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_reserved_port_is_nobody_elses() {
        let reserved = ReservedPort::new(0).unwrap();
        assert!(TcpListener::bind(("0.0.0.0", reserved.number())).is_err());
        assert!(ReservedPort::new(reserved.number()).is_err());
    }

    #[test]
    fn a_taken_port_is_refused() {
        let other = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let error = ReservedPort::new(port).expect_err("must be refused");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn a_free_port_lies_in_its_range() {
        let port = free_in(30000..=32767).unwrap();
        assert!((30000..=32767).contains(&port));
    }
}
