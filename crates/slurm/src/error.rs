//! Errors of this crate, with hints for the user.

use crate::hostlist::HostlistError;

/// Longest message of Slurm that an error quotes, in bytes.
const MAX_MESSAGE: usize = 2_000;

/// An error of this crate. [`SlurmError::hint`] suggests the next step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlurmError {
    /// Required commands are not on `PATH`.
    #[error("Slurm is not installed on this host: {} not found on PATH", .missing.join(", "))]
    NotInstalled {
        /// The commands that were not found.
        missing: Vec<&'static str>,
    },
    /// The commands exist but find no configuration (`slurm.conf`).
    #[error("Slurm has no configuration on this host: {message}")]
    NotConfigured {
        /// The command's message.
        message: String,
    },
    /// `slurmctld` does not answer.
    #[error("Slurm's controller does not answer: {message}")]
    ControllerDown {
        /// The command's message.
        message: String,
    },
    /// Authentication failed (munge or its successor).
    #[error("cannot authenticate to Slurm: {message}")]
    Authentication {
        /// The command's message.
        message: String,
    },
    /// Slurm rejected the request: unknown option, invalid partition, limits, no such node.
    #[error("Slurm refused: {message}")]
    Refused {
        /// Slurm's message.
        message: String,
    },
    /// The requested job has ended or never existed.
    #[error("the Slurm job has ended or does not exist: {message}")]
    JobGone {
        /// The command's message.
        message: String,
    },
    /// The node cannot find or execute the program of the step.
    #[error("the program is not visible on the compute node: {message}")]
    ProgramNotFound {
        /// srun's message.
        message: String,
    },
    /// Slurm cannot reach a node of the job.
    #[error("Slurm cannot reach node {node}: {message}")]
    NodeDown {
        /// The node.
        node: String,
        /// srun's message.
        message: String,
    },
    /// A command exceeded its time limit.
    #[error("{command} did not answer within {seconds} s")]
    Timeout {
        /// The command, without its arguments.
        command: String,
        /// The time limit.
        seconds: u64,
    },
    /// A command could not be started.
    #[error("cannot start {command}")]
    Start {
        /// The command's path.
        command: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A command failed for a reason that none of the other variants describes.
    #[error("{command} failed ({status}): {message}")]
    Failed {
        /// The command, without its arguments.
        command: String,
        /// Its exit status.
        status: String,
        /// Its message.
        message: String,
    },
    /// The parser does not accept the output of a command.
    #[error("cannot parse the output of {command}: {problem}")]
    UnexpectedOutput {
        /// The command, without its arguments.
        command: String,
        /// Why the parser does not accept it.
        problem: String,
    },
    /// A variable of the job's environment has a value that Slurm would not set.
    #[error("cannot use the environment variable {variable}={value:?}: {problem}")]
    BadEnvironment {
        /// The variable's name.
        variable: &'static str,
        /// Its value, truncated.
        value: String,
        /// Why it is not usable.
        problem: String,
    },
    /// A list of nodes cannot be expanded.
    #[error(transparent)]
    BadNodeList(#[from] HostlistError),
}

impl SlurmError {
    /// What the user can do next, as one sentence without a leading `hint:`; `None` if Slurm's message is enough.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::NodeDown { .. } => {
                "`scontrol show node` shows its state; leave it out with --exclude"
            }
            Self::NotInstalled { .. } => {
                "run this on a login or compute node of the cluster, or load its module first (often `module load slurm`)"
            }
            Self::NotConfigured { .. } => {
                "set SLURM_CONF to the cluster's slurm.conf, or ask the site which hosts may submit jobs"
            }
            Self::ControllerDown { .. } | Self::Timeout { .. } => {
                "`scontrol ping` shows whether the controller is back; if it stays down, tell the site's support"
            }
            Self::Authentication { .. } => {
                "munge may be down on this host or its clock may be off: `munge -n | unmunge` shows which"
            }
            Self::Refused { message } => return hint_for_refusal(message),
            Self::JobGone { .. } => {
                "this shell still has the variables of a job that ended: leave it, or `unset SLURM_JOB_ID`"
            }
            Self::ProgramNotFound { .. } => {
                "the file system that holds the program is not mounted there: copy it to a shared one"
            }
            Self::BadEnvironment { .. } => {
                "the SLURM_* variables look edited: start again from a fresh shell or a new allocation"
            }
            Self::Start { .. }
            | Self::Failed { .. }
            | Self::UnexpectedOutput { .. }
            | Self::BadNodeList(_) => return None,
        })
    }
}

impl SlurmError {
    /// Whether a step waits for resources that other steps of the job hold.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Refused { message } if nodes_are_busy(message))
    }
}

fn nodes_are_busy(message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    message.contains("requested nodes are busy")
}

/// The command that lists the valid values. Slurm's message does not name it.
fn hint_for_refusal(message: &str) -> Option<&'static str> {
    let has = |needle: &str| message.to_ascii_lowercase().contains(needle);
    if nodes_are_busy(message) {
        Some(
            "other steps of the job hold the resources (`squeue -s` lists them); a step started with `srun --overlap` holds none",
        )
    } else if has("account") || has("qos") || has("association") {
        // Before partitions: "Invalid account or account/partition combination specified".
        Some("`sacctmgr show associations user=$USER` lists your accounts and QOS")
    } else if has("partition") {
        Some("`sinfo -s` lists the partitions")
    } else if has("option") {
        Some("`srun --help` lists the options that this version of Slurm knows")
    } else if has("node configuration") || has("nodes are required") || has("node count") {
        Some(
            "`sinfo -N -l` shows the size of the nodes; ask for less per node or for another partition",
        )
    } else {
        None
    }
}

/// Makes Slurm's text safe to print: one bounded line without control characters, which could manipulate the terminal.
pub(crate) fn sanitize(text: &str) -> String {
    let mut clean = String::new();
    for line in text.lines() {
        let line: String = line
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        if !clean.is_empty() {
            clean.push_str("; ");
        }
        clean.push_str(line);
        if clean.len() > MAX_MESSAGE {
            let mut cut = MAX_MESSAGE;
            while !clean.is_char_boundary(cut) {
                cut -= 1;
            }
            clean.truncate(cut);
            clean.push('…');
            break;
        }
    }
    if clean.is_empty() {
        "no output".to_owned()
    } else {
        clean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_removed() {
        assert_eq!(
            sanitize("srun: error: a\u{1b}[2Jb\n\n  srun: c \n"),
            "srun: error: a [2Jb; srun: c"
        );
        assert_eq!(sanitize("\n"), "no output");
        assert!(sanitize(&"é".repeat(100_000)).len() < MAX_MESSAGE + 8);
    }

    #[test]
    fn refusal_hint_names_the_listing_command() {
        let refused = |message: &str| {
            SlurmError::Refused {
                message: message.into(),
            }
            .hint()
        };
        assert_eq!(
            refused("invalid partition specified: nope"),
            Some("`sinfo -s` lists the partitions")
        );
        let account = "Unable to allocate resources: Invalid account or account/partition combination specified";
        assert_eq!(
            refused(account),
            Some("`sacctmgr show associations user=$USER` lists your accounts and QOS")
        );
        assert_eq!(refused("something else"), None);
    }
}
