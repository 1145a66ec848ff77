//! Minimal netlink client: builds a message, sends it, and reads the kernel's acknowledgement.
//!
//! The few requests here do not justify a dependency.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The length of `struct nlmsghdr`.
const HEADER_LENGTH: usize = 16;
/// The kernel's own buffer for dumps is at most this large.
const DUMP_BUFFER_SIZE: usize = 32 << 10;

/// Bytes of one message or of several in a row.
#[derive(Default)]
pub(crate) struct NetlinkMessage(Vec<u8>);

/// The offset of a message or attribute whose length is filled in when it ends.
pub(crate) struct Unfinished(usize);

impl NetlinkMessage {
    /// Starts a message. Every request asks for an acknowledgement, except the begin and end messages of a batch.
    pub(crate) fn begin(&mut self, kind: u16, flags: u16, sequence: u32) -> Unfinished {
        let unfinished = Unfinished(self.0.len());
        self.0.extend(0u32.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(flags.to_ne_bytes());
        self.0.extend(sequence.to_ne_bytes());
        self.0.extend(0u32.to_ne_bytes());
        unfinished
    }

    /// Ends a message.
    pub(crate) fn end(&mut self, unfinished: Unfinished) {
        let length = (self.0.len() - unfinished.0) as u32;
        self.0[unfinished.0..unfinished.0 + 4].copy_from_slice(&length.to_ne_bytes());
    }

    /// Appends raw bytes: the header of a protocol.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    /// An attribute with its value.
    pub(crate) fn attribute(&mut self, kind: u16, value: &[u8]) {
        let unfinished = self.nest(kind);
        self.0.extend(value);
        self.end_nest(unfinished);
    }

    /// A text attribute with a terminating zero byte.
    pub(crate) fn text(&mut self, kind: u16, value: &str) {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, &bytes);
    }

    /// Starts a nested attribute.
    pub(crate) fn nest(&mut self, kind: u16) -> Unfinished {
        let unfinished = Unfinished(self.0.len());
        self.0.extend(0u16.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        unfinished
    }

    /// Ends a nested attribute and pads it to a multiple of four bytes.
    pub(crate) fn end_nest(&mut self, unfinished: Unfinished) {
        let length = (self.0.len() - unfinished.0) as u16;
        self.0[unfinished.0..unfinished.0 + 2].copy_from_slice(&length.to_ne_bytes());
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }
}

/// A netlink socket of the current network namespace.
pub(crate) struct NetlinkSocket(OwnedFd);

impl NetlinkSocket {
    /// Opens one; `protocol` is `NETLINK_ROUTE` or `NETLINK_NETFILTER`.
    pub(crate) fn open(protocol: i32) -> io::Result<Self> {
        let flags = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: a system call without pointers.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, flags, protocol) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just created the descriptor, and nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Sends messages and waits for the given number of acknowledgements; returns the first error.
    pub(crate) fn request(
        &self,
        message: &NetlinkMessage,
        acknowledgements: usize,
    ) -> io::Result<()> {
        rustix::io::write(&self.0, &message.0)?;
        let mut received = 0;
        while received < acknowledgements {
            self.wait_readable()?;
            let mut buffer = [0u8; 8192];
            let length = rustix::io::read(&self.0, &mut buffer)?;
            received += count_acks(&buffer[..length])?;
        }
        Ok(())
    }

    /// Sends a dump request and passes the body of each response to `each`.
    pub(crate) fn dump(
        &self,
        message: &NetlinkMessage,
        mut each: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        rustix::io::write(&self.0, &message.0)?;
        loop {
            self.wait_readable()?;
            let mut buffer = vec![0u8; DUMP_BUFFER_SIZE];
            let length = rustix::io::read(&self.0, &mut buffer)?;
            for (kind, body) in messages(&buffer[..length]) {
                match i32::from(kind) {
                    libc::NLMSG_DONE => return Ok(()),
                    libc::NLMSG_ERROR => {
                        return Err(
                            error_of(body).unwrap_or_else(|| io::ErrorKind::InvalidData.into())
                        );
                    }
                    _ => each(body),
                }
            }
        }
    }

    /// Waits for the acknowledgement, with a time-out so that a probe cannot hang.
    fn wait_readable(&self) -> io::Result<()> {
        let mut poll = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one valid pollfd, which outlives the call.
        match unsafe { libc::poll(&raw mut poll, 1, 2_000) } {
            1.. => Ok(()),
            0 => Err(io::Error::from(io::ErrorKind::TimedOut)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl From<OwnedFd> for NetlinkSocket {
    fn from(socket: OwnedFd) -> Self {
        Self(socket)
    }
}

/// Splits received bytes into messages: their types and bodies. Ends at the first malformed one.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(*bytes.first_chunk()?);
        let length = usize::try_from(length).ok()?;
        let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
        let body = bytes.get(HEADER_LENGTH..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, body))
    })
}

/// Splits attributes: their types and values. Ends at the first malformed one.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?);
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    })
}

/// The error in the body of an acknowledgement; `None` if it reports success or is malformed.
fn error_of(body: &[u8]) -> Option<io::Error> {
    let code = i32::from_ne_bytes(*body.first_chunk()?);
    (code != 0).then(|| io::Error::from_raw_os_error(code.saturating_neg()))
}

/// Counts the acknowledgements in the received bytes, and ignores other messages.
fn count_acks(bytes: &[u8]) -> io::Result<usize> {
    let mut received = 0;
    for (kind, body) in messages(bytes) {
        if i32::from(kind) == libc::NLMSG_ERROR && body.len() >= 4 {
            match error_of(body) {
                None => received += 1,
                Some(error) => return Err(error),
            }
        }
    }
    Ok(received)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ack(code: i32) -> Vec<u8> {
        let mut message = NetlinkMessage::default();
        let unfinished = message.begin(libc::NLMSG_ERROR as u16, 0, 1);
        message.bytes(&code.to_ne_bytes());
        message.end(unfinished);
        message.0
    }

    #[test]
    fn acknowledgements_are_counted_and_errors_returned() {
        let both = [ack(0), ack(0)].concat();
        assert_eq!(count_acks(&both).unwrap(), 2);
        let refused = count_acks(&[ack(0), ack(-libc::EPERM)].concat()).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
        assert!(count_acks(&ack(i32::MIN)).is_err());
        for cut in 0..both.len() {
            assert!(count_acks(&both[..cut]).is_ok());
        }
    }

    #[test]
    fn malformed_messages_and_attributes_end_the_iteration() {
        for bytes in [&[0; 16][..], &[255; 64], &[5, 0, 0, 0, 1], &[3, 0, 0, 0]] {
            assert_eq!(messages(bytes).count(), 0, "{bytes:?}");
        }
        for bytes in [&[0; 4][..], &[255; 64], &[5, 0, 1, 0]] {
            assert_eq!(attributes(bytes).count(), 0, "{bytes:?}");
        }
    }

    #[test]
    fn attributes_are_aligned() {
        let mut message = NetlinkMessage::default();
        message.text(3, "ab");
        assert_eq!(message.0, [7, 0, 3, 0, b'a', b'b', 0, 0]);
    }
}
