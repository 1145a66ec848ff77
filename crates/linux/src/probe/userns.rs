//! Probes for user and pid namespaces, and for mapping more than one id into them.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

use rustix::thread::UnshareFlags;

use super::{Found, at, subid};
use crate::mount;

/// Enters a new user namespace as its root, together with new namespaces of the kinds in `others`, and makes mounts private.
pub(super) fn enter(others: UnshareFlags) -> Result<(), String> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let flags = UnshareFlags::NEWUSER | UnshareFlags::NEWNS | others;
    // SAFETY: the file descriptor table, the one case that makes `unshare` unsafe, is not among the flags: callers
    // in this module pass namespaces only.
    unsafe { rustix::thread::unshare_unsafe(flags) }.map_err(at("unshare"))?;
    std::fs::write("/proc/self/setgroups", "deny").map_err(at("/proc/self/setgroups"))?;
    std::fs::write("/proc/self/uid_map", format!("0 {} 1", uid.as_raw())).map_err(at("uid_map"))?;
    std::fs::write("/proc/self/gid_map", format!("0 {} 1", gid.as_raw())).map_err(at("gid_map"))?;
    mount::keep_to_ourselves().map_err(at("making mounts private"))
}

/// Mounts a tmpfs too, because AppArmor on Ubuntu permits user namespaces but removes the capabilities in them.
pub(super) fn user_namespace(_: Option<&str>) -> Found {
    enter(UnshareFlags::NEWUTS | UnshareFlags::NEWIPC)?;
    super::mounts::scratch_tmpfs()?;
    rustix::system::sethostname(b"probe").map_err(at("sethostname"))?;
    Ok("entered, with mounts and a host name of its own".to_owned())
}

/// Mounts `/proc` for a new pid namespace. The kernel refuses if parts of the host's `/proc` are covered by other mounts.
pub(super) fn process_namespace(_: Option<&str>) -> Found {
    enter(UnshareFlags::NEWPID)?;
    let output = itself("helper-mount-proc")
        .stdin(Stdio::null())
        .output()
        .map_err(at("starting its first process"))?;
    super::parse_answer(&String::from_utf8_lossy(&output.stdout))
}

/// Runs as pid 1 of the namespace that [`process_namespace`] created.
pub(super) fn helper_mount_proc(_: Option<&str>) -> Found {
    if std::process::id() != 1 {
        return Err("not the first process of its namespace".to_owned());
    }
    let dir = super::mounts::scratch_tmpfs()?;
    let flags = rustix::mount::MountFlags::NOSUID | rustix::mount::MountFlags::NODEV;
    rustix::mount::mount("proc", &dir, "proc", flags, None::<&std::ffi::CStr>)
        .map_err(at("mounting /proc"))?;
    Ok("a process namespace with its own /proc".to_owned())
}

/// Maps the user's subordinate ids into the user namespace of a child with the setuid helpers, and reads the maps back.
pub(super) fn subordinate_ids(_: Option<&str>) -> Found {
    let uid = rustix::process::getuid().as_raw();
    let gid = rustix::process::getgid().as_raw();
    let ranges = subid::lookup(uid);
    let user_ids = ranges.user.first().ok_or("no subordinate user ids")?;
    let group_ids = ranges.group.first().ok_or("no subordinate group ids")?;

    let mut child = itself("helper-wait-for-map")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(at("starting a child"))?;
    let mapped = (|| {
        let stdout = child.stdout.take().ok_or("no pipe to the child")?;
        let mut line = String::new();
        BufReader::new(stdout.take(400))
            .read_line(&mut line)
            .map_err(at("child"))?;
        if line.trim() != "ready" {
            return Err(super::parse_answer(&line).err().unwrap_or_default());
        }
        map("newuidmap", child.id(), uid, user_ids)?;
        map("newgidmap", child.id(), gid, group_ids)?;
        let read = |name: &str| {
            std::fs::read_to_string(format!("/proc/{}/{name}", child.id())).unwrap_or_default()
        };
        if read("uid_map").lines().count() < 2 || read("gid_map").lines().count() < 2 {
            return Err("the helpers ran, but nothing was mapped".to_owned());
        }
        Ok(format!(
            "mapped {} user and {} group ids beside your own",
            user_ids.count, group_ids.count
        ))
    })();
    // The child exits when its stdin closes.
    drop(child.stdin.take());
    let _ = child.wait();
    mapped
}

/// Enters a user namespace without maps, and waits for the parent to write them.
pub(super) fn helper_wait_for_map(_: Option<&str>) -> Found {
    // SAFETY: as in `enter`: no descriptor table is unshared.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) }.map_err(at("unshare"))?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "ready")
        .and_then(|()| stdout.flush())
        .map_err(at("stdout"))?;
    let _ = std::io::stdin().read(&mut [0]);
    Ok("mapped".to_owned())
}

/// Runs `newuidmap PID 0 ID 1 1 START COUNT`, or `newgidmap` with the same arguments.
fn map(helper: &str, pid: u32, id: u32, range: &subid::Range) -> Result<(), String> {
    let numbers = [0, id, 1, 1, range.start, range.count].map(|n| n.to_string());
    let output = Command::new(helper)
        .arg(pid.to_string())
        .args(numbers)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(at(helper))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(words
        .lines()
        .last()
        .map_or_else(|| format!("{helper} failed"), str::to_owned))
}

/// A command that runs this program as another probe.
fn itself(probe: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["internal", "probe", probe]);
    command
}
