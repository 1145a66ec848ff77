//! Seccomp filters: they reject system calls of a container, or pretend that calls succeeded.
//!
//! The filters apply to 32-bit and 64-bit programs alike.

mod calls;
mod program;

use std::io;

use rustix::thread::CapabilitySet;

use self::calls::{
    CLONE, CLONE3, KEYS, MKNOD, MKNODAT, PERSONALITY, PRETENDED, REFUSED, REFUSED_I386, SOCKET,
};
use self::program::{Answer, Rule, When, program};

const NO: Answer = Answer::Error(libc::EPERM);
const UNKNOWN: Answer = Answer::Error(libc::ENOSYS);
const DONE: Answer = Answer::Error(0);

/// Personalities without security impact: Linux, its 32-bit form, with and without UNAME26, and the query of the current one.
const HARMLESS_PERSONALITIES: &[u32] = &[0, 0x0008, 0x2_0000, 0x2_0008, 0xffff_ffff];

/// Installs the `RuntimeDefault` profile for a container with these capabilities.
pub fn install_default(capabilities: CapabilitySet) -> io::Result<()> {
    install(&default_rules(capabilities))
}

fn default_rules(capabilities: CapabilitySet) -> Vec<Rule> {
    let mut rules: Vec<Rule> = REFUSED
        .iter()
        .filter(|(unlocking, _)| !unlocking.intersects(capabilities))
        .flat_map(|(_, calls)| *calls)
        .chain(KEYS)
        .chain([&REFUSED_I386])
        .map(|call| Rule(*call, When::Always, NO))
        .collect();
    if !capabilities.contains(CapabilitySet::SYS_ADMIN) {
        let namespaces = libc::CLONE_NEWNS
            | libc::CLONE_NEWCGROUP
            | libc::CLONE_NEWUTS
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUSER
            | libc::CLONE_NEWPID
            | libc::CLONE_NEWNET;
        rules.push(Rule(CLONE, When::AnyBit(0, namespaces as u32), NO));
        // The flags of clone3 are in memory, which a filter cannot read. On ENOSYS the C library falls back to clone.
        rules.push(Rule(CLONE3, When::Always, UNKNOWN));
    }
    rules.push(Rule(
        PERSONALITY,
        When::NotIn(0, HARMLESS_PERSONALITIES),
        NO,
    ));
    // AF_VSOCK is not separated by network namespaces.
    let vsock = libc::AF_VSOCK as u32;
    rules.push(Rule(SOCKET, When::Equals(0, u32::MAX, vsock), NO));
    rules
}

/// Makes the kernel appear to have no keyrings, for containers without [`install_default`], which rejects the keyring calls too.
///
/// A user's keys are the same in all of their user namespaces. Container root could link the keyring of the user's job by its id
/// and read the keys, and all containers would share one user keyring. Runtimes nested in a container, which create a session
/// keyring per container, continue without one after ENOSYS.
pub fn install_keyless() -> io::Result<()> {
    let rules: Vec<Rule> = KEYS
        .iter()
        .map(|call| Rule(*call, When::Always, UNKNOWN))
        .collect();
    install(&rules)
}

/// Makes changes of owners, users and groups, and the creation of device files, succeed without effect: for a container that has
/// only one id but expects many.
pub fn install_pretence() -> io::Result<()> {
    let mut rules: Vec<Rule> = PRETENDED
        .iter()
        .map(|call| Rule(*call, When::Always, DONE))
        .collect();
    for (call, argument) in [(MKNOD, 1), (MKNODAT, 2)] {
        for kind in [libc::S_IFCHR, libc::S_IFBLK] {
            rules.push(Rule(call, When::Equals(argument, libc::S_IFMT, kind), DONE));
        }
    }
    install(&rules)
}

