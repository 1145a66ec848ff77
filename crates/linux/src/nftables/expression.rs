//! Expressions: the instructions of a rule. They work on registers and end in a verdict.

use std::net::Ipv4Addr;

use crate::netlink::NetlinkMessage;

/// Attributes of `enum nft_list_attributes`, `nft_expr_attributes`, `nft_data_attributes` and `nft_verdict_attributes`.
const LIST_ELEM: u16 = 1;
const EXPR_NAME: u16 = 1;
const EXPR_DATA: u16 = 2;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const VERDICT_CHAIN: u16 = 2;
/// NFPROTO_IPV4.
pub(super) const FAMILY_IPV4: u8 = 2;

/// One of the sixteen registers of 32 bits. Values that are longer continue in the next registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register(u8);

impl Register {
    /// The first register.
    pub const FIRST: Self = Self(0);

    /// The register with this index, from 0 to 15.
    pub const fn at(index: u8) -> Self {
        assert!(index < 16, "there are 16 registers");
        Self(index)
    }

    /// NFT_REG32_00 is 8.
    fn number(self) -> u32 {
        8 + u32::from(self.0)
    }
}

/// What happens to a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Accept it in this hook.
    Accept,
    /// Drop it.
    Drop,
    /// Continue in a chain, and after its end behind the rule.
    Jump(String),
    /// Continue in a chain, and after its end behind the rule that jumped here.
    Goto(String),
    /// Continue behind the rule that jumped here.
    Return,
}

/// The header that a payload expression reads from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadBase {
    /// The IP header.
    Network = 1,
    /// The TCP, UDP or SCTP header.
    Transport = 2,
}

/// A property of the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetaKey {
    /// The packet mark.
    Mark = 3,
    /// The name of the input interface, 16 bytes.
    InputInterfaceName = 6,
    /// The name of the output interface, 16 bytes.
    OutputInterfaceName = 7,
    /// The transport protocol, one byte.
    TransportProtocol = 16,
}

/// A property of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CtKey {
    /// The state: a bit mask.
    State = 0,
    /// The status: a bit mask.
    Status = 2,
    /// The connection mark.
    Mark = 3,
}

/// A comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmpOp {
    /// Equal.
    Eq = 0,
    /// Not equal.
    Neq = 1,
}

/// Which address a NAT expression changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NatKind {
    /// The source.
    Source = 0,
    /// The destination.
    Destination = 1,
}

/// How a packet is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectKind {
    /// With an ICMP error "port unreachable".
    PortUnreachable,
    /// With an ICMP error "administratively prohibited".
    AdminProhibited,
    /// With a TCP reset.
    TcpReset,
}

/// The result of a route lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FibResult {
    /// The type of the destination address, such as RTN_LOCAL.
    DestinationType,
}

/// An instruction of a rule. A comparison or lookup that fails ends the rule without a verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expression {
    /// Loads bytes of a header.
    Payload {
        /// The header.
        base: PayloadBase,
        /// The first byte.
        offset: u32,
        /// How many bytes.
        length: u32,
        /// Where to.
        to: Register,
    },
    /// Loads a property of the packet.
    Meta {
        /// The property.
        key: MetaKey,
        /// Where to.
        to: Register,
    },
    /// Sets the packet mark from a register.
    SetMark {
        /// Where from.
        from: Register,
    },
    /// Loads a property of the connection.
    Ct {
        /// The property.
        key: CtKey,
        /// Where to.
        to: Register,
    },
    /// Compares a register with constant bytes.
    Cmp {
        /// The register.
        from: Register,
        /// The comparison.
        op: CmpOp,
        /// The bytes.
        value: Vec<u8>,
    },
    /// Masks a register: `to = from & mask`.
    Mask {
        /// The register.
        from: Register,
        /// Where to.
        to: Register,
        /// The mask.
        mask: Vec<u8>,
    },
    /// Looks a key up in a set; with `inverted`, succeeds if it is not in the set.
    Lookup {
        /// The set.
        set: String,
        /// The register of the key.
        key: Register,
        /// Succeeds if the key is missing.
        inverted: bool,
    },
    /// Looks a key up in a map and loads its data.
    MapLookup {
        /// The map.
        map: String,
        /// The register of the key.
        key: Register,
        /// Where to.
        to: Register,
    },
    /// Looks a key up in a verdict map and executes the verdict.
    VerdictLookup {
        /// The map.
        map: String,
        /// The register of the key.
        key: Register,
    },
    /// Loads constant bytes.
    Immediate {
        /// Where to.
        to: Register,
        /// The bytes.
        value: Vec<u8>,
    },
    /// A verdict.
    Verdict(Verdict),
    /// Loads a random number below `modulus`, in host byte order.
    Random {
        /// Exclusive upper bound.
        modulus: u32,
        /// Where to.
        to: Register,
    },
    /// Changes an address and a port of the connection, both from registers.
    Nat {
        /// Source or destination.
        kind: NatKind,
        /// The register of the address.
        address: Register,
        /// The register of the port, if it changes too.
        port: Option<Register>,
    },
    /// Changes the source address to that of the output interface.
    Masquerade,
    /// Changes the destination to this host and the port in a register.
    Redirect {
        /// The register of the port.
        port: Register,
    },
    /// Adds or refreshes a map element with a time-out: key and data from registers.
    UpdateMap {
        /// The map.
        map: String,
        /// The register of the key.
        key: Register,
        /// The register of the data.
        data: Register,
        /// The time-out in milliseconds.
        timeout_ms: u64,
    },
    /// Rejects the packet.
    Reject(RejectKind),
    /// Does not track the connection of the packet.
    NoTrack,
    /// Looks a route up.
    Fib {
        /// What to load.
        result: FibResult,
        /// Where to.
        to: Register,
    },
    /// Loads 1 if a socket with IP_TRANSPARENT is the packet's destination; ends the rule if no socket is.
    TransparentSocket {
        /// Where to.
        to: Register,
    },
    /// Counts packets and bytes.
    Counter,
}

