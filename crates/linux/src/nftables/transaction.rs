//! Transactions: changes of tables, chains, rules, sets and maps that the kernel applies all at once.

use crate::netlink::{NetlinkMessage, Unfinished};

use super::expression::{Expression, FAMILY_IPV4, Verdict, data_value, number};

/// A transaction is one netlink message, which must fit in the send buffer. An unprivileged user may enlarge it to twice
/// `net.core.wmem_max`, of which the kernel's default is 208 KiB.
pub(super) const MAX_SIZE: usize = 400 << 10;
/// The length of an attribute has 16 bits, so lists of elements are split.
const MAX_LIST_SIZE: usize = 60 << 10;

/// Message types of `enum nf_tables_msg_types`.
const NEW_TABLE: u16 = 0;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const DELETE_CHAIN: u16 = 5;
const NEW_RULE: u16 = 6;
const DELETE_RULE: u16 = 8;
const NEW_SET: u16 = 9;
const DELETE_SET: u16 = 11;
const NEW_ELEMENTS: u16 = 12;
const DELETE_ELEMENTS: u16 = 14;
const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const LIST_ELEM: u16 = 1;

/// The kind of a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainKind {
    /// Sees all packets.
    Filter,
    /// Sees the first packet of a connection, and translates its addresses.
    Nat,
}

/// Where a base chain is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookPoint {
    /// Packets that arrive, before they are routed.
    Prerouting = 0,
    /// Packets for this host.
    Input = 1,
    /// Packets that are routed on.
    Forward = 2,
    /// Packets from this host.
    Output = 3,
    /// Packets that leave, after they are routed.
    Postrouting = 4,
}

/// The hook of a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainHook {
    /// Its kind.
    pub kind: ChainKind,
    /// Where it is called.
    pub point: HookPoint,
    /// The order among the chains of the hook, lowest first.
    pub priority: i32,
}

/// A part of a key or of data. Parts of concatenations are aligned to four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetField {
    /// An IPv4 address.
    Address,
    /// A port, in network byte order.
    Port,
    /// A transport protocol.
    Protocol,
    /// A number in host byte order.
    Index,
    /// A packet mark in host byte order.
    Mark,
    /// The name of an interface.
    Interface,
}

impl SetField {
    fn length(self) -> u32 {
        match self {
            Self::Protocol => 1,
            Self::Port => 2,
            Self::Address | Self::Index | Self::Mark => 4,
            Self::Interface => 16,
        }
    }

    /// The type number of `nft`, with which it can show the set. The kernel ignores it.
    fn type_number(self) -> u32 {
        match self {
            Self::Address => 7,
            Self::Protocol => 12,
            Self::Port => 13,
            // `nft` has no type for plain numbers of four bytes.
            Self::Mark | Self::Index => 19,
            Self::Interface => 41,
        }
    }
}

/// The data of a map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapData {
    /// Values.
    Fields(Vec<SetField>),
    /// Verdicts.
    Verdicts,
}

/// Properties of a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetFlags {
    /// Its elements are the boundaries of intervals.
    pub intervals: bool,
    /// Its elements may have time-outs, and rules may add some.
    pub dynamic: bool,
}

/// A set, or a map if it has data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetSpec {
    /// Its name.
    pub name: String,
    /// The parts of its keys.
    pub key: Vec<SetField>,
    /// The data, if it is a map.
    pub data: Option<MapData>,
    /// Its properties.
    pub flags: SetFlags,
}

/// The data of an element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElementData {
    /// Bytes.
    Value(Vec<u8>),
    /// A verdict.
    Verdict(Verdict),
}

/// An element of a set or map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetElement {
    /// The key.
    pub key: Vec<u8>,
    /// The data, if it is an element of a map.
    pub data: Option<ElementData>,
    /// In a set of intervals: the key is the first that is not in the interval before it.
    pub is_end: bool,
}

impl SetElement {
    /// An element of a set.
    pub fn key(key: impl Into<Vec<u8>>) -> Self {
        Self {
            key: key.into(),
            data: None,
            is_end: false,
        }
    }

    /// The end of an interval.
    pub fn end(key: impl Into<Vec<u8>>) -> Self {
        Self {
            is_end: true,
            ..Self::key(key)
        }
    }

