//! Checks the networks of pods and services, as far as that is possible without the nodes.

use console::Failure;
use std::net::Ipv4Addr;

use cluster::NODE_PREFIX_LEN;

use super::settings::usage;
use crate::cli::{DEFAULT_POD_CIDR, DEFAULT_SERVICE_CIDR};

/// The longest prefix of a network of services that upstream accepts here.
const SERVICE_PREFIX_LEN: u32 = 28;
/// Networks to suggest, in this order, if the defaults overlap with the user's other network.
const SUGGESTIONS: [&str; 4] = [
    DEFAULT_POD_CIDR,
    DEFAULT_SERVICE_CIDR,
    "10.128.0.0/16",
    "172.20.0.0/16",
];

/// Checks both networks. The error suggests a value that would be accepted.
pub fn check(pod_cidr: &str, service_cidr: &str) -> Result<(), Failure> {
    check_cidr("--pod-cidr", pod_cidr, NODE_PREFIX_LEN.into(), service_cidr)?;
    check_cidr("--service-cidr", service_cidr, SERVICE_PREFIX_LEN, pod_cidr)?;
    if overlap(pod_cidr, service_cidr) {
        let suggestion = suggest("--pod-cidr", service_cidr);
        return Err(
            usage("--pod-cidr and --service-cidr overlap").with_hint(format!(
                "pods and services need separate networks, for example {suggestion}"
            )),
        );
    }
    Ok(())
}

/// Checks that `cidr` is an IPv4 network with a prefix of at most `longest` bits and no host bits, as upstream requires.
fn check_cidr(option: &str, cidr: &str, longest: u32, other: &str) -> Result<(), Failure> {
    let parts = cidr.split_once('/').and_then(|(address, bits)| {
        Some((address.parse::<Ipv4Addr>().ok()?, bits.parse::<u32>().ok()?))
    });
    let is_network = |address: Ipv4Addr, bits| u32::from(address).checked_shl(bits) == Some(0);
    match parts {
        Some((address, bits)) if (8..=longest).contains(&bits) && is_network(address, bits) => {
            Ok(())
        }
        _ => Err(
            usage(&format!("{option} {cidr} is not a usable IPv4 network")).with_hint(format!(
                "write its first address and its length, between 8 and {longest}: {}",
                suggest(option, other)
            )),
        ),
    }
}

/// The option with a network that does not overlap with `other`: the default if possible.
fn suggest(option: &str, other: &str) -> String {
    let default = match option {
        "--service-cidr" => DEFAULT_SERVICE_CIDR,
        _ => DEFAULT_POD_CIDR,
    };
    let mut candidates = [default].into_iter().chain(SUGGESTIONS);
    let suggestion = candidates.find(|candidate| !overlap(candidate, other));
    format!("{option}={}", suggestion.unwrap_or(default))
}

/// Whether two IPv4 networks overlap. Invalid ones do not.
fn overlap(a: &str, b: &str) -> bool {
    let ranges = control_plane::components::address_range(a)
        .zip(control_plane::components::address_range(b));
    ranges.is_some_and(|(a, b)| a.start() <= b.end() && b.start() <= a.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_networks_are_detected() {
        assert!(overlap("100.64.0.0/10", "100.96.0.0/16"));
        assert!(overlap("100.96.0.0/16", "100.96.0.0/16"));
        assert!(!overlap("100.64.0.0/11", "100.96.0.0/16"));
    }

    #[test]
    fn suggested_networks_are_accepted() {
        let good = ["100.64.0.0/11", "10.0.0.0/8", "192.168.0.0/16"];
        let bad = [
            "foo",
            "10.0.0.0",
            "10.0.0.1/8",
            "10.0.0.0/99",
            "10.0.0.0/4",
            "::/64",
        ];
        check(DEFAULT_POD_CIDR, DEFAULT_SERVICE_CIDR).unwrap();
        for good in good {
            check(good, DEFAULT_SERVICE_CIDR).unwrap();
            for bad in bad {
                let suggestion = |failure: Failure| {
                    let hint = failure.hint().unwrap().to_owned();
                    hint.rsplit_once('=').unwrap().1.to_owned()
                };
                let services = suggestion(check(good, bad).unwrap_err());
                check(good, &services).unwrap();
                let pods = suggestion(check(bad, good).unwrap_err());
                check(&pods, good).unwrap();
            }
        }
        let failure = check("foo", DEFAULT_SERVICE_CIDR).unwrap_err();
        assert!(
            failure
                .hint()
                .unwrap()
                .ends_with("--pod-cidr=100.64.0.0/11")
        );
    }
}