impl Expression {
    /// Loads the source address.
    pub fn source_address(to: Register) -> Self {
        Self::network(12, 4, to)
    }

    /// Loads the destination address.
    pub fn destination_address(to: Register) -> Self {
        Self::network(16, 4, to)
    }

    /// Loads the destination port of TCP, UDP or SCTP.
    pub fn destination_port(to: Register) -> Self {
        Self::transport(2, 2, to)
    }

    /// Loads the transport protocol.
    pub fn transport_protocol(to: Register) -> Self {
        let key = MetaKey::TransportProtocol;
        Self::Meta { key, to }
    }

    /// Loads bytes of the IP header.
    pub fn network(offset: u32, length: u32, to: Register) -> Self {
        let base = PayloadBase::Network;
        Self::Payload {
            base,
            offset,
            length,
            to,
        }
    }

    /// Loads bytes of the transport header.
    pub fn transport(offset: u32, length: u32, to: Register) -> Self {
        let base = PayloadBase::Transport;
        Self::Payload {
            base,
            offset,
            length,
            to,
        }
    }

    /// Compares for equality.
    pub fn equals(from: Register, value: impl Into<Vec<u8>>) -> Self {
        Self::Cmp {
            from,
            op: CmpOp::Eq,
            value: value.into(),
        }
    }

    /// Compares for inequality.
    pub fn differs(from: Register, value: impl Into<Vec<u8>>) -> Self {
        Self::Cmp {
            from,
            op: CmpOp::Neq,
            value: value.into(),
        }
    }

