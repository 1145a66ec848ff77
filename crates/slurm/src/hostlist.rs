//! Slurm's host lists: `node[1-3,7],gpu-a[01-02]` ⇄ names.
//!
//! Expansion keeps Slurm's order, which task ranks follow. The number of names is limited: a list of a few bytes can expand to a
//! billion names.

use std::fmt::Write as _;

/// More nodes than any cluster has. Longer lists are rejected.
pub const MAX_NODES: usize = 100_000;
/// Longest list, in bytes.
const MAX_HOSTLIST_LENGTH: usize = 4 << 20;
/// Longest host name that Linux allows, with room for a domain.
const MAX_HOST_NAME: usize = 255;

/// Why a host list cannot be expanded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot expand the node list {list:?}: {problem}")]
pub struct HostlistError {
    /// The list, truncated.
    pub list: String,
    /// Why it cannot be expanded.
    pub problem: &'static str,
}

/// Expands a host list into names, in Slurm's order. Several brackets in one name multiply, as in Slurm.
pub fn expand(list: &str) -> Result<Vec<String>, HostlistError> {
    let fail = |problem| HostlistError {
        list: list.chars().take(80).collect(),
        problem,
    };
    if list.len() > MAX_HOSTLIST_LENGTH {
        return Err(fail("too long"));
    }
    let mut names = Vec::new();
    for entry in split_outside_brackets(list).map_err(fail)? {
        expand_entry(entry, &mut names).map_err(fail)?;
    }
    Ok(names)
}

/// Splits at commas that are not inside brackets.
fn split_outside_brackets(list: &str) -> Result<Vec<&str>, &'static str> {
    let (mut entries, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'[' if inside => return Err("nested brackets"),
            b'[' => inside = true,
            b']' if !inside => return Err("unmatched closing bracket"),
            b']' => inside = false,
            b',' if !inside => {
                entries.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("unclosed bracket");
    }
    entries.push(&list[start..]);
    // Ignore empty entries: an empty list, or the trailing comma that some site scripts leave.
    entries.retain(|entry| !entry.is_empty());
    Ok(entries)
}

fn expand_entry(entry: &str, names: &mut Vec<String>) -> Result<(), &'static str> {
    let capacity = MAX_NODES - names.len();
    let mut prefixes = vec![String::new()];
    let mut rest = entry;
    while let Some((literal, tail)) = rest.split_once('[') {
        let (ranges, tail) = tail.split_once(']').ok_or("unclosed bracket")?;
        check_literal(literal)?;
        let suffixes = expand_ranges(ranges, capacity)?;
        if prefixes.len().saturating_mul(suffixes.len()) > capacity {
            return Err("too many nodes");
        }
        prefixes = prefixes
            .iter()
            .flat_map(|prefix| {
                suffixes
                    .iter()
                    .map(move |s| format!("{prefix}{literal}{s}"))
            })
            .collect();
        rest = tail;
    }
    check_literal(rest)?;
    if prefixes.len() > capacity {
        return Err("too many nodes");
    }
    for mut name in prefixes {
        name.push_str(rest);
        if name.is_empty() || name.len() > MAX_HOST_NAME {
            return Err("empty or too long name");
        }
        names.push(name);
    }
    Ok(())
}

/// Rejects characters that no host name has, because names become arguments and lines of host files.
fn check_literal(text: &str) -> Result<(), &'static str> {
    let is_allowed =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':');
    if text.bytes().all(is_allowed) {
        Ok(())
    } else {
        Err("invalid character in a name")
    }
}

/// `1-3,07,12` → `["1", "2", "3", "07", "12"]`; pads to the width of the lower bound, as Slurm does.
fn expand_ranges(ranges: &str, capacity: usize) -> Result<Vec<String>, &'static str> {
    let number = |text: &str| -> Result<u64, &'static str> {
        if text.is_empty() || text.len() > 18 || !text.bytes().all(|b| b.is_ascii_digit()) {
            return Err("invalid number in a range");
        }
        text.parse().map_err(|_| "invalid number in a range")
    };
    let mut suffixes = Vec::new();
    for range in ranges.split(',') {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        let (first, last, width) = (number(low)?, number(high)?, low.len());
        if first > last {
            return Err("range with descending bounds");
        }
        if last - first >= (capacity.saturating_sub(suffixes.len())) as u64 {
            return Err("too many nodes");
        }
        suffixes.extend((first..=last).map(|n| format!("{n:0width$}")));
    }
    Ok(suffixes)
}

