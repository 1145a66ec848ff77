//! Messages with file descriptors between two processes of this program.
//!
//! A message is one packet: a number, a text and file descriptors. A long text is sent as a memfd in the first descriptor,
//! because the kernel limits the size of packets.
//!
//! The kernel silently drops descriptors that exceed the receiver's limit. The number and a short text still arrive, and
//! [`Message::is_whole`] is false. So a lack of descriptors fails one request, not the connection.

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
const SHORT: usize = 32 << 10;
/// Where the text of a packet is: in the packet, or in a memfd.
const IN_PACKET: u8 = b'.';
const IN_MEMORY: u8 = b'm';
/// The length of the header: the location of the text, and the number.
const HEAD: usize = 1 + size_of::<u64>();

/// A received message.
#[derive(Debug)]
pub struct Message {
    /// The number that the sender chose.
    pub number: u64,
    /// Empty if it was long and its memfd was dropped.
    pub text: Vec<u8>,
    /// Empty if one of them was dropped.
    pub descriptors: Vec<OwnedFd>,
    /// False if the kernel dropped descriptors of this message.
    pub is_whole: bool,
}

/// Two connected sockets. They keep packet boundaries, and each side sees when the other one closes.
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
    let is_short = text.len() <= SHORT;
    let memory = (!is_short).then(|| in_memory(text)).transpose()?;
    let (place, inline) = match memory {
        None => (IN_PACKET, text),
        Some(_) => (IN_MEMORY, &[][..]),
    };
    let mut all: Vec<BorrowedFd<'_>> = memory.iter().map(AsFd::as_fd).collect();
    all.extend_from_slice(descriptors);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS + 1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !all.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&all)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    let mut head = vec![place];
    head.extend(number.to_le_bytes());
    let parts = [IoSlice::new(&head), IoSlice::new(inline)];
    let flags = SendFlags::NOSIGNAL;
    retry(|| rustix::net::sendmsg(&socket, &parts, &mut control, flags))?;
    Ok(())
}

fn in_memory(text: &[u8]) -> io::Result<File> {
    if text.len() > MAX_TEXT {
        let length = text.len();
        return Err(io::Error::other(format!(
            "a message of {length} bytes is too long, {MAX_TEXT} is the most"
        )));
    }
    let mut memory = File::from(rustix::fs::memfd_create("message", MemfdFlags::CLOEXEC)?);
    memory.write_all(text)?;
    Ok(memory)
}

/// Receives one message; `None` if the other side has closed.
pub fn receive(socket: impl AsFd) -> io::Result<Option<Message>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS + 1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut packet = vec![0; HEAD + SHORT];
    let got = retry(|| {
        let mut into = [IoSliceMut::new(&mut packet)];
        rustix::net::recvmsg(&socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    if got.bytes == 0 {
        return Ok(None);
    }
    packet.truncate(got.bytes);
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    let is_whole = !got.flags.contains(ReturnFlags::CTRUNC);
    if !is_whole {
        descriptors.clear();
    }
    let odd = || io::Error::other("a message that is none of ours");
    let (head, text) = packet.split_at_checked(HEAD).ok_or_else(odd)?;
    let (place, number) = head.split_first().ok_or_else(odd)?;
    let number = u64::from_le_bytes(number.try_into().map_err(|_| odd())?);
    let mut text = text.to_vec();
    if *place == IN_MEMORY && is_whole {
        let mut memory = File::from(descriptors.drain(..1).next().ok_or_else(odd)?);
        memory.rewind()?;
        memory.take(MAX_TEXT as u64).read_to_end(&mut text)?;
    }
    Ok(Some(Message {
        number,
        text,
        descriptors,
        is_whole,
    }))
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
        let (here, there) = pair().unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        let long = vec![b'x'; 1 << 20];
        send(&here, 1, &long, &[write.as_fd()]).unwrap();
        send(&here, 2, b"second", &[]).unwrap();
        send(&here, 3, &[b'x'; SHORT], &[write.as_fd()]).unwrap();
        drop((here, write));
        let first = receive(&there).unwrap().unwrap();
        assert_eq!((first.number, first.is_whole), (1, true));
        assert_eq!(first.text, long);
        rustix::io::write(&first.descriptors[0], b"through").unwrap();
        let mut buffer = [0; 16];
        assert_eq!(rustix::io::read(&read, &mut buffer).unwrap(), 7);
        assert_eq!(receive(&there).unwrap().unwrap().text, b"second");
        let third = receive(&there).unwrap().unwrap();
        assert_eq!((third.text.len(), third.descriptors.len()), (SHORT, 1));
        assert!(receive(&there).unwrap().is_none());
    }

    #[test]
    fn text_above_the_maximum_is_rejected() {
        let (here, there) = pair().unwrap();
        let error = send(&here, 1, &vec![0; MAX_TEXT + 1], &[]).unwrap_err();
        assert!(error.to_string().contains("too long"), "{error}");
        send(&here, 2, &vec![0; MAX_TEXT], &[]).unwrap();
        let message = receive(&there).unwrap().unwrap();
        assert_eq!((message.number, message.text.len()), (2, MAX_TEXT));
    }

    /// RLIMIT_NOFILE applies to the whole process, but nextest runs each test in its own process.
    #[test]
    fn connection_survives_a_lack_of_descriptors() {
        let (here, there) = pair().unwrap();
        let long = vec![b'x'; SHORT + 1];
        send(&here, 1, &long, &[here.as_fd()]).unwrap();
        send(&here, 2, b"short", &[here.as_fd(), here.as_fd()]).unwrap();
        send(&here, 3, b"no descriptors", &[]).unwrap();
        send(&here, 4, &long, &[here.as_fd()]).unwrap();
        let usual = getrlimit(Resource::Nofile);
        let next = rustix::io::dup(&here).unwrap();
        let room_for = |count: u64| {
            let used = std::os::fd::AsRawFd::as_raw_fd(&next).cast_unsigned();
            let limit = Rlimit {
                current: Some(u64::from(used) + 1 + count),
                ..usual
            };
            setrlimit(Resource::Nofile, limit).unwrap();
        };
        let said = |message: Message| {
            let text = String::from_utf8(message.text).unwrap();
            let count = message.descriptors.len();
            (message.number, message.is_whole, text, count)
        };
        room_for(0);
        let received = || said(receive(&there).unwrap().unwrap());
        assert_eq!(received(), (1, false, String::new(), 0));
        room_for(1);
        assert_eq!(received(), (2, false, "short".to_owned(), 0));
        room_for(0);
        assert_eq!(received(), (3, true, "no descriptors".to_owned(), 0));
        room_for(2);
        let (number, whole, text, count) = received();
        assert_eq!((number, whole, count), (4, true, 1));
        assert_eq!(text.len(), long.len());
    }
}
