//! Probe for TUN devices, through which packets leave a network namespace.

use std::os::fd::AsRawFd;

use rustix::thread::UnshareFlags;

use super::{ProbeReport, failed, userns};

/// From linux/if_tun.h.
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUN_F_CSUM: libc::c_ulong = 0x01;
const TUN_F_TSO4: libc::c_ulong = 0x02;
const TUN_F_TSO6: libc::c_ulong = 0x04;

/// Creates a TUN device in a new network namespace and enables checksum and TCP segmentation offload.
pub(super) fn tun(_: Option<&str>) -> ProbeReport {
    userns::enter(UnshareFlags::NEWNET)?;
    let device = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .map_err(failed("/dev/net/tun"))?;
    // SAFETY: an all-zero ifreq is a valid one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"probe0") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags =
        (libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one ifreq, which outlives the call.
    if unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } < 0 {
        return Err(failed("TUNSETIFF")(std::io::Error::last_os_error()));
    }
    let offload = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6;
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    let large = unsafe { libc::ioctl(device.as_raw_fd(), TUNSETOFFLOAD, offload) } == 0;
    let size = if large {
        "with packets of 64 KiB"
    } else {
        "without segmentation offload"
    };
    Ok(format!("made a TUN device {size}"))
}
