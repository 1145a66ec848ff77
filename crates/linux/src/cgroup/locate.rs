//! Finds the directory of a process's cgroup from `/proc`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::mountinfo;

/// Possible directories of the cgroup, from `/proc/self/cgroup` and `/proc/self/mountinfo`: one for each mount that contains it.
pub(super) fn candidate_dirs(membership: &str, mountinfo: &str) -> Vec<PathBuf> {
    let Some(own) = membership
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .map(Path::new)
    else {
        return Vec::new();
    };
    mountinfo
        .lines()
        .filter_map(|line| {
            // Fields: id parent major:minor root mount-point options … - type source super-options.
            let (fields, kind) = line.split_once(" - ")?;
            let mut fields = fields.split(' ').skip(3);
            let (root, point) = (unescape(fields.next()?), unescape(fields.next()?));
            if !kind.starts_with("cgroup2 ") {
                return None;
            }
            // A mount may contain only a part of the hierarchy; paths outside of it (`/../..`) are not visible to us.
            let below = own.strip_prefix(&root).ok()?;
            let outside = below.components().any(|part| part.as_os_str() == "..");
            (!outside).then(|| point.join(below))
        })
        .collect()
}

fn unescape(field: &str) -> PathBuf {
    PathBuf::from(OsString::from_vec(mountinfo::unescape(field.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dirs(membership: &str, mountinfo: &str) -> Vec<String> {
        let paths = candidate_dirs(membership, mountinfo).into_iter();
        paths.map(|path| path.display().to_string()).collect()
    }

    #[test]
    fn mount_of_the_whole_hierarchy() {
        let mounts = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(
            dirs(
                "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
                mounts
            ),
            ["/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/user/task_0"]
        );
    }

    #[test]
    fn hybrid_mount_beside_version_one() {
        let mounts = "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      32 23 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let of = |membership| dirs(membership, mounts);
        assert_eq!(of("4:memory:/a\n0::/b\n"), ["/sys/fs/cgroup/unified/b"]);
        assert!(of("4:memory:/a\n").is_empty());
    }

    #[test]
    fn mount_of_a_part_of_the_hierarchy() {
        let mounts = "31 23 0:27 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n\
                      32 23 0:27 / /my\\040groups rw - cgroup2 cgroup rw\n";
        assert_eq!(
            dirs("0::/docker/abc/x\n", mounts),
            ["/sys/fs/cgroup/x", "/my groups/docker/abc/x"]
        );
        assert_eq!(dirs("0::/user\n", mounts), ["/my groups/user"]);
        assert!(dirs("0::/../other\n", mounts).is_empty());
    }

    #[test]
    fn malformed_input_does_not_panic() {
        for text in [
            "",
            "\n",
            "0::",
            "0::/",
            " - cgroup2 ",
            "1 2 3 \\ \\9 - cgroup2 x",
        ] {
            let _ = candidate_dirs(text, text);
            let _ = candidate_dirs("0::/a", text);
        }
    }
}
