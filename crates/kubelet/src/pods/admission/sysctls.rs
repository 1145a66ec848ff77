//! The sysctls that a pod may set: upstream's safe ones, which only affect the pod's namespaces.

use k8s_openapi::api::core::v1::PodSpec;

use super::{PodRejection, RejectionReason};

/// Upstream's safe sysctls and their namespaces. All are namespaced in every kernel that Coracle supports.
const SAFE: &[(&str, SysctlNamespace)] = &[
    ("kernel.shm_rmid_forced", SysctlNamespace::Ipc),
    ("net.ipv4.ip_local_port_range", SysctlNamespace::Net),
    ("net.ipv4.ip_local_reserved_ports", SysctlNamespace::Net),
    ("net.ipv4.ip_unprivileged_port_start", SysctlNamespace::Net),
    ("net.ipv4.ping_group_range", SysctlNamespace::Net),
    ("net.ipv4.tcp_fin_timeout", SysctlNamespace::Net),
    ("net.ipv4.tcp_keepalive_intvl", SysctlNamespace::Net),
    ("net.ipv4.tcp_keepalive_probes", SysctlNamespace::Net),
    ("net.ipv4.tcp_keepalive_time", SysctlNamespace::Net),
    ("net.ipv4.tcp_notsent_lowat", SysctlNamespace::Net),
    ("net.ipv4.tcp_rmem", SysctlNamespace::Net),
    ("net.ipv4.tcp_slow_start_after_idle", SysctlNamespace::Net),
    ("net.ipv4.tcp_syncookies", SysctlNamespace::Net),
    ("net.ipv4.tcp_wmem", SysctlNamespace::Net),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum SysctlNamespace {
    Ipc,
    Net,
}

pub(super) fn check(spec: &PodSpec) -> Result<(), PodRejection> {
    let sysctls = spec
        .security_context
        .as_ref()
        .and_then(|context| context.sysctls.as_deref())
        .unwrap_or_default();
    for sysctl in sysctls {
        let name = normalized(&sysctl.name);
        let forbidden = |why: String| {
            let message = format!("forbidden sysctl: {why}");
            PodRejection::new(RejectionReason::SysctlForbidden, message)
        };
        let with_host = |namespace: &str| {
            forbidden(format!(
                "{name:?} not allowed with host {namespace} enabled"
            ))
        };
        match SAFE.iter().find(|(safe, _)| *safe == name) {
            None => return Err(forbidden(format!("{name:?} not allowlisted"))),
            Some((_, SysctlNamespace::Ipc)) if spec.host_ipc == Some(true) => {
                return Err(with_host("ipc"));
            }
            Some((_, SysctlNamespace::Net)) if spec.host_network == Some(true) => {
                return Err(with_host("net"));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Converts the form with slashes to the form with dots.
fn normalized(name: &str) -> String {
    match name.find(['.', '/']) {
        Some(first) if name[first..].starts_with('/') => name
            .chars()
            .map(|c| match c {
                '/' => '.',
                '.' => '/',
                other => other,
            })
            .collect(),
        _ => name.to_owned(),
    }
}
