//! Process trees that end together.
//!
//! Three kernel features ensure that no process stays behind, even after `kill -9`: the *parent death signal* ends a child with
//! its parent, a *subreaper* inherits every orphan below it, and the exit of a pid namespace's pid 1 ends all other processes in
//! it (see [`crate::namespace`]).
//!
//! If `/proc` is mounted with `hidepid`, a user sees only processes that they may trace: not those of other users, nor their own
//! [non-dumpable](crate::credentials::set_non_dumpable) ones. Functions that search `/proc` find only visible processes. Only the
//! list of the caller's own children is complete.

use std::collections::HashMap;
use std::fmt::Display;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, WaitStatus};

/// The process in which [`fork`] returned.
#[derive(Debug)]
pub enum ForkResult {
    /// The caller, with the child's pid.
    Parent(Pid),
    /// The new process.
    Child,
}

/// Forks the calling process, which must have a single thread.
///
/// Fails in a multi-threaded process: in the child, locks held by other threads would stay locked for ever.
pub fn fork() -> io::Result<ForkResult> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    if threads != 1 {
        return Err(io::Error::other(format!(
            "refusing to fork a process that has {threads} threads"
        )));
    }
    // SAFETY: the process has one thread (checked above), so the child is a complete copy and may run any code.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(ForkResult::Child),
        pid => Pid::from_raw(pid)
            .map(ForkResult::Parent)
            .ok_or_else(|| io::Error::other("fork returned no process id")),
    }
}

