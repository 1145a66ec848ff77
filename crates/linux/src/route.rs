//! Network interfaces, addresses and routes of the current network namespace.
//!
//! Requests are synchronous, without an event loop: callers run in a short-lived process or on their own thread.

use std::ffi::CStr;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::netlink::{self, NetlinkMessage, NetlinkSocket};

/// From linux/if_link.h and linux/veth.h.
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
/// From linux/rtnetlink.h: the gateway is on the link, even if it is in no network of the interface.
const RTNH_F_ONLINK: u32 = 4;
/// `struct ifinfomsg`: all zero means any interface of no family.
const INTERFACE_HEADER: [u8; 16] = [0; 16];
const CREATE_EXCLUSIVE: i32 = libc::NLM_F_CREATE | libc::NLM_F_EXCL;

/// A netlink socket of the network namespace in which it was opened.
pub struct RouteSocket {
    socket: NetlinkSocket,
    /// Looks up interfaces by name (SIOCGIFINDEX) in the same namespace.
    ioctl_socket: OwnedFd,
}

/// An address of an interface, with the prefix length of its network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The address.
    pub address: IpAddr,
    /// The prefix length in bits.
    pub prefix_length: u8,
}

impl RouteSocket {
    /// Opens a socket in the current network namespace, to which it stays bound.
    pub fn open() -> io::Result<Self> {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
        Ok(Self {
            socket: NetlinkSocket::open(libc::NETLINK_ROUTE)?,
            ioctl_socket: socket_with(
                AddressFamily::INET,
                SocketType::DGRAM,
                SocketFlags::CLOEXEC,
                None,
            )?,
        })
    }

    /// Takes two sockets that were opened in one network namespace: a netlink socket of family `NETLINK_ROUTE`, and a datagram
    /// socket for ioctls.
    pub fn from_sockets(netlink: OwnedFd, ioctl_socket: OwnedFd) -> Self {
        Self {
            socket: NetlinkSocket::from(netlink),
            ioctl_socket,
        }
    }

    /// Creates a veth pair: `name` in this namespace, and `peer` in the network namespace `peer_namespace`. Both are down.
    pub fn add_veth(
        &self,
        name: &str,
        peer: &str,
        peer_namespace: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let mut message = NetlinkMessage::default();
        let request = begin(&mut message, libc::RTM_NEWLINK, CREATE_EXCLUSIVE);
        message.bytes(&INTERFACE_HEADER);
        message.text(libc::IFLA_IFNAME, name);
        let info = message.nest(libc::IFLA_LINKINFO);
        message.text(libc::IFLA_INFO_KIND, "veth");
        let data = message.nest(IFLA_INFO_DATA);
        let other = message.nest(VETH_INFO_PEER);
        message.bytes(&INTERFACE_HEADER);
        message.text(libc::IFLA_IFNAME, peer);
        message.attribute(
            libc::IFLA_NET_NS_FD,
            &peer_namespace.as_raw_fd().to_ne_bytes(),
        );
        message.end_nest(other);
        message.end_nest(data);
        message.end_nest(info);
        message.end(request);
        self.socket.request(&message, 1)
    }

    /// Removes an interface and its peer.
    pub fn remove_interface(&self, name: &str) -> io::Result<()> {
        let mut message = NetlinkMessage::default();
        let request = begin(&mut message, libc::RTM_DELLINK, 0);
        message.bytes(&interface_header(self.index(name)?, 0));
        message.end(request);
        self.socket.request(&message, 1)
    }

    /// Brings an interface up.
    pub fn set_up(&self, name: &str) -> io::Result<()> {
        let mut message = NetlinkMessage::default();
        let request = begin(&mut message, libc::RTM_NEWLINK, 0);
        message.bytes(&interface_header(self.index(name)?, libc::IFF_UP as u32));
        message.end(request);
        self.socket.request(&message, 1)
    }

    /// Sets the largest packet of an interface.
    pub fn set_mtu(&self, name: &str, mtu: u32) -> io::Result<()> {
        let mut message = NetlinkMessage::default();
        let request = begin(&mut message, libc::RTM_NEWLINK, 0);
        message.bytes(&interface_header(self.index(name)?, 0));
        message.attribute(libc::IFLA_MTU, &mtu.to_ne_bytes());
        message.end(request);
        self.socket.request(&message, 1)
    }

