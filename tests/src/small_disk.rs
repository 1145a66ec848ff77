//! A small file system on a host.

use crate::Lab;

/// A tmpfs, mounted over a directory of a host until this is dropped.
#[derive(Debug)]
pub struct SmallDisk<'a> {
    lab: &'a Lab,
    host: String,
    mount_point: &'static str,
}

impl<'a> SmallDisk<'a> {
    /// Mounts on `node1`, with these options of tmpfs, such as `size`. If the directory does not exist, `user1` makes it, in a home
    /// directory.
    #[track_caller]
    pub fn on_node1(lab: &'a Lab, name: &str, mount_point: &'static str, options: &str) -> Self {
        lab.sh(&format!("mkdir -p {mount_point}")).run().succeeded();
        Self::on(lab, "node1", name, mount_point, options)
    }

    /// Mounts on any host, over a directory that exists.
    #[track_caller]
    pub fn on(
        lab: &'a Lab,
        host: &str,
        name: &str,
        mount_point: &'static str,
        options: &str,
    ) -> Self {
        let mount = format!("mount -n -t tmpfs -o {options} '{name}' {mount_point}");
        lab.root(host, &mount).succeeded();
        Self {
            lab,
            host: host.to_owned(),
            mount_point,
        }
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        self.lab.root(
            &self.host,
            &format!("umount -n --lazy {}", self.mount_point),
        );
    }
}
