//! What does this machine grant an ordinary user? Answered by trying.
//!
//! Most answers need namespaces of their own, and a process that entered them can't go back. So every probe is a short-lived
//! process: the program starts itself with the probe's name, [`main`] tries the thing for real, prints one line and ends;
//! whatever was made (namespaces, mounts, devices, tables) goes away with it. [`main`] must be reached before any thread is
//! started: a threaded process can't enter a user namespace.
//!
//! What can simply be read (versions, settings, file systems, subordinate ids) is in [`host`] and [`subid`]. This module reports; what the
//! answers mean is for the caller to say. Start reading at [`PROBES`].

mod devices;
pub mod host;
mod link;
mod mounts;
mod nftables;
mod seccomp;
pub mod subid;
mod userns;

use std::io::Write as _;

/// What a probe found: words for a person, either way.
pub(crate) type Found = Result<String, String>;

/// A probe: given the argument after `=` in its name, if any.
type Probe = fn(Option<&str>) -> Found;

/// Every probe by name.
pub const PROBES: &[(&str, Probe)] = &[
    ("user-namespace", userns::user_namespace),
    ("process-namespace", userns::process_namespace),
    ("subordinate-ids", userns::subordinate_ids),
    ("overlay", mounts::overlay),
    ("fuse", mounts::fuse),
    ("tun", devices::tun),
    ("bridge", link::bridge_and_veth),
    ("nftables", nftables::table_and_nat_chain),
    ("seccomp", seccomp::notification),
    // Helpers of the probes above, each a process of its own.
    ("helper-mount-proc", userns::helper_mount_proc),
    ("helper-wait-for-map", userns::helper_wait_for_map),
];

/// The whole life of a probe process. Prints `ok WORDS` or `no WORDS` on one line and returns the exit code: 0 when it worked,
/// 1 when it did not, 2 when there is no such probe. `name` may carry an argument: `overlay=/scratch/dir`.
pub fn main(name: &str) -> i32 {
    let (name, argument) = name
        .split_once('=')
        .map_or((name, None), |(n, a)| (n, Some(a)));
    let Some((_, probe)) = PROBES.iter().find(|(known, _)| *known == name) else {
        return report("no", "there is no such probe", 2);
    };
    match probe(argument) {
        Ok(words) => report("ok", &words, 0),
        Err(words) => report("no", &words, 1),
    }
}

/// Reads the line that [`main`] printed. Anything else (a crash, a message of somebody's wrapper) is a failure.
pub fn parse_answer(stdout: &str) -> Result<String, String> {
    let line = stdout
        .lines()
        .rev()
        .find(|line| !line.is_empty())
        .unwrap_or("");
    let clean = |text: &str| -> String {
        text.chars()
            .filter(|c| !c.is_control())
            .take(300)
            .collect::<String>()
            .trim()
            .to_owned()
    };
    match line.split_at_checked(2) {
        Some(("ok", words)) => Ok(clean(words)),
        Some(("no", words)) => Err(clean(words)),
        _ => Err("the probe ended without an answer".to_owned()),
    }
}

fn report(word: &str, words: &str, code: i32) -> i32 {
    let words: String = words
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    // Nobody to tell if this fails; the exit code says the same.
    let _ = writeln!(std::io::stdout(), "{word} {words}");
    code
}

/// `EPERM` alone says nothing: name the step that failed.
pub(crate) fn at<E: std::fmt::Display>(step: &str) -> impl FnOnce(E) -> String + '_ {
    move |error| format!("{step}: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_back() {
        assert_eq!(parse_answer("ok all fine\n"), Ok("all fine".into()));
        assert_eq!(
            parse_answer("hello\nno mount: EPERM\n\n"),
            Err("mount: EPERM".into())
        );
        for noise in ["", "é", "o", "panicked at", "\n\n"] {
            assert!(parse_answer(noise).is_err(), "{noise:?}");
        }
    }

    #[test]
    fn unknown_probes_are_refused() {
        assert_eq!(main("no-such-probe=x"), 2);
    }
}
