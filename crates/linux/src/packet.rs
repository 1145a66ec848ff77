//! Messages with file descriptors between two processes of this program.
//!
//! A message is one [`Packet`]: a number, a text and file descriptors. A long text is sent as a memfd in the first descriptor,
//! because the kernel limits the size of packets.
//!
//! The kernel silently drops descriptors that exceed the receiver's limit. The number and a short text still arrive, and
//! [`Packet::is_complete`] is false. So a lack of descriptors fails one request, not the connection.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::MemfdFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

/// The maximum number of descriptors per message, without the memfd of a long text.
pub const MAX_DESCRIPTORS: usize = 8;
/// The maximum length of a text. (The kernel limits the arguments and environment of a program to 6 MiB.)
pub const MAX_TEXT: usize = 16 << 20;
/// Texts up to this length are sent in the packet itself.
const MAX_INLINE_TEXT: usize = 32 << 10;
/// The location of the text: in the packet itself, or in a memfd.
const IN_PACKET: u8 = b'.';
const IN_MEMFD: u8 = b'm';
/// The length of the header: the location of the text, and the number.
const HEADER_LEN: usize = 1 + size_of::<u64>();

/// A received message.
#[derive(Debug)]
pub struct Packet {
    /// The number that the sender chose.
    pub number: u64,
    /// Empty if it was long and its memfd was dropped.
    pub text: Vec<u8>,
    /// Empty if one of them was dropped.
    pub descriptors: Vec<OwnedFd>,
    /// False if the kernel dropped descriptors of this message.
    pub is_complete: bool,
}

/// Two connected sockets (SOCK_SEQPACKET): they preserve packet boundaries, and reading from one returns the end of the stream
/// after the other is closed.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Sends one message.
pub fn send(
    socket: impl AsFd,
    number: u64,
    text: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let is_short = text.len() <= MAX_INLINE_TEXT;
    let memory = (!is_short).then(|| memory_file(text)).transpose()?;
    let (location, inline) = match memory {
        None => (IN_PACKET, text),
        Some(_) => (IN_MEMFD, &[][..]),
    };
    let mut all: Vec<BorrowedFd<'_>> = memory.iter().map(AsFd::as_fd).collect();
    all.extend_from_slice(descriptors);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS + 1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !all.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&all)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    let mut header = vec![location];
    header.extend(number.to_le_bytes());
    let parts = [IoSlice::new(&header), IoSlice::new(inline)];
    let flags = SendFlags::NOSIGNAL;
    retry(|| rustix::net::sendmsg(&socket, &parts, &mut control, flags))?;
    Ok(())
}

/// Writes a text of at most [`MAX_TEXT`] bytes to a memfd.
pub fn memory_file(text: &[u8]) -> io::Result<File> {
    if text.len() > MAX_TEXT {
        let length = text.len();
        return Err(io::Error::other(format!(
            "a message of {length} bytes is too long (the maximum is {MAX_TEXT})"
        )));
    }
    let mut memory = File::from(rustix::fs::memfd_create("message", MemfdFlags::CLOEXEC)?);
    memory.write_all(text)?;
    Ok(memory)
}

