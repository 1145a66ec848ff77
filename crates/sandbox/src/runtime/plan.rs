//! What a container's file system and first process will be, worked out before anything is done. Pure.

use std::collections::{BTreeMap, HashMap};
use std::path::{Component, Path, PathBuf};

use k8s_openapi::api::core::v1::{PodSpec, VolumeMount};

use super::env::{self, Addresses};
use super::security::{Security, security};
use crate::inner::message::{
    Access, ContainerPlan, ImageVolume, MountPlan, MountSource, ProcessPlan, Processes,
    Propagation, RootKind, RootPlan,
};
use crate::seams::{StartRequest, Volume};
use pod_protocol::Problem;

/// Device files that every container has.
const DEVICES: &[&str] = &["null", "zero", "full", "random", "urandom", "tty"];
/// And those that a privileged one has too, if the host lets the user have them.
const MORE_DEVICES: &[&str] = &["fuse", "kvm", "net/tun"];
const LINKS: &[(&str, &str)] = &[
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
    ("/dev/ptmx", "pts/ptmx"),
];
/// Of the kernel's own files, what containers should not see.
const MASKED: &[&str] = &[
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
/// And what they should not change.
const READ_ONLY: &[&str] = &[
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// What all containers of a pod have in common.
#[derive(Debug)]
pub struct PodPlace<'a> {
    /// The pod's spec.
    pub spec: &'a PodSpec,
    /// Its quality of service and memory decide how soon the kernel kills it.
    pub oom_score_adj: i32,
    /// Its host name.
    pub hostname: &'a str,
    /// Where files below /etc are: `hosts`, `hostname`, `resolv.conf`.
    pub etc: &'a Path,
    /// Its shared memory.
    pub shm: &'a Path,
    /// Its volumes.
    pub volumes: &'a BTreeMap<String, Volume>,
    /// Addresses.
    pub addresses: &'a Addresses,
    /// The user namespace has one id only.
    pub one_id: bool,
    /// Each container has a control group of its own.
    pub has_group: bool,
    /// How its image's layers become one.
    pub root: RootKind,
}

/// Works out one container. `dir` is where its changes are kept, `target` whose processes an ephemeral one joins.
pub fn container(
    place: &PodPlace<'_>,
    request: &StartRequest,
    dir: &Path,
    target: Option<u64>,
) -> Result<ContainerPlan, Problem> {
    let spec = place.spec;
    let image = &request.image.config;
    let security = security(spec, &request.container, image, place.one_id)?;
    let mut env = env::environment(image, &request.input.env, place.hostname, place.addresses);
    if request.container.tty == Some(true) {
        env::set_default(&mut env, "TERM", "xterm");
    }
    let known = env::own(&env, &request.input.env);
    let args = env::command(image, &request.container, &known);
    if args.is_empty() {
        return Err(problem("CreateContainerError", "no command specified"));
    }
    let own_context = request.container.security_context.as_ref();
    let capabilities = match (&place.root, spec.host_pid) {
        // With it, container root would look into the processes that show root file systems, and see the host's.
        (RootKind::At(_), Some(true)) => without_tracing(&security.capabilities),
        _ => security.capabilities.clone(),
    };
    let mut mounts = system_mounts(place, &security);
    let user_mounts = volume_mounts(place, request, &known)?;
    let taken: Vec<PathBuf> = user_mounts
        .iter()
        .map(|mount| mount.target.clone())
        .collect();
    mounts.extend(with_etc(user_mounts, etc_mounts(place)));
    mounts.push(bind(
        &dir.join("termination-log"),
        Path::new(termination_path(request)),
    ));
    let masked = |paths: &[&str]| -> Vec<PathBuf> {
        let shown = security.unmasked || (spec.host_pid == Some(true) && paths == READ_ONLY);
        paths.iter().filter(|_| !shown).map(PathBuf::from).collect()
    };
    let cwd = request
        .container
        .working_dir
        .clone()
        .filter(|dir| !dir.is_empty());
    Ok(ContainerPlan {
        root: RootPlan {
            layers: request.image.layers.clone(),
            upper: dir.join("upper"),
            kind: place.root.clone(),
            read_only: own_context.and_then(|own| own.read_only_root_filesystem) == Some(true),
        },
        mounts,
        image_volumes: image_volumes(&request.image.config.volumes, &taken, dir),
        links: LINKS
            .iter()
            .map(|(from, to)| (PathBuf::from(from), PathBuf::from(to)))
            .collect(),
        masked: masked(MASKED),
        read_only_paths: masked(READ_ONLY),
        processes: match target {
            Some(target) => Processes::Of(target),
            None if spec.host_pid == Some(true) || spec.share_process_namespace == Some(true) => {
                Processes::Inner
            }
            None => Processes::Own,
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
            oom_score_adj: place.oom_score_adj,
            group: None,
        },
    })
}

fn without_tracing(capabilities: &[String]) -> Vec<String> {
    let all = capabilities.iter().any(|name| name == "ALL");
    let names = linux::credentials::capability_names().map(str::to_owned);
    let kept = names.filter(|name| all || capabilities.contains(name));
    kept.filter(|name| name != "SYS_PTRACE").collect()
}

/// Where a container leaves its last words.
pub fn termination_path(request: &StartRequest) -> &str {
    let path = request.container.termination_message_path.as_deref();
    path.filter(|path| !path.is_empty())
        .unwrap_or("/dev/termination-log")
}

fn mount(source: MountSource, target: &str, access: Access) -> MountPlan {
    MountPlan {
        source,
        target: target.into(),
        access,
        propagation: Propagation::None,
    }
}

fn bind(path: &Path, target: &Path) -> MountPlan {
    MountPlan {
        source: MountSource::Bind {
            path: path.to_owned(),
            sub_path: None,
        },
        target: target.to_owned(),
        access: Access::Write,
        propagation: Propagation::None,
    }
}

/// What the kernel shows, and devices.
fn system_mounts(place: &PodPlace<'_>, security: &Security) -> Vec<MountPlan> {
    let spec = place.spec;
    let host = |path: &str| MountSource::Bind {
        path: path.into(),
        sub_path: None,
    };
    let options = [("mode", "755"), ("size", "65536k")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
    let sys_access = if security.privileged {
        Access::Write
    } else {
        Access::Read
    };
    let mut mounts = vec![
        match spec.host_pid {
            Some(true) => mount(host("/proc"), "/proc", Access::Write),
            _ => mount(MountSource::Proc, "/proc", Access::Write),
        },
        mount(MountSource::Tmpfs(options.into()), "/dev", Access::Write),
        mount(MountSource::Pts, "/dev/pts", Access::Write),
        match spec.host_ipc {
            Some(true) => bind(Path::new("/dev/shm"), Path::new("/dev/shm")),
            _ => bind(place.shm, Path::new("/dev/shm")),
        },
        match spec.host_network {
            // The host's network isn't ours, so neither is a view of its devices.
            Some(true) => mount(host("/sys"), "/sys", Access::ReadAll),
            _ => mount(MountSource::Sys, "/sys", sys_access),
        },
    ];
    if spec.host_ipc != Some(true) {
        mounts.push(mount(MountSource::Mqueue, "/dev/mqueue", Access::Write));
    }
    if place.has_group {
        mounts.push(mount(MountSource::Cgroup, "/sys/fs/cgroup", sys_access));
    } else if spec.host_network != Some(true) && Path::new("/sys/fs/cgroup").is_dir() {
        mounts.push(mount(
            host("/sys/fs/cgroup"),
            "/sys/fs/cgroup",
            Access::ReadAll,
        ));
    }
    let more = if security.privileged {
        MORE_DEVICES
    } else {
        &[]
    };
    for name in DEVICES.iter().chain(more) {
        let path = Path::new("/dev").join(name);
        if path.exists() {
            mounts.push(bind(&path, &path));
        }
    }
    mounts
}

fn etc_mounts(place: &PodPlace<'_>) -> Vec<MountPlan> {
    let files = ["hosts", "hostname", "resolv.conf"];
    files
        .map(|name| bind(&place.etc.join(name), &Path::new("/etc").join(name)))
        .into()
}

/// The pod's volumes and its files below /etc, those nearer to the root first: a volume at /etc hides none of the files, and one
/// in the place of a file is that file.
fn with_etc(volumes: Vec<MountPlan>, mut etc: Vec<MountPlan>) -> Vec<MountPlan> {
    etc.retain(|file| volumes.iter().all(|volume| volume.target != file.target));
    let mut all = volumes;
    all.append(&mut etc);
    all.sort_by_key(|mount| mount.target.components().count());
    all
}

/// What the image declares as volumes, those nearer to the root first. Where the pod mounts something, that is it.
fn image_volumes(declared: &[String], taken: &[PathBuf], dir: &Path) -> Vec<ImageVolume> {
    let mut targets: Vec<PathBuf> = declared.iter().map(|path| absolute(path)).collect();
    let plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    targets.retain(|target| {
        target.components().count() > 1 && target.components().all(plain) && !taken.contains(target)
    });
    targets.sort();
    targets.dedup();
    let volumes = targets.into_iter().enumerate();
    volumes
        .map(|(number, target)| ImageVolume {
            dir: dir.join("volumes").join(number.to_string()),
            target,
        })
        .collect()
}

/// The pod's volumes.
fn volume_mounts(
    place: &PodPlace<'_>,
    request: &StartRequest,
    known: &HashMap<String, String>,
) -> Result<Vec<MountPlan>, Problem> {
    if request
        .container
        .volume_devices
        .as_ref()
        .is_some_and(|devices| !devices.is_empty())
    {
        return Err(problem(
            "CreateContainerConfigError",
            "block volumes are not supported",
        ));
    }
    let wanted = request
        .container
        .volume_mounts
        .as_deref()
        .unwrap_or_default();
    wanted
        .iter()
        .map(|wanted| volume_mount(place, wanted, known))
        .collect()
}

fn volume_mount(
    place: &PodPlace<'_>,
    wanted: &VolumeMount,
    known: &HashMap<String, String>,
) -> Result<MountPlan, Problem> {
    let name = &wanted.name;
    let volume = place.volumes.get(name).ok_or_else(|| {
        problem(
            "CreateContainerConfigError",
            format!("cannot find volume \"{name}\" to mount into container"),
        )
    })?;
    let sub_path = sub_path(wanted, known)?;
    let read_only = wanted.read_only == Some(true);
    let (source, read_only) = match volume {
        Volume::Directory {
            path,
            read_only: always,
        } => (
            MountSource::Bind {
                path: path.clone(),
                sub_path,
            },
            read_only || *always,
        ),
        Volume::Layers(layers) => {
            let layers = layers.clone();
            (MountSource::Layers { layers, sub_path }, false)
        }
    };
    let recursive = matches!(
        wanted.recursive_read_only.as_deref(),
        Some("Enabled" | "IfPossible")
    );
    Ok(MountPlan {
        source,
        target: absolute(&wanted.mount_path),
        access: match (read_only, recursive) {
            (false, _) => Access::Write,
            (true, false) => Access::Read,
            (true, true) => Access::ReadAll,
        },
        propagation: match wanted.mount_propagation.as_deref() {
            Some("HostToContainer") => Propagation::HostToContainer,
            Some("Bidirectional") => Propagation::Bidirectional,
            _ => Propagation::None,
        },
    })
}

fn sub_path(
    wanted: &VolumeMount,
    known: &HashMap<String, String>,
) -> Result<Option<PathBuf>, Problem> {
    let text = match (&wanted.sub_path, &wanted.sub_path_expr) {
        (Some(path), _) if !path.is_empty() => path.clone(),
        (_, Some(expression)) if !expression.is_empty() => {
            let path = env::expand(expression, known);
            if path.is_empty() || path.contains("$(") {
                let message = format!(
                    "failed to expand subPath for volumeMount \"{}\"",
                    wanted.name
                );
                return Err(problem("CreateContainerConfigError", message));
            }
            path
        }
        _ => return Ok(None),
    };
    let path = PathBuf::from(&text);
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::CurDir);
    if !path.components().all(plain) {
        let message = format!(
            "failed to prepare subPath for volumeMount \"{}\": {text} leaves the volume",
            wanted.name
        );
        return Err(problem("CreateContainerConfigError", message));
    }
    Ok(Some(path))
}

fn absolute(path: &str) -> PathBuf {
    Path::new("/").join(path)
}

fn problem(reason: &str, message: impl Into<String>) -> Problem {
    Problem {
        reason: reason.to_owned(),
        message: message.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_hides_no_file_below_etc_but_that_in_its_own_place() {
        let at = |target: &str| bind(Path::new("/from"), Path::new(target));
        let volumes = ["/deep/er/est", "/etc", "/etc/hostname", "/data"].map(at);
        let etc = ["/etc/hosts", "/etc/hostname"].map(at);
        let all = with_etc(volumes.into(), etc.into());
        let targets: Vec<&Path> = all.iter().map(|mount| mount.target.as_path()).collect();
        let wanted = [
            "/etc",
            "/data",
            "/etc/hostname",
            "/etc/hosts",
            "/deep/er/est",
        ];
        assert_eq!(targets, wanted.map(Path::new));
    }

    #[test]
    fn tracing_is_taken_from_any_set_of_capabilities() {
        let all = without_tracing(&["ALL".to_owned()]);
        let has = |name: &str| all.iter().any(|found| found == name);
        assert!(has("SYS_ADMIN") && has("KILL") && !has("SYS_PTRACE"));
        let some = ["SYS_PTRACE", "CHOWN"].map(str::to_owned);
        assert_eq!(without_tracing(&some), ["CHOWN"]);
        assert!(without_tracing(&[]).is_empty());
    }

    #[test]
    fn volumes_of_an_image_give_way_to_those_of_the_pod() {
        let declared = [
            "/var/lib/b/",
            "/data",
            "relative",
            "/",
            "/up/../x",
            "/data/",
        ];
        let declared = declared.map(str::to_owned);
        let found = image_volumes(&declared, &["/data".into()], Path::new("/c"));
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
