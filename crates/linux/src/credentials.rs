//! Who a process is, and what it may do.

use std::io;

use rustix::fs::{Gid, Uid};
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

/// Whether this is a capability's name, such as `NET_ADMIN`.
pub fn is_capability(name: &str) -> bool {
    CapabilitySet::from_name(name).is_some()
}

/// The names of all capabilities.
pub fn capability_names() -> impl Iterator<Item = &'static str> {
    CapabilitySet::all().iter_names().map(|(name, _)| name)
}
