//! The resources of a job, from `scontrol show job -d`.
//!
//! The output contains text of users (name, comment, command) unquoted and with newlines. So a field counts only at
//! the start of its line, indentation included. If two lines start with the same field, one of them may be forged, and
//! the parser rejects the whole output.

use std::collections::BTreeSet;

use crate::hostlist;
use crate::job_state::{EndState, JobReason, JobState};

/// A generic resource: `gpu:a100:2`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gres {
    /// `gpu`
    pub name: String,
    /// `a100`, if the site distinguishes types.
    pub kind: Option<String>,
    /// The number of units.
    pub count: u64,
}

/// The resources of a job on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeShare {
    /// Slurm's name of the node.
    pub node: String,
    /// Allocated CPUs (hardware threads).
    pub cpus: u32,
    /// Allocated memory; `None` if Slurm does not manage memory.
    pub memory_mb: Option<u64>,
    /// Allocated generic resources, such as GPUs.
    pub gres: Vec<Gres>,
}

impl NodeShare {
    /// The number of units of a generic resource, over all of its types.
    pub fn gres_total(&self, name: &str) -> u64 {
        self.gres
            .iter()
            .filter(|gres| gres.name == name)
            .fold(0, |sum, gres| sum.saturating_add(gres.count))
    }
}

/// A job, as `scontrol` shows it. Missing fields are `None` or empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobDetail {
    /// The job id.
    pub job_id: u32,
    /// The job's state.
    pub state: Option<JobState>,
    /// Why it is in this state; `None` without a reason.
    pub reason: Option<JobReason>,
    /// Its partition.
    pub partition: Option<String>,
    /// When Slurm will end it, in seconds since 1970.
    pub end_time: Option<u64>,
    /// Its resources on each node, in Slurm's order.
    pub nodes: Vec<NodeShare>,
}

/// How a job's processes on one of its nodes ended, if they have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeOutcome {
    /// The processes run, or have ended by themselves.
    Uninterrupted,
    /// The node failed, or another one did and Slurm ended the job.
    NodeFailed,
    /// Slurm ended the job, with this state.
    JobEnded(EndState),
    /// The job is ending, and Slurm does not show why.
    Unknown,
}

impl JobDetail {
    /// Whether Slurm or a failure ended the job's processes on `node`.
    pub fn outcome_on(&self, node: &str) -> NodeOutcome {
        match &self.state {
            Some(JobState::Ended(state)) => match state {
                EndState::NodeFail | EndState::BootFail => NodeOutcome::NodeFailed,
                EndState::Completed | EndState::Failed => NodeOutcome::Uninterrupted,
                other => NodeOutcome::JobEnded(*other),
            },
            // Slurm hides the state of a job while the job's last processes are killed.
            Some(JobState::Completing) if self.reason == Some(JobReason::NodeDown) => {
                NodeOutcome::NodeFailed
            }
            Some(JobState::Completing) | None => NodeOutcome::Unknown,
            // Slurm removes a failed node from a job with --no-kill, which goes on without it.
            Some(JobState::Other(_)) if self.has_lost(node) => NodeOutcome::NodeFailed,
            Some(JobState::Other(_)) => NodeOutcome::Uninterrupted,
        }
    }

    /// Whether it has ended and will not be requeued.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, Some(JobState::Ended(_)))
    }

    /// Whether the job has nodes, but not this one.
    fn has_lost(&self, node: &str) -> bool {
        !self.nodes.is_empty() && self.nodes.iter().all(|share| share.node != node)
    }
}

