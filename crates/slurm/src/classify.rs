//! Maps the stderr of a Slurm command to a [`SlurmError`].
//!
//! Exit codes do not help: nearly every failure of `srun` is 1, and a task's own exit code looks the same. The messages below
//! are from Slurm's `slurm_errno.c` and have not changed since 22.05.

use std::process::ExitStatus;

use crate::error::{SlurmError, sanitize};

/// Substrings of the messages of each kind of failure, in lower case.
const CONTROLLER_DOWN: &[&str] = &[
    "unable to contact slurm controller",
    "connection refused",
    "controller is down",
    "communication connection failure",
    "socket timed out on send/recv",
    "unable to contact primary controller",
];
const NOT_CONFIGURED: &[&str] = &[
    "could not establish a configuration source",
    "failed to fetch config",
    "unable to process configuration file",
    "unable to open configuration file",
    // Without the file that SLURM_CONF names, the commands retry for a minute.
    "s_p_parse_file: cannot stat file",
];
const AUTHENTICATION: &[&str] = &[
    "munge",
    "authentication",
    "invalid auth",
    "zero bytes were transmitted",
];
const JOB_GONE: &[&str] = &[
    "invalid job id specified",
    "job/step already completing or completed",
    "job has expired",
    "expired or invalid job",
    "no allocation found",
    "access/permission denied for job",
];
const PROGRAM_NOT_FOUND: &[&str] = &[
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

/// Classifies the failure of a Slurm command by its stderr. `status` is `None` if the command still runs.
///
/// `srun` also forwards the stderr of its tasks, so only lines that start with the name of a Slurm program count. If there are none,
/// the error quotes the whole stderr.
pub fn classify(command: &str, status: Option<ExitStatus>, stderr: &str) -> SlurmError {
    let from_slurm: Vec<&str> = stderr.lines().filter(|line| is_from_slurm(line)).collect();
    let text = if from_slurm.is_empty() {
        stderr.to_owned()
    } else {
        from_slurm.join("\n")
    };
    let lower = text.to_ascii_lowercase();
    let contains_any = |needles: &[&str]| needles.iter().any(|needle| lower.contains(needle));
    let message = sanitize(&strip_prefixes(&text));

    if contains_any(NOT_CONFIGURED) {
        SlurmError::NotConfigured { message }
    } else if let Some(node) = node_down(&text) {
        SlurmError::NodeDown { node, message }
    } else if contains_any(CONTROLLER_DOWN) {
        SlurmError::ControllerDown { message }
    } else if contains_any(AUTHENTICATION) {
        SlurmError::Authentication { message }
    } else if contains_any(JOB_GONE) {
        SlurmError::JobGone { message }
    } else if contains_any(PROGRAM_NOT_FOUND) && lower.contains("execve") {
        SlurmError::ProgramNotFound { message }
    } else if contains_any(REFUSED) {
        SlurmError::Refused { message }
    } else {
        let status = status.map_or_else(|| "still running".to_owned(), |status| status.to_string());
        SlurmError::Failed {
            command: command.to_owned(),
            status,
            message,
        }
    }
}

/// The node on which srun failed to start its task.
///
/// `srun: error: Task launch for StepId=1.2 failed on node node2: Communication connection failure`
fn node_down(text: &str) -> Option<String> {
    let launch = text.lines().find(|line| line.contains("Task launch for"))?;
    let (_, rest) = launch.split_once(" failed on node ")?;
    let (node, _) = rest.split_once(':')?;
    Some(node.to_owned())
}

/// The node whose slurmstepd reports in this line that it cannot execute the step's program.
///
/// `slurmstepd-node2: error: execve(): /home/u/coracle: No such file or directory`
pub fn node_without_program(line: &str) -> Option<&str> {
    let (node, rest) = line.strip_prefix("slurmstepd-")?.split_once(": ")?;
    let lower = rest.to_ascii_lowercase();
    let not_found = PROGRAM_NOT_FOUND
        .iter()
        .any(|needle| lower.contains(needle));
    (not_found && lower.contains("execve")).then_some(node)
}

/// The message of `srun` about a node failure. `srun` then exits with code 0.
///
/// `srun: error: Node failure on node1`
pub fn node_failure_message(stderr: &str) -> Option<String> {
    let from_srun = stderr.lines().filter(|line| line.starts_with("srun: "));
    let line = from_srun
        .into_iter()
        .find(|line| line.contains(": Node failure on "))?;
    Some(sanitize(&strip_prefixes(line)))
}

/// Whether a Slurm program wrote this line: `srun: error: …`, `slurmstepd: error: …`, `scontrol: …`, `slurm_load_jobs error: …`.
/// Lines that [`is_noise`] describes do not count.
pub fn is_from_slurm(line: &str) -> bool {
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
    // With --label the task's rank comes first.
    let line = line
        .trim_start_matches(|c: char| c.is_ascii_digit())
        .trim_start_matches(": ");
    SOURCES.iter().any(|source| line.starts_with(source)) && !is_noise(line)
}

/// Whether this is a line that Slurm's commands write without an error, even with `--quiet`. Callers that forward stderr drop it.
pub fn is_noise(line: &str) -> bool {
    const NOISE: &[&str] = &[
        // With --cpu-bind=none, if the site has no task plugin that binds CPUs.
        "cluster configuration lacks support for cpu binding",
        "queued and waiting for resources",
        "has been allocated resources",
        "Force Terminated StepId=",
        // After its shepherd process was killed, which is done so that the step outlives srun.
        "write(shepherd): ",
    ];
    let line = line.strip_prefix("srun: ").unwrap_or(line);
    NOISE.iter().any(|noise| line.contains(noise))
}

/// `srun: error: Unable to …` → `Unable to …`
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
    fn finds_node_that_cannot_execute_the_program() {
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
    fn finds_node_failure_in_stderr() {
        let stderr = "coracle: ready\nsrun: error: Node failure on node1\nsrun: Job step aborted: Waiting up to 17 seconds for job step to finish.\n";
        assert_eq!(
            node_failure_message(stderr).as_deref(),
            Some("Node failure on node1")
        );
        assert_eq!(node_failure_message("my tool: Node failure on node1"), None);
        assert_eq!(
            node_failure_message("srun: error: node1: task 0: Exited with exit code 1"),
            None
        );
    }

    #[test]
    fn stderr_maps_to_error_variants() {
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
        let errors: Vec<String> = cases
            .iter()
            .map(|text| format!("{:?}", classify("srun", None, text)))
            .collect();
        insta::assert_snapshot!(errors.join("\n"));
    }
}
