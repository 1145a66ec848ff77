//! Reserves ports before a component listens on them.
//!
//! A port that is found free and used later may be taken in between. So a socket stays bound to it with SO_REUSEPORT.
//! The kernel shares such a port only with sockets of the same user that set that option too, as `kube-apiserver
//! --permit-port-sharing` does. A bound socket that does not listen receives no connections, so the API server gets them
//! all, also after a restart.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

/// A TCP port of this host, reserved until this is dropped.
#[derive(Debug)]
pub struct ReservedPort {
    port: u16,
    _socket: OwnedFd,
}

impl ReservedPort {
    /// Reserves `port`, or any free port if it is 0.
    pub fn new(port: u16) -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::INET,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        if port != 0 {
            // First without SO_REUSEPORT: otherwise a port that another program of the same user shares would look
            // free.
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

/// A free TCP port in `range`, searched from a random start.
///
/// It is not reserved: for ports that Kubernetes itself allocates later.
pub fn find_free_port(range: std::ops::RangeInclusive<u16>) -> io::Result<u16> {
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
        .ok_or_else(|| io::Error::new(io::ErrorKind::AddrInUse, "no free port in the range"))
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
    fn reserved_port_cannot_be_bound() {
        let reserved = ReservedPort::new(0).unwrap();
        assert!(TcpListener::bind(("0.0.0.0", reserved.number())).is_err());
        assert!(ReservedPort::new(reserved.number()).is_err());
    }

    #[test]
    fn port_in_use_is_rejected() {
        let other = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let error = ReservedPort::new(port).expect_err("must be rejected");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn free_port_is_in_range() {
        let port = find_free_port(30000..=32767).unwrap();
        assert!((30000..=32767).contains(&port));
    }
}
