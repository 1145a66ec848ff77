//! Findings about storage for images and containers' root file systems.

use super::{Topic, answer, needs_user_namespaces};
use crate::commands::doctor::report::Finding;
use crate::commands::doctor::survey::{Directory, Survey};

/// Free space that suffices for a few images and containers.
const ROOM: u64 = 5 << 30;

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
    let topic = Topic {
        id: "local-scratch",
        area: "storage",
        title: "local scratch",
        with_it: "images are unpacked there once, and pods of this node share them",
        without_it: "no room for the file systems of pods, so no pods",
    };
    let Some((dir, fs)) = chosen(survey) else {
        let tried: Vec<String> = survey
            .scratch
            .iter()
            .map(|dir| dir.path.display().to_string())
            .collect();
        return topic.missing(
            format!("nothing writable among {}", tried.join(", ")),
            "point TMPDIR to a directory on a local disk that you can write to".to_owned(),
        );
    };
    let found = format!(
        "{} ({}, {} free, {})",
        dir.path.display(),
        fs.kind,
        size(fs.free),
        named_by(dir)
    );
    let elsewhere = "point TMPDIR to a directory on a local disk, where the nodes have one";
    if fs.shared {
        topic.degraded(
            format!("{found}: shared, so slow for many small files"),
            elsewhere.to_owned(),
        )
    } else if fs.memory {
        topic.degraded(
            format!("{found}: in memory, so images count against the job's memory"),
            elsewhere.to_owned(),
        )
    } else if fs.free < ROOM {
        topic.degraded(
            format!("{found}: little room"),
            format!("free some of it, or {elsewhere}"),
        )
    } else {
        topic.ok(found)
    }
}

/// The first directory that can be written to.
fn chosen(survey: &Survey) -> Option<(&Directory, &linux::probe::host::FileSystem)> {
    survey
        .scratch
        .iter()
        .find(|dir| dir.writable)
        .and_then(|dir| Some((dir, dir.file_system.as_ref().ok()?)))
}

fn named_by(dir: &Directory) -> String {
    if dir.source.starts_with('/') {
        "the usual place".to_owned()
    } else {
        format!("from {}", dir.source)
    }
}

fn overlay(survey: &Survey) -> Finding {
    let topic = Topic {
        id: "overlayfs",
        area: "storage",
        title: "overlayfs",
        with_it: "a container's file system is stacked from image layers in milliseconds, without a copy",
        without_it: "fuse-overlayfs stacks the layers or, where FUSE is missing too, every container gets a copy",
    };
    match &survey.overlay_on_scratch {
        Some(Ok(words)) => topic.ok(words),
        Some(Err(words)) => {
            let next = needs_user_namespaces(survey).unwrap_or_else(|| {
                "it needs Linux 5.11, the module overlay, and a scratch file system with extended attributes (ext4, xfs; tmpfs from Linux 6.6)"
                    .to_owned()
            });
            topic.degraded(words, next)
        }
        None => topic.degraded("not tried: nothing to write to", None),
    }
}

fn fuse(survey: &Survey) -> Finding {
    let topic = Topic {
        id: "fuse",
        area: "storage",
        title: "FUSE",
        with_it: "stands in for overlayfs where the kernel can't stack layers",
        without_it: "nothing is lost while overlayfs works; otherwise every container gets a copy of its image",
    };
    match answer(survey, "fuse") {
        Ok(words) => topic.ok(words),
        Err(words) => {
            let next = needs_user_namespaces(survey).unwrap_or_else(|| {
                "an administrator can load the module fuse and run `chmod 0666 /dev/fuse`, which is its usual mode".to_owned()
            });
            topic.degraded(words, next)
        }
    }
}

/// The stacking method that a node chooses (`node/stacking.rs`).
fn root_file_systems(survey: &Survey) -> Finding {
    let topic = Topic {
        id: "root-file-systems",
        area: "storage",
        title: "root file systems",
        with_it: "containers share the layers of their image and start at once",
        without_it: "containers start later, and take memory or room of their own",
    };
    let overlay = matches!(survey.overlay_on_scratch, Some(Ok(_)));
    let fuse = survey.fuse_overlayfs.is_some() && answer(survey, "fuse").is_ok();
    let used = match survey.wanted_stacking.as_deref() {
        Some(wanted) => wanted,
        None if overlay => "overlay",
        None if fuse => "fuse-overlayfs",
        None => "copy",
    };
    let by = match &survey.wanted_stacking {
        Some(_) => ", because CORACLE_ROOTFS says so",
        None => "",
    };
    let next = match &survey.wanted_stacking {
        Some(_) => "unset CORACLE_ROOTFS to have the best way chosen",
        None => {
            "see overlayfs above; where it can't be had, fuse-overlayfs on the nodes' PATH avoids copies"
        }
    };
    match used {
        "overlay" => topic.ok(format!("stacked by the kernel{by}")),
        "fuse-overlayfs" => topic.degraded(
            format!("stacked by fuse-overlayfs{by}: each container has a process for it, and files are slower"),
            next.to_owned(),
        ),
        "copy" => topic.degraded(
            format!("copied{by}: each container takes the room of its image, and the time to copy it"),
            next.to_owned(),
        ),
        other => topic.missing(
            format!("CORACLE_ROOTFS is {other:?}, so no pods"),
            "it may be overlay, fuse-overlayfs or copy".to_owned(),
        ),
    }
}

fn shared_home(survey: &Survey) -> Finding {
    let topic = Topic {
        id: "shared-home",
        area: "storage",
        title: "home directory",
        with_it: "downloaded images and Kubernetes itself are kept once for all nodes",
        without_it: "each node fetches what it needs; nothing has to be shared",
    };
    match &survey.home {
        Some(dir) => match &dir.file_system {
            Ok(_) if !dir.writable => topic.degraded(
                format!("{} can't be written to", dir.path.display()),
                "free some of your quota, or point XDG_CACHE_HOME and XDG_DATA_HOME elsewhere"
                    .to_owned(),
            ),
            Ok(fs) => topic.ok(format!(
                "{} ({}, {}, {} free)",
                dir.path.display(),
                fs.kind,
                sharing(fs.shared),
                size(fs.free)
            )),
            Err(error) => topic.degraded(format!("{}: {error}", dir.path.display()), None),
        },
        None => topic.degraded(
            "HOME is not set",
            "set HOME to a directory of yours".to_owned(),
        ),
    }
}

fn shared_program(survey: &Survey) -> Finding {
    let topic = Topic {
        id: "shared-program",
        area: "storage",
        title: "this program",
        with_it: "compute nodes start it from there",
        without_it: "a step carries a copy to each node where it is not visible",
    };
    match &survey.program {
        Some(dir) => match &dir.file_system {
            Ok(fs) => topic.ok(format!(
                "in {} ({}, {})",
                dir.path.display(),
                fs.kind,
                sharing(fs.shared)
            )),
            Err(error) => topic.degraded(format!("{}: {error}", dir.path.display()), None),
        },
        None => topic.degraded("its file can't be found", None),
    }
}

fn sharing(shared: bool) -> &'static str {
    if shared { "shared" } else { "local or unknown" }
}

fn size(bytes: u64) -> String {
    const GIB: u64 = 1 << 30;
    if bytes >= 10 * GIB {
        format!("{} GiB", bytes / GIB)
    } else {
        format!("{} MiB", bytes >> 20)
    }
}
