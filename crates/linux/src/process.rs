//! Processes that live and die together.
//!
//! Three kernel features carry the promise that nothing is left behind, even after `kill -9`:
//! the *parent death signal* ends a child with its parent, a *subreaper* inherits every orphan below
//! it, and the death of a pid namespace's first process ends all others in it (see [`crate::namespace`]).
//!
//! Where `/proc` is mounted with `hidepid`, a user does not see processes that they may not trace: those of other users, and
//! their own that [hide](crate::credentials::hide). What is found here by looking through `/proc` is what it shows to the caller.
//! Only the list of its own children is complete.

use std::collections::HashMap;
use std::fmt::Display;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, WaitStatus};

/// Which side of a [`fork`] this is.
#[derive(Debug)]
pub enum Fork {
    /// The caller, with the child's process id.
    Parent(Pid),
    /// The new process.
    Child,
}

/// Forks the calling process, which must have a single thread.
///
/// A threaded process is refused: in its child, locks held by other threads would stay locked for ever.
pub fn fork() -> io::Result<Fork> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    if threads != 1 {
        return Err(io::Error::other(format!(
            "refusing to fork a process that has {threads} threads"
        )));
    }
    // SAFETY: the process has one thread (checked above), so the child is a complete copy and may
    // run any code.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Fork::Child),
        pid => Pid::from_raw(pid)
            .map(Fork::Parent)
            .ok_or_else(|| io::Error::other("fork returned no process id")),
    }
}

/// Asks for `signal` when the parent dies, and fails if it isn't `parent` any more.
///
/// The kernel watches the parent *thread*: the parent must create its children from a thread that
/// lives as long as itself.
pub fn die_with_parent(parent: Option<Pid>, signal: Signal) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(signal))?;
    if rustix::process::getppid() != parent {
        // Made without allocating: this may run between fork and exec.
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

/// Makes the process that `command` starts receive `signal` when the calling process dies, and puts
/// it into a process group of its own, so that a terminal's Ctrl-C doesn't reach it before us.
pub fn bind_to_us(command: &mut Command, signal: Signal) -> &mut Command {
    let parent = rustix::process::getpid();
    command.process_group(0);
    bind_in_our_group(command, parent, signal)
}

/// Like [`bind_to_us`], but the process stays in our process group: for what belongs to the terminal.
pub fn bind_to_us_in_group(command: &mut Command, signal: Signal) -> &mut Command {
    bind_in_our_group(command, rustix::process::getpid(), signal)
}

fn bind_in_our_group(command: &mut Command, parent: Pid, signal: Signal) -> &mut Command {
    let bind = move || die_with_parent(Some(parent), signal);
    // SAFETY: between fork and exec the closure makes two system calls (prctl, getppid) and nothing else.
    unsafe { command.pre_exec(bind) }
}

/// Orphans anywhere below the calling process become its children from now on.
pub fn become_subreaper() -> io::Result<()> {
    rustix::process::set_child_subreaper(rustix::process::Pid::from_raw(1))?;
    Ok(())
}

/// Kills every process below this one, children before their parents: a child may be there to act when its parent is killed, as
/// that of `srun` is, which then kills the whole step. Orphans come back to a subreaper, also those that `/proc` does not show.
/// Returns when none is left or `patience` is over.
pub fn kill_all_below(patience: Duration) -> io::Result<()> {
    let end = Instant::now() + patience;
    let ours = own_id();
    loop {
        let mut parents = parents()?;
        // Kernels that list no children (without CONFIG_PROC_CHILDREN) leave those that `/proc` shows.
        let own_children = children("self").unwrap_or_default();
        parents.extend(own_children.into_iter().map(|child| (child, ours)));
        for pid in deepest_first(ours, &parents) {
            signal_child(pid, parents[&pid], Signal::KILL);
        }
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some(_)) => continue,
                Ok(None) => break,
                Err(rustix::io::Errno::CHILD) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        if Instant::now() >= end {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "some processes did not end after SIGKILL",
            ));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Kills a child of ours and every process below it, those first: what they are there to do when their parent dies is not
/// done. The child is still to be waited for.
pub fn kill_from_below(child: Pid) -> io::Result<()> {
    // All stop first: a parent that saw one of its children die might end, and its others would be nobody's.
    rustix::process::kill_process(child, Signal::STOP)?;
    let parents = parents()?;
    let below = deepest_first(child.as_raw_nonzero().get(), &parents);
    for pid in below.iter().rev() {
        signal_child(*pid, parents[pid], Signal::STOP);
    }
    for pid in below {
        signal_child(pid, parents[&pid], Signal::KILL);
    }
    rustix::process::kill_process(child, Signal::KILL)?;
    Ok(())
}

/// Kills the children of a process that run the same program, which it has forked from itself; it goes on.
pub fn kill_forks_of(parent: Pid) -> io::Result<()> {
    let program = |pid: Pid| std::fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero()));
    let own = program(parent)?;
    for child in children_of(parent)? {
        if program(child).is_ok_and(|program| program == own) {
            signal_child(
                child.as_raw_nonzero().get(),
                parent.as_raw_nonzero().get(),
                Signal::KILL,
            );
        }
    }
    Ok(())
}

