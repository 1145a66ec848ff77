//! Findings about the pod network.

use super::{FindingTemplate, needs_user_namespaces, probe_result};
use crate::commands::doctor::report::Finding;
use crate::commands::doctor::survey::Survey;

pub fn findings(survey: &Survey) -> Vec<Finding> {
    vec![links(survey), nftables(survey), tun(survey)]
}

fn links(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "bridge-and-veth",
        area: "network",
        title: "bridge and veth",
        with_it: "pods of one node reach each other at kernel speed",
        without_it: "no pod network: only pods with hostNetwork can run",
    };
    match probe_result(survey, "bridge") {
        Ok(detail) => template.ok(detail),
        Err(detail) => template.missing(detail, modules(survey, "bridge and veth")),
    }
}

fn nftables(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "nftables",
        area: "network",
        title: "nftables",
        with_it: "services (ClusterIP, NodePort) and network policies are kernel rules",
        without_it: "no services: pods reach each other by their own addresses only",
    };
    match probe_result(survey, "nftables") {
        Ok(detail) => template.ok(detail),
        Err(detail) => template.missing(detail, modules(survey, "nf_tables and nft_chain_nat")),
    }
}

fn tun(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "tun",
        area: "network",
        title: "TUN device",
        with_it: "packets travel between nodes, 64 KiB at a time",
        without_it: "pods reach pods of their own node only",
    };
    match probe_result(survey, "tun") {
        Ok(detail) if detail.contains("without") => {
            template.degraded(detail, "a newer kernel sends larger packets".to_owned())
        }
        Ok(detail) => template.ok(detail),
        Err(detail) => {
            let next = needs_user_namespaces(survey).unwrap_or_else(|| {
                "an administrator can load the module tun and run `chmod 0666 /dev/net/tun`, which is its usual mode".to_owned()
            });
            template.missing(detail, next)
        }
    }
}

/// Next step for missing kernel modules. Only root can load them; a file in `modules-load.d` does so at every boot.
fn modules(survey: &Survey, names: &str) -> String {
    needs_user_namespaces(survey).unwrap_or_else(|| {
        format!("an administrator can load the kernel modules {names} (names in /etc/modules-load.d/coracle.conf)")
    })
}
