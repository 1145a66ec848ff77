//! What a job was given, from `scontrol show job -d`.
//!
//! The text holds words of users (name, comment, command) unquoted and with their newlines. A field is therefore recognised
//! by the start of its line, indentation included; where the same field starts two lines, someone is pretending, and
//! the whole answer is refused.

use std::collections::BTreeSet;

use crate::hostlist;

/// A generic resource: `gpu:a100:2`.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Gres {
    /// `gpu`
    pub name: String,
    /// `a100`, where the site tells types apart.
    pub kind: Option<String>,
    /// How many.
    pub count: u64,
}

/// The part of a job that is on one node.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct NodeShare {
    /// The node, by Slurm's name for it.
    pub node: String,
    /// How many CPUs (hardware threads) of it the job has.
    pub cpus: u32,
    /// How much memory; `None` where Slurm does not hand out memory.
    pub memory_mb: Option<u64>,
    /// GPUs and the like.
    pub gres: Vec<Gres>,
}

impl NodeShare {
    /// How many of a generic resource, over all of its types.
    pub fn gres_total(&self, name: &str) -> u64 {
        self.gres
            .iter()
            .filter(|gres| gres.name == name)
            .fold(0, |sum, gres| sum.saturating_add(gres.count))
    }
}

/// States of jobs that have ended, and don't come back.
const OVER: [&str; 10] = [
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
];

/// What Slurm knows of a job. What it does not say is `None` or empty.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct JobDetail {
    /// The job.
    pub job_id: u32,
    /// Its name: free text, up to the end of its first line.
    pub name: String,
    /// The owner's login name.
    pub user: Option<String>,
    /// The owner's user id.
    pub uid: Option<u32>,
    /// `RUNNING`, `PENDING`, …
    pub state: Option<String>,
    /// Its partition.
    pub partition: Option<String>,
    /// How long it may run, in seconds; `None` for unlimited.
    pub time_limit: Option<u64>,
    /// When Slurm will end it, in seconds since 1970.
    pub end_time: Option<u64>,
    /// What it has on each node, in Slurm's order.
    pub nodes: Vec<NodeShare>,
}

impl JobDetail {
    /// Whether it has ended, and doesn't come back.
    pub fn is_over(&self) -> bool {
        let state = self.state.as_deref();
        state.is_some_and(|state| OVER.contains(&state))
    }
}

/// Reads `scontrol show job -d` of one job, with `SLURM_TIME_FORMAT=%s`. The error says what is wrong with the text.
pub fn parse_job_detail(text: &str) -> Result<JobDetail, String> {
    // Site wrappers may say something first; the job starts where its id does.
    let first = text
        .lines()
        .find(|line| line.starts_with("JobId="))
        .ok_or("it has no JobId")?;
    let job_id = field(first, "JobId=")
        .and_then(|id| id.parse().ok())
        .ok_or("its JobId is no number")?;
    let name = first
        .split_once(" JobName=")
        .map_or("", |(_, name)| name)
        .trim_end()
        .to_owned();

    let line = |key: &str| only_line(text, key);
    let user_line = line("   UserId=")?;
    let times = line("   RunTime=")?;
    let dates = line("   StartTime=")?;
    let partition_line = line("   Partition=")?;
    let (user, uid) = user_line
        .and_then(|line| field(line, "UserId="))
        .map_or((None, None), split_user);
    let listed = line("   NodeList=")?
        .and_then(|line| field(line, "NodeList="))
        .filter(|list| *list != "(null)");

    Ok(JobDetail {
        job_id,
        name,
        user,
        uid,
        state: line("   JobState=")?.and_then(|line| owned(field(line, "JobState="))),
        partition: owned(partition_line.and_then(|line| field(line, "Partition="))),
        time_limit: times
            .and_then(|line| field(line, "TimeLimit="))
            .and_then(parse_duration),
        end_time: dates
            .and_then(|line| field(line, "EndTime="))
            .and_then(|time| time.parse().ok())
            .filter(|&time| time > 0),
        nodes: node_shares(text, listed)?,
    })
}

