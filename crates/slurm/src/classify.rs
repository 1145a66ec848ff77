//! From what a Slurm command wrote to stderr to an error with a name.
//!
//! Exit codes do not help: nearly every failure of `srun` is 1, and a task's own exit code looks the same. The words below
//! are from Slurm's `slurm_errno.c` and have not changed since 22.05.

use std::process::ExitStatus;

use crate::error::{SlurmError, clean_words};

/// What each kind of failure says, most specific first.
const DOWN: &[&str] = &[
    "unable to contact slurm controller",
    "connection refused",
    "controller is down",
    "communication connection failure",
    "socket timed out on send/recv",
    "unable to contact primary controller",
];
const UNCONFIGURED: &[&str] = &[
    "could not establish a configuration source",
    "failed to fetch config",
    "unable to process configuration file",
    "unable to open configuration file",
    // With no slurm.conf where SLURM_CONF says, the commands look for it again and again for a minute.
    "s_p_parse_file: cannot stat file",
];
const AUTHENTICATION: &[&str] = &[
    "munge",
    "authentication",
    "invalid auth",
    "zero bytes were transmitted",
];
const GONE: &[&str] = &[
    "invalid job id specified",
    "job/step already completing or completed",
    "job has expired",
    "expired or invalid job",
    "no allocation found",
    "access/permission denied for job",
];
const NO_PROGRAM: &[&str] = &[
    "no such file or directory",
    "command not found",
    "permission denied",
    "exec format error",
];
const REFUSED: &[&str] = &[
    "unrecognized option",
    "invalid option",
    "requires an argument",
    "ambiguous",
    "allocation failure",
    "unable to allocate resources",
    "unable to create step",
    "job submit/allocate failed",
    "invalid",
    "batch job submission failed",
    "more processors requested than permitted",
    "fatal:",
];

/// Names the failure of a Slurm command from its stderr. `status` is `None` while it is not known.
///
/// A task's own stderr comes through `srun` too, so only lines that a Slurm command itself wrote are looked at (they start with its
/// name); all other text is repeated only when there is nothing better.
pub fn classify(command: &str, status: Option<ExitStatus>, stderr: &str) -> SlurmError {
    let own: Vec<&str> = stderr.lines().filter(|line| is_slurms(line)).collect();
    let text = if own.is_empty() {
        stderr.to_owned()
    } else {
        own.join("\n")
    };
    let lower = text.to_ascii_lowercase();
    let says = |needles: &[&str]| needles.iter().any(|needle| lower.contains(needle));
    let words = clean_words(&strip_prefixes(&text));

    if says(UNCONFIGURED) {
        SlurmError::NotConfigured { words }
    } else if let Some(node) = node_down(&text) {
        SlurmError::NodeDown { node, words }
    } else if says(DOWN) {
        SlurmError::ControllerDown { words }
    } else if says(AUTHENTICATION) {
        SlurmError::Authentication { words }
    } else if says(GONE) {
        SlurmError::JobGone { words }
    } else if says(NO_PROGRAM) && lower.contains("execve") {
        SlurmError::ProgramNotFound { words }
    } else if says(REFUSED) {
        SlurmError::Refused { words }
    } else {
        let status = status.map_or_else(|| "still running".to_owned(), |status| status.to_string());
        SlurmError::Failed {
            command: command.to_owned(),
            status,
            words,
        }
    }
}

/// The node that srun could not start its task on: the controller is well, and says which.
///
/// `srun: error: Task launch for StepId=1.2 failed on node node2: Communication connection failure`
fn node_down(text: &str) -> Option<String> {
    let launch = text.lines().find(|line| line.contains("Task launch for"))?;
    let (_, rest) = launch.split_once(" failed on node ")?;
    let (node, _) = rest.split_once(':')?;
    Some(node.to_owned())
}

/// The node that says in this line that it can't find the program of a step.
///
/// `slurmstepd-node2: error: execve(): /home/u/coracle: No such file or directory`
pub fn node_without_program(line: &str) -> Option<&str> {
    let (node, rest) = line.strip_prefix("slurmstepd-")?.split_once(": ")?;
    let lower = rest.to_ascii_lowercase();
    let says = NO_PROGRAM.iter().any(|needle| lower.contains(needle));
    (says && lower.contains("execve")).then_some(node)
}

/// What `srun` says, before it ends with 0, of a step of which it lost a node.
///
/// `srun: error: Node failure on node1`
pub fn lost_node(stderr: &str) -> Option<String> {
    let own = stderr.lines().filter(|line| line.starts_with("srun: "));
    let line = own
        .into_iter()
        .find(|line| line.contains(": Node failure on "))?;
    Some(clean_words(&strip_prefixes(line)))
}

