//! The attachments of a node's pods: an address and a veth pair each.
//!
//! Each pod has a point-to-point link to the hub and a route of its own. There is no bridge: all packets of pods are routed, so
//! that rules for services and policies apply to them all, without kernel modules for bridges.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, OwnedFd};

use linux::route::{InterfaceAddress, RouteSocket};

use super::INTERFACE;
use super::address_pool::{AddressPool, PodCidr};
use super::claims::{Claims, ConnectionId};
use super::state::NetworkState;

/// The pods that are attached to a node's network.
pub(super) struct Attachments {
    route: RouteSocket,
    cidr: PodCidr,
    addresses: AddressPool,
    /// The interfaces in the hub's namespace, and the sandboxes that own them.
    claims: Claims,
    /// The last state of the kubelet; `None` before the first one.
    state: Option<NetworkState>,
}

/// A successful attachment.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Attached {
    pub address: Ipv4Addr,
    /// The interface was created for this request, and has no address yet.
    pub is_new: bool,
    /// Owns the interface until it is closed.
    pub connection: ConnectionId,
}

impl Attachments {
    /// Configures the hub's namespace, and finds the interfaces that an earlier process created there.
    pub(super) fn set_up(cidr: PodCidr, route: RouteSocket) -> io::Result<Self> {
        route.set_up("lo")?;
        let gateway = InterfaceAddress {
            address: cidr.gateway().into(),
            prefix_length: 32,
        };
        match route.add_address("lo", gateway) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            added => added?,
        }
        let mut attachments = Self {
            route,
            cidr,
            addresses: AddressPool::new(cidr),
            claims: Claims::default(),
            state: None,
        };
        for address in attachments.existing_interfaces()? {
            attachments.addresses.allocate(Some(address));
            attachments.claims.add_unclaimed(address);
        }
        Ok(attachments)
    }

    /// Applies the kubelet's state: reserves the addresses of its pods.
    pub(super) fn apply(&mut self, state: NetworkState) {
        self.state = Some(state);
    }

    /// Attaches a pod's network namespace. `claim` is the address of the interface that this namespace had before, if any.
    pub(super) fn attach(
        &mut self,
        uid: &str,
        claim: Option<Ipv4Addr>,
        namespace: &OwnedFd,
    ) -> io::Result<Attached> {
        self.release_lost();
        if let Some(address) = claim
            && let Some(connection) = self.claims.claim(address, uid)
        {
            return Ok(Attached {
                address,
                is_new: false,
                connection,
            });
        }
        let claim = claim.or_else(|| self.reserved_for(uid));
        if let Some(address) = claim
            && self.claims.may_belong_to(address, uid)
        {
            // It leads to the namespace of the pod's last sandbox, which has exited.
            self.remove(address);
        }
        let address = self.allocate(uid, claim)?;
        let connected = self.connect(address, namespace);
        if let Err(error) = connected {
            self.disconnect(address);
            return Err(error);
        }
        Ok(Attached {
            address,
            is_new: true,
            connection: self.claims.add(address, uid),
        })
    }

    /// Removes the interface and releases the address of a sandbox that closed its connection, unless it has another one.
    pub(super) fn detach(&mut self, attached: &Attached) {
        if self.claims.close(attached.address, attached.connection) {
            self.disconnect(attached.address);
        }
    }

    /// Reverts an attachment whose sandbox gave up before it got a response. An interface that it had before stays.
    pub(super) fn revert(&mut self, attached: &Attached) {
        if attached.is_new {
            self.detach(attached);
        } else {
            self.claims.abandon(attached.address, attached.connection);
        }
    }

    fn reserved_for(&self, uid: &str) -> Option<Ipv4Addr> {
        *self.state.as_ref()?.pods.get(uid)?
    }

    /// Whether the kubelet has reserved an address for another pod than `uid`.
    fn is_reserved(&self, address: Ipv4Addr, uid: &str) -> bool {
        let pods = self.state.iter().flat_map(|state| &state.pods);
        let mut owners = pods.filter(|(_, reserved)| **reserved == Some(address));
        owners.any(|(owner, _)| owner != uid)
    }

    fn allocate(&mut self, uid: &str, claim: Option<Ipv4Addr>) -> io::Result<Ipv4Addr> {
        let claim = claim.filter(|address| !self.is_reserved(*address, uid));
        let mut reserved = Vec::new();
        let allocated = loop {
            match self.addresses.allocate(claim) {
                Some(address) if self.is_reserved(address, uid) => reserved.push(address),
                allocated => break allocated,
            }
        };
        for address in reserved {
            self.addresses.release(address);
        }
        allocated.ok_or_else(|| {
            let cidr = self.cidr;
            io::Error::other(format!("no free address in this node's pod CIDR {cidr}"))
        })
    }

    fn connect(&self, address: Ipv4Addr, namespace: &OwnedFd) -> io::Result<()> {
        let name = interface_name(address);
        self.route.add_veth(&name, INTERFACE, namespace.as_fd())?;
        self.route.set_up(&name)?;
        let gateway = self.cidr.gateway();
        self.route
            .add_host_route(address.into(), &name, gateway.into())
    }

    fn disconnect(&mut self, address: Ipv4Addr) {
        // The kernel removes it with the pod's network namespace, but a leftover process would keep that.
        let _ = self.route.remove_interface(&interface_name(address));
        self.addresses.release(address);
    }

    fn remove(&mut self, address: Ipv4Addr) {
        self.claims.remove(address);
        self.disconnect(address);
    }

    /// Releases the addresses of sandboxes that exited while no process served them: the kernel has removed their interfaces with
    /// their network namespaces. A sandbox whose interface exists may only be stopped, and will claim its address later.
    fn release_lost(&mut self) {
        let is_lost = |address: &Ipv4Addr| !self.route.has_interface(&interface_name(*address));
        for address in self.claims.unclaimed().filter(is_lost).collect::<Vec<_>>() {
            self.claims.remove(address);
            self.addresses.release(address);
        }
    }

    fn existing_interfaces(&self) -> io::Result<Vec<Ipv4Addr>> {
        let names = self.route.interface_names()?;
        Ok(names.iter().filter_map(|name| address_of(name)).collect())
    }
}

/// The name of the hub's end of a pod's veth pair.
fn interface_name(address: Ipv4Addr) -> String {
    format!("p{:08x}", u32::from(address))
}

/// The inverse of [`interface_name`].
fn address_of(interface: &str) -> Option<Ipv4Addr> {
    let digits = interface
        .strip_prefix('p')
        .filter(|digits| digits.len() == 8)?;
    u32::from_str_radix(digits, 16).ok().map(Ipv4Addr::from)
}

/// The IPv4 address of a claim.
pub(super) fn ipv4(claim: Option<IpAddr>) -> Option<Ipv4Addr> {
    claim.and_then(|claim| match claim {
        IpAddr::V4(claim) => Some(claim),
        IpAddr::V6(_) => None,
    })
}
