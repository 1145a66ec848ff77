//! Entering new namespaces as an unprivileged user (`unshare`), and opening existing ones.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, Stdio};

use rustix::process::{Pid, WaitOptions};
use rustix::thread::UnshareFlags;

use crate::file_id::FileId;
use crate::mount;
use crate::probe::subid::{self, IdRange};
use crate::process::ForkResult;

/// From linux/nsfs.h.
const NS_GET_PARENT: libc::c_ulong = 0xb702;

/// Moves the calling, single-threaded process into new user and mount namespaces; its next child becomes pid 1 of a new pid
/// namespace.
///
/// The user keeps their own id inside, so the owners of files and sockets look the same as outside. Until the next `exec` the
/// process holds all capabilities in the new namespaces. Mounts made from now on are visible in this mount namespace only, and
/// disappear with its last process.
pub fn enter_private() -> io::Result<()> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let flags = UnshareFlags::NEWUSER | UnshareFlags::NEWNS | UnshareFlags::NEWPID;
    // SAFETY: none of these flags shares or unshares the file descriptor table, the one case that
    // makes `unshare` unsafe.
    unsafe { rustix::thread::unshare_unsafe(flags) }?;
    // The kernel permits an unprivileged gid_map only after setgroups is denied.
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", map_to_itself(uid.as_raw()))?;
    std::fs::write("/proc/self/gid_map", map_to_itself(gid.as_raw()))?;
    mount::make_all_private()
}

/// Moves the calling process into new namespaces of the kinds in `flags`, which must contain namespace flags only.
pub fn unshare(flags: UnshareFlags) -> io::Result<()> {
    if flags.contains(UnshareFlags::FILES) {
        return Err(io::Error::other(
            "cannot unshare the descriptor table: it is not a namespace",
        ));
    }
    // SAFETY: the descriptor table, the one case that makes `unshare` unsafe, is excluded above.
    unsafe { rustix::thread::unshare_unsafe(flags) }?;
    Ok(())
}

/// Opens a namespace of a process by its name in `/proc/PID/ns`. The descriptor keeps the namespace alive.
pub fn open_namespace(process: i32, name: &str) -> io::Result<OwnedFd> {
    Ok(File::open(format!("/proc/{process}/ns/{name}"))?.into())
}

/// The parent of a user or pid namespace. The kernel does not permit the query from within the namespace.
pub fn parent_namespace(namespace: impl AsFd) -> io::Result<OwnedFd> {
    let namespace = namespace.as_fd().as_raw_fd();
    // SAFETY: the request takes no argument, and the descriptor is open during the call.
    match unsafe { libc::ioctl(namespace, NS_GET_PARENT) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the kernel has just created this descriptor for us.
        parent => Ok(unsafe { OwnedFd::from_raw_fd(parent) }),
    }
}

/// Opens the user namespace of the calling process.
pub fn own_user_namespace() -> io::Result<OwnedFd> {
    own("user")
}

/// Opens the network namespace of the calling process.
pub fn own_network_namespace() -> io::Result<OwnedFd> {
    own("net")
}

/// Opens the mount namespace of the calling process.
pub fn own_mount_namespace() -> io::Result<OwnedFd> {
    own("mnt")
}

fn own(kind: &str) -> io::Result<OwnedFd> {
    Ok(File::open(format!("/proc/self/ns/{kind}"))?.into())
}

/// How many levels a user namespace is below the one of the calling process (level 0). An error if it is not a descendant.
pub fn level_below_own(namespace: OwnedFd) -> io::Result<u32> {
    let own = FileId::of(own_user_namespace()?)?;
    let mut namespace = namespace;
    let mut level = 0;
    while FileId::of(&namespace)? != own {
        // The kernel returns an error for a namespace that is not a descendant of ours, which ends the loop.
        namespace = parent_namespace(&namespace)?;
        level += 1;
    }
    Ok(level)
}

/// The ids that a user namespace maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MappedIds {
    /// The user's own id and their subordinate ids: containers may use any common id.
    Many,
    /// The user's own id only, mapped to root.
    One,
}

