//! Kernel, distribution and identity of this machine. Read once, at start.

use std::fs;
use std::path::Path;

/// The facts for `status.nodeInfo`. A fact that cannot be read is empty, as in upstream's kubelet, unless its field has a fallback.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SystemInfo {
    /// Go's name of the architecture: `amd64`, `arm64`.
    pub architecture: String,
    /// Changes with every boot.
    pub boot_id: String,
    /// The kernel release, as in `uname -r`.
    pub kernel_version: String,
    /// From `/etc/machine-id`.
    pub machine_id: String,
    /// The distribution's display name, else `Linux`.
    pub os_image: String,
    /// The hardware's UUID if this user may read it, else the machine id.
    pub system_uuid: String,
}

impl SystemInfo {
    /// Reads the facts from `/proc`, `/sys` and `/etc`.
    pub fn read() -> Self {
        let uname = rustix::system::uname();
        let machine_id = first_readable(&["/etc/machine-id", "/var/lib/dbus/machine-id"]);
        // On most systems only root may read this.
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

/// The trimmed content of the first readable file.
fn first_readable(paths: &[&str]) -> String {
    let text = paths
        .iter()
        .find_map(|path| fs::read_to_string(Path::new(path)).ok());
    text.map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// Translates the kernel's machine name to Go's, which image indexes and node selectors use.
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
    fn pretty_name_is_unquoted() {
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
    fn architectures_have_go_names() {
        assert_eq!(
            ["x86_64", "aarch64", "ppc64le"].map(go_architecture),
            ["amd64", "arm64", "ppc64le"]
        );
    }

    #[test]
    fn facts_of_this_machine_are_read() {
        let info = SystemInfo::read();
        assert!(!info.kernel_version.is_empty());
        assert!(!info.architecture.is_empty());
        assert!(!info.boot_id.is_empty());
        assert!(!info.os_image.is_empty());
    }
}
