//! A look at a container's subPaths before it is started, so that one that can't be had is told as upstream tells it.
//!
//! The container's own process finds them again, in a volume that others may have changed meanwhile.

use crate::inner::message::{MountPlan, MountSource};
use pod_protocol::Problem;

/// The same mounts, if all is well with them.
pub(super) async fn checked(
    mounts: Vec<MountPlan>,
    container: &str,
) -> Result<Vec<MountPlan>, Problem> {
    let name = container.to_owned();
    // A volume's server may take its time, and this thread is the pod's only one.
    let checking = tokio::task::spawn_blocking(move || check(&mounts, &name).map(|()| mounts));
    checking.await.unwrap_or_else(|error| {
        Err(Problem {
            reason: "CreateContainerConfigError".to_owned(),
            message: format!("subPaths of container {container:?}: {error}"),
        })
    })
}

/// Makes the directories that are missing; a problem is one of the container's configuration, and is tried again.
fn check(mounts: &[MountPlan], container: &str) -> Result<(), Problem> {
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
    use crate::inner::message::{Access, Propagation};

    #[test]
    fn a_link_out_of_the_volume_is_a_problem_of_the_configuration() {
        let volume = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc", volume.path().join("out")).unwrap();
        let mount = |sub: &str| MountPlan {
            source: MountSource::Bind {
                path: volume.path().to_owned(),
                sub_path: Some(sub.into()),
            },
            target: Path::new("/data").to_owned(),
            access: Access::Write,
            propagation: Propagation::None,
        };
        check(&[mount("new/dir")], "main").unwrap();
        assert!(volume.path().join("new/dir").is_dir());
        for sub in ["out", "out/ssh"] {
            let problem = check(&[mount(sub)], "main").unwrap_err();
            assert_eq!(problem.reason, "CreateContainerConfigError");
            let words = format!(
                "failed to prepare subPath for volumeMount /data of container \"main\": subPath {sub:?} is not within its volume"
            );
            assert_eq!(problem.message, words);
        }
    }
}