/// Parses `scontrol show job -d` of one job, printed with `SLURM_TIME_FORMAT=%s`. The error names the problem.
pub fn parse_job_detail(text: &str) -> Result<JobDetail, String> {
    // Site wrappers may print other lines first.
    let first = text
        .lines()
        .find(|line| line.starts_with("JobId="))
        .ok_or("it has no JobId")?;
    let job_id = field(first, "JobId=")
        .and_then(|id| id.parse().ok())
        .ok_or("its JobId is not a number")?;

    let line = |key: &str| only_line(text, key);
    let state_line = line("   JobState=")?;
    let dates = line("   StartTime=")?;
    let partition_line = line("   Partition=")?;
    let node_list = non_null(line("   NodeList=")?, "NodeList=");

    Ok(JobDetail {
        job_id,
        state: non_null(state_line, "JobState=").map(JobState::from),
        reason: state_line
            .and_then(|line| field(line, "Reason="))
            .filter(|reason| !["None", "(null)"].contains(reason))
            .map(JobReason::from),
        partition: non_null(partition_line, "Partition=").map(str::to_owned),
        end_time: dates
            .and_then(|line| field(line, "EndTime="))
            .and_then(|time| time.parse().ok())
            .filter(|&time| time > 0),
        nodes: node_shares(text, node_list)?,
    })
}

/// The line that starts with a key; an error if there are two.
fn only_line<'a>(text: &'a str, key: &str) -> Result<Option<&'a str>, String> {
    let mut lines = text.lines().filter(|line| line.starts_with(key));
    let found = lines.next();
    if lines.next().is_some() {
        Err(format!("{} appears twice", key.trim()))
    } else {
        Ok(found)
    }
}

/// The value after a key, up to the next space. The key must start a word.
fn field<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split(' ')
        .find_map(|word| word.strip_prefix(key))
        .filter(|value| !value.is_empty())
}

/// The value of a field, unless Slurm prints that there is none.
fn non_null<'a>(line: Option<&'a str>, key: &str) -> Option<&'a str> {
    field(line?, key).filter(|value| *value != "(null)")
}

/// The lines `     Nodes=node[1-2] CPU_IDs=0-1 Mem=2048 GRES=gpu:2(IDX:0-1)`, one per group of equal nodes.
fn node_shares(text: &str, node_list: Option<&str>) -> Result<Vec<NodeShare>, String> {
    let listed_nodes: Option<BTreeSet<String>> = match node_list {
        Some(list) => Some(
            hostlist::expand(list)
                .map_err(|error| error.to_string())?
                .into_iter()
                .collect(),
        ),
        None => None,
    };
    let (mut shares, mut seen) = (Vec::new(), BTreeSet::new());
    for line in text.lines().filter(|line| line.starts_with("     Nodes=")) {
        let bad_line = || {
            format!(
                "cannot parse its line {:?}",
                line.trim().chars().take(120).collect::<String>()
            )
        };
        let nodes = field(line, "Nodes=").ok_or_else(bad_line)?;
        let cpus = count_ids(field(line, "CPU_IDs=").unwrap_or("")).ok_or_else(bad_line)?;
        let memory: u64 = field(line, "Mem=")
            .unwrap_or("0")
            .parse()
            .map_err(|_| bad_line())?;
        let gres = parse_gres(field(line, "GRES=").unwrap_or(""));
        for node in hostlist::expand(nodes).map_err(|error| error.to_string())? {
            if listed_nodes
                .as_ref()
                .is_some_and(|listed| !listed.contains(&node))
            {
                return Err(format!("node {node} is not in its NodeList"));
            }
            if !seen.insert(node.clone()) {
                return Err(format!("node {node} appears twice"));
            }
            shares.push(NodeShare {
                node,
                cpus,
                memory_mb: Some(memory).filter(|&mb| mb > 0),
                gres: gres.clone(),
            });
        }
    }
    Ok(shares)
}

/// `0-1,4` → 3.
fn count_ids(text: &str) -> Option<u32> {
    let mut count: u32 = 0;
    for range in text.split(',').filter(|range| !range.is_empty()) {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        let (low, high): (u32, u32) = (low.parse().ok()?, high.parse().ok()?);
        count = count.checked_add(high.checked_sub(low)?.checked_add(1)?)?;
    }
    Some(count)
}

/// Parses `gpu:a100:2(IDX:0-1),shard:8(4/8,4/8),tmpfs:10G`; skips parts of another form.
pub fn parse_gres(text: &str) -> Vec<Gres> {
    let mut depth = 0usize;
    let parts = text.split(|c| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    });
    parts.filter_map(parse_one_gres).collect()
}