/// The one line that starts with a key; an error when there are two.
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

fn owned(text: Option<&str>) -> Option<String> {
    text.filter(|text| *text != "(null)").map(str::to_owned)
}

/// `user1(1001)` → name and number.
fn split_user(text: &str) -> (Option<String>, Option<u32>) {
    match text.rsplit_once('(') {
        Some((name, uid)) => (
            owned(Some(name)),
            uid.strip_suffix(')').and_then(|uid| uid.parse().ok()),
        ),
        None => (owned(Some(text)), None),
    }
}

/// `[days-]hours:minutes:seconds` or `minutes:seconds`; words (`UNLIMITED`, `Partition_Limit`) are no limit that we know.
fn parse_duration(text: &str) -> Option<u64> {
    let (days, clock) = text
        .split_once('-')
        .map_or((Some(0), text), |(days, clock)| (days.parse().ok(), clock));
    let mut seconds: u64 = 0;
    for part in clock.split(':') {
        seconds = seconds.checked_mul(60)?.checked_add(part.parse().ok()?)?;
    }
    seconds.checked_add(u64::checked_mul(days?, 86_400)?)
}

/// The lines `     Nodes=node[1-2] CPU_IDs=0-1 Mem=2048 GRES=gpu:2(IDX:0-1)`, one per group of equal nodes.
fn node_shares(text: &str, listed: Option<&str>) -> Result<Vec<NodeShare>, String> {
    let known: Option<BTreeSet<String>> = match listed {
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
        let group = || {
            format!(
                "its line {:?} cannot be read",
                line.trim().chars().take(120).collect::<String>()
            )
        };
        let nodes = field(line, "Nodes=").ok_or_else(group)?;
        let cpus = count_ids(field(line, "CPU_IDs=").unwrap_or("")).ok_or_else(group)?;
        let memory: u64 = field(line, "Mem=")
            .unwrap_or("0")
            .parse()
            .map_err(|_| group())?;
        let gres = parse_gres(field(line, "GRES=").unwrap_or(""));
        for node in hostlist::expand(nodes).map_err(|error| error.to_string())? {
            if known.as_ref().is_some_and(|known| !known.contains(&node)) {
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

/// Reads `gpu:a100:2(IDX:0-1),shard:8(4/8,4/8),tmpfs:10G`; parts that look otherwise are skipped.
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
    let words: Vec<&str> = part.split([':', '=']).collect();
    let (name, kind, count) = match words[..] {
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
        insta::assert_json_snapshot!(
            parse_job_detail(include_str!("../fixtures/job-22.05.txt")).unwrap()
        );
    }

    #[test]
    fn reads_26_05() {
        insta::assert_json_snapshot!(
            parse_job_detail(include_str!("../fixtures/job-26.05.txt")).unwrap()
        );
    }

    #[test]
    fn a_name_that_pretends_is_refused() {
        let problem =
            parse_job_detail(include_str!("../fixtures/job-22.05-hostile.txt")).unwrap_err();
        assert_eq!(problem, "UserId= appears twice");
    }

    #[test]
    fn generic_resources() {
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

    #[test]
    fn durations() {
        assert_eq!(parse_duration("1-02:00:05"), Some(93_605));
        assert_eq!(parse_duration("00:05:00"), Some(300));
        for none in [
            "UNLIMITED",
            "Partition_Limit",
            "",
            "-",
            "99999999999999999999-00:00:00",
        ] {
            assert_eq!(parse_duration(none), None, "{none:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_handled(text in "(JobId=[0-9]{1,12}|   NodeList=|     Nodes=|n\\[1-9\\]|CPU_IDs=|Mem=|GRES=gpu:|[ \n,():0-9-]|.){0,60}") {
            let _ = parse_job_detail(&text);
        }
    }
}
