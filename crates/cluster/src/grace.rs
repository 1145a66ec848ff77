//! Grace periods of the cluster's parts, which together fit into Slurm's KillWait.

use std::time::Duration;

/// Used for a program unless KillWait is shorter: 19 s in total, of Slurm's default of 30.
const WITH_PROGRAM: GracePeriods = GracePeriods {
    workload: Duration::from_secs(8),
    nodes: Duration::from_secs(6),
    control_plane: Duration::from_secs(5),
};
/// Used for manifests unless KillWait is shorter: 20 s in total. The pods are the workload; its own share is for the last lines of their
/// logs and the summary, after the nodes have ended.
const PODS_ONLY: GracePeriods = GracePeriods {
    workload: Duration::from_secs(3),
    nodes: Duration::from_secs(12),
    control_plane: Duration::from_secs(5),
};
/// Reserved for the guard's clean-up and for Slurm to notice the end.
const RESERVE: Duration = Duration::from_secs(1);

/// Grace periods of the cluster's parts, which end one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GracePeriods {
    /// The workload.
    pub workload: Duration,
    /// The agents, to stop their pods and delete their Nodes.
    pub nodes: Duration,
    /// The control plane. After it, the control plane is killed, which loses nothing.
    pub control_plane: Duration,
}

impl GracePeriods {
    /// The pods' share of the nodes' period; the rest is for status updates.
    pub fn pods(self) -> Duration {
        self.nodes.mul_f64(2.0 / 3.0)
    }

    /// Periods that fit into KillWait, the time between Slurm's first and last signal, if it is known. If no program runs beside the
    /// pods, the pods get its share.
    pub fn within_kill_wait(kill_wait: Option<Duration>, has_program: bool) -> Self {
        let default = if has_program { WITH_PROGRAM } else { PODS_ONLY };
        let total = default.workload + default.nodes + default.control_plane;
        let available = kill_wait.map_or(total, |wait| wait.saturating_sub(RESERVE));
        let share =
            |part: Duration| part.mul_f64((available.as_secs_f64() / total.as_secs_f64()).min(1.0));
        Self {
            workload: share(default.workload),
            nodes: share(default.nodes),
            control_plane: share(default.control_plane),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_fit_into_kill_wait() {
        for (has_program, default) in [(true, WITH_PROGRAM), (false, PODS_ONLY)] {
            let within = |wait| GracePeriods::within_kill_wait(wait, has_program);
            assert_eq!(within(None), default);
            assert_eq!(within(Some(Duration::from_secs(30))), default);
            for seconds in [0, 1, 2, 5, 10, 15] {
                let available = Duration::from_secs(seconds);
                let grace = within(Some(available));
                let total = grace.workload + grace.nodes + grace.control_plane;
                assert!(total <= available, "{grace:?} in {available:?}");
                assert!(seconds < 2 || total + 2 * RESERVE > available, "{grace:?}");
            }
        }
    }
}
