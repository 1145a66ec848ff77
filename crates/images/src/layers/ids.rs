//! The user namespace's id mappings: the owners that unpacked files can have.

use std::fs;

use rustix::fs::{Gid, Uid};

/// The user and group ids that a user namespace maps, as ranges of first id and count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdMappings {
    users: Vec<(u64, u64)>,
    groups: Vec<(u64, u64)>,
}

impl IdMappings {
    /// The mappings of the calling process.
    pub fn of_this_process() -> IdMappings {
        let read = |path| parse(&fs::read_to_string(path).unwrap_or_default());
        IdMappings {
            users: read("/proc/self/uid_map"),
            groups: read("/proc/self/gid_map"),
        }
    }

    /// The owner to set on a file; `None` for an id that is not mapped.
    pub fn owner(&self, uid: u64, gid: u64) -> (Option<Uid>, Option<Gid>) {
        let find = |ranges: &[(u64, u64)], id: u64| {
            let mapped = ranges
                .iter()
                .any(|(first, count)| id >= *first && id - first < *count);
            // chown takes u32::MAX as "do not change".
            u32::try_from(id)
                .ok()
                .filter(|id| mapped && *id != u32::MAX)
        };
        (
            find(&self.users, uid).map(Uid::from_raw),
            find(&self.groups, gid).map(Gid::from_raw),
        )
    }
}

/// Each line of a map: first id inside, first id outside, count.
fn parse(map: &str) -> Vec<(u64, u64)> {
    let line = |line: &str| {
        let mut numbers = line.split_whitespace().map(|number| number.parse().ok());
        let (first, _, count) = (numbers.next()??, numbers.next()?, numbers.next()??);
        Some((first, count))
    };
    map.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_returns_only_mapped_ids() {
        let ids = IdMappings {
            users: parse("         0       1000          1\n         1     100000      65535\n"),
            groups: parse("0 1000 1\n"),
        };
        assert_eq!(
            ids.owner(33, 33),
            (Some(Uid::from_raw(33)), None),
            "users and groups are mapped independently"
        );
        assert_eq!(ids.owner(65536, 0), (None, Some(Gid::from_raw(0))));
        let all = IdMappings {
            users: parse("0 0 4294967295"),
            groups: parse("0 0 4294967295"),
        };
        assert_eq!(all.owner(u64::from(u32::MAX), 1 << 40), (None, None));
    }
}
