//! Tests of the inner process against the kernel. This program acts as the sandbox and, in another process, as the container's
//! program.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a panic fails the test, and the harness prints its list of tests"
)]

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use linux::clone::{CloneResult, NewNamespaces};
use linux::namespace::MappedIds;
use linux::packet;
use rustix::process::Signal;
use rustix::thread::UnshareFlags;
use sandbox::runtime::inner::message::{
    ContainerPlan, InnerEvent, InnerRequest, MountAccess, MountPlan, MountPropagation, MountSource,
    PidNamespace, ProcessPlan, RootfsKind, RootfsPlan, SeccompProfile, UserPlan,
};

/// Environment variable of the container: its expected uid.
const UID: &str = "CORACLE_TEST_UID";
const OOM_SCORE_ADJ: i32 = 321;
/// RLIMIT_NOFILE of the container.
const NOFILE_LIMIT: u64 = 222;
/// Argument that makes the container only sleep.
const WAIT: &str = "wait";
const SIGKILL_EXIT_CODE: i32 = 128 + 9;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let has_arg = |name: &str| args.iter().any(|argument| argument == name);
    match std::env::var(UID) {
        Ok(_) if has_arg(WAIT) => std::thread::sleep(Duration::from_secs(600)),
        Ok(uid) => run_container_checks(&uid),
        // nextest lists the tests first.
        Err(_) if has_arg("--list") && has_arg("--ignored") => {}
        Err(_) if has_arg("--list") => {
            println!("container_cannot_inspect_inner_process: test")
        }
        Err(_) => run_sandbox(),
    }
}

fn run_sandbox() {
    let ids = linux::namespace::enter_as_root(UnshareFlags::NEWNS).unwrap();
    let home = tempfile::tempdir().unwrap();
    let outside = home.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    let image = home.path().join("image");
    std::fs::create_dir_all(image.join("var")).unwrap();
    symlink("/run", image.join("var/run")).unwrap();
    let through_us = format!("/proc/1/root{}", outside.display());
    symlink(through_us, image.join("out")).unwrap();
    symlink("/out/file", image.join("through")).unwrap();
    // A copy, because the inner process denies the file that it runs from.
    std::fs::copy(std::env::current_exe().unwrap(), home.path().join("check")).unwrap();
    linux::descriptors::raise_limit(Some(NOFILE_LIMIT)).unwrap();
    let mut inner = Inner::start(home.path(), ids);

    inner.send(b"nonsense", &[]);
    let (failed, _) = inner.wait_end();
    assert!(failed.contains("parse the sandbox's request"), "{failed}");
    for while_starting in [true, false] {
        assert_eq!(
            inner.run_and_kill(while_starting).1,
            Some(SIGKILL_EXIT_CODE)
        );
    }

    let (failed, _) = inner.run(0, "/out/new", "/check");
    assert!(failed.contains("chdir to cwd (/out/new)"), "{failed}");
    let (failed, _) = inner.run(0, "", "/through");
    assert!(failed.contains("cannot mount /through"), "{failed}");
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);

    for uid in [0, 1000] {
        let (failed, code) = inner.run(uid, "/made/here", "/check");
        assert_eq!((failed.as_str(), code), ("", Some(0)), "user {uid}");
    }
}

struct Inner<'a> {
    socket: OwnedFd,
    last_serial: u64,
    home: &'a Path,
    ids: MappedIds,
}

impl<'a> Inner<'a> {
    fn start(home: &'a Path, ids: MappedIds) -> Self {
        let (socket, theirs) = packet::pair().unwrap();
        let namespaces = NewNamespaces {
            pid: true,
            ..Default::default()
        };
        match linux::clone::fork_into(namespaces).unwrap() {
            CloneResult::Parent(..) => Self {
                socket,
                last_serial: 0,
                home,
                ids,
            },
            CloneResult::Child => {
                drop(socket);
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
                let served = sandbox::runtime::inner::run(theirs);
                std::process::exit(i32::from(served.is_err()))
            }
        }
    }

    /// Runs a container in our pid namespace, with this program at `program`; returns its start error and exit code.
    fn run(&mut self, uid: u32, cwd: &str, program: &str) -> (String, Option<i32>) {
        self.start_container(self.plan(uid, cwd, program));
        self.wait_end()
    }