/// Sends a signal to a process if it still is the child of `parent`. One that ended meanwhile is what we want, and its number may
/// belong to another by now.
fn signal_child(pid: i32, parent: i32, signal: Signal) {
    signal_if(pid, signal, || is_child(pid, parent));
}

fn is_child(pid: i32, parent: i32) -> bool {
    match stat_of(pid) {
        Ok(stat) => parent_in_stat(&stat) == Some(parent),
        // It has ended, or `/proc` does not show it.
        Err(_) => parent == own_id() && children("self").is_ok_and(|own| own.contains(&pid)),
    }
}

/// Kills a process if it is the one that is meant. Says whether it did.
pub fn kill_if(pid: i32, is_meant: impl FnOnce() -> bool) -> bool {
    signal_if(pid, Signal::KILL, is_meant)
}

/// Sends a signal to a process if it is the one that is meant, which is asked while its number can't become another's. Says
/// whether it did.
fn signal_if(pid: i32, signal: Signal, is_meant: impl FnOnce() -> bool) -> bool {
    let process = Pid::from_raw(pid)
        .and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok());
    process.is_some_and(|process| {
        is_meant() && rustix::process::pidfd_send_signal(process, signal).is_ok()
    })
}

/// The text of `/proc/PID/stat`. The command's name in it is whatever bytes a program has chosen.
pub(crate) fn stat_of(pid: i32) -> io::Result<String> {
    let bytes = std::fs::read(format!("/proc/{pid}/stat"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The processes below `root`, given every one's parent; those that are furthest from it come first.
fn deepest_first(root: i32, parents: &HashMap<i32, i32>) -> Vec<i32> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        let children = parents.iter().filter(|(_, p)| **p == parent);
        found.extend(children.map(|(pid, _)| *pid));
        next += 1;
    }
    found.remove(0);
    found.reverse();
    found
}

/// Kills every visible process of this user that [`carries`] `variable` (`NAME=value`), ourselves excepted: what a dead process
/// of ours had started, wherever it went since. Returns how many there were.
pub fn kill_marked(variable: &str) -> io::Result<usize> {
    let ours = own_id();
    let others = all()?.filter(|pid| *pid != ours);
    Ok(others
        .filter(|pid| kill_if(*pid, || carries(*pid, variable)))
        .count())
}

/// Whether a visible process of this user runs with these arguments in a row, and [`carries`] `variable` (`NAME=value`).
pub fn is_running(arguments: &[&str], variable: &str) -> io::Result<bool> {
    let row: Vec<u8> = arguments
        .iter()
        .flat_map(|argument| [b"\0", argument.as_bytes()].concat())
        .chain([0])
        .collect();
    let is_called_so = |pid: i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.windows(row.len()).any(|part| part == row)
    };
    Ok(all()?.any(|pid| is_called_so(pid) && carries(pid, variable)))
}

