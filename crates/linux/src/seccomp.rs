//! Filters on system calls: what a container may not ask of the kernel, and what it is told to have happened.

use std::io;

/// What a filter answers to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// This error, without doing anything. Zero is success.
    Error(i32),
}

/// When it answers so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Always,
    /// The argument of this index, masked, is not zero.
    AnyBit(u8, u32),
    /// The argument of this index, masked, is this.
    Equals(u8, u32, u32),
    /// The argument of this index is none of these.
    NotIn(u8, &'static [u32]),
}

struct Rule(libc::c_long, When, Answer);

const NO: Answer = Answer::Error(libc::EPERM);
const UNKNOWN: Answer = Answer::Error(libc::ENOSYS);
const DONE: Answer = Answer::Error(0);

/// Calls that the default profiles of container runtimes refuse to those without special capabilities.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_ioperm,
    libc::SYS_iopl,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_lookup_dcookie,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_move_pages,
    libc::SYS_nfsservctl,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pivot_root,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_sysfs,
    libc::SYS__sysctl,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_uselib,
    libc::SYS_userfaultfd,
    libc::SYS_ustat,
    libc::SYS_vhangup,
];

/// What a process with one id is told to have done, as if it were root among many.
const PRETENDED: &[libc::c_long] = &[
    libc::SYS_chown,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_lchown,
    libc::SYS_setfsgid,
    libc::SYS_setfsuid,
    libc::SYS_setgid,
    libc::SYS_setgroups,
    libc::SYS_setregid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_setreuid,
    libc::SYS_setuid,
];

/// Personalities that change nothing dangerous: Linux, its 32-bit form, with and without UNAME26, and "which one is it?".
const HARMLESS_PERSONALITIES: &[u32] = &[0, 0x0008, 0x2_0000, 0x2_0008, 0xffff_ffff];

/// Installs the profile that pods know as `RuntimeDefault`.
pub fn install_default() -> io::Result<()> {
    let mut rules: Vec<Rule> = REFUSED
        .iter()
        .map(|call| Rule(*call, When::Always, NO))
        .collect();
    let namespaces = libc::CLONE_NEWNS
        | libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET;
    rules.push(Rule(
        libc::SYS_clone,
        When::AnyBit(0, namespaces as u32),
        NO,
    ));
    // Its flags are in memory, where a filter can't look; the C library then falls back to clone.
    rules.push(Rule(libc::SYS_clone3, When::Always, UNKNOWN));
    rules.push(Rule(
        libc::SYS_personality,
        When::NotIn(0, HARMLESS_PERSONALITIES),
        NO,
    ));
    // AF_VSOCK talks past every network namespace.
    rules.push(Rule(
        libc::SYS_socket,
        When::Equals(0, u32::MAX, libc::AF_VSOCK as u32),
        NO,
    ));
    install(&rules)
}

/// Lets changes of owners, users and groups, and device files, succeed without effect: for a container that has one id
/// but believes in many.
pub fn install_pretence() -> io::Result<()> {
    let mut rules: Vec<Rule> = PRETENDED
        .iter()
        .map(|call| Rule(*call, When::Always, DONE))
        .collect();
    for (call, argument) in [(libc::SYS_mknod, 1), (libc::SYS_mknodat, 2)] {
        for kind in [libc::S_IFCHR, libc::S_IFBLK] {
            rules.push(Rule(call, When::Equals(argument, libc::S_IFMT, kind), DONE));
        }
    }
    install(&rules)
}

// Offsets into struct seccomp_data.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;
/// From linux/audit.h.
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
/// Calls of the x32 kind have this bit, and would pass by a filter that doesn't know them.
const X32: u32 = 0x4000_0000;

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    }
}

fn jump(code: u32, k: u32, yes: u8, no: u8) -> libc::sock_filter {
    libc::sock_filter {
        code: (libc::BPF_JMP | code | libc::BPF_K) as u16,
        jt: yes,
        jf: no,
        k,
    }
}

const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

fn answer(answer: Answer) -> libc::sock_filter {
    let Answer::Error(number) = answer;
    statement(RETURN, libc::SECCOMP_RET_ERRNO | number as u32)
}

fn program(rules: &[Rule]) -> Vec<libc::sock_filter> {
    let mut code = vec![
        statement(LOAD, ARCHITECTURE),
        jump(libc::BPF_JEQ, AUDIT_ARCH_X86_64, 1, 0),
        answer(UNKNOWN),
        statement(LOAD, NUMBER),
        jump(libc::BPF_JGE, X32, 0, 1),
        answer(UNKNOWN),
    ];
    for Rule(call, when, then) in rules {
        let check = condition(*when, *then);
        // Jumps are relative and short; every condition is.
        code.push(jump(libc::BPF_JEQ, *call as u32, 0, check.len() as u8));
        code.extend(check);
    }
    code.push(statement(RETURN, libc::SECCOMP_RET_ALLOW));
    code
}

/// Answers if `when` holds, else goes on behind itself with the call's number loaded again.
fn condition(when: When, then: Answer) -> Vec<libc::sock_filter> {
    let argument = |index: u8| statement(LOAD, ARGUMENTS + 8 * u32::from(index));
    let mask = |mask| statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, mask);
    let again = statement(LOAD, NUMBER);
    match when {
        When::Always => vec![answer(then)],
        When::AnyBit(index, bits) => vec![
            argument(index),
            jump(libc::BPF_JSET, bits, 0, 1),
            answer(then),
            again,
        ],
        When::Equals(index, bits, value) => vec![
            argument(index),
            mask(bits),
            jump(libc::BPF_JEQ, value, 0, 1),
            answer(then),
            again,
        ],
        When::NotIn(index, values) => {
            let mut code = vec![argument(index)];
            for (at, value) in values.iter().enumerate() {
                code.push(jump(libc::BPF_JEQ, *value, (values.len() - at) as u8, 0));
            }
            code.push(answer(then));
            code.push(again);
            code
        }
    }
}

fn install(rules: &[Rule]) -> io::Result<()> {
    let mut code = program(rules);
    let program = libc::sock_fprog {
        len: code.len() as u16,
        filter: code.as_mut_ptr(),
    };
    // SAFETY: the program points to its instructions, which outlive the call; the kernel copies and checks them.
    let done = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
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

    /// Filters can't be taken off, so each is tried in a thread of its own, which ends with it.
    fn in_a_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        std::thread::spawn(work).join().unwrap()
    }

    #[test]
    fn the_default_profile_refuses_namespaces_and_lets_programs_run() {
        in_a_thread(|| {
            crate::credentials::no_new_privileges().unwrap();
            install_default().unwrap();
            assert!(Command::new("true").status().unwrap().success());
            let refused = rustix::system::sethostname(b"x").unwrap_err();
            assert_eq!(refused, rustix::io::Errno::PERM);
            let unshared = Command::new("unshare").args(["-r", "true"]).status();
            assert!(!unshared.unwrap().success());
        });
    }

    #[test]
    fn what_one_id_cannot_do_is_pretended() {
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
}