    /// Starts a container that only sleeps, and kills it while it starts or while it runs.
    fn run_and_kill(&mut self, while_starting: bool) -> (String, Option<i32>) {
        let mut plan = self.plan(0, "", "/check");
        plan.process.args.push(WAIT.to_owned());
        self.start_container(plan);
        let process = self.last_serial;
        if !while_starting {
            assert!(matches!(self.receive(), InnerEvent::ContainerStarted(_)));
        }
        let kill = serde_json::to_vec(&InnerRequest::Kill { process }).unwrap();
        packet::send(&self.socket, 0, &kill, &[]).unwrap();
        self.wait_end()
    }

    fn start_container(&mut self, plan: ContainerPlan) {
        let text = serde_json::to_vec(&InnerRequest::StartContainer(Box::new(plan))).unwrap();
        let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
        self.send(&text, &[stdin.as_fd(), stdout.as_fd(), stderr.as_fd()]);
    }

    fn send(&mut self, text: &[u8], descriptors: &[BorrowedFd<'_>]) {
        self.last_serial += 1;
        packet::send(&self.socket, self.last_serial, text, descriptors).unwrap();
    }

    fn receive(&self) -> InnerEvent {
        let event = packet::receive(&self.socket).unwrap().unwrap();
        assert_eq!(event.number, self.last_serial);
        serde_json::from_slice(&event.text).unwrap()
    }

    fn wait_end(&self) -> (String, Option<i32>) {
        loop {
            match self.receive() {
                InnerEvent::Failed(error) => return (error.message, None),
                InnerEvent::Exited(exit) => return (String::new(), Some(exit.code)),
                InnerEvent::Done | InnerEvent::ContainerStarted(_) => {}
            }
        }
    }

    fn plan(&self, uid: u32, cwd: &str, program: &str) -> ContainerPlan {
        let check = MountSource::Bind {
            path: self.home.join("check"),
            sub_path: None,
        };
        ContainerPlan {
            root: RootfsPlan {
                layers: Vec::new(),
                upper: self.home.join("upper"),
                kind: RootfsKind::Mounted(self.home.join("image")),
                read_only: false,
            },
            mounts: vec![
                mount(MountSource::Proc, "/proc"),
                mount(MountSource::Tmpfs(Vec::new()), "/var/run"),
                mount(check, program),
            ],
            declared_volumes: Vec::new(),
            links: Vec::new(),
            masked_paths: Vec::new(),
            readonly_paths: Vec::new(),
            pid_namespace: PidNamespace::Inner,
            process: ProcessPlan {
                args: vec![program.to_owned()],
                env: vec![(UID.to_owned(), uid.to_string())],
                cwd: cwd.into(),
                user: UserPlan {
                    uid: Some(uid),
                    single_id: self.ids == MappedIds::One,
                    ..Default::default()
                },
                capabilities: linux::credentials::capability_names()
                    .map(str::to_owned)
                    .collect(),
                seccomp: SeccompProfile::RuntimeDefault,
                oom_score_adj: OOM_SCORE_ADJ,
                ..Default::default()
            },
        }
    }
}

fn mount(source: MountSource, target: &str) -> MountPlan {
    MountPlan {
        source,
        target: target.into(),
        access: MountAccess::ReadWrite,
        propagation: MountPropagation::None,
    }
}

/// Runs in the container, whose root has all capabilities over the processes that it sees.
fn run_container_checks(uid: &str) {
    assert_eq!(rustix::process::getuid().as_raw().to_string(), uid);
    assert_eq!(std::env::current_dir().unwrap(), Path::new("/made/here"));
    let score = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
    assert_eq!(score.trim(), OOM_SCORE_ADJ.to_string());
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    assert_eq!(limit.current, Some(NOFILE_LIMIT));
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(mounts.contains(" /run tmpfs "), "{mounts}");

    assert_ne!(std::process::id(), 1);
    assert!(Path::new("/proc/1/stat").exists());
    for path in ["root", "root/proc", "cwd", "exe", "ns/mnt", "environ"] {
        let seen = std::fs::File::open(Path::new("/proc/1").join(path));
        let seen = seen.map(drop).map_err(|error| error.kind());
        assert_eq!(seen, Err(ErrorKind::PermissionDenied), "{path}");
    }
}
