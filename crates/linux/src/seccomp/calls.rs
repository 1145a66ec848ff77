//! Numbers of system calls for 64-bit and 32-bit programs.

use rustix::thread::CapabilitySet;

/// One system call. i386 has several variants of some: for 16-bit and 32-bit ids, for 32-bit and 64-bit times.
#[derive(Clone, Copy, Debug)]
pub struct SystemCall {
    /// Numbers for x86_64, and for x32 (without the x32 bit) where they differ.
    pub x86_64: &'static [libc::c_long],
    /// Numbers of i386.
    pub i386: &'static [u32],
}

/// Usage: `calls![SYS_acct: 51, …]`.
macro_rules! calls {
    ($($name:ident $(+ $x32:literal)? : $($i386:literal)|*),* $(,)?) => {
        &[$(SystemCall { x86_64: &[libc::$name $(, $x32)?], i386: &[$($i386),*] }),*]
    };
}

/// Calls that the default profiles of container runtimes reject unless the container has one of these capabilities.
pub const DENIED_CALLS: &[(CapabilitySet, &[SystemCall])] = &[
    (
        CapabilitySet::empty(),
        calls![
            SYS_io_uring_enter: 426,
            SYS_io_uring_register: 427,
            SYS_io_uring_setup: 425,
            SYS_kexec_file_load: ,
            SYS_kexec_load + 528: 283,
            SYS_move_pages + 533: 317,
            SYS_nfsservctl: 169,
            SYS_pivot_root: 217,
            SYS_swapoff: 115,
            SYS_swapon: 87,
            SYS_sysfs: 135,
            SYS__sysctl: 149,
            SYS_uselib: 86,
            SYS_userfaultfd: 374,
            SYS_ustat: 62,
        ],
    ),
    (
        CapabilitySet::SYS_ADMIN,
        calls![
            SYS_fsconfig: 431,
            SYS_fsmount: 432,
            SYS_fsopen: 430,
            SYS_fspick: 433,
            SYS_lookup_dcookie: 253,
            SYS_mount: 21,
            SYS_mount_setattr: 442,
            SYS_move_mount: 429,
            SYS_open_tree: 428,
            SYS_quotactl: 131,
            SYS_quotactl_fd: 443,
            SYS_setdomainname: 121,
            SYS_sethostname: 74,
            SYS_setns: 346,
            // Includes umount.
            SYS_umount2: 52 | 22,
            SYS_unshare: 310,
        ],
    ),
    (
        CapabilitySet::SYS_ADMIN.union(CapabilitySet::BPF),
        calls![SYS_bpf: 357],
    ),
    (
        CapabilitySet::SYS_ADMIN.union(CapabilitySet::PERFMON),
        calls![SYS_perf_event_open: 336],
    ),
    (
        CapabilitySet::SYS_ADMIN.union(CapabilitySet::SYSLOG),
        calls![SYS_syslog: 103],
    ),
    (
        CapabilitySet::DAC_READ_SEARCH,
        calls![SYS_open_by_handle_at: 342],
    ),
    (CapabilitySet::SYS_BOOT, calls![SYS_reboot: 88]),
    (
        CapabilitySet::SYS_MODULE,
        calls![
            SYS_delete_module: 129,
            SYS_finit_module: 350,
            SYS_init_module: 128,
        ],
    ),
    (CapabilitySet::SYS_PACCT, calls![SYS_acct: 51]),
    (
        CapabilitySet::SYS_RAWIO,
        calls![SYS_ioperm: 101, SYS_iopl: 110],
    ),
    (
        CapabilitySet::SYS_TIME,
        calls![
            SYS_clock_adjtime: 343 | 405,
            SYS_clock_settime: 264 | 404,
            // stime is its predecessor.
            SYS_settimeofday: 79 | 25,
        ],
    ),
    (CapabilitySet::SYS_TTY_CONFIG, calls![SYS_vhangup: 111]),
];

/// Keyring calls. Keyrings are separated by user, not by user namespace.
pub const KEYRING_CALLS: &[SystemCall] = calls![
    SYS_add_key: 286,
    SYS_keyctl: 288,
    SYS_request_key: 287,
];

/// i386 only: virtual 8086 mode.
pub const DENIED_I386: SystemCall = SystemCall {
    x86_64: &[],
    i386: &[113, 166],
};

/// Calls that appear to succeed for a process with one id, as if it were root with many ids.
pub const FAKEROOT_CALLS: &[SystemCall] = calls![
    SYS_chown: 182 | 212,
    SYS_fchown: 95 | 207,
    SYS_fchownat: 298,
    SYS_lchown: 16 | 198,
    SYS_setfsgid: 139 | 216,
    SYS_setfsuid: 138 | 215,
    SYS_setgid: 46 | 214,
    SYS_setgroups: 81 | 206,
    SYS_setregid: 71 | 204,
    SYS_setresgid: 170 | 210,
    SYS_setresuid: 164 | 208,
    SYS_setreuid: 70 | 203,
    SYS_setuid: 23 | 213,
];

const fn call(x86_64: &'static [libc::c_long], i386: &'static [u32]) -> SystemCall {
    SystemCall { x86_64, i386 }
}

/// Calls that are filtered by their arguments.
pub const CLONE: SystemCall = call(&[libc::SYS_clone], &[120]);
pub const CLONE3: SystemCall = call(&[libc::SYS_clone3], &[435]);
pub const PERSONALITY: SystemCall = call(&[libc::SYS_personality], &[136]);
/// The arguments of i386's socketcall are in memory, which a filter cannot read; other runtimes allow it too.
pub const SOCKET: SystemCall = call(&[libc::SYS_socket], &[359]);
