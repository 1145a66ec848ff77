//! By what the processes of a job are found on a node.

/// The marks of a job's processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// A variable of their environment, with its value.
    pub variable: String,
    /// The name of the control group that they are in or below, where Slurm makes one.
    pub group: String,
}

impl Footprint {
    /// Of the job that this process belongs to, if there is one.
    pub fn own() -> Option<Self> {
        std::env::var("SLURM_JOB_ID").ok().map(|job| Self::of(&job))
    }

    fn of(job: &str) -> Self {
        Self {
            variable: format!("SLURM_JOB_ID={job}"),
            group: format!("job_{job}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_slurms_own() {
        let marks = Footprint::of("12");
        assert_eq!(
            (&*marks.variable, &*marks.group),
            ("SLURM_JOB_ID=12", "job_12")
        );
    }
}