    /// Adds an address to an interface.
    pub fn add_address(&self, name: &str, address: InterfaceAddress) -> io::Result<()> {
        let index = self.index(name)?;
        let (family, bytes) = family_and_bytes(address.address);
        let mut message = NetlinkMessage::default();
        let request = begin(&mut message, libc::RTM_NEWADDR, CREATE_EXCLUSIVE);
        // struct ifaddrmsg. Without IFA_F_NODAD an IPv6 address is unusable for about a second.
        message.bytes(&[family, address.prefix_length, libc::IFA_F_NODAD as u8, 0]);
        message.bytes(&index.to_ne_bytes());
        message.attribute(libc::IFA_LOCAL, &bytes);
        message.attribute(libc::IFA_ADDRESS, &bytes);
        message.end(request);
        self.socket.request(&message, 1)
    }

    /// Adds a default route via `gateway`, which is reached directly through the interface, whatever its address.
    pub fn add_default_route(&self, interface: &str, gateway: IpAddr) -> io::Result<()> {
        let index = self.index(interface)?;
        let (family, bytes) = family_and_bytes(gateway);
        self.add_route(
            family,
            0,
            libc::RT_SCOPE_UNIVERSE,
            RTNH_F_ONLINK,
            |message| {
                message.attribute(libc::RTA_GATEWAY, &bytes);
                message.attribute(libc::RTA_OIF, &index.to_ne_bytes());
            },
        )
    }

    /// Adds a route to one address through an interface. Packets from this machine get the source address `source`.
    pub fn add_host_route(
        &self,
        address: IpAddr,
        interface: &str,
        source: IpAddr,
    ) -> io::Result<()> {
        let index = self.index(interface)?;
        let (family, bytes) = family_and_bytes(address);
        let length = bytes.len() as u8 * 8;
        self.add_route(family, length, libc::RT_SCOPE_LINK, 0, |message| {
            message.attribute(libc::RTA_DST, &bytes);
            message.attribute(libc::RTA_OIF, &index.to_ne_bytes());
            message.attribute(libc::RTA_PREFSRC, &family_and_bytes(source).1);
        })
    }

    fn add_route(
        &self,
        family: u8,
        destination_length: u8,
        scope: u8,
        flags: u32,
        attributes: impl FnOnce(&mut NetlinkMessage),
    ) -> io::Result<()> {
        let mut message = NetlinkMessage::default();
        let request = begin(&mut message, libc::RTM_NEWROUTE, CREATE_EXCLUSIVE);
        // struct rtmsg
        message.bytes(&[
            family,
            destination_length,
            0,
            0,
            libc::RT_TABLE_MAIN,
            libc::RTPROT_STATIC,
            scope,
            libc::RTN_UNICAST,
        ]);
        message.bytes(&flags.to_ne_bytes());
        attributes(&mut message);
        message.end(request);
        self.socket.request(&message, 1)
    }

    /// The names of all interfaces.
    pub fn interface_names(&self) -> io::Result<Vec<String>> {
        let mut message = NetlinkMessage::default();
        let flags = (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16;
        let request = message.begin(libc::RTM_GETLINK, flags, 1);
        message.bytes(&INTERFACE_HEADER);
        message.end(request);
        let mut names = Vec::new();
        self.socket.dump(&message, |body| {
            let attributes = body.get(INTERFACE_HEADER.len()..).unwrap_or_default();
            let name = netlink::attributes(attributes)
                .find(|(kind, _)| *kind == libc::IFLA_IFNAME)
                .and_then(|(_, value)| CStr::from_bytes_until_nul(value).ok());
            names.extend(name.map(|name| name.to_string_lossy().into_owned()));
        })?;
        Ok(names)
    }

    /// Whether an interface of this name exists.
    pub fn has_interface(&self, name: &str) -> bool {
        self.index(name).is_ok()
    }

    fn index(&self, name: &str) -> io::Result<u32> {
        Ok(rustix::net::netdevice::name_to_index(
            self.ioctl_socket.as_fd(),
            name,
        )?)
    }
}

fn begin(message: &mut NetlinkMessage, kind: u16, flags: i32) -> crate::netlink::Unfinished {
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

fn family_and_bytes(address: IpAddr) -> (u8, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (libc::AF_INET as u8, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6 as u8, address.octets().to_vec()),
    }
}
