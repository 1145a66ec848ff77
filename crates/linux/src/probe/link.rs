//! Probe for the links of a pod network: a bridge and a veth pair.

use rustix::thread::UnshareFlags;

use super::{ProbeReport, failed, userns};
use crate::netlink::{NetlinkMessage, NetlinkSocket};

/// From linux/if_link.h and linux/veth.h.
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
/// `struct ifinfomsg`: all zero means a new interface of no family.
const INTERFACE_HEADER: [u8; 16] = [0; 16];

/// Creates both in a new network namespace.
pub(super) fn bridge_and_veth(_: Option<&str>) -> ProbeReport {
    userns::enter(UnshareFlags::NEWNET)?;
    let socket = NetlinkSocket::open(libc::NETLINK_ROUTE).map_err(failed("netlink socket"))?;
    socket
        .request(&new_link("probe0", "bridge", None), 1)
        .map_err(failed("bridge"))?;
    socket
        .request(&new_link("probe1", "veth", Some("probe2")), 1)
        .map_err(failed("veth"))?;
    Ok("made a bridge and a veth pair".to_owned())
}

fn new_link(name: &str, kind: &str, peer: Option<&str>) -> NetlinkMessage {
    let mut message = NetlinkMessage::default();
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK | libc::NLM_F_CREATE | libc::NLM_F_EXCL;
    let request = message.begin(libc::RTM_NEWLINK, flags as u16, 1);
    message.bytes(&INTERFACE_HEADER);
    message.text(libc::IFLA_IFNAME, name);
    let info = message.nest(libc::IFLA_LINKINFO);
    message.text(libc::IFLA_INFO_KIND, kind);
    if let Some(peer) = peer {
        let data = message.nest(IFLA_INFO_DATA);
        let other = message.nest(VETH_INFO_PEER);
        message.bytes(&INTERFACE_HEADER);
        message.text(libc::IFLA_IFNAME, peer);
        message.end_nest(other);
        message.end_nest(data);
    }
    message.end_nest(info);
    message.end(request);
    message
}
