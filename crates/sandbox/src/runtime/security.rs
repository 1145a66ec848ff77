//! A container's security context: user, capabilities, system call filter. Pure.

use k8s_openapi::api::core::v1::{Container, PodSpec, SecurityContext};
use pod_protocol::Problem;

use super::inner::message::{SeccompProfile, UserPlan};
use crate::container_runtime::ImageDefaults;

/// The default capabilities of containerd and Docker.
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

/// The resolved security context of a container, except for its file system.
#[derive(Debug, PartialEq, Eq)]
pub struct ContainerSecurity {
    /// User and groups.
    pub user: UserPlan,
    /// Capabilities, without `CAP_`, or `ALL`.
    pub capabilities: Vec<String>,
    /// Sets `no_new_privs`.
    pub no_new_privileges: bool,
    /// The system call filter.
    pub seccomp: SeccompProfile,
    /// `privileged`, within the user namespace.
    pub privileged: bool,
    /// `procMount: Unmasked`, or privileged.
    pub unmasked: bool,
}

/// Resolves the security contexts of the pod and of the container, and the image's user.
pub fn security(
    pod: &PodSpec,
    container: &Container,
    image: &ImageDefaults,
    single_id: bool,
) -> Result<ContainerSecurity, Problem> {
    let of_pod = pod.security_context.clone().unwrap_or_default();
    let own = container.security_context.clone().unwrap_or_default();
    let privileged = own.privileged == Some(true);
    let profile = own
        .seccomp_profile
        .as_ref()
        .or(of_pod.seccomp_profile.as_ref());
    let seccomp = match profile.map(|profile| profile.type_.as_str()) {
        Some("RuntimeDefault") if !privileged => SeccompProfile::RuntimeDefault,
        // No filter only on request. The default of other runtimes is also unconfined; here it denies keyrings, because they would
        // be those of the job's user.
        Some("Unconfined") if !privileged => SeccompProfile::Unconfined,
        Some("Localhost") => {
            return Err(invalid(
                "seccomp profiles of type Localhost are not supported",
            ));
        }
        _ => SeccompProfile::DenyKeyrings,
    };
    let mut groups: Vec<u32> = Vec::new();
    let supplemental = of_pod.supplemental_groups.clone().unwrap_or_default();
    for gid in supplemental.into_iter().chain(of_pod.fs_group) {
        groups.push(id(gid)?);
    }
    let user = UserPlan {
        uid: own.run_as_user.or(of_pod.run_as_user).map(id).transpose()?,
        gid: own
            .run_as_group
            .or(of_pod.run_as_group)
            .map(id)
            .transpose()?,
        image_user: image.user.clone(),
        supplemental_groups: groups,
        strict_groups: of_pod.supplemental_groups_policy.as_deref() == Some("Strict"),
        single_id,
    };
    if own.run_as_non_root.or(of_pod.run_as_non_root) == Some(true) {
        verify_not_root(&user, container)?;
    }
    Ok(ContainerSecurity {
        user,
        capabilities: capabilities(&own, privileged)?,
        no_new_privileges: own.allow_privilege_escalation == Some(false) && !privileged,
        seccomp,
        privileged,
        unmasked: privileged || own.proc_mount.as_deref() == Some("Unmasked"),
    })
}

fn verify_not_root(user: &UserPlan, container: &Container) -> Result<(), Problem> {
    let named = user.image_user.split(':').next().unwrap_or_default();
    let name = &container.name;
    let uid = match (user.uid, named) {
        (Some(0), _) => {
            return Err(invalid(format!(
                "container's runAsUser breaks non-root policy (container: {name})"
            )));
        }
        (Some(uid), _) => Some(uid),
        (None, "") => Some(0),
        (None, named) => named.parse().ok(),
    };
    match uid {
        Some(0) => Err(invalid(format!(
            "container has runAsNonRoot and image will run as root (container: {name})"
        ))),
        Some(_) => Ok(()),
        None => Err(invalid(format!(
            "container has runAsNonRoot and image has non-numeric user ({named}), cannot verify user is non-root (container: {name})"
        ))),
    }
}

