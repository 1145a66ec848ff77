//! Names of containers.

/// A new one: 64 hexadecimal digits, without the `coracle://` that a status puts before it.
pub(crate) fn new() -> String {
    let mut bytes = [0u8; 32];
    // The kernel's random numbers are always there once it has booted; an id need not be secret.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
