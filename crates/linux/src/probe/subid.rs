//! Subordinate ids from `/etc/subuid` and `/etc/subgid`, or from `getsubids` (LDAP, SSSD).

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Consecutive ids that a user may map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdRange {
    /// The first id.
    pub start: u32,
    /// The number of ids.
    pub count: u32,
}

/// The subordinate ids of one user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SubordinateIds {
    /// User ids, largest range first.
    pub user: Vec<IdRange>,
    /// Group ids, largest range first.
    pub group: Vec<IdRange>,
}

/// The ranges of a user from the files or, if these have none, from `getsubids`.
pub fn lookup(uid: u32) -> SubordinateIds {
    let name = user_name(uid);
    SubordinateIds {
        user: ranges_for("/etc/subuid", &[], name.as_deref(), uid),
        group: ranges_for("/etc/subgid", &["-g"], name.as_deref(), uid),
    }
}

fn ranges_for(file: &str, options: &[&str], name: Option<&str>, uid: u32) -> Vec<IdRange> {
    let mut ranges = std::fs::read_to_string(file)
        .map(|text| parse_file(&text, name, uid))
        .unwrap_or_default();
    if let Some(name) = name.filter(|_| ranges.is_empty()) {
        ranges = output_of("getsubids", options.iter().copied().chain([name]))
            .map(|text| parse_getsubids(&text))
            .unwrap_or_default();
    }
    ranges.sort_by_key(|range| std::cmp::Reverse(range.count));
    ranges
}

/// The user's name, from `getent`, because a static program has no NSS. `$USER` is the fallback.
pub fn user_name(uid: u32) -> Option<String> {
    let entry = output_of("getent", ["passwd", &uid.to_string()]);
    let looked_up = entry.and_then(|text| text.split(':').next().map(str::to_owned));
    looked_up
        .or_else(|| std::env::var("USER").ok())
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.is_empty())
}

fn output_of<'a>(program: &str, args: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .env("LC_ALL", "C")
        .output();
    let output = output.ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Parses lines of `name:start:count` or `uid:start:count`.
fn parse_file(text: &str, name: Option<&str>, uid: u32) -> Vec<IdRange> {
    let uid = uid.to_string();
    let is_owner = |owner: &str| owner == uid || Some(owner) == name;
    let lines = text
        .lines()
        .map(|line| line.trim().split(':').collect::<Vec<_>>());
    lines
        .filter_map(|fields| match fields[..] {
            [owner, start, count] if is_owner(owner) => range(start, count),
            _ => None,
        })
        .collect()
}

/// Parses lines of `0: user1 100000 65536`.
fn parse_getsubids(text: &str) -> Vec<IdRange> {
    let lines = text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines
        .filter_map(|fields| match fields[..] {
            [_, _, start, count] => range(start, count),
            _ => None,
        })
        .collect()
}

fn range(start: &str, count: &str) -> Option<IdRange> {
    let range = IdRange {
        start: start.parse().ok()?,
        count: count.parse().ok()?,
    };
    (range.count > 0 && range.start.checked_add(range.count).is_some()).then_some(range)
}

/// State of a setuid helper (`newuidmap`, `newgidmap`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SetuidHelper {
    /// Installed with the privilege that it needs.
    Ready(PathBuf),
    /// Installed, but without setuid bit and without file capabilities.
    Unprivileged(PathBuf),
    /// Not on `PATH`.
    Missing,
}

/// Finds a helper on `PATH` and checks its privileges.
pub fn find_helper(name: &str) -> SetuidHelper {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).filter(|dir| dir.is_absolute());
    let Some(file) = dirs.map(|dir| dir.join(name)).find(|file| file.is_file()) else {
        return SetuidHelper::Missing;
    };
    if is_privileged(&file) {
        SetuidHelper::Ready(file)
    } else {
        SetuidHelper::Unprivileged(file)
    }
}

fn is_privileged(file: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let set_uid = file
        .metadata()
        .is_ok_and(|meta| meta.mode() & 0o4000 != 0 && meta.uid() == 0);
    let mut buffer = [0u8; 64];
    set_uid || rustix::fs::getxattr(file, "security.capability", &mut buffer).is_ok_and(|n| n > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_found_by_name_or_uid() {
        let text = "# a comment\nuser1:100000:65536\nuser2:1:1\n2001:300000:1000\nuser1:x:y\nuser1:9:0\nuser1:4294967295:5\n";
        let starts = |name, uid| {
            parse_file(text, name, uid)
                .iter()
                .map(|r| r.start)
                .collect::<Vec<_>>()
        };
        assert_eq!(starts(Some("user1"), 2001), [100_000, 300_000]);
        assert_eq!(starts(None, 2001), [300_000]);
        assert!(starts(Some("user3"), 7).is_empty());
    }

    #[test]
    fn getsubids_output_is_parsed() {
        let expected = IdRange {
            start: 100_000,
            count: 65_536,
        };
        assert_eq!(
            parse_getsubids("0: user1 100000 65536\nError fetching ranges\n"),
            [expected]
        );
    }
}
