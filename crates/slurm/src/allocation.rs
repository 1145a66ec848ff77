//! Where are we: inside which job, in which step, on which node? Read from the environment alone.

use crate::error::SlurmError;
use crate::hostlist;

/// Where in the job this process runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A task of an `srun` step, on a compute node.
    Task {
        /// Its number among the step's tasks; 0 is the first.
        procid: u32,
        /// Its number among the tasks of its node.
        localid: Option<u32>,
        /// How many tasks the step has.
        tasks: Option<u32>,
    },
    /// A batch script, or `salloc`'s shell where the site starts it on the first node: one process, on a compute node,
    /// which no other process of the job duplicates.
    Batch,
    /// The job exists, but we are not on one of its nodes (`salloc`'s shell on a login node, or a shell
    /// that was given `SLURM_JOB_ID` by hand).
    AllocatedElsewhere,
}

/// The job that this process runs in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// The job.
    pub job_id: u32,
    /// The step that we are a task of; `None` outside of `srun`.
    pub step_id: Option<u32>,
    /// Where in the job we are.
    pub place: Place,
    /// The job's nodes, in Slurm's order; the first one leads.
    pub nodes: Vec<String>,
    /// The node we are on, by Slurm's name for it.
    pub this_node: Option<String>,
    /// The nodes of our step, which may be fewer than the job's.
    pub step_nodes: Vec<String>,
    /// The name of the Slurm cluster.
    pub cluster: Option<String>,
    /// The job's partition.
    pub partition: Option<String>,
    /// When Slurm will end the job, in seconds since 1970. Older versions do not say; [`crate::JobDetail`] does.
    pub end_time: Option<u64>,
}

/// The step ids from here on are special (batch script, external step, interactive step). Slurm prints some of them as
/// negative numbers and some as large ones, depending on the version.
const FIRST_SPECIAL_STEP: i64 = 0xffff_fff0;

impl Allocation {
    /// Reads the allocation from the process's environment; `None` outside of a job.
    pub fn from_process_env() -> Result<Option<Self>, SlurmError> {
        Self::from_env(|name| std::env::var(name).ok())
    }

    /// As [`Allocation::from_process_env`], with the environment given as a look-up.
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, SlurmError> {
        let text = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let Some((name, job_id)) = first(&text, &["SLURM_JOB_ID", "SLURM_JOBID"]) else {
            return Ok(None);
        };
        let job_id: u32 = job_id
            .parse()
            .ok()
            .filter(|&id| id > 0)
            .ok_or_else(|| bad(name, &job_id, "it is no job id"))?;

        let nodes = node_list(&text, &["SLURM_JOB_NODELIST", "SLURM_NODELIST"])?;
        let step_nodes = node_list(&text, &["SLURM_STEP_NODELIST"])?;
        let number = |name: &'static str| text(name).and_then(|value| value.parse::<u32>().ok());
        let step_id = first(&text, &["SLURM_STEP_ID", "SLURM_STEPID"])
            .and_then(|(_, value)| value.parse::<i64>().ok())
            .filter(|id| (0..FIRST_SPECIAL_STEP).contains(id))
            .and_then(|id| u32::try_from(id).ok());
        let this_node = text("SLURMD_NODENAME");

        let place = match (&this_node, step_id, number("SLURM_PROCID")) {
            (None, ..) => Place::AllocatedElsewhere,
            // A batch script has SLURM_PROCID=0 as well, so the step is what tells.
            (Some(_), Some(_), Some(procid)) => Place::Task {
                procid,
                localid: number("SLURM_LOCALID"),
                tasks: number("SLURM_STEP_NUM_TASKS").or_else(|| number("SLURM_NTASKS")),
            },
            (Some(_), ..) => Place::Batch,
        };
        Ok(Some(Self {
            job_id,
            step_id,
            place,
            nodes,
            this_node,
            step_nodes,
            cluster: text("SLURM_CLUSTER_NAME"),
            partition: text("SLURM_JOB_PARTITION"),
            end_time: text("SLURM_JOB_END_TIME")
                .and_then(|value| value.parse().ok())
                .filter(|&time| time > 0),
        }))
    }

    /// Whether we are on the job's first node.
    pub fn on_first_node(&self) -> bool {
        self.this_node.is_some() && self.this_node.as_ref() == self.nodes.first()
    }
}

/// The first of several names that is set: newer ones first.
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
            hostlist::expand(&list).map_err(|error| bad(name, &list, error.problem))
        }
        None => Ok(Vec::new()),
    }
}

fn bad(variable: &'static str, value: &str, problem: &str) -> SlurmError {
    SlurmError::BadEnvironment {
        variable,
        value: value.chars().take(80).collect(),
        problem: problem.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Environments captured in the lab (22.05.8), by the way the process was started.
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
    fn a_task_of_srun() {
        insta::assert_debug_snapshot!(
            read(include_str!("../fixtures/env-srun-22.05.txt")).unwrap()
        );
    }

    #[test]
    fn a_batch_script_has_a_procid_too() {
        let batch = read(include_str!("../fixtures/env-sbatch-22.05.txt"))
            .unwrap()
            .unwrap();
        assert_eq!(
            (batch.place, batch.step_id, batch.nodes.len()),
            (Place::Batch, None, 2)
        );
    }

    #[test]
    fn salloc_on_the_login_node() {
        let salloc = read(include_str!("../fixtures/env-salloc-22.05.txt"))
            .unwrap()
            .unwrap();
        assert_eq!(
            (&salloc.place, salloc.on_first_node()),
            (&Place::AllocatedElsewhere, false)
        );
    }

    #[test]
    fn an_interactive_step_is_one_process() {
        for step in ["-6", "4294967290", "4294967291"] {
            let env = format!(
                "SLURM_JOB_ID=7\nSLURM_STEP_ID={step}\nSLURM_PROCID=0\nSLURMD_NODENAME=n1\nSLURM_JOB_NODELIST=n[1-2]"
            );
            let shell = read(&env).unwrap().unwrap();
            assert_eq!(
                (&shell.place, shell.on_first_node()),
                (&Place::Batch, true),
                "{step}"
            );
        }
    }

    #[test]
    fn nonsense_is_named_and_nothing_is_nothing() {
        assert_eq!(read("HOME=/root\nSLURM_JOB_ID=").unwrap(), None);
        insta::assert_snapshot!(read("SLURM_JOB_ID=seven").unwrap_err(),
            @r#"the environment variable SLURM_JOB_ID makes no sense ("seven"): it is no job id"#);
        insta::assert_snapshot!(read("SLURM_JOB_ID=7\nSLURM_JOB_NODELIST=n[1-999999999]").unwrap_err(),
            @r#"the environment variable SLURM_JOB_NODELIST makes no sense ("n[1-999999999]"): it stands for too many nodes"#);
    }
}