/// Receives one message; `None` if the other side has closed.
pub fn receive(socket: impl AsFd) -> io::Result<Option<Packet>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS + 1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut packet = vec![0; HEADER_LEN + MAX_INLINE_TEXT];
    let received = retry(|| {
        let mut into = [IoSliceMut::new(&mut packet)];
        rustix::net::recvmsg(&socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    if received.bytes == 0 {
        return Ok(None);
    }
    packet.truncate(received.bytes);
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    let is_complete = !received.flags.contains(ReturnFlags::CTRUNC);
    if !is_complete {
        descriptors.clear();
    }
    let malformed = || io::Error::other("malformed packet");
    let (header, text) = packet.split_at_checked(HEADER_LEN).ok_or_else(malformed)?;
    let (location, number) = header.split_first().ok_or_else(malformed)?;
    let number = u64::from_le_bytes(number.try_into().map_err(|_| malformed())?);
    let mut text = text.to_vec();
    if *location == IN_MEMFD && is_complete {
        let memory = descriptors.drain(..1).next().ok_or_else(malformed)?;
        text = read_memory_file(memory.into())?;
    }
    Ok(Some(Packet {
        number,
        text,
        descriptors,
        is_complete,
    }))
}

/// Reads a [`memory_file`] from its beginning.
pub fn read_memory_file(mut memory: File) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    memory.rewind()?;
    memory.take(MAX_TEXT as u64).read_to_end(&mut text)?;
    Ok(text)
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(rustix::io::Errno::INTR) => {}
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    #[test]
    fn text_and_descriptors_arrive_together() {
        let (sender, receiver) = pair().unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        let long = vec![b'x'; 1 << 20];
        send(&sender, 1, &long, &[write.as_fd()]).unwrap();
        send(&sender, 2, b"second", &[]).unwrap();
        send(&sender, 3, &[b'x'; MAX_INLINE_TEXT], &[write.as_fd()]).unwrap();
        drop((sender, write));
        let first = receive(&receiver).unwrap().unwrap();
        assert_eq!((first.number, first.is_complete), (1, true));
        assert_eq!(first.text, long);
        rustix::io::write(&first.descriptors[0], b"through").unwrap();
        let mut buffer = [0; 16];
        assert_eq!(rustix::io::read(&read, &mut buffer).unwrap(), 7);
        assert_eq!(receive(&receiver).unwrap().unwrap().text, b"second");
        let third = receive(&receiver).unwrap().unwrap();
        assert_eq!(
            (third.text.len(), third.descriptors.len()),
            (MAX_INLINE_TEXT, 1)
        );
        assert!(receive(&receiver).unwrap().is_none());
    }

    #[test]
    fn text_above_the_maximum_is_rejected() {
        let (sender, receiver) = pair().unwrap();
        let error = send(&sender, 1, &vec![0; MAX_TEXT + 1], &[]).unwrap_err();
        assert!(error.to_string().contains("too long"), "{error}");
        send(&sender, 2, &vec![0; MAX_TEXT], &[]).unwrap();
        let message = receive(&receiver).unwrap().unwrap();
        assert_eq!((message.number, message.text.len()), (2, MAX_TEXT));
    }

    /// RLIMIT_NOFILE applies to the whole process, but nextest runs each test in its own process.
    #[test]
    fn connection_survives_dropped_descriptors() {
        let (sender, receiver) = pair().unwrap();
        let long = vec![b'x'; MAX_INLINE_TEXT + 1];
        send(&sender, 1, &long, &[sender.as_fd()]).unwrap();
        send(&sender, 2, b"short", &[sender.as_fd(), sender.as_fd()]).unwrap();
        send(&sender, 3, b"no descriptors", &[]).unwrap();
        send(&sender, 4, &long, &[sender.as_fd()]).unwrap();
        let usual = getrlimit(Resource::Nofile);
        let next = rustix::io::dup(&sender).unwrap();
        let allow_descriptors = |count: u64| {
            let used = std::os::fd::AsRawFd::as_raw_fd(&next).cast_unsigned();
            let limit = Rlimit {
                current: Some(u64::from(used) + 1 + count),
                ..usual
            };
            setrlimit(Resource::Nofile, limit).unwrap();
        };
        let fields = |message: Packet| {
            let text = String::from_utf8(message.text).unwrap();
            let count = message.descriptors.len();
            (message.number, message.is_complete, text, count)
        };
        allow_descriptors(0);
        let received = || fields(receive(&receiver).unwrap().unwrap());
        assert_eq!(received(), (1, false, String::new(), 0));
        allow_descriptors(1);
        assert_eq!(received(), (2, false, "short".to_owned(), 0));
        allow_descriptors(0);
        assert_eq!(received(), (3, true, "no descriptors".to_owned(), 0));
        allow_descriptors(2);
        let (number, is_complete, text, count) = received();
        assert_eq!((number, is_complete, count), (4, true, 1));
        assert_eq!(text.len(), long.len());
    }
}
