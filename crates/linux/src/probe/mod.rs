//! Probes that find out what this machine permits an unprivileged user, by trying it.
//!
//! Most probes need new namespaces, and a process cannot return from these. So every probe is a short-lived process: the program
//! starts itself with the name of the probe, [`main`] runs the experiment, prints one line and exits. Namespaces, mounts, devices
//! and tables that it created disappear with it. Call [`main`] before any thread starts: a multi-threaded process cannot enter a
//! user namespace.
//!
//! Facts that can simply be read (versions, sysctls, file systems, subordinate ids) are in [`host`] and [`subid`]. This module
//! only reports; the caller decides what the results mean. Start reading at [`PROBES`].

mod devices;
pub mod host;
mod link;
mod mounts;
mod nftables;
mod seccomp;
pub mod subid;
mod userns;

use std::io::Write as _;

/// The result of a probe: a human-readable description of the success or of the failure.
pub(crate) type ProbeReport = Result<String, String>;

/// A probe function. It gets the argument after `=` in the name of the probe, if any.
type Probe = fn(Option<&str>) -> ProbeReport;

/// All probes by name.
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
    // Helpers of the probes above, each run in its own process.
    ("helper-mount-proc", userns::helper_mount_proc),
    ("helper-wait-for-map", userns::helper_wait_for_map),
];

/// The main function of a probe process. Prints `ok TEXT` or `no TEXT` on one line and returns the exit code: 0 for success, 1
/// for failure, 2 for an unknown probe. `name` may contain an argument: `overlay=/scratch/dir`.
pub fn main(name: &str) -> i32 {
    let (name, argument) = name
        .split_once('=')
        .map_or((name, None), |(n, a)| (n, Some(a)));
    let Some((_, probe)) = PROBES.iter().find(|(known, _)| *known == name) else {
        return report("no", "unknown probe", 2);
    };
    match probe(argument) {
        Ok(description) => report("ok", &description, 0),
        Err(description) => report("no", &description, 1),
    }
}

/// Parses the line that [`main`] printed. Any other output (a crash, a message of a wrapper script) is a failure.
pub fn parse_output(stdout: &str) -> Result<String, String> {
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
        Some(("ok", description)) => Ok(clean(description)),
        Some(("no", description)) => Err(clean(description)),
        _ => Err("the probe printed no result".to_owned()),
    }
}

fn report(verdict: &str, description: &str, code: i32) -> i32 {
    let description: String = description
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    // If stdout is closed, the exit code still reports the result.
    let _ = writeln!(std::io::stdout(), "{verdict} {description}");
    code
}

/// Adds the failed step to an error, because `EPERM` alone does not identify it.
pub(crate) fn failed<E: std::fmt::Display>(step: &str) -> impl FnOnce(E) -> String + '_ {
    move |error| format!("{step}: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_parsed() {
        assert_eq!(parse_output("ok all fine\n"), Ok("all fine".into()));
        assert_eq!(
            parse_output("hello\nno mount: EPERM\n\n"),
            Err("mount: EPERM".into())
        );
        for noise in ["", "é", "o", "panicked at", "\n\n"] {
            assert!(parse_output(noise).is_err(), "{noise:?}");
        }
    }

    #[test]
    fn unknown_probes_are_rejected() {
        assert_eq!(main("no-such-probe=x"), 2);
    }
}
