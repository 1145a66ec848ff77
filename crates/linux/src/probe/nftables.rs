//! Probe for nftables, with which Services are implemented: one batch with a table and a NAT chain.

use rustix::thread::UnshareFlags;

use super::{ProbeReport, failed, userns};
use crate::netlink::{NetlinkMessage, NetlinkSocket};

/// From linux/netfilter/nfnetlink.h and nf_tables.h.
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
const SUBSYSTEM: u16 = 10;
const NEW_TABLE: u16 = SUBSYSTEM << 8;
const NEW_CHAIN: u16 = SUBSYSTEM << 8 | 3;
const TABLE_NAME: u16 = 1;
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_TYPE: u16 = 7;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
/// `struct nfgenmsg`: family IPv4.
const IPV4: [u8; 4] = [libc::AF_INET as u8, 0, 0, 0];

/// Creates both in a new network namespace.
pub(super) fn table_and_nat_chain(_: Option<&str>) -> ProbeReport {
    userns::enter(UnshareFlags::NEWNET)?;
    let socket = NetlinkSocket::open(libc::NETLINK_NETFILTER).map_err(failed("netlink socket"))?;
    socket.request(&batch(), 2).map_err(failed("nftables"))?;
    Ok("made a table with a nat chain".to_owned())
}

fn batch() -> NetlinkMessage {
    let mut message = NetlinkMessage::default();
    let frame = |message: &mut NetlinkMessage, kind, sequence| {
        let open = message.begin(kind, libc::NLM_F_REQUEST as u16, sequence);
        // In a batch message the last two bytes are the subsystem, in network byte order.
        message.bytes(&[0, 0]);
        message.bytes(&SUBSYSTEM.to_be_bytes());
        message.end(open);
    };
    let create = (libc::NLM_F_REQUEST | libc::NLM_F_ACK | libc::NLM_F_CREATE) as u16;

    frame(&mut message, BATCH_BEGIN, 1);
    let table = message.begin(NEW_TABLE, create, 2);
    message.bytes(&IPV4);
    message.text(TABLE_NAME, "probe");
    message.end(table);

    let chain = message.begin(NEW_CHAIN, create, 3);
    message.bytes(&IPV4);
    message.text(CHAIN_TABLE, "probe");
    message.text(CHAIN_NAME, "services");
    let hook = message.nest(CHAIN_HOOK | libc::NLA_F_NESTED as u16);
    message.attribute(HOOK_NUMBER, &0u32.to_be_bytes());
    message.attribute(HOOK_PRIORITY, &(-100i32).to_be_bytes());
    message.end_nest(hook);
    message.text(CHAIN_TYPE, "nat");
    message.end(chain);
    frame(&mut message, BATCH_END, 4);
    message
}
