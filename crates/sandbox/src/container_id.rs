//! Container ids.

/// Statuses show an id with the name of its runtime, as in `containerd://`.
const API_PREFIX: &str = "coracle://";

/// Generates an id: 64 hexadecimal digits, without the prefix.
pub(crate) fn generate() -> String {
    let mut bytes = [0u8; 32];
    // Does not fail once the kernel has booted. Ids need not be secret.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Adds the prefix of statuses.
pub(crate) fn to_api(id: &str) -> String {
    format!("{API_PREFIX}{id}")
}

/// Removes the prefix of statuses.
pub(crate) fn from_api(id: &str) -> String {
    id.rsplit("//").next().unwrap_or(id).to_owned()
}
