//! The addresses of this host.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

/// The addresses at which other hosts may reach this one: those of interfaces that are up, except loopback and link-local ones.
/// IPv4 comes first, then the order of the kernel.
pub fn host_addresses() -> io::Result<Vec<IpAddr>> {
    let mut list: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: `list` is a valid place for the head of the list, which is freed below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = list;
    while !next.is_null() {
        // SAFETY: a non-null element of a list from getifaddrs, not freed yet.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        let up = entry.ifa_flags & (libc::IFF_UP as u32) != 0;
        if !up || entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: `ifa_addr` is not null and points to a socket address of the family it names.
        if let Some(address) = unsafe { ip_of(entry.ifa_addr) }
            && is_reachable_from_elsewhere(address)
        {
            found.push(address);
        }
    }
    // SAFETY: `list` came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(list) };
    found.sort_by_key(IpAddr::is_ipv6);
    found.dedup();
    Ok(found)
}

/// # Safety
/// `address` must point to a socket address of the family that it names.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: every socket address begins with its family.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: an AF_INET address is a sockaddr_in.
            let v4 = unsafe { &*address.cast::<libc::sockaddr_in>() };
            Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: an AF_INET6 address is a sockaddr_in6.
            let v6 = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

fn is_reachable_from_elsewhere(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local() && !v4.is_unspecified(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local() && !v6.is_unspecified(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_link_local_addresses_are_excluded() {
        for local in ["127.0.0.1", "169.254.3.4", "::1", "fe80::1"] {
            assert!(
                !is_reachable_from_elsewhere(local.parse().unwrap()),
                "{local}"
            );
        }
        for public in ["10.1.2.3", "100.64.0.1", "2001:db8::1"] {
            assert!(
                is_reachable_from_elsewhere(public.parse().unwrap()),
                "{public}"
            );
        }
    }

    #[test]
    fn addresses_can_be_listed() {
        host_addresses().unwrap();
    }
}