/// Moves the calling, single-threaded process into a user namespace as its root, and into new namespaces of the kinds in `with`.
/// If the user has subordinate ids and the setuid helpers work, the ids are mapped from 1 on; otherwise the namespace has one id.
pub fn enter_as_root(with: UnshareFlags) -> io::Result<MappedIds> {
    let (uid, gid) = (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    let ranges = subid::lookup(uid);
    let ranges = ranges.user.first().zip(ranges.group.first());
    let helpers = ranges.map(|(user, group)| {
        move |process| {
            if !run_map_helper("newuidmap", process, uid, user) {
                WrittenMaps::None
            } else if !run_map_helper("newgidmap", process, gid, group) {
                WrittenMaps::Users
            } else {
                WrittenMaps::All
            }
        }
    });
    enter(with, uid, gid, helpers)
}

fn enter(
    with: UnshareFlags,
    uid: u32,
    gid: u32,
    helpers: Option<impl FnOnce(Pid) -> WrittenMaps>,
) -> io::Result<MappedIds> {
    let ids = match enter_with_helpers(helpers)? {
        WrittenMaps::All => MappedIds::Many,
        WrittenMaps::None => {
            map_one(uid, gid)?;
            MappedIds::One
        }
        // A map can be written only once, so the single-id map needs a nested namespace.
        WrittenMaps::Users => {
            map_groups(gid)?;
            become_root()?;
            unshare(UnshareFlags::NEWUSER)?;
            map_one(0, 0)?;
            MappedIds::One
        }
    };
    // After the maps are written, switch from the overflow id to root.
    become_root()?;
    unshare(with)?;
    if with.contains(UnshareFlags::NEWNS) {
        mount::make_all_private()?;
    }
    Ok(ids)
}

/// The maps of a new user namespace that the helpers have written.
#[derive(Clone, Copy)]
enum WrittenMaps {
    None = 1,
    /// The uid_map only: the helper for groups is missing or has failed.
    Users,
    All,
}

/// Enters a user namespace and lets helpers write its maps. The helpers are setuid programs that must run in the parent
/// namespace, so a forked child stays there and runs them.
fn enter_with_helpers(helpers: Option<impl FnOnce(Pid) -> WrittenMaps>) -> io::Result<WrittenMaps> {
    let Some(helpers) = helpers else {
        unshare(UnshareFlags::NEWUSER)?;
        return Ok(WrittenMaps::None);
    };
    let (mut entered_rx, entered_tx) = pipe()?;
    let (mut maps_rx, maps_tx) = pipe()?;
    let process = rustix::process::getpid();
    let child = match crate::process::fork()? {
        ForkResult::Child => {
            drop((entered_tx, maps_rx));
            if entered_rx.read(&mut [0]).is_ok_and(|n| n == 1) {
                let _ = (&maps_tx).write(&[helpers(process) as u8]);
            }
            std::process::exit(0)
        }
        ForkResult::Parent(child) => child,
    };
    drop((entered_rx, maps_tx));
    unshare(UnshareFlags::NEWUSER)?;
    (&entered_tx).write_all(b".")?;
    let mut written = [0];
    let _ = maps_rx.read(&mut written)?;
    let _ = rustix::process::waitpid(Some(child), WaitOptions::empty());
    let maps = [WrittenMaps::Users, WrittenMaps::All];
    let maps = maps.into_iter().find(|maps| [*maps as u8] == written);
    Ok(maps.unwrap_or(WrittenMaps::None))
}

/// Moves the calling, single-threaded process, which must be root, into a child of the current user namespace with all ids mapped
/// to themselves, and into new namespaces of the kinds in `with`.
pub fn enter_nested(with: UnshareFlags) -> io::Result<()> {
    let users = identity_map_of(&std::fs::read_to_string("/proc/self/uid_map")?);
    let groups = identity_map_of(&std::fs::read_to_string("/proc/self/gid_map")?);
    // The kernel lets only a process in the parent namespace map more than one id.
    let helper = |process: Pid| {
        let write = |file: &str, map: &str| {
            std::fs::write(format!("/proc/{}/{file}", process.as_raw_nonzero()), map).is_ok()
        };
        if !write("uid_map", &users) {
            WrittenMaps::None
        } else if !write("gid_map", &groups) {
            WrittenMaps::Users
        } else {
            WrittenMaps::All
        }
    };
    match enter_with_helpers(Some(helper))? {
        WrittenMaps::All => {}
        WrittenMaps::None => {
            return Err(io::Error::other("cannot map users into a user namespace"));
        }
        WrittenMaps::Users => {
            return Err(io::Error::other("cannot map groups into a user namespace"));
        }
    }
    become_root()?;
    unshare(with)
}

/// Builds an identity map of the ids in the given map text.
fn identity_map_of(map: &str) -> String {
    let lines = map.lines().filter_map(|line| {
        let mut fields = line.split_whitespace();
        let (first, count) = (fields.next()?, fields.nth(1)?);
        Some(format!("{first} {first} {count}\n"))
    });
    lines.collect()
}

/// Maps one user and one group to root.
fn map_one(uid: u32, gid: u32) -> io::Result<()> {
    map_groups(gid)?;
    std::fs::write("/proc/self/uid_map", format!("0 {uid} 1"))
}

fn map_groups(gid: u32) -> io::Result<()> {
    // The kernel permits an unprivileged gid_map only after setgroups is denied.
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/gid_map", format!("0 {gid} 1"))
}

fn become_root() -> io::Result<()> {
    rustix::thread::set_thread_res_gid(
        rustix::fs::Gid::ROOT,
        rustix::fs::Gid::ROOT,
        rustix::fs::Gid::ROOT,
    )?;
    rustix::thread::set_thread_res_uid(
        rustix::fs::Uid::ROOT,
        rustix::fs::Uid::ROOT,
        rustix::fs::Uid::ROOT,
    )?;
    Ok(())
}

/// The ids that the current user namespace maps.
pub fn mapped_ids() -> MappedIds {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let one = |line: &str| line.split_whitespace().last() == Some("1");
    if map.lines().count() == 1 && map.lines().all(one) {
        MappedIds::One
    } else {
        MappedIds::Many
    }
}

/// Moves the calling process, which is root, into a new user namespace that maps it to `uid` and `gid`: for containers that run as
/// another user where only one id is available.
pub fn enter_as_user(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: NEWUSER does not unshare the file descriptor table, the one case that makes `unshare` unsafe.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) }?;
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("{uid} 0 1"))?;
    std::fs::write("/proc/self/gid_map", format!("{gid} 0 1"))?;
    Ok(())
}

