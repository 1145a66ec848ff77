//! Values that the shell completes: running clusters, partitions, Slurm's options.
//!
//! The shell calls this program with [`VARIABLE`] set; clap then prints candidates instead of running a command. Errors mean no
//! candidates: a completion must not print messages into a command line.

use std::ffi::OsStr;

use clap_complete::engine::{CompletionCandidate, PathCompleter, ValueCompleter};
use slurm::Slurm;
use slurm::srun_options::SrunOptions;

/// The variable that requests completion. It names the shell.
pub const VARIABLE: &str = "CORACLE_COMPLETE";

/// The step of a cluster's agents, by which its job is found.
const AGENT_STEP: &str = "coracle-node";

/// The user's jobs with a running cluster.
pub fn cluster_jobs() -> Vec<CompletionCandidate> {
    let jobs = crate::block_on(async { Ok(Slurm::find()?.jobs_with_step(AGENT_STEP).await?) });
    let jobs = jobs.unwrap_or_default();
    jobs.iter()
        .map(|job| CompletionCandidate::new(job.to_string()))
        .collect()
}

/// The partitions of the Slurm cluster.
pub fn partitions() -> Vec<CompletionCandidate> {
    let partitions = crate::block_on(async { Ok(Slurm::find()?.partitions().await?) });
    let partitions = partitions.unwrap_or_default();
    partitions
        .into_iter()
        .map(|partition| CompletionCandidate::new(partition.name))
        .collect()
}

/// Slurm's options, and paths of workloads.
pub fn slurm_option_or_path(current: &OsStr) -> Vec<CompletionCandidate> {
    let Some(prefix) = current.to_str().and_then(|word| word.strip_prefix("--")) else {
        return PathCompleter::any().stdio().complete(current);
    };
    let options = SrunOptions::built_in();
    let matching = options.long_names().filter(|name| name.starts_with(prefix));
    matching
        .map(|name| CompletionCandidate::new(format!("--{name}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use std::ffi::OsString;

    fn complete(line: &str) -> Vec<String> {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let last = words.len() - 1;
        let mut command = crate::cli::Cli::command();
        let candidates = clap_complete::engine::complete(&mut command, words, last, None).unwrap();
        let text = |candidate: &CompletionCandidate| candidate.get_value().display().to_string();
        candidates.iter().map(text).collect()
    }

    #[test]
    fn commands_and_options_are_completed() {
        let commands = complete("coracle ");
        for command in ["run", "doctor", "completion", "man"] {
            assert!(commands.contains(&command.to_owned()), "{commands:?}");
        }
        assert!(!commands.contains(&"internal".to_owned()));
        assert_eq!(complete("coracle run --pod-c"), ["--pod-cidr"]);
        assert_eq!(complete("coracle completion z"), ["zsh"]);
    }

    #[test]
    fn options_of_slurm_are_completed() {
        assert_eq!(complete("coracle run --partit"), ["--partition"]);
    }
}
