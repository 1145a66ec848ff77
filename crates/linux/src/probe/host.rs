//! Facts about a host: kernel, sysctls, file systems, cgroups. [`is_writable`] and [`cgroup`] create and remove a test file or
//! cgroup; the other functions only read.

use std::path::{Path, PathBuf};

use crate::cgroup::Cgroup;

/// The kernel's release string and its comparable version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// As `uname -r` prints it.
    pub release: String,
    /// Major and minor.
    pub version: (u32, u32),
}

/// The running kernel.
pub fn kernel() -> Kernel {
    let release = rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned();
    let version = parse_release(&release);
    Kernel { release, version }
}

fn parse_release(release: &str) -> (u32, u32) {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// The value of a sysctl such as `user.max_user_namespaces`; `None` if the kernel does not have it.
pub fn sysctl(name: &str) -> Option<String> {
    let path = Path::new("/proc/sys").join(name.replace('.', "/"));
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

/// The file system that holds a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSystemInfo {
    /// Its name, or its magic number if the name is unknown.
    pub kind: String,
    /// Whether the file system is probably visible on other nodes.
    pub shared: bool,
    /// Whether it is in memory, so that files count against the memory of the job.
    pub memory: bool,
    /// Bytes available to an unprivileged user.
    pub free: u64,
}

/// Describes the file system that holds `path`.
pub fn file_system(path: &Path) -> std::io::Result<FileSystemInfo> {
    let stat = rustix::fs::statfs(path)?;
    let (kind, class) = classify_magic(stat.f_type as u64 & 0xffff_ffff);
    Ok(FileSystemInfo {
        kind,
        shared: class == FileSystemClass::Shared,
        memory: class == FileSystemClass::Memory,
        free: stat
            .f_bavail
            .saturating_mul(u64::try_from(stat.f_bsize).unwrap_or(0)),
    })
}

#[derive(Debug, PartialEq, Eq)]
enum FileSystemClass {
    Shared,
    Memory,
    Other,
}

/// The name and class of a file system. The magic numbers are from linux/magic.h and the sources of the file systems.
fn classify_magic(magic: u64) -> (String, FileSystemClass) {
    let (name, class) = match magic {
        0x6969 => ("nfs", FileSystemClass::Shared),
        0x0bd0_0bd0 => ("lustre", FileSystemClass::Shared),
        0x4750_4653 => ("gpfs", FileSystemClass::Shared),
        0x1983_0326 => ("beegfs", FileSystemClass::Shared),
        0x00c3_6400 => ("ceph", FileSystemClass::Shared),
        0xff53_4d42 | 0xfe53_4d42 => ("cifs", FileSystemClass::Shared),
        0x5346_414f => ("afs", FileSystemClass::Shared),
        0x0102_1997 => ("9p", FileSystemClass::Shared),
        0x0bad_1dea => ("orangefs", FileSystemClass::Shared),
        0xaad7_aaea => ("panfs", FileSystemClass::Shared),
        0x0102_1994 => ("tmpfs", FileSystemClass::Memory),
        0x8584_58f6 => ("ramfs", FileSystemClass::Memory),
        0xef53 => ("ext4", FileSystemClass::Other),
        0x5846_5342 => ("xfs", FileSystemClass::Other),
        0x9123_683e => ("btrfs", FileSystemClass::Other),
        0x2fc1_2fc1 => ("zfs", FileSystemClass::Other),
        0x794c_7630 => ("overlay", FileSystemClass::Other),
        0x6573_5546 => ("fuse", FileSystemClass::Other),
        0x7371_7368 => ("squashfs", FileSystemClass::Other),
        other => return (format!("unknown (0x{other:x})"), FileSystemClass::Other),
    };
    (name.to_owned(), class)
}

/// Whether a file can be created in a directory. Creates one, because modes, quotas and read-only mounts can all prevent it.
pub fn is_writable(dir: &Path) -> bool {
    use std::os::unix::fs::OpenOptionsExt;
    // O_TMPFILE needs no clean-up; file systems without it (NFS) get a named file.
    let nameless = std::fs::OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .open(dir);
    if nameless.is_ok() {
        return true;
    }
    let named = dir.join(format!(".coracle-probe-{}", std::process::id()));
    let created = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&named)
        .is_ok();
    if created {
        let _ = std::fs::remove_file(&named);
    }
    created
}

/// The `hidepid` option of `/proc`; `None` if all processes are visible.
pub fn hidepid() -> Option<String> {
    parse_hidepid(&std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
}

fn parse_hidepid(mountinfo: &str) -> Option<String> {
    // Fields: id parent major:minor root mount-point options … - type source super-options; the last mount on /proc is the
    // visible one.
    let mut lines = mountinfo
        .lines()
        .filter(|line| line.split(' ').nth(4) == Some("/proc"));
    let options = lines.next_back()?.rsplit(' ').next()?;
    let value = options
        .split(',')
        .find_map(|option| option.strip_prefix("hidepid="))?;
    (!matches!(value, "0" | "off")).then(|| value.to_owned())
}

/// The cgroup (version 2) of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupInfo {
    /// Its directory.
    pub path: PathBuf,
    /// The controllers that it can enable for child cgroups.
    pub controllers: Vec<String>,
    /// Whether it is delegated to us: we can create child cgroups (tested), move processes and enable controllers.
    pub delegated: bool,
}

/// Finds the cgroup of this process; `None` if the host has only version 1.
pub fn cgroup() -> Option<CgroupInfo> {
    let cgroup = Cgroup::own()?;
    let child = cgroup.child(&format!("coracle-probe-{}", std::process::id()));
    // Moving processes and enabling controllers cannot be tried while this process is in the cgroup, so check the permissions.
    let delegated = cgroup.is_delegated() && child.create().is_ok();
    if delegated {
        let _ = child.remove();
    }
    Some(CgroupInfo {
        path: cgroup.path().to_owned(),
        controllers: cgroup.controllers(),
        delegated,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_are_parsed() {
        assert_eq!(parse_release("6.18.44-fc-v445"), (6, 18));
        assert_eq!(parse_release("4.18.0-553.el8_10.x86_64"), (4, 18));
        assert_eq!(parse_release("odd"), (0, 0));
    }

    #[test]
    fn last_proc_mount_decides_hidepid() {
        let line = |options| format!("22 1 0:21 / /proc rw,nosuid - proc proc rw,{options}\n");
        assert_eq!(parse_hidepid(&line("hidepid=2")).as_deref(), Some("2"));
        assert_eq!(
            parse_hidepid(&(line("hidepid=invisible") + &line("gid=5"))),
            None
        );
        assert_eq!(parse_hidepid(&line("hidepid=off")), None);
        assert_eq!(parse_hidepid("garbage\n"), None);
    }

    #[test]
    fn file_systems_are_classified_by_magic_number() {
        assert_eq!(
            classify_magic(0x6969),
            ("nfs".into(), FileSystemClass::Shared)
        );
        assert_eq!(
            classify_magic(0x1234),
            ("unknown (0x1234)".into(), FileSystemClass::Other)
        );
        assert!(file_system(Path::new("/")).is_ok());
        assert!(file_system(Path::new("/no/such/path")).is_err());
    }
}
