//! How to find the processes of a job on a node.

/// Properties by which the processes of a job are recognised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobProcessMarkers {
    /// An environment variable, as `NAME=value`.
    pub env_variable: String,
    /// The name of the cgroup that contains the processes, where Slurm creates one. They may be in its descendants.
    pub cgroup_name: String,
}

impl JobProcessMarkers {
    /// Markers of the job that this process belongs to; `None` outside of a job.
    pub fn of_current_job() -> Option<Self> {
        std::env::var("SLURM_JOB_ID")
            .ok()
            .map(|job_id| Self::of_job(&job_id))
    }

    fn of_job(job_id: &str) -> Self {
        Self {
            env_variable: format!("SLURM_JOB_ID={job_id}"),
            cgroup_name: format!("job_{job_id}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_contain_the_job_id() {
        let markers = JobProcessMarkers::of_job("12");
        assert_eq!(
            (&*markers.env_variable, &*markers.cgroup_name),
            ("SLURM_JOB_ID=12", "job_12")
        );
    }
}
