//! nftables of a network namespace, over netlink: tables, chains, rules, sets and maps of family `ip`, in atomic transactions.
//!
//! Covers only the features that our rules need, as thin types over the kernel's attributes (`linux/netfilter/nf_tables.h`). The
//! tests compare the result with the output of `nft list ruleset`.

mod expression;
mod transaction;

#[cfg(test)]
mod tests;

pub use expression::{
    CmpOp, CtKey, Expression, FibResult, MetaKey, NatKind, PayloadBase, Register, RejectKind,
    Verdict,
};
pub use transaction::{
    ChainHook, ChainKind, ElementData, HookPoint, MapData, SetElement, SetField, SetFlags, SetSpec,
    Transaction,
};

use std::io;
use std::os::fd::OwnedFd;

use crate::netlink::NetlinkSocket;

/// A netlink socket for nftables. It stays bound to the network namespace in which it was opened.
pub struct NftablesSocket(NetlinkSocket);

/// `NETLINK_NETFILTER`, for `socket(2)`.
pub const PROTOCOL: u32 = libc::NETLINK_NETFILTER as u32;

impl NftablesSocket {
    /// Opens a socket in the current network namespace.
    pub fn open() -> io::Result<Self> {
        Ok(Self(NetlinkSocket::open(libc::NETLINK_NETFILTER)?))
    }

    /// Takes a netlink socket with this [`PROTOCOL`].
    pub fn from_socket(socket: OwnedFd) -> Self {
        Self(NetlinkSocket::from(socket))
    }

    /// Sets the size of the send buffer as large as an unprivileged user may, because a transaction is one message.
    pub fn enlarge_buffer(&self) -> io::Result<()> {
        self.0.set_send_buffer_size(transaction::MAX_SIZE)
    }

    /// Applies a transaction: all of it, or nothing.
    pub fn apply(&self, transaction: Transaction) -> io::Result<()> {
        match transaction.finish() {
            Some(batch) => self.0.request(&batch, 1),
            None => Ok(()),
        }
    }
}
