//! Who a process is, and what it may do.

use std::io;

use rustix::fs::{Gid, Uid};
use rustix::process::DumpableBehavior;
use rustix::thread::{CapabilitySet, CapabilitySets};

/// All capabilities that this kernel knows.
pub fn all_capabilities() -> CapabilitySet {
    CapabilitySet::all()
        .iter()
        .filter(|capability| {
            rustix::thread::capability_is_in_bounding_set(*capability).unwrap_or(false)
        })
        .collect()
}

/// Takes all but `kept` from what this process and its descendants can ever have.
pub fn bound_capabilities(kept: CapabilitySet) -> io::Result<()> {
    for capability in all_capabilities().difference(kept).iter() {
        rustix::thread::remove_capability_from_bounding_set(capability)?;
    }
    Ok(())
}

/// Becomes another user with other groups. Capabilities that root had are kept until [`limit_capabilities`].
pub fn become_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    rustix::thread::set_keep_capabilities(true)?;
    let groups: Vec<Gid> = groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    rustix::thread::set_thread_groups(&groups)?;
    let gid = Gid::from_raw(gid);
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    let uid = Uid::from_raw(uid);
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    // Leaving root has put them out of effect.
    let mut sets = rustix::thread::capabilities(None)?;
    sets.effective = sets.permitted;
    rustix::thread::set_capabilities(None, sets)?;
    Ok(())
}

/// Has these capabilities from now on: a process of root has them all in effect, another has none but may get them by a
/// program that carries them.
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

/// From now on no program gives this process more rights than it has.
pub fn no_new_privileges() -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    Ok(())
}

/// Nobody looks into this process, or acts as it, who has not the right to look into all processes where it was started as a
/// program: not those who have that right in a user namespace that it has entered since. The same holds for its children, and
/// for each until it becomes another program.
pub fn hide() -> io::Result<()> {
    // rustix reads what the kernel has told about itself once, at the first need; before Linux 6.4 that is from a file below
    // /proc, which is closed to processes that hide.
    let _ = (
        rustix::param::page_size(),
        rustix::param::clock_ticks_per_second(),
    );
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(())
}

/// Does something as a process that isn't hidden, and hides: those who are may not write to their own files below `/proc`.
pub fn unhidden<T>(work: impl FnOnce() -> T) -> io::Result<T> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    let done = work();
    hide()?;
    Ok(done)
}

/// Whether this is a capability's name, such as `NET_ADMIN`.
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

    /// Root of a user namespace, with all its rights, looks at its parent, who is that too.
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
    fn who_hides_is_seen_by_nobody_of_its_user_namespace() {
        let as_expected = in_a_child(|| {
            crate::namespace::enter_as_root(UnshareFlags::empty()).unwrap();
            let seen_before = root_sees_parent();
            hide().unwrap();
            let hidden = !root_sees_parent();
            // Children, too.
            let hidden_child = in_a_child(|| !root_sees_parent());
            let unhidden = unhidden(|| {
                let is_written = std::fs::write("/proc/self/oom_score_adj", "1000").is_ok();
                root_sees_parent() && is_written
            });
            let unhidden = unhidden.unwrap();
            seen_before && hidden && hidden_child && unhidden && !root_sees_parent()
        });
        assert!(as_expected);
    }
}
