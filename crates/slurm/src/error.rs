//! What can go wrong when talking to Slurm, and what the user can do about it.

use crate::hostlist::HostlistError;

/// Longest piece of Slurm's own words that we repeat.
const MAX_WORDS: usize = 2_000;

/// An error of this crate. [`SlurmError::hint`] says what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlurmError {
    /// Commands that we need are not on `PATH`.
    #[error("Slurm is not installed on this host: {} not found on PATH", .missing.join(", "))]
    NotInstalled {
        /// The commands that were not found.
        missing: Vec<&'static str>,
    },
    /// The commands are there, but have no configuration (`slurm.conf`).
    #[error("Slurm has no configuration on this host: {words}")]
    NotConfigured {
        /// What the command said.
        words: String,
    },
    /// `slurmctld` does not answer.
    #[error("Slurm's controller does not answer: {words}")]
    ControllerDown {
        /// What the command said.
        words: String,
    },
    /// Slurm does not believe who we are (munge or its successor).
    #[error("Slurm could not authenticate us: {words}")]
    Authentication {
        /// What the command said.
        words: String,
    },
    /// Slurm understood the request and said no: unknown option, invalid partition, limits, no such node.
    #[error("Slurm refused: {words}")]
    Refused {
        /// Slurm's own words.
        words: String,
    },
    /// The job that we were told to use has ended or never existed.
    #[error("the Slurm job is gone: {words}")]
    JobGone {
        /// What the command said.
        words: String,
    },
    /// The program that srun was to start does not exist on the node, or cannot be executed there.
    #[error("the program is not visible on the compute node: {words}")]
    ProgramNotFound {
        /// What srun said.
        words: String,
    },
    /// A node of the job can't be reached.
    #[error("Slurm cannot reach node {node}: {words}")]
    NodeDown {
        /// The node.
        node: String,
        /// What srun said.
        words: String,
    },
    /// A command took longer than we wait for it.
    #[error("{command} did not answer within {seconds} s")]
    Timeout {
        /// The command, without its arguments.
        command: String,
        /// How long we waited.
        seconds: u64,
    },
    /// A command could not be started at all.
    #[error("cannot start {command}")]
    Start {
        /// The command's path.
        command: String,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// A command failed in a way that we have no better name for.
    #[error("{command} failed ({status}): {words}")]
    Failed {
        /// The command, without its arguments.
        command: String,
        /// Its exit status.
        status: String,
        /// What it said.
        words: String,
    },
    /// A command answered with something that we cannot read.
    #[error("cannot understand the answer of {command}: {problem}")]
    Unreadable {
        /// The command, without its arguments.
        command: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A variable of the job's environment is not what Slurm would write.
    #[error("the environment variable {variable} makes no sense ({value:?}): {problem}")]
    BadEnvironment {
        /// The variable's name.
        variable: &'static str,
        /// Its value, cut if long.
        value: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A list of nodes cannot be expanded.
    #[error(transparent)]
    BadNodeList(#[from] HostlistError),
}

impl SlurmError {
    /// What the user can do next, as one sentence without a leading `hint:`; `None` where Slurm's words say it all.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::NodeDown { .. } => {
                "`scontrol show node` tells what Slurm knows of it; leave it out with --exclude"
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
            Self::Refused { words } => return refusal_hint(words),
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
            | Self::Unreadable { .. }
            | Self::BadNodeList(_) => return None,
        })
    }

    /// Whether trying the same again later can help without anything else changing.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::ControllerDown { .. } | Self::Timeout { .. })
    }
}

/// Slurm says what it refused, but not where to look up what it would accept.
fn refusal_hint(words: &str) -> Option<&'static str> {
    let has = |needle: &str| words.to_ascii_lowercase().contains(needle);
    if has("requested nodes are busy") {
        Some(
            "other steps of the job hold it (`squeue -s` lists them); one that is started with `srun --overlap` holds nothing",
        )
    } else if has("partition") {
        Some("`sinfo -s` lists the partitions")
    } else if has("account") || has("qos") || has("association") {
        Some("`sacctmgr show associations user=$USER` lists your accounts and QOS")
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

/// Makes Slurm's text fit to be shown: no control characters (they could rewrite the terminal), bounded, no empty lines.
pub(crate) fn clean_words(text: &str) -> String {
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
        if clean.len() > MAX_WORDS {
            let mut cut = MAX_WORDS;
            while !clean.is_char_boundary(cut) {
                cut -= 1;
            }
            clean.truncate(cut);
            clean.push('…');
            break;
        }
    }
    if clean.is_empty() {
        "it said nothing".to_owned()
    } else {
        clean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_made_harmless() {
        assert_eq!(
            clean_words("srun: error: a\u{1b}[2Jb\n\n  srun: c \n"),
            "srun: error: a [2Jb; srun: c"
        );
        assert_eq!(clean_words("\n"), "it said nothing");
        assert!(clean_words(&"é".repeat(100_000)).len() < MAX_WORDS + 8);
    }

    #[test]
    fn a_refusal_points_to_the_right_command() {
        let refused = |words: &str| {
            SlurmError::Refused {
                words: words.into(),
            }
            .hint()
        };
        assert_eq!(
            refused("invalid partition specified: nope"),
            Some("`sinfo -s` lists the partitions")
        );
        assert_eq!(refused("something else"), None);
    }
}
