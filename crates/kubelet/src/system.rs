//! What this machine is: kernel, distribution, identity. Read once, at start.

use std::fs;
use std::path::Path;

/// What a Node reports about its machine; what can't be read is empty, as in upstream's kubelet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SystemFacts {
    /// The architecture as Go names it: `amd64`, `arm64`.
    pub architecture: String,
    /// Changes with every boot.
    pub boot_id: String,
    /// The kernel's release, as `uname -r` prints it.
    pub kernel_version: String,
    /// The installation's identity, from `/etc/machine-id`.
    pub machine_id: String,
    /// The distribution's name for people.
    pub os_image: String,
    /// The hardware's identity where an ordinary user may read it, else the machine id.
    pub system_uuid: String,
}

impl SystemFacts {
    /// Reads the facts of this machine.
    pub fn read() -> Self {
        let uname = rustix::system::uname();
        let machine_id = first_readable(&["/etc/machine-id", "/var/lib/dbus/machine-id"]);
        // Only root may read this one on most systems.
        let hardware = first_readable(&["/sys/class/dmi/id/product_uuid"]);
        Self {
            architecture: go_architecture(&uname.machine().to_string_lossy()).to_owned(),
            boot_id: first_readable(&["/proc/sys/kernel/random/boot_id"]),
            kernel_version: uname.release().to_string_lossy().into_owned(),
            system_uuid: if hardware.is_empty() {
                machine_id.clone()
            } else {
                hardware
            },
            machine_id,
            os_image: ["/etc/os-release", "/usr/lib/os-release"]
                .iter()
                .find_map(|path| os_image(&fs::read_to_string(path).ok()?))
                .unwrap_or_else(|| "Linux".to_owned()),
        }
    }
}

/// The trimmed text of the first of these files that can be read.
fn first_readable(paths: &[&str]) -> String {
    let text = paths
        .iter()
        .find_map(|path| fs::read_to_string(Path::new(path)).ok());
    text.map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// Go's name (which image indexes and node selectors use) for what the kernel calls its machine.
fn go_architecture(machine: &str) -> &str {
    match machine {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The value of `PRETTY_NAME` in an os-release file.
fn os_image(os_release: &str) -> Option<String> {
    let value = os_release
        .lines()
        .find_map(|line| line.trim().strip_prefix("PRETTY_NAME="))?
        .trim();
    let unquoted = [('"', '"'), ('\'', '\'')]
        .iter()
        .find_map(|(open, close)| value.strip_prefix(*open)?.strip_suffix(*close))
        .unwrap_or(value);
    (!unquoted.is_empty()).then(|| unquoted.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn os_release_is_read_as_shells_would() {
        assert_eq!(
            os_image("ID=rocky\nPRETTY_NAME=\"Rocky Linux 9.4\"\n").unwrap(),
            "Rocky Linux 9.4"
        );
        assert_eq!(
            os_image("PRETTY_NAME='Alpine Linux v3.20'").unwrap(),
            "Alpine Linux v3.20"
        );
        assert_eq!(os_image("PRETTY_NAME=Void").unwrap(), "Void");
        assert_eq!(os_image("PRETTY_NAME=\"\"\n"), None);
        assert_eq!(os_image("NAME=x\n# PRETTY_NAME=no\n"), None);
    }

    #[test]
    fn architectures_are_gos() {
        assert_eq!(
            ["x86_64", "aarch64", "ppc64le"].map(go_architecture),
            ["amd64", "arm64", "ppc64le"]
        );
    }

    #[test]
    fn this_machine_has_a_kernel() {
        let facts = SystemFacts::read();
        assert!(!facts.kernel_version.is_empty());
        assert!(!facts.architecture.is_empty());
        assert!(!facts.boot_id.is_empty());
        assert!(!facts.os_image.is_empty());
    }
}
