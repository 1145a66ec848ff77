//! A Slurm command line as data, and the environment that it must not inherit.

use std::ffi::OsString;
use std::path::PathBuf;

/// One command to run: pure data, so that what is run can be tested without Slurm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invocation {
    /// Absolute path of the command.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Variables of our environment that it must not see, sorted.
    pub env_remove: Vec<String>,
    /// Variables to set, sorted by name.
    pub env_set: Vec<(String, String)>,
}

impl Invocation {
    /// The command, ready to spawn: in a process group of its own (Ctrl-C at the terminal reaches us, and we end it in
    /// order), killed when the handle is dropped. Standard streams are the caller's to set.
    pub fn command(&self) -> tokio::process::Command {
        let mut command = tokio::process::Command::from(self.std_command());
        command.process_group(0).kill_on_drop(true);
        command
    }

    /// The command for a caller that becomes it (`exec`): same process group, no handle.
    pub fn std_command(&self) -> std::process::Command {
        let mut command = std::process::Command::new(&self.program);
        command.args(&self.args);
        for name in &self.env_remove {
            command.env_remove(name);
        }
        command.envs(self.env_set.iter().map(|(name, value)| (name, value)));
        command
    }

    /// The command line for messages and logs, quoted only where a reader would be misled.
    pub fn display(&self) -> String {
        let mut words = vec![self.program.to_string_lossy().into_owned()];
        words.extend(self.args.iter().map(|arg| {
            let arg = arg.to_string_lossy();
            if arg.is_empty()
                || arg
                    .chars()
                    .any(|c| c.is_whitespace() || c.is_control() || "'\"\\$`".contains(c))
            {
                format!("{arg:?}")
            } else {
                arg.into_owned()
            }
        }));
        words.join(" ")
    }
}

/// Whether a variable of the outer job or step may stay when a further step is started from inside it.
///
/// `srun` takes more than eighty `SLURM_*` and `SRUN_*` variables as options (each release adds some), and slurmstepd sets
/// many of the same names for a job or step: SLURM_NTASKS, SLURM_CPU_BIND, SLURM_MEM_PER_CPU beside --mem, SLURM_DISTRIBUTION,
/// SLURM_EXPORT_ENV … A nested srun would take the outer step's values as its own wishes and fail, or bind every agent to
/// one core. So this is a list of what is kept, and the rest goes. What describes the *step* is set anew by Slurm.
pub fn is_kept_in_steps(name: &str) -> bool {
    if matches!(
        name,
        "SLURM_JOB_NAME" | "SLURM_JOB_NUM_NODES" | "SLURM_JOB_DEPENDENCY"
    ) {
        return false;
    }
    if let Some(rest) = name.strip_prefix("SLURM_") {
        return rest.starts_with("JOB_")
            || matches!(
                rest,
                // What commands need to find their controller and to prove who they are.
                "CONF" | "CONF_SERVER" | "CLUSTER_NAME" | "WORKING_CLUSTER" | "JWT" | "SACK_KEY" | "SACK_JWKS"
                // The job, under its old name; what the job got; a site's scratch directory.
                | "JOBID" | "NODELIST" | "TMPDIR" | "SUBMIT_DIR"
                | "SUBMIT_HOST" | "ARRAY_JOB_ID" | "ARRAY_TASK_ID" | "HET_SIZE" | "RESTART_COUNT"
            );
    }
    // PMI and PMIx: an agent is no rank of the outer step.
    !(name.starts_with("SRUN_")
        || name.starts_with("SLURMD_")
        || name.starts_with("PMI_")
        || name.starts_with("PMIX_"))
}

/// The names to remove from an environment before a step is started from inside it.
pub(crate) fn removed_for_steps<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let mut removed: Vec<String> = names
        .into_iter()
        .filter(|name| !is_kept_in_steps(name))
        .map(str::to_owned)
        .collect();
    removed.sort_unstable();
    removed.dedup();
    removed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_in_the_environment_are_removed_and_the_job_is_kept() {
        for name in [
            "SLURM_NTASKS",
            "SLURM_CPU_BIND",
            "SLURM_MEM_PER_CPU",
            "SRUN_CPUS_PER_TASK",
            "SLURM_STEP_ID",
            "SLURM_PROCID",
            "SLURM_JOB_NAME",
            "SLURM_EXPORT_ENV",
            "SLURMD_NODENAME",
            "PMIX_RANK",
            "SLURM_A_NEW_OPTION",
            "SLURM_GPUS_PER_TASK",
        ] {
            assert!(!is_kept_in_steps(name), "{name}");
        }
        for name in [
            "SLURM_JOB_ID",
            "SLURM_CONF",
            "SLURM_JOB_NODELIST",
            "SLURM_JOB_GPUS",
            "HOME",
            "PATH",
            "TMPDIR",
            "SLURM_TMPDIR",
        ] {
            assert!(is_kept_in_steps(name), "{name}");
        }
    }

    #[test]
    fn a_command_line_is_shown_readably() {
        let invocation = Invocation {
            program: "/usr/bin/srun".into(),
            args: ["--nodes=2", "a b", ""].map(Into::into).to_vec(),
            env_remove: Vec::new(),
            env_set: Vec::new(),
        };
        assert_eq!(invocation.display(), r#"/usr/bin/srun --nodes=2 "a b" """#);
    }
}
