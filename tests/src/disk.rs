//! A small file system on `node1`.

use crate::Lab;

/// A file system in memory, at a place of `node1` that it hides, and gone when this is dropped.
#[derive(Debug)]
pub struct SmallDisk<'a> {
    lab: &'a Lab,
    place: &'static str,
}

impl<'a> SmallDisk<'a> {
    /// With these options of tmpfs, such as its `size`. If there is no such place, `user1` makes it, in a home directory.
    #[track_caller]
    pub fn on_node1(lab: &'a Lab, name: &str, place: &'static str, options: &str) -> Self {
        lab.sh(&format!("mkdir -p {place}")).run().succeeded();
        let mount = format!("mount -n -t tmpfs -o {options} '{name}' {place}");
        lab.root("node1", &mount).succeeded();
        Self { lab, place }
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        self.lab
            .root("node1", &format!("umount -n --lazy {}", self.place));
    }
}
