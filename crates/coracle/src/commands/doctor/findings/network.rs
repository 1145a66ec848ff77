//! Findings about the pod network. There is none between nodes yet, so what only that needs (nftables, TUN devices, seccomp
//! notification) is not reported.

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

/// Next step for missing kernel modules. Only root can load them; a file in `modules-load.d` does so at every boot.
fn modules(survey: &Survey, names: &str) -> String {
    needs_user_namespaces(survey).unwrap_or_else(|| {
        format!("an administrator can load the kernel modules {names} (names in /etc/modules-load.d/coracle.conf)")
    })
}
