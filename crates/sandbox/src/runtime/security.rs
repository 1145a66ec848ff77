//! What a container may do: users, capabilities, system calls. Pure.

use k8s_openapi::api::core::v1::{Container, PodSpec, SecurityContext};

use crate::inner::message::{Seccomp, UserPlan};
use crate::seams::ImageDefaults;
use pod_protocol::Problem;

/// What containers of other runtimes have when nothing is said.
const DEFAULT_CAPABILITIES: &[&str] = &[
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

/// The part of a security context that isn't about files.
#[derive(Debug, PartialEq, Eq)]
pub struct Security {
    /// Who.
    pub user: UserPlan,
    /// What root may do.
    pub capabilities: Vec<String>,
    /// No program gives more rights.
    pub no_new_privileges: bool,
    /// The filter of system calls.
    pub seccomp: Seccomp,
    /// All that the user namespace gives.
    pub privileged: bool,
    /// `/proc` with nothing hidden.
    pub unmasked: bool,
}

/// Works it out from the pod's and the container's security context and the image.
pub fn security(
    pod: &PodSpec,
    container: &Container,
    image: &ImageDefaults,
    one_id: bool,
) -> Result<Security, Problem> {
    let of_pod = pod.security_context.clone().unwrap_or_default();
    let own = container.security_context.clone().unwrap_or_default();
    let privileged = own.privileged == Some(true);
    let profile = own
        .seccomp_profile
        .as_ref()
        .or(of_pod.seccomp_profile.as_ref());
    let seccomp = match profile.map(|profile| profile.type_.as_str()) {
        Some("RuntimeDefault") if !privileged => Seccomp::RuntimeDefault,
        // Only whoever asks for it has none. Others have what other runtimes call unconfined, but for keyrings, which would
        // be their user's.
        Some("Unconfined") if !privileged => Seccomp::None,
        Some("Localhost") => {
            return Err(refused(
                "seccomp profiles of type Localhost are not supported",
            ));
        }
        _ => Seccomp::Keyless,
    };
    let mut groups: Vec<u32> = Vec::new();
    let all = of_pod.supplemental_groups.clone().unwrap_or_default();
    for gid in all.into_iter().chain(of_pod.fs_group) {
        groups.push(id(gid)?);
    }
    let user = UserPlan {
        uid: own.run_as_user.or(of_pod.run_as_user).map(id).transpose()?,
        gid: own
            .run_as_group
            .or(of_pod.run_as_group)
            .map(id)
            .transpose()?,
        name: image.user.clone(),
        groups,
        groups_strict: of_pod.supplemental_groups_policy.as_deref() == Some("Strict"),
        one_id,
    };
    if own.run_as_non_root.or(of_pod.run_as_non_root) == Some(true) {
        verify_not_root(&user, container)?;
    }
    Ok(Security {
        user,
        capabilities: capabilities(&own, privileged)?,
        no_new_privileges: own.allow_privilege_escalation == Some(false) && !privileged,
        seccomp,
        privileged,
        unmasked: privileged || own.proc_mount.as_deref() == Some("Unmasked"),
    })
}

fn verify_not_root(user: &UserPlan, container: &Container) -> Result<(), Problem> {
    let named = user.name.split(':').next().unwrap_or_default();
    let name = &container.name;
    let uid = match (user.uid, named) {
        (Some(0), _) => {
            return Err(refused(format!(
                "container's runAsUser breaks non-root policy (container: {name})"
            )));
        }
        (Some(uid), _) => Some(uid),
        (None, "") => Some(0),
        (None, named) => named.parse().ok(),
    };
    match uid {
        Some(0) => Err(refused(format!(
            "container has runAsNonRoot and image will run as root (container: {name})"
        ))),
        Some(_) => Ok(()),
        None => Err(refused(format!(
            "container has runAsNonRoot and image has non-numeric user ({named}), cannot verify user is non-root (container: {name})"
        ))),
    }
}

fn capabilities(own: &SecurityContext, privileged: bool) -> Result<Vec<String>, Problem> {
    if privileged {
        return Ok(vec!["ALL".to_owned()]);
    }
    let changes = own.capabilities.clone().unwrap_or_default();
    let plain = |name: &String| name.strip_prefix("CAP_").unwrap_or(name).to_uppercase();
    let add: Vec<String> = changes.add.unwrap_or_default().iter().map(plain).collect();
    let drop: Vec<String> = changes.drop.unwrap_or_default().iter().map(plain).collect();
    for name in add.iter().chain(&drop) {
        if name != "ALL" && !linux::credentials::is_capability(name) {
            return Err(refused(format!("unknown capability \"CAP_{name}\"")));
        }
    }
    let is_all = |name: &String| name == "ALL";
    let mut kept: Vec<String> = match (add.iter().any(is_all), drop.iter().any(is_all)) {
        (true, false) => linux::credentials::capability_names()
            .map(str::to_owned)
            .collect(),
        (_, true) => Vec::new(),
        (false, false) => DEFAULT_CAPABILITIES
            .iter()
            .map(|name| (*name).to_owned())
            .collect(),
    };
    kept.retain(|name| !drop.contains(name));
    for name in add.into_iter().filter(|name| name != "ALL") {
        if !kept.contains(&name) {
            kept.push(name);
        }
    }
    Ok(kept)
}

fn id(wanted: i64) -> Result<u32, Problem> {
    u32::try_from(wanted).map_err(|_| refused(format!("{wanted} is no user or group id")))
}

fn refused(message: impl Into<String>) -> Problem {
    Problem {
        reason: "CreateContainerConfigError".to_owned(),
        message: message.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(
        pod: serde_json::Value,
        own: serde_json::Value,
        image_user: &str,
    ) -> Result<Security, Problem> {
        let pod =
            serde_json::from_value(json!({"containers": [], "securityContext": pod})).unwrap();
        let container =
            serde_json::from_value(json!({"name": "c", "securityContext": own})).unwrap();
        let image = ImageDefaults {
            user: image_user.into(),
            ..Default::default()
        };
        security(&pod, &container, &image, false)
    }

    #[test]
    fn the_container_wins_over_the_pod_and_the_pod_over_the_image() {
        let found = of(
            json!({"runAsUser": 1, "runAsGroup": 2, "fsGroup": 3, "supplementalGroups": [4]}),
            json!({"runAsUser": 5}),
            "app",
        )
        .unwrap();
        assert_eq!(
            (found.user.uid, found.user.gid, &found.user.groups[..]),
            (Some(5), Some(2), &[4, 3][..])
        );
        assert!(!found.no_new_privileges);
    }

    #[test]
    fn only_pods_that_ask_for_it_have_no_filter() {
        let with = |own: serde_json::Value| of(json!({}), own, "").unwrap().seccomp;
        let profile = |kind: &str| json!({"seccompProfile": {"type": kind}});
        assert_eq!(with(json!({})), Seccomp::Keyless);
        assert_eq!(with(profile("Unconfined")), Seccomp::None);
        assert_eq!(with(profile("RuntimeDefault")), Seccomp::RuntimeDefault);
        let of_pod = of(profile("Unconfined"), json!({}), "").unwrap();
        assert_eq!(of_pod.seccomp, Seccomp::None);
        for kind in ["Unconfined", "RuntimeDefault"] {
            let mut privileged = profile(kind);
            privileged["privileged"] = json!(true);
            assert_eq!(with(privileged), Seccomp::Keyless);
        }
    }

    #[test]
    fn root_is_refused_where_it_must_not_be() {
        let non_root = || json!({"runAsNonRoot": true});
        for (own, user, why) in [
            (json!({}), "", "image will run as root"),
            (json!({}), "0:5", "image will run as root"),
            (json!({}), "app", "non-numeric user (app)"),
            (json!({"runAsUser": 0}), "", "breaks non-root policy"),
        ] {
            let refused = of(non_root(), own, user).unwrap_err();
            assert!(refused.message.contains(why), "{refused:?}");
        }
        assert!(of(non_root(), json!({}), "1000").is_ok());
        assert!(of(non_root(), json!({"runAsUser": 7}), "").is_ok());
    }

    #[test]
    fn capabilities_are_added_and_dropped() {
        let with = |add: &[&str], drop: &[&str]| {
            of(
                json!({}),
                json!({"capabilities": {"add": add, "drop": drop}}),
                "",
            )
            .map(|found| found.capabilities)
        };
        assert_eq!(with(&["NET_ADMIN"], &["ALL"]).unwrap(), ["NET_ADMIN"]);
        assert!(
            with(&["CAP_SYS_TIME"], &[])
                .unwrap()
                .contains(&"SYS_TIME".to_owned())
        );
        assert!(!with(&[], &["KILL"]).unwrap().contains(&"KILL".to_owned()));
        let all = with(&["ALL"], &["KILL"]).unwrap();
        assert!(all.contains(&"SYS_ADMIN".to_owned()) && !all.contains(&"KILL".to_owned()));
        assert!(with(&["NONSENSE"], &[]).is_err());
    }

    #[test]
    fn negative_ids_are_refused() {
        assert!(of(json!({"runAsUser": -1}), json!({}), "").is_err());
    }
}
