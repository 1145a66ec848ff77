//! Probes for user and pid namespaces, and for mapping more than one id into them.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

use rustix::thread::UnshareFlags;

use super::{ProbeReport, failed, subid};
use crate::mount;

/// Enters a new user namespace as its root, together with new namespaces of the kinds in `others`, and makes mounts private.
pub(super) fn enter(others: UnshareFlags) -> Result<(), String> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let flags = UnshareFlags::NEWUSER | UnshareFlags::NEWNS | others;
    // SAFETY: unsharing the file descriptor table would be unsafe. Callers pass only namespace flags.
    unsafe { rustix::thread::unshare_unsafe(flags) }.map_err(failed("unshare"))?;
    std::fs::write("/proc/self/setgroups", "deny").map_err(failed("/proc/self/setgroups"))?;
    std::fs::write("/proc/self/uid_map", format!("0 {} 1", uid.as_raw()))
        .map_err(failed("uid_map"))?;
    std::fs::write("/proc/self/gid_map", format!("0 {} 1", gid.as_raw()))
        .map_err(failed("gid_map"))?;
    mount::make_all_private().map_err(failed("making mounts private"))
}

/// Mounts a tmpfs too, because AppArmor on Ubuntu permits user namespaces but removes the capabilities in them.
pub(super) fn user_namespace(_: Option<&str>) -> ProbeReport {
    enter(UnshareFlags::NEWUTS | UnshareFlags::NEWIPC)?;
    super::mounts::scratch_tmpfs()?;
    rustix::system::sethostname(b"probe").map_err(failed("sethostname"))?;
    Ok("entered, with private mounts and its own host name".to_owned())
}

/// Mounts `/proc` for a new pid namespace. The kernel refuses if parts of the host's `/proc` are covered by other mounts.
pub(super) fn process_namespace(_: Option<&str>) -> ProbeReport {
    enter(UnshareFlags::NEWPID)?;
    let output = probe_command("helper-mount-proc")
        .stdin(Stdio::null())
        .output()
        .map_err(failed("starting its first process"))?;
    super::parse_output(&String::from_utf8_lossy(&output.stdout))
}

/// Runs as pid 1 of the namespace that [`process_namespace`] created.
pub(super) fn helper_mount_proc(_: Option<&str>) -> ProbeReport {
    if std::process::id() != 1 {
        return Err("not the first process of its namespace".to_owned());
    }
    let dir = super::mounts::scratch_tmpfs()?;
    let flags = rustix::mount::MountFlags::NOSUID | rustix::mount::MountFlags::NODEV;
    rustix::mount::mount("proc", &dir, "proc", flags, None::<&std::ffi::CStr>)
        .map_err(failed("mounting /proc"))?;
    Ok("a process namespace with its own /proc".to_owned())
}

/// Maps the user's subordinate ids into the user namespace of a child with the setuid helpers, and reads the maps back.
pub(super) fn subordinate_ids(_: Option<&str>) -> ProbeReport {
    let uid = rustix::process::getuid().as_raw();
    let gid = rustix::process::getgid().as_raw();
    let ranges = subid::lookup(uid);
    let user_ids = ranges.user.first().ok_or("no subordinate user ids")?;
    let group_ids = ranges.group.first().ok_or("no subordinate group ids")?;

    let mut child = probe_command("helper-wait-for-map")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed("starting a child"))?;
    let mapped = (|| {
        let stdout = child.stdout.take().ok_or("no pipe to the child")?;
        let mut line = String::new();
        BufReader::new(stdout.take(400))
            .read_line(&mut line)
            .map_err(failed("child"))?;
        if line.trim() != "ready" {
            return Err(super::parse_output(&line).err().unwrap_or_default());
        }
        run_map_helper("newuidmap", child.id(), uid, user_ids)?;
        run_map_helper("newgidmap", child.id(), gid, group_ids)?;
        let read = |name: &str| {
            std::fs::read_to_string(format!("/proc/{}/{name}", child.id())).unwrap_or_default()
        };
        if read("uid_map").lines().count() < 2 || read("gid_map").lines().count() < 2 {
            return Err("the helpers succeeded, but no ids are mapped".to_owned());
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
pub(super) fn helper_wait_for_map(_: Option<&str>) -> ProbeReport {
    // SAFETY: as in `enter`: no descriptor table is unshared.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) }.map_err(failed("unshare"))?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "ready")
        .and_then(|()| stdout.flush())
        .map_err(failed("stdout"))?;
    let _ = std::io::stdin().read(&mut [0]);
    Ok("mapped".to_owned())
}

/// Runs `newuidmap PID 0 ID 1 1 START COUNT`, or `newgidmap` with the same arguments.
fn run_map_helper(helper: &str, pid: u32, id: u32, range: &subid::IdRange) -> Result<(), String> {
    let numbers = [0, id, 1, 1, range.start, range.count].map(|n| n.to_string());
    let output = Command::new(helper)
        .arg(pid.to_string())
        .args(numbers)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(failed(helper))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(stderr
        .lines()
        .last()
        .map_or_else(|| format!("{helper} failed"), str::to_owned))
}

/// A command that runs this program as another probe.
fn probe_command(probe: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["internal", "probe", probe]);
    command
}
