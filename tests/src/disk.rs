//! A small file system on a host.

use crate::Lab;

/// A tmpfs, mounted over a directory of a host until this is dropped.
#[derive(Debug)]
pub struct SmallDisk<'a> {
    lab: &'a Lab,
    host: String,
    place: &'static str,
}

impl<'a> SmallDisk<'a> {
    /// Mounts on `node1`, with these options of tmpfs, such as `size`. If the directory does not exist, `user1` makes it, in a home
    /// directory.
    #[track_caller]
    pub fn on_node1(lab: &'a Lab, name: &str, place: &'static str, options: &str) -> Self {
        lab.sh(&format!("mkdir -p {place}")).run().succeeded();
        Self::on(lab, "node1", name, place, options)
    }

    /// Mounts on any host, over a directory that exists.
    #[track_caller]
    pub fn on(lab: &'a Lab, host: &str, name: &str, place: &'static str, options: &str) -> Self {
        let mount = format!("mount -n -t tmpfs -o {options} '{name}' {place}");
        lab.root(host, &mount).succeeded();
        Self {
            lab,
            host: host.to_owned(),
            place,
        }
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        self.lab
            .root(&self.host, &format!("umount -n --lazy {}", self.place));
    }
}
