//! What a privileged container may try, to get at the root of its node (tests/qemu/run). One attempt for each process, in a mount
//! namespace of its own, so that none spoils the next. Prints whether a file of the node's root came into sight.

use std::ffi::CStr;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use rustix::mount::{MountFlags, OpenTreeFlags, UnmountFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

/// It lies in the root of the virtual machine, and in no image.
const OF_THE_NODE: &str = "handover";
/// More than there are directories above any of ours.
const DEPTH: usize = 64;

/// What was tried, and how it ended.
struct Attempt {
    steps: Vec<String>,
}

impl Attempt {
    /// Notes a step. The attacker goes on in any case.
    fn step<T>(&mut self, name: &str, done: rustix::io::Result<T>) -> Option<T> {
        let word = match &done {
            Ok(_) => "works".to_owned(),
            Err(error) => format!("{error:?}"),
        };
        self.steps.push(format!("{name} {word}"));
        done.ok()
    }

    fn unmount(&mut self, place: &str) {
        let done = rustix::mount::unmount(place, UnmountFlags::DETACH);
        self.step(&format!("umount {place}"), done);
    }

    fn memory_at(&mut self, place: &str) {
        let _ = std::fs::create_dir_all(place);
        let none: Option<&CStr> = None;
        let done = rustix::mount::mount("none", place, "tmpfs", MountFlags::empty(), none);
        self.step("mount tmpfs", done);
    }

    fn unmount_all(&mut self) {
        let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let places: Vec<&str> = text
            .lines()
            .filter_map(|line| line.split(' ').nth(4))
            .collect();
        for place in places.into_iter().rev() {
            self.unmount(place);
        }
    }

    fn run(&mut self, name: &str) {
        match name {
            // Only what every attempt does at the end.
            "setns" => {}
            "umount" => self.unmount("/"),
            "umount-all" => self.unmount_all(),
            "move" => {
                let _ = std::fs::create_dir_all("/tmp/away");
                self.memory_at("/tmp/away");
                let _ = std::fs::create_dir_all("/tmp/away/root");
                let done = rustix::mount::mount_move("/", "/tmp/away/root");
                self.step("move /", done);
            }
            "pivot" => {
                self.memory_at("/tmp/next");
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

fn is_in_sight() -> bool {
    let places = [
        "/",
        ".",
        "..",
        "/..",
        "/old",
        "/tmp/away/root",
        "/proc/1/root",
    ];
    let mut places = places.iter().map(Path::new);
    places.any(|place| place.join(OF_THE_NODE).exists())
}

fn main() {
    let name = std::env::args().nth(1).unwrap_or_default();
    let mut attempt = Attempt { steps: Vec::new() };
    let fresh = linux::namespace::unshare(UnshareFlags::NEWNS);
    attempt.steps.push(format!("a mount namespace {fresh:?}"));
    let own = File::open("/proc/self/ns/mnt");
    attempt.run(&name);
    let mut seen = is_in_sight();
    // Whoever enters a mount namespace gets the uppermost of what is mounted on its root.
    if let Ok(own) = own {
        let entered = move_into_link_name_space(
            std::os::fd::AsFd::as_fd(&own),
            Some(LinkNameSpaceType::Mount),
        );
        attempt.step("setns", entered);
        seen |= is_in_sight();
    }
    let word = if seen { "reached" } else { "kept out" };
    let steps = attempt.steps.join(", ");
    // If nobody reads it, the check fails.
    let _ = writeln!(std::io::stdout(), "{name}: {word}: {steps}");
}