    /// An element of a map.
    pub fn with_value(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Self {
        Self {
            data: Some(ElementData::Value(value.into())),
            ..Self::key(key)
        }
    }

    /// An element of a verdict map.
    pub fn with_verdict(key: impl Into<Vec<u8>>, verdict: Verdict) -> Self {
        Self {
            data: Some(ElementData::Verdict(verdict)),
            ..Self::key(key)
        }
    }
}

/// Changes of one table of family `ip`.
pub struct Transaction {
    table: String,
    batch: NetlinkMessage,
    /// The begin of the last request, which asks for an acknowledgement.
    last: Option<usize>,
}

impl Transaction {
    /// An empty transaction.
    pub fn new(table: &str) -> Self {
        let mut batch = NetlinkMessage::default();
        boundary(&mut batch, BATCH_BEGIN);
        Self {
            table: table.to_owned(),
            batch,
            last: None,
        }
    }

    /// Its size in bytes. It must stay below [`Transaction::MAX_SIZE`].
    pub fn size(&self) -> usize {
        self.batch.len()
    }

    /// The maximum size of a transaction.
    pub const MAX_SIZE: usize = MAX_SIZE;

    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.last.is_none()
    }

    /// Creates the table, if it does not exist.
    pub fn add_table(&mut self) {
        let table = self.table.clone();
        self.request(NEW_TABLE, libc::NLM_F_CREATE, |message| {
            message.text(1, &table)
        });
    }

    /// Deletes the table and everything in it. It must exist.
    pub fn delete_table(&mut self) {
        let table = self.table.clone();
        self.request(DELETE_TABLE, 0, |message| message.text(1, &table));
    }

    /// Creates a chain, if it does not exist.
    pub fn add_chain(&mut self, name: &str, hook: Option<ChainHook>) {
        let table = self.table.clone();
        self.request(NEW_CHAIN, libc::NLM_F_CREATE, |message| {
            message.text(1, &table);
            message.text(3, name);
            let Some(hook) = hook else { return };
            let nest = message.nest(4);
            number(message, 1, hook.point as u32);
            number(message, 2, hook.priority.cast_unsigned());
            message.end_nest(nest);
            let kind = match hook.kind {
                ChainKind::Filter => "filter",
                ChainKind::Nat => "nat",
            };
            message.text(7, kind);
        });
    }

    /// Deletes an empty chain that nothing refers to.
    pub fn delete_chain(&mut self, name: &str) {
        let table = self.table.clone();
        self.request(DELETE_CHAIN, 0, |message| {
            message.text(1, &table);
            message.text(3, name);
        });
    }

    /// Deletes all rules of a chain.
    pub fn flush_chain(&mut self, name: &str) {
        let table = self.table.clone();
        self.request(DELETE_RULE, 0, |message| {
            message.text(1, &table);
            message.text(2, name);
        });
    }

    /// Appends a rule to a chain.
    pub fn add_rule(&mut self, chain: &str, expressions: &[Expression]) {
        let table = self.table.clone();
        self.request(
            NEW_RULE,
            libc::NLM_F_CREATE | libc::NLM_F_APPEND,
            |message| {
                message.text(1, &table);
                message.text(2, chain);
                let list = message.nest(4);
                for expression in expressions {
                    expression.encode(message);
                }
                message.end_nest(list);
            },
        );
    }

    /// Creates a set or map, if it does not exist.
    pub fn add_set(&mut self, set: &SetSpec) {
        let table = self.table.clone();
        self.request(NEW_SET, libc::NLM_F_CREATE, |message| {
            message.text(1, &table);
            message.text(2, &set.name);
            number(message, 3, set_flags(set));
            number(message, 4, concatenated_type(&set.key));
            number(message, 5, fields_length(&set.key));
            match &set.data {
                Some(MapData::Verdicts) => number(message, 6, VERDICT_TYPE),
                Some(MapData::Fields(fields)) => {
                    number(message, 6, concatenated_type(fields));
                    number(message, 7, fields_length(fields));
                }
                None => {}
            }
            // Identifies the set within the transaction; unused otherwise, but mandatory.
            number(message, 10, 1);
        });
    }

    /// Deletes a set or map that no rule refers to.
    pub fn delete_set(&mut self, name: &str) {
        let table = self.table.clone();
        self.request(DELETE_SET, 0, |message| {
            message.text(1, &table);
            message.text(2, name);
        });
    }