/// Whether a process of this user has `variable` (`NAME=value`) in its environment, or as an argument. Of those that
/// [hide](crate::credentials::hide) only the latter can be read, and with `hidepid` neither.
pub fn carries(pid: i32, variable: &str) -> bool {
    let user = rustix::process::geteuid().as_raw();
    let is_ours = std::fs::metadata(format!("/proc/{pid}")).is_ok_and(|found| found.uid() == user);
    let has = |name: &str| {
        let text = std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let mut words = text.split(|byte| *byte == 0);
        words.any(|found| found == variable.as_bytes())
    };
    is_ours && (has("environ") || has("cmdline"))
}

/// The exit code that a shell would report for `status`.
pub fn shell_code(status: WaitStatus) -> i32 {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => 1,
    }
}

/// The processes whose parent is `parent`, read from `/proc`.
pub fn children_of(parent: Pid) -> io::Result<Vec<Pid>> {
    Ok(parents()?
        .into_iter()
        .filter(|(_, p)| *p == parent.as_raw_nonzero().get())
        .filter_map(|(pid, _)| Pid::from_raw(pid))
        .collect())
}

/// Every visible process with its parent.
pub fn parents() -> io::Result<HashMap<i32, i32>> {
    // A process may end while we look at it.
    let with_parent = |pid| Some((pid, parent_in_stat(&stat_of(pid).ok()?)?));
    Ok(all()?.filter_map(with_parent).collect())
}

/// The children of all threads of a process, by its number or `self`. An error if the process can't be seen, or if the kernel
/// lists no children.
pub(crate) fn children(process: impl Display) -> io::Result<Vec<i32>> {
    let mut found = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("children"))?;
        let pids = text.split_whitespace();
        found.extend(pids.filter_map(|pid| pid.parse::<i32>().ok()));
    }
    Ok(found)
}

fn own_id() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// Every visible process.
pub(crate) fn all() -> io::Result<impl Iterator<Item = i32>> {
    let entries = std::fs::read_dir("/proc")?.flatten();
    Ok(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()))
}

