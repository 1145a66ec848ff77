//! The job, step and node that this process runs in, from its environment alone.

use crate::error::SlurmError;
use crate::hostlist;

/// The location of a process in a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobLocation {
    /// A task of an `srun` step, on a compute node.
    Task {
        /// The task's rank in the step (`SLURM_PROCID`).
        procid: u32,
        /// The number of tasks in the step.
        tasks: Option<u32>,
    },
    /// A batch script, or `salloc`'s shell if the site starts it on the first node: exactly one process of the job,
    /// on a compute node.
    Batch,
    /// On a host that is not a node of the job (`salloc`'s shell on a login node, or a shell in which the user set
    /// `SLURM_JOB_ID`).
    OffNode,
}

/// The job that this process runs in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// The job id.
    pub job_id: u32,
    /// The step that this process is a task of; `None` outside of `srun`.
    pub step_id: Option<u32>,
    /// The location of this process in the job.
    pub location: JobLocation,
    /// The job's nodes, in Slurm's order. The leader runs on the first.
    pub nodes: Vec<String>,
    /// The name of the Slurm cluster.
    pub cluster: Option<String>,
    /// The job's partition.
    pub partition: Option<String>,
}

/// Step ids from here on are reserved: batch script, external step, interactive step. Depending on the version, Slurm prints them as
/// negative or as large numbers.
const FIRST_SPECIAL_STEP: i64 = 0xffff_fff0;

impl Allocation {
    /// Reads the allocation from the process's environment; `None` outside of a job.
    pub fn from_process_env() -> Result<Option<Self>, SlurmError> {
        Self::from_env(|name| std::env::var(name).ok())
    }

    /// As [`Allocation::from_process_env`], with a function that looks up variables.
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, SlurmError> {
        let text = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let Some((name, job_id)) = first(&text, &["SLURM_JOB_ID", "SLURM_JOBID"]) else {
            return Ok(None);
        };
        let job_id: u32 = job_id
            .parse()
            .ok()
            .filter(|&id| id > 0)
            .ok_or_else(|| bad_environment(name, &job_id, "not a job id"))?;

        let nodes = node_list(&text, &["SLURM_JOB_NODELIST", "SLURM_NODELIST"])?;
        let number = |name: &'static str| text(name).and_then(|value| value.parse::<u32>().ok());
        let step_id = first(&text, &["SLURM_STEP_ID", "SLURM_STEPID"])
            .and_then(|(_, value)| value.parse::<i64>().ok())
            .filter(|id| (0..FIRST_SPECIAL_STEP).contains(id))
            .and_then(|id| u32::try_from(id).ok());
        let on_node = text("SLURMD_NODENAME").is_some();

        let location = match (on_node, step_id, number("SLURM_PROCID")) {
            (false, ..) => JobLocation::OffNode,
            // A batch script has SLURM_PROCID=0 too; only the step id distinguishes it from a task.
            (true, Some(_), Some(procid)) => JobLocation::Task {
                procid,
                tasks: number("SLURM_STEP_NUM_TASKS").or_else(|| number("SLURM_NTASKS")),
            },
            (true, ..) => JobLocation::Batch,
        };
        Ok(Some(Self {
            job_id,
            step_id,
            location,
            nodes,
            cluster: text("SLURM_CLUSTER_NAME"),
            partition: text("SLURM_JOB_PARTITION"),
        }))
    }
}

/// The first variable that is set, with its name. Callers list newer names first.
fn first(
    text: &impl Fn(&str) -> Option<String>,
    names: &[&'static str],
) -> Option<(&'static str, String)> {
    names.iter().find_map(|&name| Some((name, text(name)?)))
}

fn node_list(
    text: &impl Fn(&str) -> Option<String>,
    names: &[&'static str],
) -> Result<Vec<String>, SlurmError> {
    match first(text, names) {
        Some((name, list)) => {
            hostlist::expand(&list).map_err(|error| bad_environment(name, &list, error.problem))
        }
        None => Ok(Vec::new()),
    }
}

fn bad_environment(variable: &'static str, value: &str, problem: &str) -> SlurmError {
    SlurmError::BadEnvironment {
        variable,
        value: value.chars().take(80).collect(),
        problem: problem.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses environments captured in the lab (22.05.8), one for each way to start a process.
    fn read(env: &str) -> Result<Option<Allocation>, SlurmError> {
        let value = |name: &str| {
            env.lines().find_map(|line| {
                Some(
                    line.split_once('=')
                        .filter(|(n, _)| *n == name)?
                        .1
                        .to_owned(),
                )
            })
        };
        Allocation::from_env(value)
    }

    #[test]
    fn srun_task_environment() {
        insta::assert_debug_snapshot!(
            read(include_str!("../fixtures/env-srun-22.05.txt")).unwrap()
        );
    }

    #[test]
    fn batch_script_with_procid_is_not_a_task() {
        let batch = read(include_str!("../fixtures/env-sbatch-22.05.txt"))
            .unwrap()
            .unwrap();
        assert_eq!(
            (batch.location, batch.step_id, batch.nodes.len()),
            (JobLocation::Batch, None, 2)
        );
    }

    #[test]
    fn salloc_shell_on_login_node_is_off_node() {
        let salloc = read(include_str!("../fixtures/env-salloc-22.05.txt"))
            .unwrap()
            .unwrap();
        assert_eq!(salloc.location, JobLocation::OffNode);
    }

    #[test]
    fn interactive_step_counts_as_batch() {
        for step in ["-6", "4294967290", "4294967291"] {
            let env = format!(
                "SLURM_JOB_ID=7\nSLURM_STEP_ID={step}\nSLURM_PROCID=0\nSLURMD_NODENAME=n1\nSLURM_JOB_NODELIST=n[1-2]"
            );
            let shell = read(&env).unwrap().unwrap();
            assert_eq!(shell.location, JobLocation::Batch, "{step}");
        }
    }

    #[test]
    fn invalid_variables_are_named_in_the_error() {
        assert_eq!(read("HOME=/root\nSLURM_JOB_ID=").unwrap(), None);
        insta::assert_snapshot!(read("SLURM_JOB_ID=seven").unwrap_err(),
            @r#"cannot use the environment variable SLURM_JOB_ID="seven": not a job id"#);
        insta::assert_snapshot!(read("SLURM_JOB_ID=7\nSLURM_JOB_NODELIST=n[1-999999999]").unwrap_err(),
            @r#"cannot use the environment variable SLURM_JOB_NODELIST="n[1-999999999]": too many nodes"#);
    }
}
