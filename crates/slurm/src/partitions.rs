//! The partitions, from `sinfo`.

/// What we ask for: one line per partition, fields between bars. `%P` carries a star on the default partition.
pub(crate) const ARGS: &[&str] = &["--noheader", "--summarize", "--format=%P|%a|%l|%F"];

/// A partition as an ordinary user sees it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Partition {
    /// Its name.
    pub name: String,
    /// Whether jobs go there when none is asked for.
    pub default: bool,
    /// `up`, `down`, `drain` or `inactive`.
    pub state: String,
    /// Longest time that a job may ask for, in Slurm's words (`1-00:00:00`, `infinite`).
    pub time_limit: String,
    /// Nodes that run jobs.
    pub nodes_allocated: u32,
    /// Nodes that could run jobs now.
    pub nodes_idle: u32,
    /// All nodes, also those that are down.
    pub nodes_total: u32,
}

/// Reads the answer to [`ARGS`]; lines that look otherwise are skipped.
pub fn parse_partitions(text: &str) -> Vec<Partition> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Partition> {
    let fields: Vec<&str> = line.trim().split('|').collect();
    let [name, state, time_limit, nodes] = fields[..] else {
        return None;
    };
    let counts: Vec<u32> = nodes.split('/').map(count).collect::<Option<_>>()?;
    let [allocated, idle, _other, total] = counts[..] else {
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
        state: state.to_owned(),
        time_limit: time_limit.to_owned(),
        nodes_allocated: allocated,
        nodes_idle: idle,
        nodes_total: total,
    })
}

/// Large counts are abbreviated by sinfo: `12K`.
fn count(text: &str) -> Option<u32> {
    match text.strip_suffix('K') {
        Some(thousands) => Some((thousands.parse::<f32>().ok()? * 1024.0) as u32),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_sinfo() {
        let text = "main*|up|infinite|1/1/0/2\nlong|down|7-00:00:00|0/12K/0/12K\nslurm_load_partitions: something\n|up|1|0/0/0/0\n";
        insta::assert_debug_snapshot!(parse_partitions(text).iter().map(|p| (&p.name, p.default, &p.state, p.nodes_idle, p.nodes_total)).collect::<Vec<_>>(), @r#"
        [
            (
                "main",
                true,
                "up",
                1,
                2,
            ),
            (
                "long",
                false,
                "down",
                12288,
                12288,
            ),
        ]
        "#);
    }
}
