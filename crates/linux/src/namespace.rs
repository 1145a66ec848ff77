//! Entering new namespaces as an ordinary user.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use rustix::process::{Pid, WaitOptions};
use rustix::thread::UnshareFlags;

use crate::file_id::FileId;
use crate::mount;
use crate::probe::subid::{self, Range};
use crate::process::Fork;

/// Moves the calling, single-threaded process into a user and a mount namespace of its own; its next
/// child becomes the first process of a new pid namespace.
///
/// The user keeps their own id inside, so files and sockets look as they do outside. Until the next
/// `exec` the process holds all capabilities over the new namespaces. Mounts made from here on are
/// seen by nobody else, and disappear with the last process.
pub fn enter_private() -> io::Result<()> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let flags = UnshareFlags::NEWUSER | UnshareFlags::NEWNS | UnshareFlags::NEWPID;
    // SAFETY: none of these flags shares or unshares the file descriptor table, the one case that
    // makes `unshare` unsafe.
    unsafe { rustix::thread::unshare_unsafe(flags) }?;
    // The kernel allows a group map only to those who gave up changing their groups.
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", identity_map(uid.as_raw()))?;
    std::fs::write("/proc/self/gid_map", identity_map(gid.as_raw()))?;
    mount::keep_to_ourselves()
}

/// Gives the calling process new namespaces of the kinds in `flags`, which must name namespaces only.
pub fn unshare(flags: UnshareFlags) -> io::Result<()> {
    if flags.contains(UnshareFlags::FILES) {
        return Err(io::Error::other("the descriptor table is no namespace"));
    }
    // SAFETY: the descriptor table, the one case that makes `unshare` unsafe, is excluded above.
    unsafe { rustix::thread::unshare_unsafe(flags) }?;
    Ok(())
}

/// A file that stands for the user namespace of the calling process.
pub fn own_user_namespace() -> io::Result<OwnedFd> {
    own("user")
}

/// A file that stands for the network namespace of the calling process.
pub fn own_network() -> io::Result<OwnedFd> {
    own("net")
}

fn own(kind: &str) -> io::Result<OwnedFd> {
    Ok(File::open(format!("/proc/self/ns/{kind}"))?.into())
}

/// The ancestor of a user namespace, or itself, whose parent is the calling process's own.
pub fn child_of_own(namespace: OwnedFd) -> io::Result<OwnedFd> {
    let own = FileId::of(own_user_namespace()?)?;
    let mut namespace = namespace;
    loop {
        // The kernel refuses for a namespace that does not descend from ours, so that the walk ends there.
        let parent = crate::fresh::parent_namespace(&namespace)?;
        if FileId::of(&parent)? == own {
            return Ok(namespace);
        }
        namespace = parent;
    }
}

/// How many ids a user namespace has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// The user's own and their subordinate ones: containers may use any usual id.
    Many,
    /// The user's own only, as root.
    One,
}

