//! Minimal netlink: build a message, send it, read the kernel's acknowledgement.
//!
//! The few requests here do not justify a library.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Bytes of one message or of several in a row.
#[derive(Default)]
pub(crate) struct Message(Vec<u8>);

/// A message or attribute that is not finished: its length is filled in at the end.
pub(crate) struct Open(usize);

impl Message {
    /// Starts a message. Every request asks for an acknowledgement, except the begin and end messages of a batch.
    pub(crate) fn begin(&mut self, kind: u16, flags: u16, sequence: u32) -> Open {
        let open = Open(self.0.len());
        self.0.extend(0u32.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(flags.to_ne_bytes());
        self.0.extend(sequence.to_ne_bytes());
        self.0.extend(0u32.to_ne_bytes());
        open
    }

    /// Ends a message.
    pub(crate) fn end(&mut self, open: Open) {
        let length = (self.0.len() - open.0) as u32;
        self.0[open.0..open.0 + 4].copy_from_slice(&length.to_ne_bytes());
    }

    /// Appends raw bytes: the header of a protocol.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    /// An attribute with its value.
    pub(crate) fn attribute(&mut self, kind: u16, value: &[u8]) {
        let open = self.nest(kind);
        self.0.extend(value);
        self.end_nest(open);
    }

    /// A text attribute with a terminating zero byte.
    pub(crate) fn text(&mut self, kind: u16, value: &str) {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, &bytes);
    }

    /// Starts a nested attribute.
    pub(crate) fn nest(&mut self, kind: u16) -> Open {
        let open = Open(self.0.len());
        self.0.extend(0u16.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        open
    }

    /// Ends a nested attribute and pads it to a multiple of four bytes.
    pub(crate) fn end_nest(&mut self, open: Open) {
        let length = (self.0.len() - open.0) as u16;
        self.0[open.0..open.0 + 2].copy_from_slice(&length.to_ne_bytes());
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }
}

/// A netlink socket of the current network namespace.
pub(crate) struct Socket(OwnedFd);

impl Socket {
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
    pub(crate) fn ask(&self, message: &Message, acknowledgements: usize) -> io::Result<()> {
        rustix::io::write(&self.0, &message.0)?;
        let mut seen = 0;
        while seen < acknowledgements {
            self.wait_readable()?;
            let mut buffer = [0u8; 8192];
            let length = rustix::io::read(&self.0, &mut buffer)?;
            seen += read_verdicts(&buffer[..length])?;
        }
        Ok(())
    }

    /// Waits for the answer. The wait is bounded so that a probe cannot hang.
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

/// Counts the acknowledgements in the received bytes, and ignores other messages.
fn read_verdicts(mut bytes: &[u8]) -> io::Result<usize> {
    let number =
        |bytes: &[u8], at: usize| Some(i32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let mut seen = 0;
    while let (Some(length), Some(kind)) = (number(bytes, 0), bytes.get(4..6)) {
        let length = usize::try_from(length).unwrap_or(0);
        if length < 16 || length > bytes.len() {
            break;
        }
        if kind == (libc::NLMSG_ERROR as u16).to_ne_bytes() {
            match number(bytes, 16) {
                Some(0) => seen += 1,
                Some(code) => return Err(io::Error::from_raw_os_error(code.saturating_neg())),
                None => break,
            }
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
    }
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(code: i32) -> Vec<u8> {
        let mut message = Message::default();
        let open = message.begin(libc::NLMSG_ERROR as u16, 0, 1);
        message.bytes(&code.to_ne_bytes());
        message.end(open);
        message.0
    }

    #[test]
    fn acknowledgements_are_counted_and_errors_returned() {
        let both = [verdict(0), verdict(0)].concat();
        assert_eq!(read_verdicts(&both).unwrap(), 2);
        let refused = read_verdicts(&[verdict(0), verdict(-libc::EPERM)].concat()).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
        assert!(read_verdicts(&verdict(i32::MIN)).is_err());
        for cut in 0..both.len() {
            assert!(read_verdicts(&both[..cut]).is_ok());
        }
    }

    #[test]
    fn attributes_are_aligned() {
        let mut message = Message::default();
        message.text(3, "ab");
        assert_eq!(message.0, [7, 0, 3, 0, b'a', b'b', 0, 0]);
    }
}
