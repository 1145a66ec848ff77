//! Jobs that have a step of a given name, from `squeue`.

use std::collections::BTreeSet;

/// Lists the steps of our own running jobs.
pub(crate) const SQUEUE_ARGS: &[&str] = &["--me", "--steps", "--noheader", "--format=%i|%j"];

/// Parses lines such as `12.3|coracle-node`. Returns the jobs that have a step of this name, sorted.
pub(crate) fn jobs_with_step(text: &str, name: &str) -> Vec<u32> {
    let job = |line: &str| {
        let (id, step_name) = line.trim().split_once('|')?;
        // Skips `12_3.4`, a step of an array task: squeue does not print the task's own job id here. The user can name that job.
        (step_name == name).then(|| id.split('.').next()?.parse().ok())?
    };
    let jobs: BTreeSet<u32> = text.lines().filter_map(job).collect();
    jobs.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_jobs_by_step_name() {
        let text = "12.0|bash\n12.1|coracle-node\n12.2|coracle-node\n7.1|coracle-node\n9.1|x|coracle-node\nodd\n8_1.2|coracle-node\n";
        assert_eq!(jobs_with_step(text, "coracle-node"), [7, 12]);
    }
}
