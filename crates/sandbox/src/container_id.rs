//! Ids of containers.

/// A new id: 64 hexadecimal digits, without the prefix `coracle://` of a container status.
pub(crate) fn new() -> String {
    let mut bytes = [0u8; 32];
    // Can't fail after boot. An id need not be secret.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