    /// Deletes all elements of a set or map.
    pub fn flush_set(&mut self, set: &str) {
        let table = self.table.clone();
        self.request(DELETE_ELEMENTS, 0, |message| {
            message.text(1, &table);
            message.text(2, set);
        });
    }

    /// Adds elements to a set or map. An element of a map that exists with other data is an error.
    pub fn add_elements<'a>(
        &mut self,
        set: &str,
        elements: impl IntoIterator<Item = &'a SetElement>,
    ) {
        self.elements(NEW_ELEMENTS, libc::NLM_F_CREATE, set, elements);
    }

    /// Deletes elements of a set or map. They must exist.
    pub fn delete_elements<'a>(
        &mut self,
        set: &str,
        elements: impl IntoIterator<Item = &'a SetElement>,
    ) {
        self.elements(DELETE_ELEMENTS, 0, set, elements);
    }

    fn elements<'a>(
        &mut self,
        kind: u16,
        flags: i32,
        set: &str,
        elements: impl IntoIterator<Item = &'a SetElement>,
    ) {
        let table = self.table.clone();
        let mut elements = elements.into_iter().peekable();
        while elements.peek().is_some() {
            self.request(kind, flags, |message| {
                message.text(1, &table);
                message.text(2, set);
                let list = message.nest(3);
                let start = message.len();
                while message.len() - start < MAX_LIST_SIZE
                    && let Some(element) = elements.next()
                {
                    element.encode(message);
                }
                message.end_nest(list);
            });
        }
    }

    /// The bytes of the transaction; `None` if it is empty.
    pub(super) fn finish(mut self) -> Option<NetlinkMessage> {
        let last = self.last?;
        // Errors are reported for every request, success only for this one.
        self.batch.add_flags(last, libc::NLM_F_ACK as u16);
        boundary(&mut self.batch, BATCH_END);
        Some(self.batch)
    }

    fn request(&mut self, kind: u16, flags: i32, attributes: impl FnOnce(&mut NetlinkMessage)) {
        self.last = Some(self.batch.len());
        let flags = (libc::NLM_F_REQUEST | flags) as u16;
        let request = self.batch.begin(SUBSYSTEM << 8 | kind, flags, 1);
        header(&mut self.batch, FAMILY_IPV4, 0);
        attributes(&mut self.batch);
        self.batch.end(request);
    }
}

impl SetElement {
    fn encode(&self, message: &mut NetlinkMessage) {
        let element = message.nest(LIST_ELEM);
        data_value(message, 1, &self.key);
        match &self.data {
            Some(ElementData::Value(value)) => data_value(message, 2, value),
            Some(ElementData::Verdict(verdict)) => {
                let data = message.nest(2);
                verdict.encode(message);
                message.end_nest(data);
            }
            None => {}
        }
        if self.is_end {
            number(message, 3, INTERVAL_END);
        }
        message.end_nest(element);
    }
}

/// NFT_DATA_VERDICT.
const VERDICT_TYPE: u32 = 0xffff_ff00;
const INTERVAL_END: u32 = 1;

/// `enum nft_set_flags`.
fn set_flags(set: &SetSpec) -> u32 {
    let mut flags = 0;
    if set.flags.intervals {
        flags |= 4;
    }
    if set.data.is_some() {
        flags |= 8;
    }
    if set.flags.dynamic {
        flags |= 0x10 | 0x20;
    }
    flags
}

/// The type number of a concatenation: six bits for each part.
fn concatenated_type(fields: &[SetField]) -> u32 {
    fields
        .iter()
        .fold(0, |number, field| number << 6 | field.type_number())
}

/// The length of a key or of data: parts of concatenations are aligned.
fn fields_length(fields: &[SetField]) -> u32 {
    match fields {
        [field] => field.length(),
        fields => fields
            .iter()
            .map(|field| field.length().next_multiple_of(4))
            .sum(),
    }
}

fn boundary(batch: &mut NetlinkMessage, kind: u16) {
    let message: Unfinished = batch.begin(kind, libc::NLM_F_REQUEST as u16, 0);
    header(batch, 0, SUBSYSTEM);
    batch.end(message);
}

/// `struct nfgenmsg`.
fn header(batch: &mut NetlinkMessage, family: u8, resource: u16) {
    batch.bytes(&[family, 0]);
    batch.bytes(&resource.to_be_bytes());
}
