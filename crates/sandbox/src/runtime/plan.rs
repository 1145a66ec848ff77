//! Computes a container's file system and first process. Pure.

use std::collections::{BTreeMap, HashMap};
use std::path::{Component, Path, PathBuf};

use k8s_openapi::api::core::v1::{PodSpec, VolumeMount};
use pod_protocol::Problem;
use pod_protocol::mounts::is_recursive_read_only;

use super::env::{self, PodAddresses};
use super::inner::message::{
    ContainerPlan, DeclaredVolume, MountAccess, MountPlan, MountPropagation, MountSource,
    PidNamespace, ProcessPlan, RootfsKind, RootfsPlan,
};
use super::security::{ContainerSecurity, security};
use crate::container_runtime::StartRequest;
use crate::node_services::ReadyVolume;

/// Device files that every container has.
const DEVICES: &[&str] = &["null", "zero", "full", "random", "urandom", "tty"];
/// Further device files of privileged containers, if the host's user has access to them.
const PRIVILEGED_DEVICES: &[&str] = &["fuse", "kvm", "net/tun"];
const LINKS: &[(&str, &str)] = &[
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
    ("/dev/ptmx", "pts/ptmx"),
];
/// `maskedPaths` of other runtimes.
const MASKED_PATHS: &[&str] = &[
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
/// `readonlyPaths` of other runtimes.
const READONLY_PATHS: &[&str] = &[
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// Properties of the pod that its containers' plans depend on.
#[derive(Debug)]
pub struct PodContext<'a> {
    /// The pod's spec.
    pub spec: &'a PodSpec,
    /// Of this container.
    pub oom_score_adj: i32,
    /// The pod's host name.
    pub hostname: &'a str,
    /// Directory with `hosts`, `hostname` and `resolv.conf`.
    pub etc: &'a Path,
    /// Directory that is mounted on `/dev/shm`.
    pub shm: &'a Path,
    /// The volumes by name.
    pub volumes: &'a BTreeMap<String, ReadyVolume>,
    /// Addresses of the pod and its node.
    pub addresses: &'a PodAddresses,
    /// The user namespace maps a single id.
    pub single_id: bool,
    /// Each container has a cgroup of its own.
    pub has_cgroup: bool,
    /// How this container's layers are merged.
    pub root: RootfsKind,
}

/// Plans one container. `dir` is the directory of this attempt; `target` is the serial of the container whose pid namespace an
/// ephemeral container joins.
pub fn plan_container(
    pod: &PodContext<'_>,
    request: &StartRequest,
    dir: &Path,
    target: Option<u64>,
) -> Result<ContainerPlan, Problem> {
    let spec = pod.spec;
    let image = &request.image.config;
    let security = security(spec, &request.container, image, pod.single_id)?;
    let mut env = env::environment(image, &request.input.env, pod.hostname, pod.addresses);
    if request.container.tty == Some(true) {
        env::set_default(&mut env, "TERM", "xterm");
    }
    let variables = env::own_variables(&env, &request.input.env);
    let args = env::command(image, &request.container, &variables);
    if args.is_empty() {
        return Err(Problem::new("CreateContainerError", "no command specified"));
    }
    let own_context = request.container.security_context.as_ref();
    let capabilities = match (&pod.root, spec.host_pid) {
        // With SYS_PTRACE the container's root could inspect the fuse-overlayfs processes, which see the host's root.
        (RootfsKind::Mounted(_), Some(true)) => without_ptrace(&security.capabilities),
        _ => security.capabilities.clone(),
    };
    let mut mounts = system_mounts(pod, &security);
    let user_mounts = volume_mounts(pod, request, &variables)?;
    let mount_targets: Vec<PathBuf> = user_mounts
        .iter()
        .map(|mount| mount.target.clone())
        .collect();
    mounts.extend(with_etc(user_mounts, etc_mounts(pod)));
    mounts.push(bind(
        &dir.join("termination-log"),
        Path::new(termination_message_path(request)),
    ));
    let unless_unmasked = |paths: &[&str]| -> Vec<PathBuf> {
        let skip = security.unmasked || (spec.host_pid == Some(true) && paths == READONLY_PATHS);
        paths.iter().filter(|_| !skip).map(PathBuf::from).collect()
    };
    let cwd = request
        .container
        .working_dir
        .clone()
        .filter(|dir| !dir.is_empty());
    Ok(ContainerPlan {
        root: RootfsPlan {
            layers: request.image.layers.clone(),
            upper: dir.join("upper"),
            kind: pod.root.clone(),
            read_only: own_context.and_then(|own| own.read_only_root_filesystem) == Some(true),
        },
        mounts,
        declared_volumes: declared_volumes(&request.image.config.volumes, &mount_targets, dir),
        links: LINKS
            .iter()
            .map(|(link, target)| (PathBuf::from(link), PathBuf::from(target)))
            .collect(),
        masked_paths: unless_unmasked(MASKED_PATHS),
        readonly_paths: unless_unmasked(READONLY_PATHS),
        pid_namespace: match target {
            Some(target) => PidNamespace::Target(target),
            None if spec.host_pid == Some(true) || spec.share_process_namespace == Some(true) => {
                PidNamespace::Inner
            }
            None => PidNamespace::Own,
        },
        process: ProcessPlan {
            args,
            env,
            cwd: cwd.unwrap_or_else(|| image.working_dir.clone()).into(),
            user: security.user,
            capabilities,
            no_new_privileges: security.no_new_privileges,
            seccomp: security.seccomp,
            terminal: request.container.tty == Some(true),
            oom_score_adj: pod.oom_score_adj,
            cgroup: None,
        },
    })
}

fn without_ptrace(capabilities: &[String]) -> Vec<String> {
    let kept = capabilities.iter().filter(|name| *name != "SYS_PTRACE");
    kept.cloned().collect()
}

fn termination_message_path(request: &StartRequest) -> &str {
    let path = request.container.termination_message_path.as_deref();
    path.filter(|path| !path.is_empty())
        .unwrap_or("/dev/termination-log")
}

fn mount(source: MountSource, target: &str, access: MountAccess) -> MountPlan {
    MountPlan {
        source,
        target: target.into(),
        access,
        propagation: MountPropagation::None,
    }
}

fn bind(path: &Path, target: &Path) -> MountPlan {
    MountPlan {
        source: MountSource::Bind {
            path: path.to_owned(),
            sub_path: None,
        },
        target: target.to_owned(),
        access: MountAccess::ReadWrite,
        propagation: MountPropagation::None,
    }
}

/// Kernel file systems and devices.
fn system_mounts(pod: &PodContext<'_>, security: &ContainerSecurity) -> Vec<MountPlan> {
    let spec = pod.spec;
    let host = |path: &str| MountSource::Bind {
        path: path.into(),
        sub_path: None,
    };
    let options = [("mode", "755"), ("size", "65536k")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
    let sys_access = if security.privileged {
        MountAccess::ReadWrite
    } else {
        MountAccess::ReadOnly
    };
    let mut mounts = vec![
        match spec.host_pid {
            Some(true) => mount(host("/proc"), "/proc", MountAccess::ReadWrite),
            _ => mount(MountSource::Proc, "/proc", MountAccess::ReadWrite),
        },
        mount(
            MountSource::Tmpfs(options.into()),
            "/dev",
            MountAccess::ReadWrite,
        ),
        mount(MountSource::Pts, "/dev/pts", MountAccess::ReadWrite),
        match spec.host_ipc {
            Some(true) => bind(Path::new("/dev/shm"), Path::new("/dev/shm")),
            _ => bind(pod.shm, Path::new("/dev/shm")),
        },
        match spec.host_network {
            // sysfs of the host's network namespace cannot be mounted in our user namespace, so bind the host's.
            Some(true) => mount(host("/sys"), "/sys", MountAccess::RecursiveReadOnly),
            _ => mount(MountSource::Sys, "/sys", sys_access),
        },
    ];
    if spec.host_ipc != Some(true) {
        mounts.push(mount(
            MountSource::Mqueue,
            "/dev/mqueue",
            MountAccess::ReadWrite,
        ));
    }
    if pod.has_cgroup {
        mounts.push(mount(MountSource::Cgroup, "/sys/fs/cgroup", sys_access));
    } else if spec.host_network != Some(true) && Path::new("/sys/fs/cgroup").is_dir() {
        mounts.push(mount(
            host("/sys/fs/cgroup"),
            "/sys/fs/cgroup",
            MountAccess::RecursiveReadOnly,
        ));
    }
    let privileged_devices = if security.privileged {
        PRIVILEGED_DEVICES
    } else {
        &[]
    };
    for name in DEVICES.iter().chain(privileged_devices) {
        let path = Path::new("/dev").join(name);
        if path.exists() {
            mounts.push(bind(&path, &path));
        }
    }
    mounts
}

fn etc_mounts(pod: &PodContext<'_>) -> Vec<MountPlan> {
    let files = ["hosts", "hostname", "resolv.conf"];
    files
        .map(|name| bind(&pod.etc.join(name), &Path::new("/etc").join(name)))
        .into()
}

/// The pod's volumes and its files in /etc, those nearer to the root first: a volume at /etc hides none of the files, and a volume
/// mounted on a file replaces it.
fn with_etc(volumes: Vec<MountPlan>, mut etc: Vec<MountPlan>) -> Vec<MountPlan> {
    etc.retain(|file| volumes.iter().all(|volume| volume.target != file.target));
    let mut all = volumes;
    all.append(&mut etc);
    all.sort_by_key(|mount| mount.target.components().count());
    all
}

/// The volumes that the image declares, those nearer to the root first. Mounts of the pod replace them.
fn declared_volumes(
    declared: &[String],
    mount_targets: &[PathBuf],
    dir: &Path,
) -> Vec<DeclaredVolume> {
    let mut targets: Vec<PathBuf> = declared.iter().map(|path| absolute(path)).collect();
    let is_plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    targets.retain(|target| {
        target.components().count() > 1
            && target.components().all(is_plain)
            && !mount_targets.contains(target)
    });
    targets.sort();
    targets.dedup();
    let volumes = targets.into_iter().enumerate();
    volumes
        .map(|(number, target)| DeclaredVolume {
            dir: dir.join("volumes").join(number.to_string()),
            target,
        })
        .collect()
}

/// The volume mounts of a container.
fn volume_mounts(
    pod: &PodContext<'_>,
    request: &StartRequest,
    variables: &HashMap<String, String>,
) -> Result<Vec<MountPlan>, Problem> {
    if request
        .container
        .volume_devices
        .as_ref()
        .is_some_and(|devices| !devices.is_empty())
    {
        return Err(Problem::new(
            "CreateContainerConfigError",
            "block volumes are not supported",
        ));
    }
    let mounts = request
        .container
        .volume_mounts
        .as_deref()
        .unwrap_or_default();
    mounts
        .iter()
        .map(|mount| volume_mount(pod, mount, variables))
        .collect()
}

fn volume_mount(
    pod: &PodContext<'_>,
    mount: &VolumeMount,
    variables: &HashMap<String, String>,
) -> Result<MountPlan, Problem> {
    let name = &mount.name;
    let volume = pod.volumes.get(name).ok_or_else(|| {
        Problem::new(
            "CreateContainerConfigError",
            format!("cannot find volume \"{name}\" to mount into container"),
        )
    })?;
    let sub_path = sub_path(mount, variables)?;
    let read_only = mount.read_only == Some(true);
    let (source, read_only) = match volume {
        ReadyVolume::Directory {
            path,
            read_only: always,
        } => (
            MountSource::Bind {
                path: path.clone(),
                sub_path,
            },
            read_only || *always,
        ),
        ReadyVolume::Layers(layers) => {
            let layers = layers.clone();
            (MountSource::Layers { layers, sub_path }, false)
        }
    };
    Ok(MountPlan {
        source,
        target: absolute(&mount.mount_path),
        access: match (read_only, is_recursive_read_only(mount)) {
            (false, _) => MountAccess::ReadWrite,
            (true, false) => MountAccess::ReadOnly,
            (true, true) => MountAccess::RecursiveReadOnly,
        },
        propagation: match mount.mount_propagation.as_deref() {
            Some("HostToContainer") => MountPropagation::HostToContainer,
            Some("Bidirectional") => MountPropagation::Bidirectional,
            _ => MountPropagation::None,
        },
    })
}

fn sub_path(
    mount: &VolumeMount,
    variables: &HashMap<String, String>,
) -> Result<Option<PathBuf>, Problem> {
    let text = match (&mount.sub_path, &mount.sub_path_expr) {
        (Some(path), _) if !path.is_empty() => path.clone(),
        (_, Some(expression)) if !expression.is_empty() => {
            let path = env::expand(expression, variables);
            if path.is_empty() || path.contains("$(") {
                let message = format!(
                    "failed to expand subPath for volumeMount \"{}\"",
                    mount.name
                );
                return Err(Problem::new("CreateContainerConfigError", message));
            }
            path
        }
        _ => return Ok(None),
    };
    let path = PathBuf::from(&text);
    let is_plain = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::CurDir);
    if !path.components().all(is_plain) {
        let message = format!(
            "failed to prepare subPath for volumeMount \"{}\": {text} leaves the volume",
            mount.name
        );
        return Err(Problem::new("CreateContainerConfigError", message));
    }
    Ok(Some(path))
}

fn absolute(path: &str) -> PathBuf {
    Path::new("/").join(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_at_etc_does_not_hide_pod_files() {
        let at = |target: &str| bind(Path::new("/from"), Path::new(target));
        let volumes = ["/deep/er/est", "/etc", "/etc/hostname", "/data"].map(at);
        let etc = ["/etc/hosts", "/etc/hostname"].map(at);
        let all = with_etc(volumes.into(), etc.into());
        let targets: Vec<&Path> = all.iter().map(|mount| mount.target.as_path()).collect();
        let expected = [
            "/etc",
            "/data",
            "/etc/hostname",
            "/etc/hosts",
            "/deep/er/est",
        ];
        assert_eq!(targets, expected.map(Path::new));
    }

    #[test]
    fn ptrace_is_removed_from_capabilities() {
        let names: Vec<_> = linux::credentials::capability_names()
            .map(str::to_owned)
            .collect();
        let all = without_ptrace(&names);
        let has = |name: &str| all.iter().any(|found| found == name);
        assert!(has("SYS_ADMIN") && has("KILL") && !has("SYS_PTRACE"));
        let some = ["SYS_PTRACE", "CHOWN"].map(str::to_owned);
        assert_eq!(without_ptrace(&some), ["CHOWN"]);
        assert!(without_ptrace(&[]).is_empty());
    }

    #[test]
    fn pod_mounts_replace_declared_volumes() {
        let declared = [
            "/var/lib/b/",
            "/data",
            "relative",
            "/",
            "/up/../x",
            "/data/",
        ];
        let declared = declared.map(str::to_owned);
        let found = declared_volumes(&declared, &["/data".into()], Path::new("/c"));
        let shown: Vec<String> = found
            .iter()
            .map(|volume| format!("{} {}", volume.dir.display(), volume.target.display()))
            .collect();
        assert_eq!(
            shown,
            ["/c/volumes/0 /relative", "/c/volumes/1 /var/lib/b/"]
        );
    }
}
