//! How long each part of the end may take, so that all of it fits into what Slurm gives.

use std::time::Duration;

/// What is used unless Slurm gives less; 19 s in all, of Slurm's usual 30.
const USUAL: Grace = Grace {
    workload: Duration::from_secs(8),
    nodes: Duration::from_secs(6),
    control_plane: Duration::from_secs(5),
};
/// What the guard needs at the very end, and Slurm to notice.
const RESERVE: Duration = Duration::from_secs(1);

/// What the parts get to end by themselves, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grace {
    /// The workload.
    pub workload: Duration,
    /// The agents, to end their pods and take their Nodes away.
    pub nodes: Duration,
    /// The control plane. Then it is killed: nothing is lost with it.
    pub control_plane: Duration,
}

impl Grace {
    /// What pods get of the nodes' part: the rest is for telling the API server.
    pub fn pods(self) -> Duration {
        self.nodes.mul_f64(2.0 / 3.0)
    }

    /// The parts' shares of Slurm's time between its first signal and the last (KillWait), if it is known.
    pub fn within(kill_wait: Option<Duration>) -> Self {
        let all = USUAL.workload + USUAL.nodes + USUAL.control_plane;
        let given = kill_wait.map_or(all, |wait| wait.saturating_sub(RESERVE));
        let share =
            |part: Duration| part.mul_f64((given.as_secs_f64() / all.as_secs_f64()).min(1.0));
        Self {
            workload: share(USUAL.workload),
            nodes: share(USUAL.nodes),
            control_plane: share(USUAL.control_plane),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_fits_into_what_slurm_gives() {
        assert_eq!(Grace::within(None), USUAL);
        assert_eq!(Grace::within(Some(Duration::from_secs(30))), USUAL);
        for seconds in [0, 1, 2, 5, 10, 15] {
            let given = Duration::from_secs(seconds);
            let grace = Grace::within(Some(given));
            let all = grace.workload + grace.nodes + grace.control_plane;
            assert!(all <= given, "{grace:?} in {given:?}");
            assert!(seconds < 2 || all + 2 * RESERVE > given, "{grace:?}");
        }
    }
}
