//! Seccomp filters, which deny system calls of a container, or pretend that they succeeded.
//!
//! The filters apply to 32-bit and 64-bit programs alike.

mod calls;
mod program;

use std::io;

use rustix::thread::CapabilitySet;

use self::calls::{
    CLONE, CLONE3, DENIED_CALLS, DENIED_I386, FAKEROOT_CALLS, KEYRING_CALLS, PERSONALITY, SOCKET,
};
use self::program::{Condition, FilterAction, FilterRule, program};

const DENY: FilterAction = FilterAction::Error(libc::EPERM);
const PRETEND_UNKNOWN: FilterAction = FilterAction::Error(libc::ENOSYS);
const PRETEND_SUCCESS: FilterAction = FilterAction::Error(0);

/// Personalities without security impact: Linux, its 32-bit form, with and without UNAME26, and the query of the current one.
const HARMLESS_PERSONALITIES: &[u32] = &[0, 0x0008, 0x2_0000, 0x2_0008, 0xffff_ffff];

/// Installs the `RuntimeDefault` profile for a container with these capabilities.
pub fn install_default(capabilities: CapabilitySet) -> io::Result<()> {
    install(&default_rules(capabilities))
}

fn default_rules(capabilities: CapabilitySet) -> Vec<FilterRule> {
    let mut rules: Vec<FilterRule> = DENIED_CALLS
        .iter()
        .filter(|(unlocking, _)| !unlocking.intersects(capabilities))
        .flat_map(|(_, calls)| *calls)
        .chain(KEYRING_CALLS)
        .chain([&DENIED_I386])
        .map(|call| FilterRule(*call, Condition::Always, DENY))
        .collect();
    if !capabilities.contains(CapabilitySet::SYS_ADMIN) {
        let namespaces = libc::CLONE_NEWNS
            | libc::CLONE_NEWCGROUP
            | libc::CLONE_NEWUTS
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUSER
            | libc::CLONE_NEWPID
            | libc::CLONE_NEWNET;
        rules.push(FilterRule(
            CLONE,
            Condition::AnyBit(0, namespaces as u32),
            DENY,
        ));
        // The flags of clone3 are in memory, which a filter cannot read. On ENOSYS the C library falls back to clone.
        rules.push(FilterRule(CLONE3, Condition::Always, PRETEND_UNKNOWN));
    }
    rules.push(FilterRule(
        PERSONALITY,
        Condition::NotIn(0, HARMLESS_PERSONALITIES),
        DENY,
    ));
    // AF_VSOCK is not separated by network namespaces.
    let vsock = libc::AF_VSOCK as u32;
    rules.push(FilterRule(
        SOCKET,
        Condition::Equals(0, u32::MAX, vsock),
        DENY,
    ));
    rules
}

/// Makes the kernel appear to have no keyrings, for containers without [`install_default`], which rejects the keyring calls too.
///
/// A user's keys are the same in all of their user namespaces. Container root could link the keyring of the user's job by its id
/// and read the keys, and all containers would share one user keyring. Runtimes nested in a container, which create a session
/// keyring per container, continue without one after ENOSYS.
pub fn install_without_keyrings() -> io::Result<()> {
    let rules: Vec<FilterRule> = KEYRING_CALLS
        .iter()
        .map(|call| FilterRule(*call, Condition::Always, PRETEND_UNKNOWN))
        .collect();
    install(&rules)
}

/// Makes chown, setuid and setgid succeed without effect, like fakeroot: for a container that has only one id but expects many.
///
/// The creation of device files fails with EPERM, as in every user namespace: programs test for that, and would use a file that
/// does not exist.
pub fn install_fakeroot() -> io::Result<()> {
    let rules: Vec<FilterRule> = FAKEROOT_CALLS
        .iter()
        .map(|call| FilterRule(*call, Condition::Always, PRETEND_SUCCESS))
        .collect();
    install(&rules)
}

