//! The inner process and the kernel. This program is the sandbox, and, in another process, the container's program.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that can't go on has failed, and harnesses tell what they have"
)]

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use linux::fresh::{Forked, Fresh};
use linux::namespace::Ids;
use linux::packet;
use rustix::process::Signal;
use rustix::thread::UnshareFlags;
use sandbox::inner::message::{
    Access, ContainerPlan, MountPlan, MountSource, News, ProcessPlan, Processes, Propagation,
    Request, RootKind, RootPlan, Seccomp, UserPlan,
};

/// In a container's environment: its user.
const UID: &str = "CORACLE_TEST_UID";
const SCORE: i32 = 321;
/// How many files a container's processes may open.
const OPEN_FILES: u64 = 222;
/// An argument of a container that only waits.
const WAIT: &str = "wait";
/// How a shell tells of a process that was killed.
const KILLED: i32 = 128 + 9;

fn main() {
    let asked: Vec<String> = std::env::args().collect();
    let asked = |word: &str| asked.iter().any(|argument| argument == word);
    match std::env::var(UID) {
        Ok(_) if asked(WAIT) => std::thread::sleep(Duration::from_secs(600)),
        Ok(uid) => look_around(&uid),
        // What harnesses are asked before.
        Err(_) if asked("--list") && asked("--ignored") => {}
        Err(_) if asked("--list") => {
            println!("containers_do_not_look_into_the_inner_process: test")
        }
        Err(_) => be_sandbox(),
    }
}

fn be_sandbox() {
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
    // Another file, for the one that we run from is refused.
    std::fs::copy(std::env::current_exe().unwrap(), home.path().join("check")).unwrap();
    linux::descriptors::raise_limit(Some(OPEN_FILES)).unwrap();
    let mut inner = Inner::start(home.path(), ids);

    inner.ask(b"nonsense", &[]);
    let (failed, _) = inner.end();
    assert!(failed.contains("what the sandbox asks for"), "{failed}");
    for starting in [true, false] {
        assert_eq!(inner.run_and_kill(starting).1, Some(KILLED));
    }

    let (failed, _) = inner.run(0, "/out/new", "/check");
    assert!(failed.contains("chdir to cwd (/out/new)"), "{failed}");
    let (failed, _) = inner.run(0, "", "/through");
    assert!(failed.contains("mounting /through"), "{failed}");
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);

    for uid in [0, 1000] {
        let (failed, code) = inner.run(uid, "/made/here", "/check");
        assert_eq!((failed.as_str(), code), ("", Some(0)), "user {uid}");
    }
}

struct Inner<'a> {
    socket: OwnedFd,
    last: u64,
    home: &'a Path,
    ids: Ids,
}

impl<'a> Inner<'a> {
    fn start(home: &'a Path, ids: Ids) -> Self {
        let (socket, theirs) = packet::pair().unwrap();
        let fresh = Fresh {
            pid: true,
            ..Default::default()
        };
        match linux::fresh::fork_into(fresh).unwrap() {
            Forked::Parent(..) => Self {
                socket,
                last: 0,
                home,
                ids,
            },
            Forked::Child => {
                drop(socket);
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
                let served = sandbox::inner::run(theirs);
                std::process::exit(i32::from(served.is_err()))
            }
        }
    }

    /// Runs a container that shares our processes, with this program at `program`: why it can't, and how it ended.
    fn run(&mut self, uid: u32, cwd: &str, program: &str) -> (String, Option<i32>) {
        self.begin(self.plan(uid, cwd, program));
        self.end()
    }

    /// Runs one that would wait, and has it killed when it runs, or before.
    fn run_and_kill(&mut self, starting: bool) -> (String, Option<i32>) {
        let mut plan = self.plan(0, "", "/check");
        plan.process.args.push(WAIT.to_owned());
        self.begin(plan);
        let process = self.last;
        if !starting {
            assert!(matches!(self.hear(), News::Runs(_)));
        }
        let kill = serde_json::to_vec(&Request::Kill { process }).unwrap();
        packet::send(&self.socket, 0, &kill, &[]).unwrap();
        self.end()
    }

    fn begin(&mut self, plan: ContainerPlan) {
        let text = serde_json::to_vec(&Request::Start(Box::new(plan))).unwrap();
        let (input, output, errors) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
        self.ask(&text, &[input.as_fd(), output.as_fd(), errors.as_fd()]);
    }

    fn ask(&mut self, text: &[u8], beside: &[BorrowedFd<'_>]) {
        self.last += 1;
        packet::send(&self.socket, self.last, text, beside).unwrap();
    }

    fn hear(&self) -> News {
        let answer = packet::receive(&self.socket).unwrap().unwrap();
        assert_eq!(answer.number, self.last);
        serde_json::from_slice(&answer.text).unwrap()
    }

    fn end(&self) -> (String, Option<i32>) {
        loop {
            match self.hear() {
                News::Failed { message, .. } => return (message, None),
                News::Exited { code, .. } => return (String::new(), Some(code)),
                News::Done | News::Runs(_) => {}
            }
        }
    }

    fn plan(&self, uid: u32, cwd: &str, program: &str) -> ContainerPlan {
        let check = MountSource::Bind {
            path: self.home.join("check"),
            sub_path: None,
        };
        ContainerPlan {
            root: RootPlan {
                layers: Vec::new(),
                upper: self.home.join("upper"),
                kind: RootKind::At(self.home.join("image")),
                read_only: false,
            },
            mounts: vec![
                mount(MountSource::Proc, "/proc"),
                mount(MountSource::Tmpfs(Vec::new()), "/var/run"),
                mount(check, program),
            ],
            image_volumes: Vec::new(),
            links: Vec::new(),
            masked: Vec::new(),
            read_only_paths: Vec::new(),
            processes: Processes::Inner,
            process: ProcessPlan {
                args: vec![program.to_owned()],
                env: vec![(UID.to_owned(), uid.to_string())],
                cwd: cwd.into(),
                user: UserPlan {
                    uid: Some(uid),
                    one_id: self.ids == Ids::One,
                    ..Default::default()
                },
                capabilities: vec!["ALL".to_owned()],
                seccomp: Seccomp::RuntimeDefault,
                oom_score_adj: SCORE,
                ..Default::default()
            },
        }
    }
}

fn mount(source: MountSource, target: &str) -> MountPlan {
    MountPlan {
        source,
        target: target.into(),
        access: Access::Write,
        propagation: Propagation::None,
    }
}

/// In the container, whose root may look into all processes that it sees, by its capabilities.
fn look_around(uid: &str) {
    assert_eq!(rustix::process::getuid().as_raw().to_string(), uid);
    assert_eq!(std::env::current_dir().unwrap(), Path::new("/made/here"));
    let score = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
    assert_eq!(score.trim(), SCORE.to_string());
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    assert_eq!(limit.current, Some(OPEN_FILES));
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
