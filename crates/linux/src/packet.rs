//! Messages with file descriptors, between two processes of ours.
//!
//! A message is one packet: a short text, its descriptors beside it. Text that may be long travels in memory of its own, as the
//! first descriptor, because the kernel bounds the size of packets.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::MemfdFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

/// So many descriptors may come with one message, the text's not counted.
pub const MAX_DESCRIPTORS: usize = 8;
/// No message of ours is longer. (Kubernetes' own limit for an object is 1.5 MB.)
const MAX_TEXT: u64 = 16 << 20;

/// Two connected ends. Packets keep their boundaries, and the end of one side is seen by the other.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Sends one message.
pub fn send(socket: impl AsFd, text: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut memory = File::from(rustix::fs::memfd_create("message", MemfdFlags::CLOEXEC)?);
    memory.write_all(text)?;
    let mut all = vec![memory.as_fd()];
    all.extend_from_slice(descriptors);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS + 1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&all)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    let flags = SendFlags::NOSIGNAL;
    retry(|| rustix::net::sendmsg(&socket, &[IoSlice::new(b".")], &mut control, flags))?;
    Ok(())
}

/// Receives one message; `None` at the other side's end.
pub fn receive(socket: impl AsFd) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS + 1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0u8; 1];
    let got = retry(|| {
        let mut into = [IoSliceMut::new(&mut byte)];
        rustix::net::recvmsg(&socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    if got.bytes == 0 {
        return Ok(None);
    }
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    if descriptors.is_empty() {
        return Err(io::Error::other("a message without its text"));
    }
    let mut memory = File::from(descriptors.remove(0));
    memory.rewind()?;
    let mut text = Vec::new();
    memory.take(MAX_TEXT).read_to_end(&mut text)?;
    Ok(Some((text, descriptors)))
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
    use super::*;

    #[test]
    fn text_and_descriptors_arrive_together() {
        let (here, there) = pair().unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        let long = vec![b'x'; 1 << 20];
        send(&here, &long, &[write.as_fd()]).unwrap();
        send(&here, b"second", &[]).unwrap();
        drop((here, write));
        let (text, descriptors) = receive(&there).unwrap().unwrap();
        assert_eq!(text, long);
        rustix::io::write(&descriptors[0], b"through").unwrap();
        let mut buffer = [0; 16];
        assert_eq!(rustix::io::read(&read, &mut buffer).unwrap(), 7);
        assert_eq!(receive(&there).unwrap().unwrap().0, b"second");
        assert!(receive(&there).unwrap().is_none());
    }
}
