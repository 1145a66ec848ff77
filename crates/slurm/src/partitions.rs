//! Partitions, from `sinfo`.

use std::fmt;

/// One line per partition, fields separated by bars. `%P` marks the default partition with a star.
pub(crate) const SINFO_ARGS: &[&str] = &["--noheader", "--summarize", "--format=%P|%a|%F"];

/// A partition as an ordinary user sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// Its name.
    pub name: String,
    /// Whether Slurm uses it for jobs that name no partition.
    pub default: bool,
    /// Whether it accepts and starts jobs.
    pub state: PartitionState,
    /// Nodes that could run jobs now.
    pub nodes_idle: u32,
    /// All nodes, including those that are down.
    pub nodes_total: u32,
}

/// The state of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartitionState {
    /// Accepts and starts jobs.
    Up,
    /// Any other state, as `sinfo` prints it: `down`, `drain`, `inact`.
    NotUp(String),
}

impl From<&str> for PartitionState {
    fn from(text: &str) -> Self {
        match text {
            "up" => Self::Up,
            other => Self::NotUp(other.to_owned()),
        }
    }
}

impl fmt::Display for PartitionState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Up => "up",
            Self::NotUp(state) => state,
        })
    }
}

/// Parses the output of `sinfo` with [`SINFO_ARGS`]; skips lines of another form.
pub fn parse_partitions(text: &str) -> Vec<Partition> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Partition> {
    let fields: Vec<&str> = line.trim().split('|').collect();
    let [name, state, nodes] = fields[..] else {
        return None;
    };
    let counts: Vec<u32> = nodes.split('/').map(parse_count).collect::<Option<_>>()?;
    let [_allocated, idle, _other, total] = counts[..] else {
        return None;
    };
    let (name, default) = name
        .strip_suffix('*')
        .map_or((name, false), |name| (name, true));
    if name.is_empty() {
        return None;
    }
    Some(Partition {
        name: name.to_owned(),
        default,
        state: state.into(),
        nodes_idle: idle,
        nodes_total: total,
    })
}

/// `sinfo` abbreviates large counts: `12K`.
fn parse_count(text: &str) -> Option<u32> {
    match text.strip_suffix('K') {
        Some(thousands) => Some((thousands.parse::<f32>().ok()? * 1024.0) as u32),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_sinfo_output() {
        let text = "main*|up|1/1/0/2\nlong|down|0/12K/0/12K\nslurm_load_partitions: something\n|up|0/0/0/0\n";
        let partition = |name: &str, default, state, nodes_idle, nodes_total| Partition {
            name: name.to_owned(),
            default,
            state,
            nodes_idle,
            nodes_total,
        };
        let down = PartitionState::NotUp("down".to_owned());
        assert_eq!(
            parse_partitions(text),
            [
                partition("main", true, PartitionState::Up, 1, 2),
                partition("long", false, down, 12288, 12288),
            ]
        );
    }
}
