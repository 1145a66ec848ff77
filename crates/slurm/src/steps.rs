//! Which jobs have a step of some name.

use std::collections::BTreeSet;

/// Asks for the steps of our own running jobs.
pub(crate) const ARGS: &[&str] = &["--me", "--steps", "--noheader", "--format=%i|%j"];

/// The jobs in lines such as `12.3|coracle-node`.
pub(crate) fn jobs_with_step(text: &str, name: &str) -> Vec<u32> {
    let job = |line: &str| {
        let (id, found) = line.trim().split_once('|')?;
        // `12_3.4` is a step of a task of an array, whose own number isn't told here; it can be named by the user.
        (found == name).then(|| id.split('.').next()?.parse().ok())?
    };
    let jobs: BTreeSet<u32> = text.lines().filter_map(job).collect();
    jobs.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_found_by_their_steps() {
        let text = "12.0|bash\n12.1|coracle-node\n12.2|coracle-node\n7.1|coracle-node\n9.1|x|coracle-node\nodd\n8_1.2|coracle-node\n";
        assert_eq!(jobs_with_step(text, "coracle-node"), [7, 12]);
    }
}