/// Sets the parent death signal of this process. Fails if the parent is no longer `parent`.
///
/// The kernel sends the signal when the parent *thread* exits, so the parent must fork its children from a thread that lives as
/// long as the process.
pub fn set_parent_death_signal(parent: Option<Pid>, signal: Signal) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(signal))?;
    if rustix::process::getppid() != parent {
        // Does not allocate: this may run between fork and exec.
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

/// Makes the process that `command` starts receive `signal` when the calling process exits, and puts it into its own process
/// group, so that Ctrl-C on a terminal reaches only us.
pub fn set_death_signal_in_new_group(command: &mut Command, signal: Signal) -> &mut Command {
    let parent = rustix::process::getpid();
    command.process_group(0);
    set_death_signal(command, parent, signal)
}

/// Like [`set_death_signal_in_new_group`], but the process stays in our process group: for programs that use the terminal.
pub fn set_death_signal_in_our_group(command: &mut Command, signal: Signal) -> &mut Command {
    set_death_signal(command, rustix::process::getpid(), signal)
}

fn set_death_signal(command: &mut Command, parent: Pid, signal: Signal) -> &mut Command {
    let set_signal = move || set_parent_death_signal(Some(parent), signal);
    // SAFETY: between fork and exec the closure makes two system calls (prctl, getppid) and nothing else.
    unsafe { command.pre_exec(set_signal) }
}

/// Makes the calling process the new parent of orphans anywhere below it.
pub fn become_subreaper() -> io::Result<()> {
    rustix::process::set_child_subreaper(rustix::process::Pid::from_raw(1))?;
    Ok(())
}

/// Kills every process below this one, children before their parents, because a child may react to the death of its parent: the
/// child of `srun` then kills the whole step. A subreaper inherits orphans, also those that `/proc` does not show. Returns when no
/// process is left, or with an error after `timeout`.
pub fn kill_descendants(timeout: Duration) -> io::Result<()> {
    let end = Instant::now() + timeout;
    let own = own_pid();
    loop {
        let mut parents = parent_pids()?;
        // Kernels without CONFIG_PROC_CHILDREN list no children; then only processes visible in `/proc` are killed.
        let own_children = children("self").unwrap_or_default();
        parents.extend(own_children.into_iter().map(|child| (child, own)));
        for pid in deepest_first(own, &parents) {
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
                "some processes did not exit after SIGKILL",
            ));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Kills a child of this process and every process below it, descendants first, so that they cannot react to the death of their
/// parent. The caller must still wait for the child.
pub fn kill_tree(child: Pid) -> io::Result<()> {
    // Stop all of them first: a parent might exit when one of its children dies, and its other children would be reparented.
    rustix::process::kill_process(child, Signal::STOP)?;
    let parents = parent_pids()?;
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

/// Kills the children of a process that run the same executable (its forks). The process itself continues.
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

/// Sends a signal to a process if it is still a child of `parent`. If it has exited, its pid may have been reused.
fn signal_child(pid: i32, parent: i32, signal: Signal) {
    signal_if(pid, signal, || is_child(pid, parent));
}

fn is_child(pid: i32, parent: i32) -> bool {
    match stat_of(pid) {
        Ok(stat) => parent_in_stat(&stat) == Some(parent),
        // The process has exited, or `/proc` does not show it.
        Err(_) => parent == own_pid() && children("self").is_ok_and(|own| own.contains(&pid)),
    }
}

/// Kills a process if `is_expected` confirms its identity. Returns whether the signal was sent.
pub fn kill_if(pid: i32, is_expected: impl FnOnce() -> bool) -> bool {
    signal_if(pid, Signal::KILL, is_expected)
}

/// Sends a signal to a process if `is_expected` confirms its identity. The open pidfd prevents a race with pid reuse. Returns
/// whether the signal was sent.
fn signal_if(pid: i32, signal: Signal, is_expected: impl FnOnce() -> bool) -> bool {
    let process = Pid::from_raw(pid)
        .and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok());
    process.is_some_and(|process| {
        is_expected() && rustix::process::pidfd_send_signal(process, signal).is_ok()
    })
}

/// The text of `/proc/PID/stat`. The command name in it is an arbitrary byte string.
pub(crate) fn stat_of(pid: i32) -> io::Result<String> {
    let bytes = std::fs::read(format!("/proc/{pid}/stat"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The descendants of `root` in a map of pids to parent pids, deepest first.
fn deepest_first(root: i32, parents: &HashMap<i32, i32>) -> Vec<i32> {
    let mut tree = vec![root];
    let mut next = 0;
    while let Some(parent) = tree.get(next).copied() {
        let children = parents.iter().filter(|(_, p)| **p == parent);
        tree.extend(children.map(|(pid, _)| *pid));
        next += 1;
    }
    tree.remove(0);
    tree.reverse();
    tree
}

/// Kills every visible process of this user, except this one, that [has the mark](has_mark): the processes that a dead process of
/// ours started, whatever parent, session or group they have now. Returns how many were killed.
pub fn kill_marked(mark: &str) -> io::Result<usize> {
    let own = own_pid();
    let others = visible_pids()?.filter(|pid| *pid != own);
    Ok(others
        .filter(|pid| kill_if(*pid, || has_mark(*pid, mark)))
        .count())
}

/// Whether a visible process of this user has these consecutive arguments and [has the mark](has_mark).
pub fn is_running(arguments: &[&str], mark: &str) -> io::Result<bool> {
    let pattern: Vec<u8> = arguments
        .iter()
        .flat_map(|argument| [b"\0", argument.as_bytes()].concat())
        .chain([0])
        .collect();
    let has_arguments = |pid: i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.windows(pattern.len()).any(|part| part == pattern)
    };
    Ok(visible_pids()?.any(|pid| has_arguments(pid) && has_mark(pid, mark)))
}

/// Whether a process belongs to this user and has `mark` (`NAME=value`) in its environment or as an argument. Of
/// [non-dumpable](crate::credentials::set_non_dumpable) processes only the arguments are readable, and with `hidepid` neither.
pub fn has_mark(pid: i32, mark: &str) -> bool {
    let user = rustix::process::geteuid().as_raw();
    let is_ours = std::fs::metadata(format!("/proc/{pid}")).is_ok_and(|found| found.uid() == user);
    let contains_mark = |name: &str| {
        let text = std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let mut entries = text.split(|byte| *byte == 0);
        entries.any(|entry| entry == mark.as_bytes())
    };
    is_ours && (contains_mark("environ") || contains_mark("cmdline"))
}

/// The exit code that a shell reports for `status`.
pub fn shell_exit_code(status: WaitStatus) -> i32 {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => 1,
    }
}

/// The processes whose parent is `parent`, read from `/proc`.
pub fn children_of(parent: Pid) -> io::Result<Vec<Pid>> {
    Ok(parent_pids()?
        .into_iter()
        .filter(|(_, p)| *p == parent.as_raw_nonzero().get())
        .filter_map(|(pid, _)| Pid::from_raw(pid))
        .collect())
}

/// All visible processes with their parents.
pub fn parent_pids() -> io::Result<HashMap<i32, i32>> {
    // A process may exit during the search.
    let with_parent = |pid| Some((pid, parent_in_stat(&stat_of(pid).ok()?)?));
    Ok(visible_pids()?.filter_map(with_parent).collect())
}

/// The children of all threads of a process, given by its pid or as `self`. An error if the process is not visible, or if the
/// kernel lists no children.
pub(crate) fn children(process: impl Display) -> io::Result<Vec<i32>> {
    let mut found = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("children"))?;
        let pids = text.split_whitespace();
        found.extend(pids.filter_map(|pid| pid.parse::<i32>().ok()));
    }
    Ok(found)
}

fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// All visible processes.
pub(crate) fn visible_pids() -> io::Result<impl Iterator<Item = i32>> {
    let entries = std::fs::read_dir("/proc")?.flatten();
    Ok(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()))
}

