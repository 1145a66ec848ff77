//! Network interfaces, addresses and routes of the current network namespace.
//!
//! Requests are synchronous, without an event loop: callers run in a short-lived process or on their own thread.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::netlink::{Message, Socket};

/// From linux/if_link.h and linux/veth.h.
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
/// The size of `struct ifinfomsg`; all zero means any interface of no family.
const INTERFACE_HEADER: [u8; 16] = [0; 16];
const NEW: i32 = libc::NLM_F_CREATE | libc::NLM_F_EXCL;

/// A netlink socket of the network namespace in which it was opened.
pub struct Route {
    socket: Socket,
    /// An ordinary socket of the same namespace, to look up interfaces by name.
    names: std::os::fd::OwnedFd,
}

/// An address with its prefix length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefixed {
    /// The address.
    pub address: IpAddr,
    /// The prefix length in bits.
    pub length: u8,
}

impl Route {
    /// Opens a socket in the current network namespace, to which it stays bound.
    pub fn open() -> io::Result<Self> {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
        Ok(Self {
            socket: Socket::open(libc::NETLINK_ROUTE)?,
            names: socket_with(
                AddressFamily::INET,
                SocketType::DGRAM,
                SocketFlags::CLOEXEC,
                None,
            )?,
        })
    }

    /// Creates a bridge.
    pub fn add_bridge(&self, name: &str) -> io::Result<()> {
        let mut message = Message::default();
        let request = begin(&mut message, libc::RTM_NEWLINK, NEW);
        message.bytes(&INTERFACE_HEADER);
        message.text(libc::IFLA_IFNAME, name);
        let info = message.nest(libc::IFLA_LINKINFO);
        message.text(libc::IFLA_INFO_KIND, "bridge");
        message.end_nest(info);
        message.end(request);
        self.socket.ask(&message, 1)
    }

    /// Creates a veth pair: `name` in this namespace as a port of the bridge `master`, and `peer` in the network namespace
    /// `there`. Both are down.
    pub fn add_veth(
        &self,
        name: &str,
        master: &str,
        peer: &str,
        there: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let master = self.index(master)?;
        let mut message = Message::default();
        let request = begin(&mut message, libc::RTM_NEWLINK, NEW);
        message.bytes(&INTERFACE_HEADER);
        message.text(libc::IFLA_IFNAME, name);
        message.attribute(libc::IFLA_MASTER, &master.to_ne_bytes());
        let info = message.nest(libc::IFLA_LINKINFO);
        message.text(libc::IFLA_INFO_KIND, "veth");
        let data = message.nest(IFLA_INFO_DATA);
        let other = message.nest(VETH_INFO_PEER);
        message.bytes(&INTERFACE_HEADER);
        message.text(libc::IFLA_IFNAME, peer);
        message.attribute(libc::IFLA_NET_NS_FD, &there.as_raw_fd().to_ne_bytes());
        message.end_nest(other);
        message.end_nest(data);
        message.end_nest(info);
        message.end(request);
        self.socket.ask(&message, 1)
    }

    /// Removes an interface and its peer.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let mut message = Message::default();
        let request = begin(&mut message, libc::RTM_DELLINK, 0);
        message.bytes(&interface_header(self.index(name)?, 0));
        message.end(request);
        self.socket.ask(&message, 1)
    }

    /// Brings an interface up.
    pub fn set_up(&self, name: &str) -> io::Result<()> {
        let mut message = Message::default();
        let request = begin(&mut message, libc::RTM_NEWLINK, 0);
        message.bytes(&interface_header(self.index(name)?, libc::IFF_UP as u32));
        message.end(request);
        self.socket.ask(&message, 1)
    }

    /// Adds an address to an interface.
    pub fn add_address(&self, name: &str, address: Prefixed) -> io::Result<()> {
        let index = self.index(name)?;
        let (family, bytes) = wire(address.address);
        let mut message = Message::default();
        let request = begin(&mut message, libc::RTM_NEWADDR, NEW);
        // struct ifaddrmsg. Without IFA_F_NODAD an IPv6 address is unusable for about a second.
        message.bytes(&[family, address.length, libc::IFA_F_NODAD as u8, 0]);
        message.bytes(&index.to_ne_bytes());
        message.attribute(libc::IFA_LOCAL, &bytes);
        message.attribute(libc::IFA_ADDRESS, &bytes);
        message.end(request);
        self.socket.ask(&message, 1)
    }

    /// Adds a default route via `gateway`.
    pub fn add_default_route(&self, gateway: IpAddr) -> io::Result<()> {
        let (family, bytes) = wire(gateway);
        let mut message = Message::default();
        let request = begin(&mut message, libc::RTM_NEWROUTE, NEW);
        // struct rtmsg
        message.bytes(&[
            family,
            0,
            0,
            0,
            libc::RT_TABLE_MAIN,
            libc::RTPROT_STATIC,
            libc::RT_SCOPE_UNIVERSE,
            libc::RTN_UNICAST,
        ]);
        message.bytes(&0u32.to_ne_bytes());
        message.attribute(libc::RTA_GATEWAY, &bytes);
        message.end(request);
        self.socket.ask(&message, 1)
    }

    /// Whether an interface of this name exists.
    pub fn has(&self, name: &str) -> bool {
        self.index(name).is_ok()
    }

    fn index(&self, name: &str) -> io::Result<u32> {
        Ok(rustix::net::netdevice::name_to_index(
            self.names.as_fd(),
            name,
        )?)
    }
}

fn begin(message: &mut Message, kind: u16, flags: i32) -> crate::netlink::Open {
    message.begin(
        kind,
        (libc::NLM_F_REQUEST | libc::NLM_F_ACK | flags) as u16,
        1,
    )
}

/// struct ifinfomsg for one interface, with flags to set.
fn interface_header(index: u32, flags: u32) -> [u8; 16] {
    let mut header = INTERFACE_HEADER;
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..16].copy_from_slice(&flags.to_ne_bytes());
    header
}

fn wire(address: IpAddr) -> (u8, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (libc::AF_INET as u8, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6 as u8, address.octets().to_vec()),
    }
}
