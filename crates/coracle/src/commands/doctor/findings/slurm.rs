//! Findings about Slurm as seen from this host.

use slurm::{PartitionState, SlurmError, SlurmVersion};

use super::FindingTemplate;
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
    let template = FindingTemplate {
        id: "slurm-commands",
        area: "slurm",
        title: "Slurm commands",
        with_it: "`coracle run` asks Slurm for nodes and starts its agents on them",
        without_it: "`coracle run` can't work from here; pods alone do not need them",
    };
    let srun = match &survey.slurm.commands {
        Ok(srun) => srun.display(),
        Err(error) => return template.missing(message(error), hint(error)),
    };
    match &survey.slurm.version {
        Some(Ok(version)) if *version >= SlurmVersion::OLDEST => {
            template.ok(format!("{version} ({srun})"))
        }
        Some(Ok(version)) => template.degraded(
            format!(
                "{version} ({srun}) is older than {}, the oldest that is tested",
                SlurmVersion::OLDEST
            ),
            None,
        ),
        Some(Err(error)) => template.missing(message(error), hint(error)),
        None => template.missing("not checked", None),
    }
}

fn controller(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "slurm-controller",
        area: "slurm",
        title: "Slurm controller",
        with_it: "jobs and steps can be started",
        without_it: "nothing can be started through Slurm; running clusters keep running",
    };
    match &survey.slurm.controller {
        Some(Ok(())) => template.ok("answers"),
        Some(Err(error)) => template.missing(message(error), hint(error)),
        None => template.missing("not checked, because commands are missing", None),
    }
}

fn partitions(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "slurm-partitions",
        area: "slurm",
        title: "partitions",
        with_it: "`coracle run -p NAME` gets its nodes there; `coracle doctor -p NAME` checks one of them",
        without_it: "no partition to run jobs in",
    };
    let partitions = &survey.slurm.partitions;
    if partitions.is_empty() {
        return template.missing("none found", None);
    }
    let describe = |partition: &slurm::Partition| {
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
    let mut found: Vec<String> = partitions.iter().take(8).map(describe).collect();
    if partitions.len() > found.len() {
        found.push(format!("{} more", partitions.len() - found.len()));
    }
    let found = found.join(", ");
    if partitions
        .iter()
        .any(|partition| partition.state == PartitionState::Up)
    {
        template.ok(found)
    } else {
        template.missing(
            found,
            "none is up: ask the site's support when they will be".to_owned(),
        )
    }
}

fn job(survey: &Survey) -> Finding {
    let template = FindingTemplate {
        id: "slurm-job",
        area: "slurm",
        title: "this shell",
        with_it: "inside a job, `coracle run` uses the nodes of that job; elsewhere it asks Slurm for nodes",
        without_it: "`coracle run` asks Slurm for nodes",
    };
    match survey.slurm.job {
        Some(id) => template.ok(format!("inside job {id}, whose nodes `coracle run` uses")),
        None => template.ok("`coracle run` asks Slurm for nodes"),
    }
}

fn message(error: &SlurmError) -> String {
    error.to_string()
}

fn hint(error: &SlurmError) -> Option<String> {
    error.hint().map(str::to_owned)
}