/// The parent's pid in the text of `/proc/PID/stat`. The command name is in parentheses and may itself contain parentheses and
/// spaces, so the fields are counted from the last parenthesis.
fn parent_in_stat(stat: &str) -> Option<i32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{hidden_child, in_a_child_with_hidepid};

    #[test]
    fn kill_descendants_kills_invisible_processes() {
        assert!(in_a_child_with_hidepid(|| {
            // The grandchild becomes an orphan when its parent is killed.
            let children = [
                hidden_child(|| ()),
                hidden_child(|| {
                    hidden_child(|| ());
                }),
            ];
            let visible = parent_pids().unwrap();
            assert!(children.iter().all(|child| !visible.contains_key(child)));
            kill_descendants(Duration::from_secs(5)).is_ok()
        }));
    }

    #[test]
    fn children_come_before_their_parents() {
        let parents = HashMap::from([(2, 1), (3, 2), (4, 3), (5, 1), (6, 5), (7, 9), (9, 0)]);
        let order = deepest_first(1, &parents);
        let position = |pid| order.iter().position(|found| *found == pid).unwrap();
        assert_eq!(order.len(), 5);
        assert!(
            position(4) < position(3) && position(3) < position(2) && position(6) < position(5)
        );
        assert_eq!(deepest_first(4, &parents), []);
    }

    #[test]
    fn kill_tree_kills_children_before_their_parent() {
        let dir = tempfile::tempdir().unwrap();
        let marker = dir.path().join("marker");
        // The inner shell creates the file when its stdin closes.
        let script = r#"exec 4<&0; (read x <&4; touch "$0") & echo; sleep 60"#;
        let mut child = Command::new("sh")
            .args(["-c", script])
            .arg(&marker)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut begun = [0];
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut begun).unwrap();
        kill_tree(Pid::from_child(&child)).unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert!(!marker.exists());
    }

    #[test]
    fn kill_forks_of_kills_only_the_same_executable() {
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
        let mut output = io::BufReader::new(parent.stdout.take().unwrap());
        let mut line = String::new();
        io::BufRead::read_line(&mut output, &mut line).unwrap();
        kill_forks_of(Pid::from_child(&parent)).unwrap();
        io::BufRead::read_line(&mut output, &mut line).unwrap();
        io::BufRead::read_line(&mut output, &mut line).unwrap();
        assert_eq!(line, "\n137\nother\n");
        assert!(parent.try_wait().unwrap().is_none());
        drop(parent.stdin.take());
        parent.wait().unwrap();
    }

    /// A child whose command name, taken from its file name, is not valid UTF-8.
    fn spawn_with_non_utf8_name(dir: &std::path::Path) -> std::process::Child {
        use std::os::unix::ffi::OsStrExt;
        use std::os::unix::fs::PermissionsExt;
        let program = dir.join(std::ffi::OsStr::from_bytes(b"\xff\xfe"));
        std::fs::write(&program, "#!/bin/sh\nread x\n").unwrap();
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&program, executable).unwrap();
        let input = std::process::Stdio::piped();
        let child = Command::new(&program).stdin(input).spawn().unwrap();
        let comm = format!("/proc/{}/comm", child.id());
        // The kernel may resume the parent before the new program has its name.
        let named = || std::fs::read(&comm).unwrap() == b"\xff\xfe\n";
        assert!((0..500).any(|_| named() || {
            std::thread::sleep(Duration::from_millis(10));
            false
        }));
        child
    }

    #[test]
    fn processes_with_non_utf8_names_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = spawn_with_non_utf8_name(dir.path());
        let pid = Pid::from_child(&child);
        let children = children_of(rustix::process::getpid()).unwrap();
        assert!(children.contains(&pid));
        assert!(crate::usage::ProcessSample::of(pid.as_raw_nonzero().get()).is_some());
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
    fn parent_is_parsed_after_parentheses_in_names() {
        assert_eq!(parent_in_stat("12 (a) b (c) S 7 12 12 0"), Some(7));
        assert_eq!(parent_in_stat("12 (a"), None);
        assert_eq!(parent_in_stat(""), None);
    }

    #[test]
    fn multi_threaded_process_is_not_forked() {
        // The test harness runs every test on a separate thread.
        let refused = fork().expect_err("must refuse");
        assert!(refused.to_string().contains("threads"), "{refused}");
    }

    #[test]
    fn marked_processes_are_killed_after_re_parenting() {
        let mark = format!("CORACLE_TEST_MARK={}", std::process::id());
        let (name, value) = mark.split_once('=').unwrap();
        // Its parent exits at once, so the process is reparented.
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