    /// Requires that an address in a register is in a network.
    pub fn in_network(from: Register, network: Ipv4Addr, prefix_length: u8) -> Vec<Self> {
        let mask = u32::MAX
            .checked_shl(32 - u32::from(prefix_length))
            .unwrap_or(0);
        let network = u32::from(network) & mask;
        vec![
            Self::Mask {
                from,
                to: from,
                mask: mask.to_be_bytes().to_vec(),
            },
            Self::equals(from, network.to_be_bytes()),
        ]
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Payload { .. } => "payload",
            Self::Meta { .. } | Self::SetMark { .. } => "meta",
            Self::Ct { .. } => "ct",
            Self::Cmp { .. } => "cmp",
            Self::Mask { .. } => "bitwise",
            Self::Lookup { .. } | Self::MapLookup { .. } | Self::VerdictLookup { .. } => "lookup",
            Self::Immediate { .. } | Self::Verdict(_) => "immediate",
            Self::Random { .. } => "numgen",
            Self::Nat { .. } => "nat",
            Self::Masquerade => "masq",
            Self::Redirect { .. } => "redir",
            Self::UpdateMap { .. } => "dynset",
            Self::Reject(_) => "reject",
            Self::NoTrack => "notrack",
            Self::Fib { .. } => "fib",
            Self::TransparentSocket { .. } => "socket",
            Self::Counter => "counter",
        }
    }

    /// Appends this as an element of a list of expressions.
    pub(super) fn encode(&self, message: &mut NetlinkMessage) {
        let element = message.nest(LIST_ELEM);
        message.text(EXPR_NAME, self.name());
        let data = message.nest(EXPR_DATA);
        self.encode_attributes(message);
        message.end_nest(data);
        message.end_nest(element);
    }

    /// The attributes are those of `enum nft_payload_attributes` and so on, in the order of `nf_tables.h`.
    fn encode_attributes(&self, message: &mut NetlinkMessage) {
        match self {
            Self::Payload {
                base,
                offset,
                length,
                to,
            } => {
                number(message, 1, to.number());
                number(message, 2, *base as u32);
                number(message, 3, *offset);
                number(message, 4, *length);
            }
            Self::Meta { key, to } => {
                number(message, 1, to.number());
                number(message, 2, *key as u32);
            }
            Self::SetMark { from } => {
                number(message, 2, MetaKey::Mark as u32);
                number(message, 3, from.number());
            }
            Self::Ct { key, to } => {
                number(message, 1, to.number());
                number(message, 2, *key as u32);
            }
            Self::Cmp { from, op, value } => {
                number(message, 1, from.number());
                number(message, 2, *op as u32);
                data_value(message, 3, value);
            }
            Self::Mask { from, to, mask } => {
                number(message, 1, from.number());
                number(message, 2, to.number());
                number(message, 3, mask.len() as u32);
                data_value(message, 4, mask);
                data_value(message, 5, &vec![0; mask.len()]);
            }
            Self::Lookup { set, key, inverted } => {
                message.text(1, set);
                number(message, 2, key.number());
                number(message, 5, u32::from(*inverted));
            }
            Self::MapLookup { map, key, to } => {
                message.text(1, map);
                number(message, 2, key.number());
                number(message, 3, to.number());
            }
            Self::VerdictLookup { map, key } => {
                message.text(1, map);
                number(message, 2, key.number());
                number(message, 3, VERDICT_REGISTER);
            }
            Self::Immediate { to, value } => {
                number(message, 1, to.number());
                data_value(message, 2, value);
            }
            Self::Verdict(verdict) => {
                number(message, 1, VERDICT_REGISTER);
                let data = message.nest(2);
                verdict.encode(message);
                message.end_nest(data);
            }
            Self::Random { modulus, to } => {
                number(message, 1, to.number());
                number(message, 2, *modulus);
                number(message, 3, NUMGEN_RANDOM);
                number(message, 4, 0);
            }
            Self::Nat {
                kind,
                address,
                port,
            } => {
                number(message, 1, *kind as u32);
                number(message, 2, FAMILY_IPV4.into());
                number(message, 3, address.number());
                if let Some(port) = port {
                    number(message, 5, port.number());
                }
            }
            Self::Redirect { port } => number(message, 1, port.number()),
            Self::UpdateMap {
                map,
                key,
                data,
                timeout_ms,
            } => {
                message.text(1, map);
                number(message, 3, DYNSET_UPDATE);
                number(message, 4, key.number());
                number(message, 5, data.number());
                message.attribute(6, &timeout_ms.to_be_bytes());
            }
            Self::Reject(kind) => {
                let (kind, code) = match kind {
                    RejectKind::PortUnreachable => (0, 3),
                    RejectKind::AdminProhibited => (0, 13),
                    RejectKind::TcpReset => (1, 0),
                };
                number(message, 1, kind);
                message.attribute(2, &[code]);
            }
            Self::Fib { result, to } => {
                let FibResult::DestinationType = result;
                number(message, 1, to.number());
                number(message, 2, FIB_ADDRESS_TYPE);
                number(message, 3, FIB_DESTINATION);
            }
            Self::TransparentSocket { to } => {
                number(message, 1, SOCKET_TRANSPARENT);
                number(message, 2, to.number());
            }
            Self::Masquerade | Self::NoTrack | Self::Counter => {}
        }
    }
}

const VERDICT_REGISTER: u32 = 0;
const NUMGEN_RANDOM: u32 = 1;
const DYNSET_UPDATE: u32 = 1;
const FIB_ADDRESS_TYPE: u32 = 3;
const FIB_DESTINATION: u32 = 2;
const SOCKET_TRANSPARENT: u32 = 0;

impl Verdict {
    /// Appends the verdict as the content of an attribute of data.
    pub(super) fn encode(&self, message: &mut NetlinkMessage) {
        let (code, chain) = match self {
            Self::Drop => (0, None),
            Self::Accept => (1, None),
            Self::Jump(chain) => (-3, Some(chain)),
            Self::Goto(chain) => (-4, Some(chain)),
            Self::Return => (-5, None),
        };
        let verdict = message.nest(DATA_VERDICT);
        message.attribute(VERDICT_CODE, &i32::to_be_bytes(code));
        if let Some(chain) = chain {
            message.text(VERDICT_CHAIN, chain);
        }
        message.end_nest(verdict);
    }
}

/// Appends a number. nftables uses network byte order for attributes.
pub(super) fn number(message: &mut NetlinkMessage, attribute: u16, value: u32) {
    message.attribute(attribute, &value.to_be_bytes());
}

/// Appends data that is plain bytes.
pub(super) fn data_value(message: &mut NetlinkMessage, attribute: u16, value: &[u8]) {
    let data = message.nest(attribute);
    message.attribute(DATA_VALUE, value);
    message.end_nest(data);
}
