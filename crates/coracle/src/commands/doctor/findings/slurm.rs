//! Findings about Slurm as seen from this host.

use slurm::{PartitionState, SlurmError, SlurmVersion};

use super::Topic;
use crate::commands::doctor::report::Finding;
use crate::commands::doctor::survey::Survey;

pub fn findings(survey: &Survey) -> Vec<Finding> {
    vec![
        commands(survey),
        controller(survey),
        partitions(survey),
        job(survey),
    ]
}

fn commands(survey: &Survey) -> Finding {
    let topic = Topic {
        id: "slurm-commands",
        area: "slurm",
        title: "Slurm commands",
        with_it: "`coracle run` asks Slurm for nodes and starts its agents on them",
        without_it: "`coracle run` can't work from here; pods alone do not need them",
    };
    let srun = match &survey.slurm.commands {
        Ok(srun) => srun.display(),
        Err(error) => return topic.missing(words(error), hint(error)),
    };
    match &survey.slurm.version {
        Some(Ok(version)) if *version >= SlurmVersion::OLDEST => {
            topic.ok(format!("{version} ({srun})"))
        }
        Some(Ok(version)) => topic.degraded(
            format!(
                "{version} ({srun}) is older than {}, the oldest that is tested",
                SlurmVersion::OLDEST
            ),
            None,
        ),
        Some(Err(error)) => topic.missing(words(error), hint(error)),
        None => topic.missing("not asked", None),
    }
}

fn controller(survey: &Survey) -> Finding {
    let topic = Topic {
        id: "slurm-controller",
        area: "slurm",
        title: "Slurm controller",
        with_it: "jobs and steps can be started",
        without_it: "nothing can be started through Slurm; running clusters keep running",
    };
    match &survey.slurm.controller {
        Some(Ok(())) => topic.ok("answers"),
        Some(Err(error)) => topic.missing(words(error), hint(error)),
        None => topic.missing("not asked, since commands are missing", None),
    }
}

fn partitions(survey: &Survey) -> Finding {
    let topic = Topic {
        id: "slurm-partitions",
        area: "slurm",
        title: "partitions",
        with_it: "`coracle run -p NAME` gets its nodes there; `coracle doctor -p NAME` looks at one",
        without_it: "no place to run jobs",
    };
    let all = &survey.slurm.partitions;
    if all.is_empty() {
        return topic.missing("none seen", None);
    }
    let show = |partition: &slurm::Partition| {
        let star = if partition.default { "*" } else { "" };
        let idle = format!(
            "{} of {} nodes idle",
            partition.nodes_idle, partition.nodes_total
        );
        let state = if partition.state == PartitionState::Up {
            String::new()
        } else {
            format!(", {}", partition.state)
        };
        format!("{}{star} ({idle}{state})", partition.name)
    };
    let mut found: Vec<String> = all.iter().take(8).map(show).collect();
    if all.len() > found.len() {
        found.push(format!("{} more", all.len() - found.len()));
    }
    let found = found.join(", ");
    if all
        .iter()
        .any(|partition| partition.state == PartitionState::Up)
    {
        topic.ok(found)
    } else {
        topic.missing(
            found,
            "none is up: ask the site's support when they will be".to_owned(),
        )
    }
}

fn job(survey: &Survey) -> Finding {
    let topic = Topic {
        id: "slurm-job",
        area: "slurm",
        title: "this shell",
        with_it: "inside a job, `coracle run` uses the nodes of that job",
        without_it: "outside of a job, `coracle run` asks Slurm for one, with the options given",
    };
    match survey.slurm.job {
        Some(id) => topic.ok(format!("inside job {id}")),
        None => topic.ok("not inside a job"),
    }
}

fn words(error: &SlurmError) -> String {
    error.to_string()
}

fn hint(error: &SlurmError) -> Option<String> {
    error.hint().map(str::to_owned)
}
