//! TUN devices whose packets may be as large as the kernel's own: with checksums and segmentation left to the receiver.
//!
//! A packet is preceded by a `struct virtio_net_hdr` ([`HEADER_LENGTH`] bytes), which says which checksum is missing and how the
//! packet is to be segmented. The header is passed on to the TUN device of the other side as it is; the kernel checks it there.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use crate::syscall::check;

/// The length of `struct virtio_net_hdr`.
pub const HEADER_LENGTH: usize = 10;
/// The maximum length of a packet with its header.
pub const MAX_PACKET: usize = HEADER_LENGTH + 65535;
/// The device file.
pub const PATH: &str = "/dev/net/tun";

/// From linux/if_tun.h: offloads that the reader accepts.
const TUN_F_CSUM: libc::c_ulong = 0x01;
const TUN_F_TSO4: libc::c_ulong = 0x02;
const TUN_F_TSO6: libc::c_ulong = 0x04;
const TUN_F_TSO_ECN: libc::c_ulong = 0x08;
const TUN_F_USO4: libc::c_ulong = 0x20;
const TUN_F_USO6: libc::c_ulong = 0x40;
const TSO: libc::c_ulong = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN;

/// Attaches a descriptor of [`PATH`] to the device `name` as one more queue; the first one creates the device, in the network
/// namespace in which the descriptor was opened. The device exists as long as one of its queues is open.
pub fn attach_queue(device: impl AsFd, name: &str) -> io::Result<()> {
    let device = device.as_fd().as_raw_fd();
    let name = CString::new(name)?;
    let name = name.as_bytes_with_nul();
    // SAFETY: `ifreq` is plain data, for which zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() > request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = from.cast_signed();
    }
    let flags = libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE;
    request.ifr_ifru.ifru_flags = flags as i16;
    // SAFETY: the request points to a valid `ifreq`, which outlives the call.
    check(unsafe { libc::ioctl(device, libc::TUNSETIFF, &raw mut request) })?;
    let length = HEADER_LENGTH as libc::c_int;
    // SAFETY: the request points to a valid integer, which outlives the call.
    check(unsafe { libc::ioctl(device, libc::TUNSETVNETHDRSZ, &raw const length) })?;
    // Segmentation of UDP needs Linux 6.2.
    let offloads = [TSO | TUN_F_USO4 | TUN_F_USO6, TSO, TUN_F_CSUM, 0];
    let mut result = Ok(());
    for offload in offloads {
        // SAFETY: the argument of this request is a plain number.
        result = check(unsafe { libc::ioctl(device, libc::TUNSETOFFLOAD, offload) });
        if result.is_ok() {
            break;
        }
    }
    result
}

/// Opens [`PATH`] in the current network namespace, non-blocking.
pub fn open() -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    Ok(rustix::fs::open(PATH, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use rustix::thread::UnshareFlags;

    use super::*;
    use crate::route::{InterfaceAddress, RouteSocket};
    use crate::testing::in_a_child;

    #[test]
    fn packets_of_the_kernel_are_read_with_their_header() {
        assert!(in_a_child(|| {
            crate::namespace::enter_as_root(UnshareFlags::NEWNET).unwrap();
            let queues = [open().unwrap(), open().unwrap()];
            for queue in &queues {
                attach_queue(queue, "test").unwrap();
            }
            let route = RouteSocket::open().unwrap();
            let address = InterfaceAddress {
                address: [10, 1, 0, 1].into(),
                prefix_length: 24,
            };
            route.set_mtu("test", 65520).unwrap();
            route.add_address("test", address).unwrap();
            route.set_up("test").unwrap();
            let socket = UdpSocket::bind("10.1.0.1:0").unwrap();
            socket.send_to(&[7; 60_000], "10.1.0.2:9").unwrap();
            let mut packet = vec![0; MAX_PACKET];
            let expected = HEADER_LENGTH + 20 + 8 + 60_000;
            // Other packets are those by which the kernel announces the interface. Byte 9 of the IP header is the protocol.
            queues.iter().any(|queue| {
                std::iter::from_fn(|| rustix::io::read(queue, &mut packet).ok())
                    .any(|length| length == expected)
            }) && packet[HEADER_LENGTH + 9] == 17
        }));
    }
}
