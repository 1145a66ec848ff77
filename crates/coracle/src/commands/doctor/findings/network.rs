//! Findings about the pod network. It does not connect nodes yet, so requirements of such a connection (nftables, TUN devices,
//! seccomp notification) are not reported.

use super::{FindingTemplate, needs_user_namespaces, probe_result};
use crate::commands::doctor::report::Finding;
use crate::commands::doctor::survey::Survey;

pub fn findings(survey: &Survey) -> Vec<Finding> {
    vec![links(survey)]
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

/// Next step for missing kernel modules. Only root can load them; with a file in `modules-load.d` they are loaded at every boot.
fn modules(survey: &Survey, names: &str) -> String {
    needs_user_namespaces(survey).unwrap_or_else(|| {
        format!("an administrator can load the kernel modules {names} (names in /etc/modules-load.d/coracle.conf)")
    })
}
