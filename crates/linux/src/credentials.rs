//! User and group ids, capabilities and privileges of a process.

use std::io;

use rustix::fs::{Gid, Uid};
use rustix::process::DumpableBehavior;
use rustix::thread::{CapabilitySet, CapabilitySets};

/// All capabilities that the kernel knows.
pub fn all_capabilities() -> CapabilitySet {
    CapabilitySet::all()
        .iter()
        .filter(|capability| {
            rustix::thread::capability_is_in_bounding_set(*capability).unwrap_or(false)
        })
        .collect()
}

/// Removes all capabilities but `kept` from the bounding set of this process and its descendants.
pub fn limit_bounding_set(kept: CapabilitySet) -> io::Result<()> {
    for capability in all_capabilities().difference(kept).iter() {
        rustix::thread::remove_capability_from_bounding_set(capability)?;
    }
    Ok(())
}

/// Changes the user, group and supplementary groups. Root's capabilities are kept until [`limit_capabilities`].
pub fn become_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    rustix::thread::set_keep_capabilities(true)?;
    let groups: Vec<Gid> = groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    rustix::thread::set_thread_groups(&groups)?;
    let gid = Gid::from_raw(gid);
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    let uid = Uid::from_raw(uid);
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    // The change of the uid has cleared the effective set.
    let mut sets = rustix::thread::capabilities(None)?;
    sets.effective = sets.permitted;
    rustix::thread::set_capabilities(None, sets)?;
    Ok(())
}

/// Limits the capabilities to `kept`. A root process has all of them in effect. Another process has none, but can gain them by
/// executing a file with capabilities.
pub fn limit_capabilities(kept: CapabilitySet, root: bool) -> io::Result<()> {
    let held = if root { kept } else { CapabilitySet::empty() };
    let sets = CapabilitySets {
        effective: held,
        permitted: held,
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, sets)?;
    Ok(())
}

/// Sets no_new_privs: from now on, exec grants no privileges (setuid bits, file capabilities).
pub fn set_no_new_privs() -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    Ok(())
}

/// Makes this process non-dumpable. Tracing it, or accessing it through `/proc`, then needs CAP_SYS_PTRACE in the user namespace
/// of its last exec; the capability in a user namespace that it has entered since does not suffice. Forked children inherit this;
/// exec resets it.
pub fn set_non_dumpable() -> io::Result<()> {
    // rustix caches parameters of the kernel on first use. Before Linux 6.4 it reads them from a file in /proc, which a
    // non-dumpable process cannot open.
    let _ = (
        rustix::param::page_size(),
        rustix::param::clock_ticks_per_second(),
    );
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(())
}

/// Runs `work` while the process is dumpable, then makes it non-dumpable again: a non-dumpable process cannot write to its own
/// files in `/proc`.
pub fn while_dumpable<T>(work: impl FnOnce() -> T) -> io::Result<T> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    let done = work();
    set_non_dumpable()?;
    Ok(done)
}

/// Whether `name` is the name of a capability, such as `NET_ADMIN`.
pub fn is_capability(name: &str) -> bool {
    CapabilitySet::from_name(name).is_some()
}

/// The names of all capabilities.
pub fn capability_names() -> impl Iterator<Item = &'static str> {
    CapabilitySet::all().iter_names().map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use rustix::thread::UnshareFlags;

    use super::*;
    use crate::testing::in_a_child;

    /// Whether root of a user namespace, with all capabilities, can access its parent process, which is root there too.
    fn root_sees_parent() -> bool {
        let pid = rustix::process::getpid().as_raw_nonzero();
        in_a_child(|| {
            let at = |name: &str| format!("/proc/{pid}/{name}");
            let seen = std::fs::read_link(at("root"));
            let file = std::fs::metadata(at("root/proc"));
            let closed = |kind| kind == ErrorKind::PermissionDenied;
            match (seen, file) {
                (Ok(_), Ok(_)) => true,
                (Err(one), Err(other)) if closed(one.kind()) && closed(other.kind()) => false,
                other => panic!("{other:?}"),
            }
        })
    }

    #[test]
    fn non_dumpable_process_is_not_accessible_to_root() {
        let as_expected = in_a_child(|| {
            crate::namespace::enter_as_root(UnshareFlags::empty()).unwrap();
            let seen_before = root_sees_parent();
            set_non_dumpable().unwrap();
            let hidden = !root_sees_parent();
            // Forked children are non-dumpable too.
            let hidden_child = in_a_child(|| !root_sees_parent());
            let seen_while_dumpable = while_dumpable(|| {
                let is_written = std::fs::write("/proc/self/oom_score_adj", "1000").is_ok();
                root_sees_parent() && is_written
            });
            let seen_while_dumpable = seen_while_dumpable.unwrap();
            seen_before && hidden && hidden_child && seen_while_dumpable && !root_sees_parent()
        });
        assert!(as_expected);
    }
}