fn install(rules: &[Rule]) -> io::Result<()> {
    let mut code = program(rules);
    let program = libc::sock_fprog {
        len: code.len() as u16,
        filter: code.as_mut_ptr(),
    };
    // Kernels before 5.16 disable speculative store bypass for filtered programs, which slows down their loads. Like other container
    // runtimes, opt out.
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
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
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
    fn call_of_32_bits(number: u32, arguments: [u32; 3]) -> Option<i32> {
        // This file exists only on kernels with 32-bit support.
        std::fs::metadata("/proc/sys/abi/vsyscall32").ok()?;
        let [first, second, third] = arguments.map(u64::from);
        let answer: u64;
        // SAFETY: the calls that the tests make read and write no memory. The register of the first argument, which the compiler
        // reserves, is restored, and the registers that old kernels clear are declared.
        unsafe {
            std::arch::asm!(
                "xchg rbx, {first}",
                "int 0x80",
                "xchg rbx, {first}",
                first = inout(reg) first => _,
                inlateout("rax") u64::from(number) => answer,
                in("rcx") second,
                in("rdx") third,
                out("r8") _,
                out("r9") _,
                out("r10") _,
                out("r11") _,
            );
        }
        Some(answer as u32 as i32)
    }

    #[test]
    fn default_profile_rejects_namespaces_and_runs_programs() {
        in_a_thread(|| {
            crate::credentials::no_new_privileges().unwrap();
            install_default(CapabilitySet::empty()).unwrap();
            assert!(Command::new("true").status().unwrap().success());
            let refused = rustix::system::sethostname(b"x").unwrap_err();
            assert_eq!(refused, rustix::io::Errno::PERM);
            let unshared = Command::new("unshare").args(["-r", "true"]).status();
            assert!(!unshared.unwrap().success());
        });
    }

    /// The errno of a failing call under the default filter for these capabilities.
    fn answer(capabilities: CapabilitySet, call: fn() -> libc::c_long) -> Option<i32> {
        in_a_thread(move || {
            crate::credentials::no_new_privileges().unwrap();
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
        let no = Some(libc::EPERM);
        assert_eq!(answer(CapabilitySet::empty(), enter), no);
        assert_eq!(answer(time, enter), no);
        assert_eq!(answer(admin, enter), Some(libc::EBADF));
        assert_eq!(answer(admin, set_time), no);
        assert_eq!(answer(time, set_time), Some(libc::EINVAL));
        assert_eq!(answer(time, fork), Some(libc::ENOSYS));
        assert_eq!(answer(admin, fork), Some(libc::EINVAL));
        let refused = |capabilities| default_rules(capabilities).len();
        // Some calls are rejected whatever the capabilities are.
        assert!(refused(CapabilitySet::all()) > 10);
        assert!(refused(CapabilitySet::BPF) < refused(CapabilitySet::CHOWN));
    }

    #[test]
    fn calls_that_need_many_ids_appear_to_succeed() {
        in_a_thread(|| {
            let file = tempfile::NamedTempFile::new().unwrap();
            let path = file.path().to_owned();
            crate::credentials::no_new_privileges().unwrap();
            install_pretence().unwrap();
            std::os::unix::fs::chown(&path, Some(4711), Some(4711)).unwrap();
            let owner = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(&path).unwrap());
            assert_eq!(owner, rustix::process::geteuid().as_raw());
            let device = path.with_extension("device");
            let kind = rustix::fs::FileType::CharacterDevice;
            let made = rustix::fs::mknodat(rustix::fs::CWD, &device, kind, 0o600.into(), 0x103);
            made.unwrap();
            assert!(!device.exists());
        });
    }

    #[test]
    fn all_profiles_reject_keyrings() {
        // SAFETY: keyctl(KEYCTL_GET_KEYRING_ID, KEY_SPEC_SESSION_KEYRING) takes integers only.
        let keyctl = || unsafe { libc::syscall(libc::SYS_keyctl, 0, -3, 1) };
        assert_eq!(answer(CapabilitySet::all(), keyctl), Some(libc::EPERM));
        in_a_thread(move || {
            crate::credentials::no_new_privileges().unwrap();
            install_keyless().unwrap();
            assert_eq!(keyctl(), -1);
            let refused = io::Error::last_os_error().raw_os_error();
            assert_eq!(refused, Some(libc::ENOSYS));
            for number in [ADD_KEY_I386, REQUEST_KEY_I386, KEYCTL_I386] {
                let refused = call_of_32_bits(number, [0; 3]);
                assert!(refused.is_none_or(|refused| refused == -libc::ENOSYS));
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
            crate::credentials::no_new_privileges().unwrap();
            install_default(CapabilitySet::empty()).unwrap();
            let Some(pid) = call_of_32_bits(GETPID, [0; 3]) else {
                return;
            };
            assert_eq!(pid, std::process::id() as i32);
            let vsock = libc::AF_VSOCK as u32;
            for (number, arguments) in [
                (MOUNT, [0; 3]),
                (CLONE_I386, [libc::CLONE_NEWUSER as u32, 0, 0]),
                (SOCKET_I386, [vsock, 1, 0]),
            ] {
                let refused = call_of_32_bits(number, arguments);
                assert_eq!(refused, Some(-libc::EPERM), "{number}");
            }
        });
    }

    #[test]
    fn pretended_calls_apply_to_32_bit_programs() {
        in_a_thread(|| {
            crate::credentials::no_new_privileges().unwrap();
            install_pretence().unwrap();
            if call_of_32_bits(GETPID, [0; 3]).is_none() {
                return;
            }
            // The path is a null pointer, so these calls succeed only because of the filter.
            for (number, arguments) in [
                (CHOWN32, [0, 5, 5]),
                (SETUID, [4711, 0, 0]),
                (SETRESUID32, [4711, 4711, 4711]),
                (MKNOD_I386, [0, libc::S_IFCHR | 0o600, 0x103]),
            ] {
                assert_eq!(call_of_32_bits(number, arguments), Some(0), "{number}");
            }
            let pipe = [0, libc::S_IFIFO | 0o600, 0];
            assert_eq!(call_of_32_bits(MKNOD_I386, pipe), Some(-libc::EFAULT));
        });
    }
}
