//! A node's range of addresses, and which of them are taken.

use std::collections::HashSet;
use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// A range such as `100.64.3.0/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    first: u32,
    prefix: u8,
}

impl Range {
    /// How many bits of an address name the range.
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// The hub's own address, which is every pod's gateway: the first after the range's name.
    pub fn gateway(self) -> Ipv4Addr {
        Ipv4Addr::from(self.first + 1)
    }

    /// The part of this range that belongs to the node of this index, if each node gets a `/prefix`.
    pub fn of_node(self, index: u32, prefix: u8) -> Option<Self> {
        let bits = prefix.checked_sub(self.prefix).filter(|_| prefix <= 30)?;
        let there = bits >= 32 || u64::from(index) < 1u64 << bits;
        let first = self
            .first
            .checked_add(index.checked_shl(32 - u32::from(prefix))?)?;
        there.then_some(Self { first, prefix })
    }

    /// The addresses that pods can have.
    pub fn usable(self) -> impl Iterator<Item = Ipv4Addr> {
        self.offsets()
            .map(move |offset| Ipv4Addr::from(self.first + offset))
    }

    /// Not the range's name, nor the gateway's, nor that of all.
    fn offsets(self) -> std::ops::Range<u32> {
        2..self.size().saturating_sub(1)
    }

    fn size(self) -> u32 {
        1u32.checked_shl(32 - u32::from(self.prefix))
            .unwrap_or(u32::MAX)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", Ipv4Addr::from(self.first), self.prefix)
    }
}

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text} is no IPv4 range such as 100.64.0.0/11");
        let (address, prefix) = text.split_once('/').ok_or_else(wrong)?;
        let address: Ipv4Addr = address.parse().map_err(|_| wrong())?;
        let prefix: u8 = prefix
            .parse()
            .ok()
            .filter(|prefix| (1..=30).contains(prefix))
            .ok_or_else(wrong)?;
        let mask = u32::MAX << (32 - u32::from(prefix));
        Ok(Self {
            first: u32::from(address) & mask,
            prefix,
        })
    }
}

/// Who has which address.
#[derive(Debug)]
pub struct Addresses {
    range: Range,
    taken: HashSet<u32>,
    /// Where the search for the next goes on, so that an address isn't given again at once.
    next: u32,
}

impl Addresses {
    /// Nobody has one yet.
    pub fn new(range: Range) -> Self {
        Self {
            range,
            taken: HashSet::new(),
            next: 2,
        }
    }

    /// Takes an address: the one that is claimed, if it is free and of this range, else the next.
    pub fn take(&mut self, claim: Option<Ipv4Addr>) -> Option<Ipv4Addr> {
        let usable = self.range.offsets();
        let claimed = claim
            .and_then(|claim| u32::from(claim).checked_sub(self.range.first))
            .filter(|offset| usable.contains(offset) && !self.taken.contains(offset));
        let next = self.next.max(usable.start);
        let offset = claimed.or_else(|| {
            (next..usable.end)
                .chain(usable.start..next)
                .find(|offset| !self.taken.contains(offset))
        })?;
        if claimed.is_none() {
            self.next = offset + 1;
        }
        self.taken.insert(offset);
        Some(Ipv4Addr::from(self.range.first + offset))
    }

    /// Gives it back.
    pub fn give_back(&mut self, address: Ipv4Addr) {
        self.taken
            .remove(&u32::from(address).wrapping_sub(self.range.first));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_get_their_parts() {
        let all: Range = "100.64.0.0/11".parse().unwrap();
        assert_eq!(all.of_node(0, 24).unwrap().to_string(), "100.64.0.0/24");
        assert_eq!(all.of_node(300, 24).unwrap().to_string(), "100.65.44.0/24");
        assert!(all.of_node(8191, 24).is_some());
        assert!(all.of_node(8192, 24).is_none());
        assert!(all.of_node(0, 8).is_none());
        for wrong in ["", "1.2.3.4", "1.2.3.4/33", "1.2.3.4/31", "x/8"] {
            assert!(wrong.parse::<Range>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn addresses_are_given_once_and_again_late() {
        let mut addresses = Addresses::new("10.0.0.0/29".parse().unwrap());
        let mut take = |claim: Option<&str>| {
            addresses
                .take(claim.map(|claim| claim.parse().unwrap()))
                .map(|address| address.to_string())
        };
        assert_eq!(take(None).as_deref(), Some("10.0.0.2"));
        assert_eq!(take(Some("10.0.0.5")).as_deref(), Some("10.0.0.5"));
        assert_eq!(take(Some("10.0.0.5")).as_deref(), Some("10.0.0.3"));
        assert_eq!(take(Some("10.0.1.9")).as_deref(), Some("10.0.0.4"));
        assert_eq!(take(None).as_deref(), Some("10.0.0.6"));
        assert_eq!(take(None), None);
        addresses.give_back("10.0.0.2".parse().unwrap());
        assert_eq!(addresses.take(None).unwrap().to_string(), "10.0.0.2");
    }
}
