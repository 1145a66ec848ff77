//! Findings about storage for images and containers' root file systems.

use super::{FindingTemplate, needs_user_namespaces, probe_result};
use crate::commands::doctor::report::Finding;
use crate::commands::doctor::survey::{Survey, SurveyedDir};

/// Free space that suffices for a few images and containers.
const ENOUGH_FREE_BYTES: u64 = 5 << 30;

pub fn findings(survey: &Survey) -> Vec<Finding> {
    vec![
        scratch(survey),
        overlay(survey),
        fuse(survey),
        root_file_systems(survey),
        shared_home(survey),
        shared_program(survey),
    ]
}

fn scratch(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "local-scratch",
        area: "storage",
        title: "local scratch",
        with_it: "images are unpacked there once, and pods of this node share them",
        without_it: "no space for the file systems of pods, so no pods",
    };
    let Some((dir, fs)) = first_writable(survey) else {
        let candidates: Vec<String> = survey
            .scratch
            .iter()
            .map(|dir| dir.path.display().to_string())
            .collect();
        return template.missing(
            format!("no writable directory among {}", candidates.join(", ")),
            "point TMPDIR to a directory on a local disk that you can write to".to_owned(),
        );
    };
    let found = format!(
        "{} ({}, {} free, {})",
        dir.path.display(),
        fs.kind,
        size(fs.free),
        source_of(dir)
    );
    let local_disk = "point TMPDIR to a directory on a local disk, where the nodes have one";
    if fs.shared {
        template.degraded(
            format!("{found}: shared, so slow for many small files"),
            local_disk.to_owned(),
        )
    } else if fs.memory {
        template.degraded(
            format!("{found}: in memory, so images count against the job's memory"),
            local_disk.to_owned(),
        )
    } else if fs.free < ENOUGH_FREE_BYTES {
        template.degraded(
            format!("{found}: little space"),
            format!("free some of it, or {local_disk}"),
        )
    } else {
        template.ok(found)
    }
}

/// The first directory that can be written to.
fn first_writable(survey: &Survey) -> Option<(&SurveyedDir, &linux::probe::host::FileSystemInfo)> {
    survey
        .scratch
        .iter()
        .find(|dir| dir.writable)
        .and_then(|dir| Some((dir, dir.file_system.as_ref().ok()?)))
}

fn source_of(dir: &SurveyedDir) -> String {
    if dir.source.starts_with('/') {
        "the default".to_owned()
    } else {
        format!("from {}", dir.source)
    }
}

fn overlay(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "overlayfs",
        area: "storage",
        title: "overlayfs",
        with_it: "a container's file system is stacked from image layers in milliseconds, without a copy",
        without_it: "fuse-overlayfs stacks the layers or, where FUSE is missing too, every container gets a copy",
    };
    match &survey.overlay_on_scratch {
        Some(Ok(detail)) => template.ok(detail),
        Some(Err(detail)) => {
            let next = needs_user_namespaces(survey).unwrap_or_else(|| {
                "it needs Linux 5.11, the module overlay, and a scratch file system with extended attributes (ext4, xfs; tmpfs from Linux 6.6)"
                    .to_owned()
            });
            template.degraded(detail, next)
        }
        None => template.degraded("not run: no writable directory", None),
    }
}

fn fuse(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "fuse",
        area: "storage",
        title: "FUSE",
        with_it: "replaces overlayfs where the kernel can't stack layers",
        without_it: "nothing is lost while overlayfs works; otherwise every container gets a copy of its image",
    };
    match probe_result(survey, "fuse") {
        Ok(detail) => template.ok(detail),
        Err(detail) => {
            let next = needs_user_namespaces(survey).unwrap_or_else(|| {
                "an administrator can load the module fuse and run `chmod 0666 /dev/fuse`, which is its usual mode".to_owned()
            });
            template.degraded(detail, next)
        }
    }
}

/// The snapshotter that a node selects (`snapshotter.rs`).
fn root_file_systems(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "root-file-systems",
        area: "storage",
        title: "root file systems",
        with_it: "containers share the layers of their image and start at once",
        without_it: "containers start later, and use more memory or disk space",
    };
    let overlay = matches!(survey.overlay_on_scratch, Some(Ok(_)));
    let fuse = survey.fuse_overlayfs.is_some() && probe_result(survey, "fuse").is_ok();
    let snapshotter = match survey.snapshotter_choice.as_deref() {
        Some(choice) => choice,
        None if overlay => "overlay",
        None if fuse => "fuse-overlayfs",
        None => "copy",
    };
    let reason = match &survey.snapshotter_choice {
        Some(_) => ", as CORACLE_ROOTFS requests",
        None => "",
    };
    let next = match &survey.snapshotter_choice {
        Some(_) => "unset CORACLE_ROOTFS to select the best one automatically",
        None => {
            "see overlayfs above; where it does not work, fuse-overlayfs on the nodes' PATH avoids copies"
        }
    };
    match snapshotter {
        "overlay" => template.ok(format!("stacked by the kernel{reason}")),
        "fuse-overlayfs" => template.degraded(
            format!("stacked by fuse-overlayfs{reason}: each container has a process for it, and files are slower"),
            next.to_owned(),
        ),
        "copy" => template.degraded(
            format!("copied{reason}: each container needs the disk space of its image, and time to copy it"),
            next.to_owned(),
        ),
        other => template.missing(
            format!("CORACLE_ROOTFS is {other:?}, so no pods"),
            "it may be overlay, fuse-overlayfs or copy".to_owned(),
        ),
    }
}

fn shared_home(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "shared-home",
        area: "storage",
        title: "home directory",
        with_it: "downloaded images and Kubernetes itself are kept there, once for all nodes that see it",
        without_it: "each node fetches what it needs",
    };
    match &survey.home {
        Some(dir) => match &dir.file_system {
            Ok(_) if !dir.writable => template.degraded(
                format!("{} can't be written to", dir.path.display()),
                "free some of your quota, or point XDG_CACHE_HOME and XDG_DATA_HOME elsewhere"
                    .to_owned(),
            ),
            Ok(fs) => template.ok(format!(
                "{} ({}{}, {} free)",
                dir.path.display(),
                fs.kind,
                sharing(fs.shared),
                size(fs.free)
            )),
            Err(error) => template.degraded(format!("{}: {error}", dir.path.display()), None),
        },
        None => template.degraded(
            "HOME is not set",
            "set HOME to a directory of yours".to_owned(),
        ),
    }
}

fn shared_program(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "shared-program",
        area: "storage",
        title: "this program",
        with_it: "compute nodes that see it start it from there; a step carries a copy to the others",
        without_it: "a step carries a copy to each node",
    };
    match &survey.program {
        Some(dir) => match &dir.file_system {
            Ok(fs) => template.ok(format!(
                "in {} ({}{})",
                dir.path.display(),
                fs.kind,
                sharing(fs.shared)
            )),
            Err(error) => template.degraded(format!("{}: {error}", dir.path.display()), None),
        },
        None => template.degraded("its file can't be found", None),
    }
}

/// Types of file systems that are not known to be shared are not mentioned: some sites share them by other means.
fn sharing(shared: bool) -> &'static str {
    if shared { ", shared by nodes" } else { "" }
}

fn size(bytes: u64) -> String {
    const GIB: u64 = 1 << 30;
    if bytes >= 10 * GIB {
        format!("{} GiB", bytes / GIB)
    } else {
        format!("{} MiB", bytes >> 20)
    }
}
