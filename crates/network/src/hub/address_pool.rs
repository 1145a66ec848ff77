//! A node's pod CIDR, and the allocation of its addresses.

use std::collections::HashSet;
use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// An IPv4 CIDR of pods, such as `100.64.3.0/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodCidr {
    first: u32,
    prefix: u8,
}

impl PodCidr {
    /// The prefix length.
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// The hub's address, which is the pods' gateway: the first after the network address.
    pub fn gateway(self) -> Ipv4Addr {
        Ipv4Addr::from(self.first + 1)
    }

    /// The subnet of the node with this index, if each node gets a `/prefix`.
    pub fn node_subnet(self, index: u32, prefix: u8) -> Option<Self> {
        let bits = prefix.checked_sub(self.prefix).filter(|_| prefix <= 30)?;
        let exists = bits >= 32 || u64::from(index) < 1u64 << bits;
        let first = self
            .first
            .checked_add(index.checked_shl(32 - u32::from(prefix))?)?;
        exists.then_some(Self { first, prefix })
    }

    /// The addresses for pods.
    pub fn pod_addresses(self) -> impl Iterator<Item = Ipv4Addr> {
        self.pod_offsets()
            .map(move |offset| Ipv4Addr::from(self.first + offset))
    }

    /// Offsets of the addresses for pods: without the network, gateway and broadcast addresses.
    fn pod_offsets(self) -> std::ops::Range<u32> {
        2..self.size().saturating_sub(1)
    }

    fn size(self) -> u32 {
        1u32.checked_shl(32 - u32::from(self.prefix))
            .unwrap_or(u32::MAX)
    }
}

impl fmt::Display for PodCidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", Ipv4Addr::from(self.first), self.prefix)
    }
}

impl FromStr for PodCidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("{text} is not an IPv4 CIDR such as 100.64.0.0/11");
        let (address, prefix) = text.split_once('/').ok_or_else(invalid)?;
        let address: Ipv4Addr = address.parse().map_err(|_| invalid())?;
        let prefix: u8 = prefix
            .parse()
            .ok()
            .filter(|prefix| (1..=30).contains(prefix))
            .ok_or_else(invalid)?;
        let mask = u32::MAX << (32 - u32::from(prefix));
        Ok(Self {
            first: u32::from(address) & mask,
            prefix,
        })
    }
}

/// Allocates the addresses of a pod CIDR.
#[derive(Debug)]
pub struct AddressPool {
    cidr: PodCidr,
    allocated: HashSet<u32>,
    /// The start of the next search, so that released addresses are reused late.
    next: u32,
}

impl AddressPool {
    /// A pool in which all addresses are free.
    pub fn new(cidr: PodCidr) -> Self {
        Self {
            cidr,
            allocated: HashSet::new(),
            next: 2,
        }
    }

    /// Allocates the claimed address if it is free and in the CIDR, else the next free one.
    pub fn allocate(&mut self, claim: Option<Ipv4Addr>) -> Option<Ipv4Addr> {
        let usable = self.cidr.pod_offsets();
        let claimed = claim
            .and_then(|claim| u32::from(claim).checked_sub(self.cidr.first))
            .filter(|offset| usable.contains(offset) && !self.allocated.contains(offset));
        let next = self.next.max(usable.start);
        let offset = claimed.or_else(|| {
            (next..usable.end)
                .chain(usable.start..next)
                .find(|offset| !self.allocated.contains(offset))
        })?;
        if claimed.is_none() {
            self.next = offset + 1;
        }
        self.allocated.insert(offset);
        Some(Ipv4Addr::from(self.cidr.first + offset))
    }

    /// Releases an address.
    pub fn release(&mut self, address: Ipv4Addr) {
        self.allocated
            .remove(&u32::from(address).wrapping_sub(self.cidr.first));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_get_distinct_subnets() {
        let all: PodCidr = "100.64.0.0/11".parse().unwrap();
        assert_eq!(all.node_subnet(0, 24).unwrap().to_string(), "100.64.0.0/24");
        assert_eq!(
            all.node_subnet(300, 24).unwrap().to_string(),
            "100.65.44.0/24"
        );
        assert!(all.node_subnet(8191, 24).is_some());
        assert!(all.node_subnet(8192, 24).is_none());
        assert!(all.node_subnet(0, 8).is_none());
        for invalid in ["", "1.2.3.4", "1.2.3.4/33", "1.2.3.4/31", "x/8"] {
            assert!(invalid.parse::<PodCidr>().is_err(), "{invalid}");
        }
    }

    #[test]
    fn addresses_are_unique_and_reused_late() {
        let mut addresses = AddressPool::new("10.0.0.0/29".parse().unwrap());
        let mut allocate = |claim: Option<&str>| {
            addresses
                .allocate(claim.map(|claim| claim.parse().unwrap()))
                .map(|address| address.to_string())
        };
        assert_eq!(allocate(None).as_deref(), Some("10.0.0.2"));
        assert_eq!(allocate(Some("10.0.0.5")).as_deref(), Some("10.0.0.5"));
        assert_eq!(allocate(Some("10.0.0.5")).as_deref(), Some("10.0.0.3"));
        assert_eq!(allocate(Some("10.0.1.9")).as_deref(), Some("10.0.0.4"));
        assert_eq!(allocate(None).as_deref(), Some("10.0.0.6"));
        assert_eq!(allocate(None), None);
        addresses.release("10.0.0.2".parse().unwrap());
        assert_eq!(addresses.allocate(None).unwrap().to_string(), "10.0.0.2");
    }
}