/// The parent's id in the text of `/proc/PID/stat`. The command name stands in parentheses and may
/// itself hold parentheses and spaces, so the fields are counted from the last one.
fn parent_in_stat(stat: &str) -> Option<i32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{hidden_child, in_a_child_with_hidepid};

    #[test]
    fn processes_that_proc_does_not_show_are_killed_too() {
        assert!(in_a_child_with_hidepid(|| {
            // The second is an orphan as soon as the first is killed.
            let children = [
                hidden_child(|| ()),
                hidden_child(|| {
                    hidden_child(|| ());
                }),
            ];
            let shown = parents().unwrap();
            assert!(children.iter().all(|child| !shown.contains_key(child)));
            kill_all_below(Duration::from_secs(5)).is_ok()
        }));
    }

    #[test]
    fn children_come_before_their_parents() {
        let parents = HashMap::from([(2, 1), (3, 2), (4, 3), (5, 1), (6, 5), (7, 9), (9, 0)]);
        let order = deepest_first(1, &parents);
        let place = |pid| order.iter().position(|found| *found == pid).unwrap();
        assert_eq!(order.len(), 5);
        assert!(place(4) < place(3) && place(3) < place(2) && place(6) < place(5));
        assert_eq!(deepest_first(4, &parents), []);
    }

    #[test]
    fn what_waits_for_its_parents_death_is_killed_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let told = dir.path().join("told");
        // The inner shell acts when its input ends.
        let script = r#"exec 4<&0; (read x <&4; touch "$0") & echo; sleep 60"#;
        let mut child = Command::new("sh")
            .args(["-c", script])
            .arg(&told)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut begun = [0];
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut begun).unwrap();
        kill_from_below(Pid::from_child(&child)).unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert!(!told.exists());
    }

    #[test]
    fn only_forks_of_a_process_are_killed() {
        let script = r#"
            exec 3<&0
            sleep 1000 & other=$!
            (read x <&3) & fork=$!
            until [ "$(readlink /proc/$other/exe)" != "$(readlink /proc/$$/exe)" ]; do :; done
            echo
            wait $fork; echo $?
            kill $other && echo other
            read x
        "#;
        let mut parent = Command::new("sh")
            .args(["-c", script])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = io::BufReader::new(parent.stdout.take().unwrap());
        let mut line = String::new();
        io::BufRead::read_line(&mut said, &mut line).unwrap();
        kill_forks_of(Pid::from_child(&parent)).unwrap();
        io::BufRead::read_line(&mut said, &mut line).unwrap();
        io::BufRead::read_line(&mut said, &mut line).unwrap();
        assert_eq!(line, "\n137\nother\n");
        assert!(parent.try_wait().unwrap().is_none());
        drop(parent.stdin.take());
        parent.wait().unwrap();
    }

    /// A child whose name is no text: that of its file is what the kernel calls it.
    fn nameless(dir: &std::path::Path) -> std::process::Child {
        use std::os::unix::ffi::OsStrExt;
        use std::os::unix::fs::PermissionsExt;
        let program = dir.join(std::ffi::OsStr::from_bytes(b"\xff\xfe"));
        std::fs::write(&program, "#!/bin/sh\nread x\n").unwrap();
        let runs = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&program, runs).unwrap();
        let input = std::process::Stdio::piped();
        let child = Command::new(&program).stdin(input).spawn().unwrap();
        let comm = format!("/proc/{}/comm", child.id());
        // The kernel lets us go on a moment before the new program has its name.
        let named = || std::fs::read(&comm).unwrap() == b"\xff\xfe\n";
        assert!((0..500).any(|_| named() || {
            std::thread::sleep(Duration::from_millis(10));
            false
        }));
        child
    }

    #[test]
    fn nobody_hides_behind_a_name_that_is_no_text() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = nameless(dir.path());
        let pid = Pid::from_child(&child);
        let children = children_of(rustix::process::getpid()).unwrap();
        assert!(children.contains(&pid));
        assert!(crate::usage::Sample::of(pid.as_raw_nonzero().get()).is_some());
        signal_child(
            pid.as_raw_nonzero().get(),
            rustix::process::getpid().as_raw_nonzero().get(),
            Signal::KILL,
        );
        let ended = child.wait().unwrap();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&ended),
            Some(9)
        );
    }

    #[test]
    fn the_parent_is_found_behind_an_awkward_name() {
        assert_eq!(parent_in_stat("12 (a) b (c) S 7 12 12 0"), Some(7));
        assert_eq!(parent_in_stat("12 (a"), None);
        assert_eq!(parent_in_stat(""), None);
    }

    #[test]
    fn a_threaded_process_is_not_forked() {
        // The test harness runs every test on a thread of its own.
        let refused = fork().expect_err("must refuse");
        assert!(refused.to_string().contains("threads"), "{refused}");
    }

    #[test]
    fn marked_processes_are_found_wherever_they_went() {
        let mark = format!("CORACLE_TEST_MARK={}", std::process::id());
        let (name, value) = mark.split_once('=').unwrap();
        // Its parent ends at once, so it is nobody's child that we know.
        let status = Command::new("sh")
            .args(["-c", "setsid sleep 60 & :"])
            .env(name, value)
            .status();
        assert!(status.unwrap().success());
        let end = Instant::now() + Duration::from_secs(5);
        let mut killed = 0;
        while killed == 0 && Instant::now() < end {
            killed = kill_marked(&mark).unwrap();
        }
        assert_eq!(killed, 1);
    }

    #[test]
    fn a_child_is_listed_with_its_parent() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let children = children_of(rustix::process::getpid()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(
            children
                .iter()
                .any(|p| p.as_raw_nonzero().get() as u32 == child.id())
        );
    }
}