/// The inverse of [`expand`]: folds consecutive numbers, so that thousands of nodes fit on one command line.
/// `expand(&compress(names)) == names` for any names that `expand` can return.
pub fn compress(names: &[String]) -> String {
    let mut out = String::new();
    let mut rest = names;
    while let Some((first, mut tail)) = rest.split_first() {
        if !out.is_empty() {
            out.push(',');
        }
        let (head, digits) = split_number(first);
        let mut last = digits;
        while let Some((next, after)) = tail.split_first() {
            let (next_head, next_digits) = split_number(next);
            if digits.is_empty() || next_head != head || !follows(last, next_digits) {
                break;
            }
            (last, tail) = (next_digits, after);
        }
        let _ = if last == digits {
            write!(out, "{first}")
        } else {
            write!(out, "{head}[{digits}-{last}]")
        };
        rest = tail;
    }
    out
}

/// Splits a name before its trailing digits. More digits than fit into a number count as none.
fn split_number(name: &str) -> (&str, &str) {
    let at = name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    if name.len() - at > 18 {
        (name, "")
    } else {
        name.split_at(at)
    }
}

/// Whether `b` is the number after `a`, and a range padded to the width of `a` prints it the same way.
fn follows(a: &str, b: &str) -> bool {
    let (Ok(x), Ok(y)) = (a.parse::<u64>(), b.parse::<u64>()) else {
        return false;
    };
    let width = a.len();
    // A change of width (9 → 10) always starts a new range. Unpadded numbers would not need it, but this is simpler.
    x + 1 == y && b.len() == width
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn expands_as_slurm_does() {
        let show = |list: &str| {
            expand(list)
                .map(|names| names.join(" "))
                .map_err(|e| e.problem)
        };
        assert_eq!(
            show("node[1-3,7],gpu-a[01-02]").unwrap(),
            "node1 node2 node3 node7 gpu-a01 gpu-a02"
        );
        assert_eq!(show("login").unwrap(), "login");
        assert_eq!(show("n[9-11]").unwrap(), "n9 n10 n11");
        assert_eq!(show("n[08-10],m").unwrap(), "n08 n09 n10 m");
        assert_eq!(show("r[1-2]n[1-2]").unwrap(), "r1n1 r1n2 r2n1 r2n2");
        assert_eq!(show("r[1-2]-ib").unwrap(), "r1-ib r2-ib");
        assert_eq!(show("").unwrap(), "");
    }

    #[test]
    fn rejects_malformed_and_huge_lists() {
        let lists = [
            "n[1-999999999]",
            "n[1-999999999999999999]",
            "a[1-1000]b[1-1000]",
            "n[",
            "n]",
            "n[[1]]",
            "n[]",
            "n[1-]",
            "n[-1]",
            "n[3-1]",
            "n[a-b]",
            "a b",
            "a;b",
            "-N\n",
            "n[1-60000],m[1-60000]",
            "[99999999999999999999]",
        ];
        for list in lists {
            assert!(expand(list).is_err(), "{list:?}");
        }
        assert!(expand(&"x".repeat(300)).is_err());
    }

    #[test]
    fn folds_consecutive_numbers() {
        let names = |list: &str| expand(list).unwrap();
        assert_eq!(
            compress(&names("node1,node2,node3,node7")),
            "node[1-3],node7"
        );
        assert_eq!(compress(&names("n08,n09,n10,n1,a,a")), "n[08-10],n1,a,a");
        assert_eq!(compress(&names("n[9-11]")), "n9,n[10-11]");
        assert_eq!(compress(&[]), "");
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(list in ".{0,60}") {
            if let Ok(names) = expand(&list) { prop_assert!(names.len() <= MAX_NODES); }
        }

        #[test]
        fn list_like_text_never_panics(list in "[an0-9\\[\\],-]{0,40}") {
            if let Ok(names) = expand(&list) { prop_assert!(names.len() <= MAX_NODES); }
        }

        #[test]
        fn expand_inverts_compress(names in proptest::collection::vec("[a-c]{1,2}[0-9]{0,3}", 0..40)) {
            prop_assert_eq!(expand(&compress(&names)).unwrap(), names);
        }
    }
}
