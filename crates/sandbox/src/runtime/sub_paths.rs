//! Creates a container's subPaths before its start, so that an invalid one is reported with upstream's reason.
//!
//! The container's own process resolves them again, because other containers may have changed the volume meanwhile.

use pod_protocol::Problem;

use super::inner::message::{MountPlan, MountSource};

/// Creates missing directories of subPaths, and returns the mounts.
pub(super) async fn create(
    mounts: Vec<MountPlan>,
    container: &str,
) -> Result<Vec<MountPlan>, Problem> {
    let name = container.to_owned();
    // A file server may block, and the sandbox has one thread.
    let creating =
        tokio::task::spawn_blocking(move || create_blocking(&mounts, &name).map(|()| mounts));
    creating.await.unwrap_or_else(|error| {
        Err(Problem::new(
            "CreateContainerConfigError",
            format!("cannot create subPaths of container {container:?}: {error}"),
        ))
    })
}

fn create_blocking(mounts: &[MountPlan], container: &str) -> Result<(), Problem> {
    for mount in mounts {
        let MountSource::Bind {
            path,
            sub_path: Some(sub),
        } = &mount.source
        else {
            continue;
        };
        linux::subpath::open(path, &sub.to_string_lossy(), true).map_err(|error| Problem {
            reason: "CreateContainerConfigError".to_owned(),
            message: format!(
                "failed to prepare subPath for volumeMount {} of container {container:?}: {error}",
                mount.target.display()
            ),
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::runtime::inner::message::{MountAccess, MountPropagation};

    #[test]
    fn sub_path_outside_volume_is_config_error() {
        let volume = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc", volume.path().join("out")).unwrap();
        let mount = |sub: &str| MountPlan {
            source: MountSource::Bind {
                path: volume.path().to_owned(),
                sub_path: Some(sub.into()),
            },
            target: Path::new("/data").to_owned(),
            access: MountAccess::ReadWrite,
            propagation: MountPropagation::None,
        };
        create_blocking(&[mount("new/dir")], "main").unwrap();
        assert!(volume.path().join("new/dir").is_dir());
        for sub in ["out", "out/ssh"] {
            let problem = create_blocking(&[mount(sub)], "main").unwrap_err();
            assert_eq!(problem.reason, "CreateContainerConfigError");
            let expected = format!(
                "failed to prepare subPath for volumeMount /data of container \"main\": subPath {sub:?} is not within its volume"
            );
            assert_eq!(problem.message, expected);
        }
    }
}
