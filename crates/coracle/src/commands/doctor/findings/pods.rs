//! Findings about the requirements of pods: namespaces, subordinate ids, cgroups.

use linux::probe::subid::SetuidHelper;

use super::{FindingTemplate, needs_user_namespaces, probe_result};
use crate::commands::doctor::report::Finding;
use crate::commands::doctor::survey::Survey;

/// The first kernel with overlayfs in user namespaces.
const OLDEST_KERNEL: (u32, u32) = (5, 11);
/// Each container takes a few user namespaces, so a lower limit is reported.
const MIN_NAMESPACES: u64 = 256;

pub fn findings(survey: &Survey) -> Vec<Finding> {
    vec![
        kernel(survey),
        user_namespaces(survey),
        process_namespaces(survey),
        subordinate_ids(survey),
        cgroups(survey),
        hidden_processes(survey),
    ]
}

fn kernel(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "kernel",
        area: "pods",
        title: "kernel",
        with_it: "Linux 5.11 or newer lets an ordinary user stack image layers (overlayfs)",
        without_it: "older kernels are not supported; layers are copied, and other parts may fail",
    };
    if survey.kernel.version >= OLDEST_KERNEL {
        template.ok(&survey.kernel.release)
    } else {
        let next = "an administrator can offer nodes with a newer kernel (RHEL 9, Ubuntu 22.04, Debian 12 or SLES 15 SP4 have one)";
        template.degraded(&survey.kernel.release, next.to_owned())
    }
}

fn user_namespaces(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "user-namespaces",
        area: "pods",
        title: "user namespaces",
        with_it: "every pod gets its own file systems, processes and network, with no root on the host",
        without_it: "no pods: there is no alternative to them yet",
    };
    let sysctl = |name: &str| survey.sysctls.get(name).map(String::as_str);
    let limit = sysctl("user.max_user_namespaces").and_then(|value| value.parse::<u64>().ok());
    match probe_result(survey, "user-namespace") {
        Ok(detail) => match limit {
            Some(limit) if limit < MIN_NAMESPACES => template.degraded(
                format!("{detail}; at most {limit} of them for each user"),
                "an administrator can set user.max_user_namespaces=15000 in /etc/sysctl.d/"
                    .to_owned(),
            ),
            _ => template.ok(detail),
        },
        Err(detail) => {
            let assignment = if limit == Some(0) {
                "user.max_user_namespaces=15000"
            } else if sysctl("kernel.unprivileged_userns_clone") == Some("0") {
                "kernel.unprivileged_userns_clone=1"
            } else if sysctl("kernel.apparmor_restrict_unprivileged_userns") == Some("1") {
                return template.missing(
                    format!("{detail} (AppArmor restricts them)"),
                    "an administrator can set kernel.apparmor_restrict_unprivileged_userns=0 in /etc/sysctl.d/, \
                     or give this program an AppArmor profile with `userns,`"
                        .to_owned(),
                );
            } else {
                return template.missing(
                    detail,
                    "no known setting forbids them: a container or a seccomp filter around this shell may; try on a bare compute node"
                        .to_owned(),
                );
            };
            let next = format!(
                "an administrator can set {assignment} in /etc/sysctl.d/ and run `sysctl --system`"
            );
            template.missing(detail, next)
        }
    }
}

fn process_namespaces(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "process-namespaces",
        area: "pods",
        title: "process namespaces",
        with_it: "containers see their own processes only, and all of them end with the pod",
        without_it: "containers share the host's /proc, and see your other processes there",
    };
    match probe_result(survey, "process-namespace") {
        Ok(detail) => template.ok(detail),
        Err(detail) => {
            let covered = "parts of /proc are covered here, as container engines do: start outside of a container";
            let next = needs_user_namespaces(survey).unwrap_or_else(|| covered.to_owned());
            template.degraded(detail, next)
        }
    }
}

fn subordinate_ids(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "subordinate-ids",
        area: "pods",
        title: "subordinate ids",
        with_it: "containers use any user and group id, as images expect",
        without_it: "each container runs as one single id; changes of users and owners inside succeed without effect",
    };
    let error = match probe_result(survey, "subordinate-ids") {
        Ok(detail) => return template.ok(detail),
        Err(error) => error,
    };
    let user = &survey.user;
    let has = (
        !survey.ranges.user.is_empty(),
        !survey.ranges.group.is_empty(),
    );
    let (found, next) = match (has, &survey.newuidmap, &survey.newgidmap) {
        ((false, _) | (_, false), ..) => {
            let lacking = match has {
                (false, false) => "/etc/subuid and /etc/subgid have no entry",
                (false, true) => "/etc/subuid has no entry",
                _ => "/etc/subgid has no entry",
            };
            let next = format!("an administrator can run `usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}` on every node");
            (format!("{lacking} for {user}"), next)
        }
        (_, SetuidHelper::Missing, _) | (_, _, SetuidHelper::Missing) => (
            "newuidmap or newgidmap is not installed".to_owned(),
            "an administrator can install the package uidmap (Debian, Ubuntu) or shadow-utils (RHEL, SLES)".to_owned(),
        ),
        (_, SetuidHelper::Unprivileged(file), _) | (_, _, SetuidHelper::Unprivileged(file)) => (
            format!("{} has neither setuid bit nor capabilities", file.display()),
            format!("an administrator can run `chmod u+s {}`", file.display()),
        ),
        _ => (
            error.to_owned(),
            needs_user_namespaces(survey)
                .unwrap_or_else(|| "a mount option (nosuid) or no_new_privs may stop the helpers: try in a fresh job".to_owned()),
        ),
    };
    template.degraded(found, next)
}

fn cgroups(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "cgroup-delegation",
        area: "pods",
        title: "cgroup delegation",
        with_it: "limits of single containers are enforced by the kernel",
        without_it: "limits apply to the whole job, as Slurm sets them, not to single containers",
    };
    match &survey.cgroup {
        Some(group) if group.delegated && group.controllers.iter().any(|c| c == "memory" || c == "cpu") => {
            template.ok(format!("{} delegates {}", group.path.display(), group.controllers.join(", ")))
        }
        Some(group) => {
            let found = if group.delegated { "delegates neither cpu nor memory" } else { "is not delegated to you" };
            template.degraded(
                format!("{} {found}", group.path.display()),
                "an administrator can delegate it to you (systemd: Delegate=cpu memory pids; Slurm: a SPANK plugin that gives the task's cgroup to its user)"
                    .to_owned(),
            )
        }
        None => template.degraded(
            "no cgroup of version 2",
            "an administrator can boot with systemd.unified_cgroup_hierarchy=1 and set CgroupPlugin=cgroup/v2 for Slurm".to_owned(),
        ),
    }
}

fn hidden_processes(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "hidden-processes",
        area: "pods",
        title: "/proc of other users",
        with_it: "other users may read command lines unless they are hidden; Coracle never puts secrets there",
        without_it: "other users may read command lines; Coracle never puts secrets there",
    };
    match &survey.hidepid {
        Some(value) => template.ok(format!("hidden (hidepid={value})")),
        None => template.ok("visible to all users, as on most hosts"),
    }
}