fn capabilities(own: &SecurityContext, privileged: bool) -> Result<Vec<String>, Problem> {
    if privileged {
        return Ok(linux::credentials::capability_names()
            .map(str::to_owned)
            .collect());
    }
    let changes = own.capabilities.clone().unwrap_or_default();
    let without_prefix = |name: &String| name.strip_prefix("CAP_").unwrap_or(name).to_uppercase();
    let add: Vec<String> = changes
        .add
        .unwrap_or_default()
        .iter()
        .map(without_prefix)
        .collect();
    let drop: Vec<String> = changes
        .drop
        .unwrap_or_default()
        .iter()
        .map(without_prefix)
        .collect();
    for name in add.iter().chain(&drop) {
        if name != "ALL" && !linux::credentials::is_capability(name) {
            return Err(invalid(format!("unknown capability \"CAP_{name}\"")));
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
    u32::try_from(wanted).map_err(|_| invalid(format!("invalid user or group id {wanted}")))
}

fn invalid(message: impl Into<String>) -> Problem {
    Problem::new("CreateContainerConfigError", message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn resolve(
        pod: serde_json::Value,
        own: serde_json::Value,
        image_user: &str,
    ) -> Result<ContainerSecurity, Problem> {
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
    fn container_overrides_pod_and_pod_overrides_image() {
        let resolved = resolve(
            json!({"runAsUser": 1, "runAsGroup": 2, "fsGroup": 3, "supplementalGroups": [4]}),
            json!({"runAsUser": 5}),
            "app",
        )
        .unwrap();
        assert_eq!(
            (
                resolved.user.uid,
                resolved.user.gid,
                &resolved.user.supplemental_groups[..]
            ),
            (Some(5), Some(2), &[4, 3][..])
        );
        assert!(!resolved.no_new_privileges);
    }

    #[test]
    fn only_unconfined_pods_have_no_filter() {
        let seccomp = |own: serde_json::Value| resolve(json!({}), own, "").unwrap().seccomp;
        let profile = |kind: &str| json!({"seccompProfile": {"type": kind}});
        assert_eq!(seccomp(json!({})), SeccompProfile::DenyKeyrings);
        assert_eq!(seccomp(profile("Unconfined")), SeccompProfile::Unconfined);
        assert_eq!(
            seccomp(profile("RuntimeDefault")),
            SeccompProfile::RuntimeDefault
        );
        let of_pod = resolve(profile("Unconfined"), json!({}), "").unwrap();
        assert_eq!(of_pod.seccomp, SeccompProfile::Unconfined);
        for kind in ["Unconfined", "RuntimeDefault"] {
            let mut privileged = profile(kind);
            privileged["privileged"] = json!(true);
            assert_eq!(seccomp(privileged), SeccompProfile::DenyKeyrings);
        }
    }

    #[test]
    fn run_as_non_root_rejects_root() {
        let non_root = || json!({"runAsNonRoot": true});
        for (own, user, why) in [
            (json!({}), "", "image will run as root"),
            (json!({}), "0:5", "image will run as root"),
            (json!({}), "app", "non-numeric user (app)"),
            (json!({"runAsUser": 0}), "", "breaks non-root policy"),
        ] {
            let rejected = resolve(non_root(), own, user).unwrap_err();
            assert!(rejected.message.contains(why), "{rejected:?}");
        }
        assert!(resolve(non_root(), json!({}), "1000").is_ok());
        assert!(resolve(non_root(), json!({"runAsUser": 7}), "").is_ok());
    }

    #[test]
    fn capabilities_are_added_and_dropped() {
        let capabilities = |add: &[&str], drop: &[&str]| {
            resolve(
                json!({}),
                json!({"capabilities": {"add": add, "drop": drop}}),
                "",
            )
            .map(|resolved| resolved.capabilities)
        };
        assert_eq!(
            capabilities(&["NET_ADMIN"], &["ALL"]).unwrap(),
            ["NET_ADMIN"]
        );
        assert!(
            capabilities(&["CAP_SYS_TIME"], &[])
                .unwrap()
                .contains(&"SYS_TIME".to_owned())
        );
        assert!(
            !capabilities(&[], &["KILL"])
                .unwrap()
                .contains(&"KILL".to_owned())
        );
        let all = capabilities(&["ALL"], &["KILL"]).unwrap();
        assert!(all.contains(&"SYS_ADMIN".to_owned()) && !all.contains(&"KILL".to_owned()));
        assert!(capabilities(&["NONSENSE"], &[]).is_err());
    }

    #[test]
    fn negative_ids_are_invalid() {
        assert!(resolve(json!({"runAsUser": -1}), json!({}), "").is_err());
    }
}
