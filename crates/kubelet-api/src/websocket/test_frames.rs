//! Frames of clients and servers, for tests.

/// Encodes a masked frame, as a client sends it.
pub(crate) fn client_frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mask = [0x37, 0xfa, 0x21, 0x3d];
    let mut frame = vec![first];
    match payload.len() {
        length @ 0..=125 => frame.push(0x80 | length as u8),
        length @ 126..=0xffff => {
            frame.push(0x80 | 126);
            frame.extend((length as u16).to_be_bytes());
        }
        length => {
            frame.push(0x80 | 127);
            frame.extend((length as u64).to_be_bytes());
        }
    }
    frame.extend(mask);
    let masked = payload.iter().zip(mask.into_iter().cycle());
    frame.extend(masked.map(|(byte, mask)| byte ^ mask));
    frame
}

/// Decodes the first frame of a server's output: its first byte and its payload. `None` if it is incomplete.
pub(crate) fn server_frame(bytes: &[u8]) -> Option<(u8, Vec<u8>)> {
    let (&[first, second], rest) = bytes.split_first_chunk()?;
    assert_eq!(second & 0x80, 0, "servers do not mask");
    let (length, rest) = match second {
        126 => {
            let (length, rest) = rest.split_first_chunk()?;
            (u64::from(u16::from_be_bytes(*length)), rest)
        }
        127 => {
            let (length, rest) = rest.split_first_chunk()?;
            (u64::from_be_bytes(*length), rest)
        }
        length => (length.into(), rest),
    };
    Some((first, rest.get(..length as usize)?.to_vec()))
}