fn pipe() -> io::Result<(File, File)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    Ok((read.into(), write.into()))
}

/// Runs a setuid helper that maps `id` to root, and `range` to the ids from 1 on.
fn run_map_helper(helper: &str, process: Pid, id: u32, range: &IdRange) -> bool {
    Command::new(helper)
        .arg(process.as_raw_nonzero().to_string())
        .args([0, id, 1, 1, range.start, range.count].map(|n| n.to_string()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// A map of one id to itself.
fn map_to_itself(id: u32) -> String {
    format!("{id} {id} 1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::in_a_child;

    /// Enters with a helper that writes only maps that need no privilege.
    fn enter_with(helper: impl FnOnce(Pid, u32, u32) -> WrittenMaps) -> bool {
        in_a_child(|| {
            let (uid, gid) = (
                rustix::process::geteuid().as_raw(),
                rustix::process::getegid().as_raw(),
            );
            let helper = |process| helper(process, uid, gid);
            let flags = UnshareFlags::NEWNS | UnshareFlags::NEWNET;
            let entered = enter(flags, uid, gid, Some(helper)).unwrap();
            let is_root =
                rustix::process::geteuid().is_root() && rustix::process::getegid().is_root();
            let can_mount = mount::tmpfs(std::path::Path::new("/tmp"), 1 << 20).is_ok();
            entered == MappedIds::One && mapped_ids() == MappedIds::One && is_root && can_mount
        })
    }

    #[test]
    fn nested_namespace_keeps_the_same_ids() {
        let map = "         0       1000          1\n         1     100000      65536\n";
        assert_eq!(identity_map_of(map), "0 0 1\n1 1 65536\n");
        let same = in_a_child(|| {
            let entered = enter_as_root(UnshareFlags::empty()).unwrap();
            let above = std::fs::read_link("/proc/self/ns/user").unwrap();
            enter_nested(UnshareFlags::NEWNS).unwrap();
            let below = std::fs::read_link("/proc/self/ns/user").unwrap();
            let is_root =
                rustix::process::geteuid().is_root() && rustix::process::getegid().is_root();
            mapped_ids() == entered && is_root && above != below
        });
        assert!(same);
    }

    #[test]
    fn levels_are_counted_from_a_nested_namespace() {
        assert!(in_a_child(|| {
            let level = |namespace| level_below_own(namespace).ok();
            let outer = own_user_namespace().unwrap();
            let levels = [
                level(deep_namespace()),
                level(own_user_namespace().unwrap()),
            ];
            enter_as_root(UnshareFlags::empty()).unwrap();
            levels == [Some(2), Some(0)] && level(outer).is_none()
        }));
    }

    /// A user namespace two levels below ours, whose creator has exited.
    fn deep_namespace() -> OwnedFd {
        let (mut ready_rx, ready_tx) = pipe().unwrap();
        let (exit_rx, exit_tx) = pipe().unwrap();
        let child = match crate::process::fork().unwrap() {
            ForkResult::Child => {
                drop(exit_tx);
                enter_as_root(UnshareFlags::empty()).unwrap();
                enter_nested(UnshareFlags::empty()).unwrap();
                (&ready_tx).write_all(b".").unwrap();
                let _ = (&exit_rx).read(&mut [0]);
                std::process::exit(0)
            }
            ForkResult::Parent(child) => child,
        };
        ready_rx.read_exact(&mut [0]).unwrap();
        let path = format!("/proc/{}/ns/user", child.as_raw_nonzero());
        let below = File::open(path).unwrap().into();
        drop(exit_tx);
        let _ = rustix::process::waitpid(Some(child), WaitOptions::empty());
        below
    }

    #[test]
    fn namespace_has_one_id_if_helpers_fail() {
        assert!(enter_with(|_, _, _| WrittenMaps::None));
    }

    #[test]
    fn namespace_has_one_id_if_newgidmap_fails() {
        assert!(enter_with(|process, uid, _| {
            let map = format!("/proc/{}/uid_map", process.as_raw_nonzero());
            std::fs::write(map, format!("0 {uid} 1")).unwrap();
            WrittenMaps::Users
        }));
    }
}
