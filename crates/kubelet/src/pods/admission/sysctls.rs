//! Which kernel parameters a pod may set: those that are its namespaces' own and harm nobody else.

use k8s_openapi::api::core::v1::PodSpec;
use pod_protocol::Problem;

use super::problem;

/// Upstream's safe sysctls, all of them namespaced in any kernel that Coracle runs on, by the namespace they belong to.
const SAFE: &[(&str, Namespace)] = &[
    ("kernel.shm_rmid_forced", Namespace::Ipc),
    ("net.ipv4.ip_local_port_range", Namespace::Net),
    ("net.ipv4.ip_local_reserved_ports", Namespace::Net),
    ("net.ipv4.ip_unprivileged_port_start", Namespace::Net),
    ("net.ipv4.ping_group_range", Namespace::Net),
    ("net.ipv4.tcp_fin_timeout", Namespace::Net),
    ("net.ipv4.tcp_keepalive_intvl", Namespace::Net),
    ("net.ipv4.tcp_keepalive_probes", Namespace::Net),
    ("net.ipv4.tcp_keepalive_time", Namespace::Net),
    ("net.ipv4.tcp_notsent_lowat", Namespace::Net),
    ("net.ipv4.tcp_rmem", Namespace::Net),
    ("net.ipv4.tcp_slow_start_after_idle", Namespace::Net),
    ("net.ipv4.tcp_syncookies", Namespace::Net),
    ("net.ipv4.tcp_wmem", Namespace::Net),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Namespace {
    Ipc,
    Net,
}

pub(super) fn allowed(spec: &PodSpec) -> Result<(), Problem> {
    let sysctls = spec
        .security_context
        .as_ref()
        .and_then(|context| context.sysctls.as_deref())
        .unwrap_or_default();
    for sysctl in sysctls {
        let name = normal(&sysctl.name);
        let forbidden =
            |why: String| problem("SysctlForbidden", format!("forbidden sysctl: {why}"));
        let with_host = |namespace: &str| {
            forbidden(format!(
                "{name:?} not allowed with host {namespace} enabled"
            ))
        };
        match SAFE.iter().find(|(safe, _)| *safe == name) {
            None => return Err(forbidden(format!("{name:?} not allowlisted"))),
            Some((_, Namespace::Ipc)) if spec.host_ipc == Some(true) => {
                return Err(with_host("ipc"));
            }
            Some((_, Namespace::Net)) if spec.host_network == Some(true) => {
                return Err(with_host("net"));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// With dots between its parts, where it is written with slashes.
fn normal(name: &str) -> String {
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