/// Moves the calling, single-threaded process into a user namespace of which it is root, and with it into the other
/// namespaces of `with`. With subordinate ids and their helpers the namespace has them all from 1 on; else it has one id.
pub fn enter_as_root(with: UnshareFlags) -> io::Result<Ids> {
    let (uid, gid) = (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    let ranges = subid::lookup(uid);
    let ranges = ranges.user.first().zip(ranges.group.first());
    let helpers = ranges.map(|(user, group)| {
        move |process| {
            if !map("newuidmap", process, uid, user) {
                Mapped::Nothing
            } else if !map("newgidmap", process, gid, group) {
                Mapped::Users
            } else {
                Mapped::All
            }
        }
    });
    enter(with, uid, gid, helpers)
}

fn enter(
    with: UnshareFlags,
    uid: u32,
    gid: u32,
    helpers: Option<impl FnOnce(Pid) -> Mapped>,
) -> io::Result<Ids> {
    let ids = match enter_mapped(helpers)? {
        Mapped::All => Ids::Many,
        Mapped::Nothing => {
            map_one(uid, gid)?;
            Ids::One
        }
        // A map can't be written twice, so there is one namespace more in it.
        Mapped::Users => {
            map_groups(gid)?;
            become_root()?;
            unshare(UnshareFlags::NEWUSER)?;
            map_one(0, 0)?;
            Ids::One
        }
    };
    // The maps say who we are; until now we were nobody there.
    become_root()?;
    unshare(with)?;
    if with.contains(UnshareFlags::NEWNS) {
        mount::keep_to_ourselves()?;
    }
    Ok(ids)
}

/// Which maps of a new user namespace the helpers have written.
#[derive(Clone, Copy)]
enum Mapped {
    Nothing = 1,
    /// That of users only: the helper for groups is missing, or has refused.
    Users,
    All,
}

/// Enters a user namespace into which helpers may map something. They are setuid programs and do it from outside, so a child
/// stays there.
fn enter_mapped(helpers: Option<impl FnOnce(Pid) -> Mapped>) -> io::Result<Mapped> {
    let Some(helpers) = helpers else {
        unshare(UnshareFlags::NEWUSER)?;
        return Ok(Mapped::Nothing);
    };
    let (mut told, tell) = pipe()?;
    let (mut answer, answering) = pipe()?;
    let process = rustix::process::getpid();
    let child = match crate::process::fork()? {
        Fork::Child => {
            drop((tell, answer));
            if told.read(&mut [0]).is_ok_and(|n| n == 1) {
                let _ = (&answering).write(&[helpers(process) as u8]);
            }
            std::process::exit(0)
        }
        Fork::Parent(child) => child,
    };
    drop((told, answering));
    unshare(UnshareFlags::NEWUSER)?;
    (&tell).write_all(b".")?;
    let mut mapped = [0];
    let _ = answer.read(&mut mapped)?;
    let _ = rustix::process::waitpid(Some(child), WaitOptions::empty());
    let known = [Mapped::Users, Mapped::All];
    let found = known.into_iter().find(|known| [*known as u8] == mapped);
    Ok(found.unwrap_or(Mapped::Nothing))
}

/// Moves the calling, single-threaded process into a user namespace below the current one, of which it must be root, with
/// the same ids by the same numbers, and with it into the other namespaces of `with`.
pub fn enter_below(with: UnshareFlags) -> io::Result<()> {
    let users = same_ids(&std::fs::read_to_string("/proc/self/uid_map")?);
    let groups = same_ids(&std::fs::read_to_string("/proc/self/gid_map")?);
    // Only a process of the namespace above may map more than one id.
    let helper = |process: Pid| {
        let write = |file: &str, map: &str| {
            std::fs::write(format!("/proc/{}/{file}", process.as_raw_nonzero()), map).is_ok()
        };
        if !write("uid_map", &users) {
            Mapped::Nothing
        } else if !write("gid_map", &groups) {
            Mapped::Users
        } else {
            Mapped::All
        }
    };
    match enter_mapped(Some(helper))? {
        Mapped::All => {}
        Mapped::Nothing => return Err(io::Error::other("cannot map users into a user namespace")),
        Mapped::Users => return Err(io::Error::other("cannot map groups into a user namespace")),
    }
    become_root()?;
    unshare(with)
}

/// A map of the same ids onto themselves, from the text of a map.
fn same_ids(map: &str) -> String {
    let lines = map.lines().filter_map(|line| {
        let mut fields = line.split_whitespace();
        let (first, count) = (fields.next()?, fields.nth(1)?);
        Some(format!("{first} {first} {count}\n"))
    });
    lines.collect()
}

/// Maps one user and one group onto root.
fn map_one(uid: u32, gid: u32) -> io::Result<()> {
    map_groups(gid)?;
    std::fs::write("/proc/self/uid_map", format!("0 {uid} 1"))
}

fn map_groups(gid: u32) -> io::Result<()> {
    // The kernel allows a group map only to those who gave up changing their groups.
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

/// How many ids the current user namespace has.
pub fn ids() -> Ids {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let one = |line: &str| line.split_whitespace().last() == Some("1");
    if map.lines().count() == 1 && map.lines().all(one) {
        Ids::One
    } else {
        Ids::Many
    }
}

/// Makes a user namespace in which `uid` and `gid` are what is root now, and enters it: for a container that runs as
/// another user where there is only one id to give.
pub fn rename_only_id(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: as above.
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

/// Has a setuid helper map `id` onto root and `range` onto the ids after it.
fn map(helper: &str, process: Pid, id: u32, range: &Range) -> bool {
    Command::new(helper)
        .arg(process.as_raw_nonzero().to_string())
        .args([0, id, 1, 1, range.start, range.count].map(|n| n.to_string()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// One id, mapped onto itself.
fn identity_map(id: u32) -> String {
    format!("{id} {id} 1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::in_a_child;

    /// Enters with a helper that maps what everybody may.
    fn enter_with(helper: impl FnOnce(Pid, u32, u32) -> Mapped) -> bool {
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
            let works = mount::tmpfs(std::path::Path::new("/tmp"), 1 << 20).is_ok();
            entered == Ids::One && ids() == Ids::One && is_root && works
        })
    }

    #[test]
    fn a_namespace_below_has_the_same_ids() {
        let map = "         0       1000          1\n         1     100000      65536\n";
        assert_eq!(same_ids(map), "0 0 1\n1 1 65536\n");
        let same = in_a_child(|| {
            let entered = enter_as_root(UnshareFlags::empty()).unwrap();
            let above = std::fs::read_link("/proc/self/ns/user").unwrap();
            enter_below(UnshareFlags::NEWNS).unwrap();
            let below = std::fs::read_link("/proc/self/ns/user").unwrap();
            let is_root =
                rustix::process::geteuid().is_root() && rustix::process::getegid().is_root();
            ids() == entered && is_root && above != below
        });
        assert!(same);
    }

    #[test]
    fn the_ancestor_below_our_namespace_is_found_from_deep_inside() {
        assert!(in_a_child(|| {
            let deep = deep_namespaces();
            let found = inode(child_of_own(deep.below).unwrap());
            // The walk from a namespace that is not below ours ends with an error.
            let own = child_of_own(own_user_namespace().unwrap());
            found == deep.first && own.is_err()
        }));
    }

    fn inode(namespace: OwnedFd) -> u64 {
        rustix::fs::fstat(namespace).unwrap().st_ino
    }

    struct Deep {
        /// The inode of the first user namespace below ours.
        first: u64,
        /// One below that.
        below: OwnedFd,
    }

    /// Two user namespaces, one below the other; the processes that made them are gone.
    fn deep_namespaces() -> Deep {
        let (mut told, tell) = pipe().unwrap();
        let (stay, end) = pipe().unwrap();
        let child = match crate::process::fork().unwrap() {
            Fork::Child => {
                drop(end);
                enter_as_root(UnshareFlags::empty()).unwrap();
                let first = inode(own_user_namespace().unwrap());
                enter_below(UnshareFlags::empty()).unwrap();
                (&tell).write_all(&first.to_ne_bytes()).unwrap();
                let _ = (&stay).read(&mut [0]);
                std::process::exit(0)
            }
            Fork::Parent(child) => child,
        };
        let mut first = [0; 8];
        told.read_exact(&mut first).unwrap();
        let path = format!("/proc/{}/ns/user", child.as_raw_nonzero());
        let below = File::open(path).unwrap().into();
        drop(end);
        let _ = rustix::process::waitpid(Some(child), WaitOptions::empty());
        Deep {
            first: u64::from_ne_bytes(first),
            below,
        }
    }

    #[test]
    fn a_namespace_has_one_id_where_helpers_do_nothing() {
        assert!(enter_with(|_, _, _| Mapped::Nothing));
    }

    #[test]
    fn a_namespace_has_one_id_where_only_users_could_be_mapped() {
        assert!(enter_with(|process, uid, _| {
            let map = format!("/proc/{}/uid_map", process.as_raw_nonzero());
            std::fs::write(map, format!("0 {uid} 1")).unwrap();
            Mapped::Users
        }));
    }
}
