//! A Slurm command line as data, and the variables that it must not inherit.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::Slurm;

/// A command to run. It is plain data, so tests can check it without Slurm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invocation {
    /// Absolute path of the command.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Variables to remove from the inherited environment, sorted.
    pub env_remove: Vec<String>,
    /// Variables to set, sorted by name.
    pub env_set: Vec<(String, String)>,
}

impl Invocation {
    /// An `srun` that starts a step; `env` are the names of the variables in our environment.
    pub(crate) fn step<'a>(
        slurm: &Slurm,
        args: Vec<OsString>,
        env: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        Self {
            program: slurm.srun.clone(),
            args,
            env_remove: removed_for_steps(env),
            env_set: Vec::new(),
        }
    }

    /// The command, ready to spawn. The caller sets the standard streams.
    ///
    /// It gets a new process group, so that Ctrl-C at the terminal reaches only the caller, which then stops the command. Dropping
    /// the handle kills it.
    pub fn command(&self) -> tokio::process::Command {
        let mut command = tokio::process::Command::from(self.std_command());
        command.process_group(0).kill_on_drop(true);
        command
    }

    /// The command for a caller that replaces itself with it (`exec`): same process group, no handle.
    pub fn std_command(&self) -> std::process::Command {
        let mut command = std::process::Command::new(&self.program);
        command.args(&self.args);
        for name in &self.env_remove {
            command.env_remove(name);
        }
        command.envs(self.env_set.iter().map(|(name, value)| (name, value)));
        command
    }

    /// The command line for messages and logs. Arguments are quoted only if they would be ambiguous.
    pub fn display(&self) -> String {
        let mut arguments = vec![self.program.to_string_lossy().into_owned()];
        arguments.extend(self.args.iter().map(|arg| {
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
        arguments.join(" ")
    }
}

/// The names of the variables in our environment.
pub fn environment_names() -> Vec<String> {
    std::env::vars_os()
        .map(|(name, _)| name.to_string_lossy().into_owned())
        .collect()
}

/// Whether a step that is started from inside a job or step inherits this variable.
///
/// `srun` takes more than eighty `SLURM_*` and `SRUN_*` variables as options (each release adds some), and slurmstepd sets
/// many of the same names for a job or step: SLURM_NTASKS, SLURM_CPU_BIND, SLURM_MEM_PER_CPU beside --mem, SLURM_DISTRIBUTION,
/// SLURM_EXPORT_ENV … A nested srun would take the outer step's values as its own options and fail, or bind every agent to
/// one core. So this is an allow-list for Slurm's variables. Slurm itself sets those that describe the new step.
pub fn is_inherited_by_steps(name: &str) -> bool {
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
                // Commands need these to find the controller and to authenticate.
                "CONF" | "CONF_SERVER" | "CLUSTER_NAME" | "WORKING_CLUSTER" | "JWT" | "SACK_KEY" | "SACK_JWKS"
                // The job id under its old name; properties of the job; a site's scratch directory.
                | "JOBID" | "NODELIST" | "TMPDIR" | "SUBMIT_DIR"
                | "SUBMIT_HOST" | "ARRAY_JOB_ID" | "ARRAY_TASK_ID" | "HET_SIZE" | "RESTART_COUNT"
            );
    }
    // PMI and PMIx: the new process is not a rank of the outer step.
    !(name.starts_with("SRUN_")
        || name.starts_with("SLURMD_")
        || name.starts_with("PMI_")
        || name.starts_with("PMIX_"))
}

/// The variables to remove before starting a step from inside a job or step, sorted.
pub(crate) fn removed_for_steps<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let mut removed: Vec<String> = names
        .into_iter()
        .filter(|name| !is_inherited_by_steps(name))
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
    fn steps_inherit_the_job_but_no_options() {
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
            assert!(!is_inherited_by_steps(name), "{name}");
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
            assert!(is_inherited_by_steps(name), "{name}");
        }
    }

    #[test]
    fn display_quotes_ambiguous_arguments() {
        let invocation = Invocation {
            program: "/usr/bin/srun".into(),
            args: ["--nodes=2", "a b", ""].map(Into::into).to_vec(),
            env_remove: Vec::new(),
            env_set: Vec::new(),
        };
        assert_eq!(invocation.display(), r#"/usr/bin/srun --nodes=2 "a b" """#);
    }
}