fn parse_one_gres(part: &str) -> Option<Gres> {
    // Newer versions can print the TRES prefix: gres/gpu:2 or gres:gpu:2.
    let part = part.split('(').next()?.trim();
    let part = part
        .strip_prefix("gres/")
        .or_else(|| part.strip_prefix("gres:"))
        .unwrap_or(part);
    let fields: Vec<&str> = part.split([':', '=']).collect();
    let (name, kind, count) = match fields[..] {
        [name, count] => (name, None, count),
        [name, kind, count] => (name, Some(kind), count),
        _ => return None,
    };
    let (digits, unit) = count.split_at(
        count
            .trim_end_matches(|c: char| c.is_ascii_alphabetic())
            .len(),
    );
    let factor: u64 = match unit {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        _ => return None,
    };
    let count = digits.parse::<u64>().ok()?.checked_mul(factor)?;
    (!name.is_empty() && count > 0).then(|| Gres {
        name: name.to_owned(),
        kind: kind.map(str::to_owned),
        count,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_22_05() {
        insta::assert_debug_snapshot!(
            parse_job_detail(include_str!("../fixtures/job-22.05.txt")).unwrap()
        );
    }

    #[test]
    fn reads_26_05() {
        insta::assert_debug_snapshot!(
            parse_job_detail(include_str!("../fixtures/job-26.05.txt")).unwrap()
        );
    }

    #[test]
    fn node_outcome_follows_from_state_and_reason() {
        let text = include_str!("../fixtures/job-26.05.txt");
        let outcome = |state: &str| {
            let text = text.replace("JobState=RUNNING Reason=None", state);
            parse_job_detail(&text).unwrap().outcome_on("gpu-a01")
        };
        assert_eq!(
            outcome("JobState=RUNNING Reason=None"),
            NodeOutcome::Uninterrupted
        );
        assert_eq!(
            outcome("JobState=NODE_FAIL Reason=NodeDown"),
            NodeOutcome::NodeFailed
        );
        assert_eq!(
            outcome("JobState=COMPLETING Reason=NodeDown"),
            NodeOutcome::NodeFailed
        );
        assert_eq!(
            outcome("JobState=COMPLETING Reason=None"),
            NodeOutcome::Unknown
        );
        assert_eq!(
            outcome("JobState=COMPLETED Reason=None"),
            NodeOutcome::Uninterrupted
        );
        assert_eq!(
            outcome("JobState=TIMEOUT Reason=TimeLimit"),
            NodeOutcome::JobEnded(EndState::Timeout)
        );
        // With --no-kill the job goes on without a failed node.
        let detail = parse_job_detail(text).unwrap();
        assert_eq!(detail.outcome_on("gpu-a04"), NodeOutcome::NodeFailed);
    }

    #[test]
    fn forged_fields_in_the_job_name_are_rejected() {
        let problem =
            parse_job_detail(include_str!("../fixtures/job-22.05-hostile.txt")).unwrap_err();
        assert_eq!(problem, "NodeList= appears twice");
    }

    #[test]
    fn parses_generic_resources() {
        let show = |text: &str| {
            parse_gres(text)
                .iter()
                .map(|g| format!("{}/{}={}", g.name, g.kind.as_deref().unwrap_or(""), g.count))
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(show("gpu:2(IDX:0-1)"), "gpu/=2");
        assert_eq!(
            show("gpu:a100:2(IDX:0,2),gpu:h100:1(IDX:1),tmpfs:10G"),
            "gpu/a100=2 gpu/h100=1 tmpfs/=10737418240"
        );
        assert_eq!(show("shard:gpu:4(4/8,0/8)"), "shard/gpu=4");
        assert_eq!(show("gres/gpu=3"), "gpu/=3");
        assert_eq!(show("(null)"), "");
        assert_eq!(show("gpu:0(IDX:),gpu:x:y:z,gpu:9999999999999999999T"), "");
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "(JobId=[0-9]{1,12}|   NodeList=|     Nodes=|n\\[1-9\\]|CPU_IDs=|Mem=|GRES=gpu:|[ \n,():0-9-]|.){0,60}") {
            let _ = parse_job_detail(&text);
        }
    }
}
