//! Attempts of a privileged container to reach the root of its node (tests/qemu/run). Each process makes one attempt, in its own mount
//! namespace, so that attempts do not affect each other. Prints whether a file of the node's root is visible.

use std::ffi::CStr;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use rustix::mount::{MountFlags, OpenTreeFlags, UnmountFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

/// A file in the root of the virtual machine, but in no image.
const NODE_FILE: &str = "handover";
/// More than the depth of any directory here.
const DEPTH: usize = 64;

/// The steps of an attempt, with their results.
struct Attempt {
    steps: Vec<String>,
}

impl Attempt {
    /// Records a step. A failed step does not end the attempt.
    fn step<T>(&mut self, name: &str, result: rustix::io::Result<T>) -> Option<T> {
        let outcome = match &result {
            Ok(_) => "works".to_owned(),
            Err(error) => format!("{error:?}"),
        };
        self.steps.push(format!("{name} {outcome}"));
        result.ok()
    }

    fn unmount(&mut self, path: &str) {
        let done = rustix::mount::unmount(path, UnmountFlags::DETACH);
        self.step(&format!("umount {path}"), done);
    }

    fn mount_tmpfs(&mut self, path: &str) {
        let _ = std::fs::create_dir_all(path);
        let none: Option<&CStr> = None;
        let done = rustix::mount::mount("none", path, "tmpfs", MountFlags::empty(), none);
        self.step("mount tmpfs", done);
    }

    fn unmount_all(&mut self) {
        let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mount_points: Vec<&str> = text
            .lines()
            .filter_map(|line| line.split(' ').nth(4))
            .collect();
        for path in mount_points.into_iter().rev() {
            self.unmount(path);
        }
    }

    fn run(&mut self, name: &str) {
        match name {
            // Only the step that ends every attempt.
            "setns" => {}
            "umount" => self.unmount("/"),
            "umount-all" => self.unmount_all(),
            "move" => {
                let _ = std::fs::create_dir_all("/tmp/away");
                self.mount_tmpfs("/tmp/away");
                let _ = std::fs::create_dir_all("/tmp/away/root");
                let done = rustix::mount::mount_move("/", "/tmp/away/root");
                self.step("move /", done);
            }
            "pivot" => {
                self.mount_tmpfs("/tmp/next");
                let _ = std::fs::create_dir_all("/tmp/next/old");
                let done = rustix::process::pivot_root("/tmp/next", "/tmp/next/old");
                self.step("pivot_root", done);
                let done = rustix::process::chdir("/");
                self.step("chdir /", done);
                self.unmount("/old");
                self.unmount("/");
            }
            "chroot" => {
                let _ = std::fs::create_dir_all("/tmp/in");
                let root = File::open("/");
                let done = rustix::process::chroot("/tmp/in");
                self.step("chroot", done);
                if let Ok(root) = root {
                    let done = rustix::process::fchdir(root);
                    self.step("fchdir", done);
                }
                for _ in 0..DEPTH {
                    let _ = rustix::process::chdir("..");
                }
                let done = rustix::process::chroot(".");
                self.step("chroot .", done);
            }
            "open-tree" => {
                let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::AT_RECURSIVE;
                let copy = rustix::mount::open_tree(rustix::fs::CWD, "/..", flags);
                if let Some(copy) = self.step("open_tree", copy) {
                    let done = rustix::process::fchdir(copy);
                    self.step("fchdir", done);
                    for _ in 0..DEPTH {
                        let _ = rustix::process::chdir("..");
                    }
                }
            }
            "user" => {
                let done = linux::namespace::enter_as_root(UnshareFlags::NEWNS);
                self.steps.push(format!("a user namespace {done:?}"));
                self.unmount("/");
            }
            "rootfs" => {
                let _ = std::fs::create_dir_all("/tmp/first");
                let none: Option<&CStr> = None;
                let flags = MountFlags::empty();
                let done = rustix::mount::mount("none", "/tmp/first", "rootfs", flags, none);
                self.step("mount rootfs", done);
                let done = rustix::process::chdir("/tmp/first");
                self.step("chdir", done);
            }
            other => self.steps.push(format!("{other} is unknown")),
        }
    }
}

fn node_root_is_visible() -> bool {
    let dirs = [
        "/",
        ".",
        "..",
        "/..",
        "/old",
        "/tmp/away/root",
        "/proc/1/root",
    ];
    let mut dirs = dirs.iter().map(Path::new);
    dirs.any(|dir| dir.join(NODE_FILE).exists())
}

fn main() {
    let name = std::env::args().nth(1).unwrap_or_default();
    let mut attempt = Attempt { steps: Vec::new() };
    let fresh = linux::namespace::unshare(UnshareFlags::NEWNS);
    attempt.steps.push(format!("a mount namespace {fresh:?}"));
    let own = File::open("/proc/self/ns/mnt");
    attempt.run(&name);
    let mut seen = node_root_is_visible();
    // setns(2) sets the root to the topmost mount on the namespace's root.
    if let Ok(own) = own {
        let entered = move_into_link_name_space(
            std::os::fd::AsFd::as_fd(&own),
            Some(LinkNameSpaceType::Mount),
        );
        attempt.step("setns", entered);
        seen |= node_root_is_visible();
    }
    let outcome = if seen { "reached" } else { "blocked" };
    let steps = attempt.steps.join(", ");
    // Ignore errors: without this output, the check fails.
    let _ = writeln!(std::io::stdout(), "{name}: {outcome}: {steps}");
}