/// Lines of Slurm's own: `srun: error: …`, `slurmstepd: error: …`, `scontrol: …`, `slurm_load_jobs error: …`.
fn is_slurms(line: &str) -> bool {
    const SOURCES: &[&str] = &[
        "srun: ",
        "sbatch: ",
        "salloc: ",
        "scontrol: ",
        "sinfo: ",
        "squeue: ",
        "scancel: ",
        "slurmstepd: ",
        "slurmstepd-",
        "slurm_load_",
        "slurm_",
    ];
    // Labelled output (--label) puts the task's number first.
    let line = line
        .trim_start_matches(|c: char| c.is_ascii_digit())
        .trim_start_matches(": ");
    SOURCES.iter().any(|source| line.starts_with(source)) && !is_noise(line)
}

/// Lines that Slurm's commands write, even with `--quiet`, while all is well. Whoever passes their stderr on leaves these out.
pub fn is_noise(line: &str) -> bool {
    const NOISE: &[&str] = &[
        // Said to --cpu-bind=none where there is nothing to bind with.
        "cluster configuration lacks support for cpu binding",
        "queued and waiting for resources",
        "has been allocated resources",
        "Force Terminated StepId=",
        // Said where its child was killed so that it doesn't end the step with srun.
        "write(shepherd): ",
    ];
    let line = line.strip_prefix("srun: ").unwrap_or(line);
    NOISE.iter().any(|noise| line.contains(noise))
}

/// `srun: error: Unable to …` → `Unable to …`: the user knows that it was srun.
fn strip_prefixes(text: &str) -> String {
    let strip = |line: &str| {
        let mut line = line.trim();
        for prefix in [
            "srun: ",
            "sbatch: ",
            "scontrol: ",
            "sinfo: ",
            "slurm_load_jobs ",
            "error: ",
            "fatal: ",
        ] {
            line = line.strip_prefix(prefix).unwrap_or(line);
        }
        line.to_owned()
    };
    text.lines().map(strip).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_does_not_see_the_program_is_named() {
        let line = "slurmstepd-node2: error: execve(): /u/coracle: No such file or directory";
        assert_eq!(node_without_program(line), Some("node2"));
        for other in [
            "slurmstepd: error: execve(): /u/coracle: No such file or directory",
            "slurmstepd-node2: error: couldn't chdir to `/u': No such file or directory",
            "srun: error: node2: task 1: Exited with exit code 2",
        ] {
            assert_eq!(node_without_program(other), None, "{other}");
        }
    }

    #[test]
    fn a_lost_node_is_named() {
        let said = "coracle: ready\nsrun: error: Node failure on node1\nsrun: Job step aborted: Waiting up to 17 seconds for job step to finish.\n";
        assert_eq!(lost_node(said).as_deref(), Some("Node failure on node1"));
        assert_eq!(lost_node("my tool: Node failure on node1"), None);
        assert_eq!(
            lost_node("srun: error: node1: task 0: Exited with exit code 1"),
            None
        );
    }

    #[test]
    fn names_what_slurm_says() {
        let cases = [
            "srun: error: Unable to allocate resources: Unable to contact slurm controller (connect failure)",
            "srun: error: invalid partition specified: nope\nsrun: error: Unable to allocate resources: Invalid partition name specified",
            "srun: unrecognized option '--frobnicate'\nTry \"srun --help\" for more information",
            "srun: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\nsrun: fatal: Could not establish a configuration source",
            "srun: error: Unable to confirm allocation for job 4: Invalid job id specified\nsrun: Check SLURM_JOB_ID environment variable. Expired or invalid job 4",
            "srun: cluster configuration lacks support for cpu binding\nslurmstepd-node1: error: execve(): /home/u/coracle: No such file or directory\nsrun: error: node1: task 0: Exited with exit code 2",
            "slurm_load_jobs error: Invalid job id specified",
            "srun: error: Task launch for StepId=1.2 failed on node node2: Communication connection failure\nsrun: error: Application launch failed: Communication connection failure",
            "srun: error: s_p_parse_file: cannot stat file /nonexistent: No such file or directory, retrying in 1sec up to 60sec",
            "srun: error: Munge encode failed: Failed to access \"/run/munge/munge.socket.2\": No such file or directory",
            "srun: error: Unable to allocate resources: Requested node configuration is not available",
            "my program: invalid partition, says the task\nsrun: error: node1: task 0: Exited with exit code 3",
            "",
        ];
        let named: Vec<String> = cases
            .iter()
            .map(|text| format!("{:?}", classify("srun", None, text)))
            .collect();
        insta::assert_snapshot!(named.join("\n"));
    }
}