fn install(rules: &[FilterRule]) -> io::Result<()> {
    let mut code = program(rules);
    let program = libc::sock_fprog {
        len: code.len() as u16,
        filter: code.as_mut_ptr(),
    };
    // Kernels before 5.16 disable speculative store bypass for filtered programs, which slows down their loads. Like other
    // container runtimes, opt out.
    let flags = libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: the program points to its instructions, which outlive the call; the kernel copies and checks them.
    let done = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            &raw const program,
        )
    };
    crate::syscall::check(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// A filter cannot be removed, so each test installs it in a new thread.
    fn in_a_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        std::thread::spawn(work).join().unwrap()
    }

    /// Makes a system call of the 32-bit ABI. Returns its result, or the negative errno; `None` on a kernel without 32-bit
    /// support.
    fn i386_call(number: u32, arguments: [u32; 3]) -> Option<i32> {
        // This file exists only on kernels with 32-bit support.
        std::fs::metadata("/proc/sys/abi/vsyscall32").ok()?;
        let [first, second, third] = arguments.map(u64::from);
        let result: u64;
        // SAFETY: the calls that the tests make read and write no memory. The register of the first argument, which the compiler
        // reserves, is restored, and the registers that old kernels clear are declared.
        unsafe {
            std::arch::asm!(
                "xchg rbx, {first}",
                "int 0x80",
                "xchg rbx, {first}",
                first = inout(reg) first => _,
                inlateout("rax") u64::from(number) => result,
                in("rcx") second,
                in("rdx") third,
                out("r8") _,
                out("r9") _,
                out("r10") _,
                out("r11") _,
            );
        }
        Some(result as u32 as i32)
    }

    #[test]
    fn default_profile_rejects_namespaces_and_runs_programs() {
        in_a_thread(|| {
            crate::credentials::set_no_new_privs().unwrap();
            install_default(CapabilitySet::empty()).unwrap();
            assert!(Command::new("true").status().unwrap().success());
            let denied = rustix::system::sethostname(b"x").unwrap_err();
            assert_eq!(denied, rustix::io::Errno::PERM);
            let unshared = Command::new("unshare").args(["-r", "true"]).status();
            assert!(!unshared.unwrap().success());
        });
    }

    /// The errno of a failing call under the default filter for these capabilities.
    fn errno_of(capabilities: CapabilitySet, call: fn() -> libc::c_long) -> Option<i32> {
        in_a_thread(move || {
            crate::credentials::set_no_new_privs().unwrap();
            install_default(capabilities).unwrap();
            assert_eq!(call(), -1);
            io::Error::last_os_error().raw_os_error()
        })
    }

    #[test]
    fn capabilities_unlock_their_calls() {
        // SAFETY: the kernel gets no memory, and neither this descriptor nor this clock exists.
        let enter = || unsafe { libc::syscall(libc::SYS_setns, -1, 0) };
        // SAFETY: as above.
        let set_time = || unsafe { libc::syscall(libc::SYS_clock_settime, 4711, 0) };
        // SAFETY: as above.
        let fork = || unsafe { libc::syscall(libc::SYS_clone3, 0, 0) };
        let (admin, time) = (CapabilitySet::SYS_ADMIN, CapabilitySet::SYS_TIME);
        let denied = Some(libc::EPERM);
        assert_eq!(errno_of(CapabilitySet::empty(), enter), denied);
        assert_eq!(errno_of(time, enter), denied);
        assert_eq!(errno_of(admin, enter), Some(libc::EBADF));
        assert_eq!(errno_of(admin, set_time), denied);
        assert_eq!(errno_of(time, set_time), Some(libc::EINVAL));
        assert_eq!(errno_of(time, fork), Some(libc::ENOSYS));
        assert_eq!(errno_of(admin, fork), Some(libc::EINVAL));
        let rule_count = |capabilities| default_rules(capabilities).len();
        // Some calls are rejected whatever the capabilities are.
        assert!(rule_count(CapabilitySet::all()) > 10);
        assert!(rule_count(CapabilitySet::BPF) < rule_count(CapabilitySet::CHOWN));
    }

    #[test]
    fn fakeroot_filter_pretends_success() {
        in_a_thread(|| {
            let file = tempfile::NamedTempFile::new().unwrap();
            let path = file.path().to_owned();
            crate::credentials::set_no_new_privs().unwrap();
            install_fakeroot().unwrap();
            std::os::unix::fs::chown(&path, Some(4711), Some(4711)).unwrap();
            let owner = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(&path).unwrap());
            assert_eq!(owner, rustix::process::geteuid().as_raw());
        });
    }

    #[test]
    fn all_profiles_reject_keyrings() {
        // SAFETY: keyctl(KEYCTL_GET_KEYRING_ID, KEY_SPEC_SESSION_KEYRING) takes integers only.
        let keyctl = || unsafe { libc::syscall(libc::SYS_keyctl, 0, -3, 1) };
        assert_eq!(errno_of(CapabilitySet::all(), keyctl), Some(libc::EPERM));
        in_a_thread(move || {
            crate::credentials::set_no_new_privs().unwrap();
            install_without_keyrings().unwrap();
            assert_eq!(keyctl(), -1);
            let errno = io::Error::last_os_error().raw_os_error();
            assert_eq!(errno, Some(libc::ENOSYS));
            for number in [ADD_KEY_I386, REQUEST_KEY_I386, KEYCTL_I386] {
                let result = i386_call(number, [0; 3]);
                assert!(result.is_none_or(|result| result == -libc::ENOSYS));
            }
            assert!(Command::new("true").status().unwrap().success());
        });
    }

    const ADD_KEY_I386: u32 = 286;
    const REQUEST_KEY_I386: u32 = 287;
    const KEYCTL_I386: u32 = 288;
    const GETPID: u32 = 20;
    const MOUNT: u32 = 21;
    const SETUID: u32 = 23;
    const CHOWN32: u32 = 212;
    const SETRESUID32: u32 = 208;
    const MKNOD_I386: u32 = 14;
    const CLONE_I386: u32 = 120;
    const SOCKET_I386: u32 = 359;

    #[test]
    fn default_profile_applies_to_32_bit_programs() {
        in_a_thread(|| {
            crate::credentials::set_no_new_privs().unwrap();
            install_default(CapabilitySet::empty()).unwrap();
            let Some(pid) = i386_call(GETPID, [0; 3]) else {
                return;
            };
            assert_eq!(pid, std::process::id() as i32);
            let vsock = libc::AF_VSOCK as u32;
            for (number, arguments) in [
                (MOUNT, [0; 3]),
                (CLONE_I386, [libc::CLONE_NEWUSER as u32, 0, 0]),
                (SOCKET_I386, [vsock, 1, 0]),
            ] {
                let result = i386_call(number, arguments);
                assert_eq!(result, Some(-libc::EPERM), "{number}");
            }
        });
    }

    #[test]
    fn fakeroot_filter_applies_to_32_bit_programs() {
        in_a_thread(|| {
            crate::credentials::set_no_new_privs().unwrap();
            install_fakeroot().unwrap();
            if i386_call(GETPID, [0; 3]).is_none() {
                return;
            }
            // The path is a null pointer, so these calls succeed only because of the filter.
            for (number, arguments) in [
                (CHOWN32, [0, 5, 5]),
                (SETUID, [4711, 0, 0]),
                (SETRESUID32, [4711, 4711, 4711]),
            ] {
                assert_eq!(i386_call(number, arguments), Some(0), "{number}");
            }
            // Of a device too: the kernel decides, which reads the path first.
            for kind in [libc::S_IFIFO, libc::S_IFCHR] {
                let result = i386_call(MKNOD_I386, [0, kind | 0o600, 0x103]);
                assert!(result.is_some_and(|result| result < 0), "{result:?}");
            }
        });
    }
}
