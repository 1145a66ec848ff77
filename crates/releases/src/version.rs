//! Upstream's version numbers, ordered as in semver, then by build metadata. Parsing is strict, because they become names of
//! directories and parts of URLs.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

/// The version that `fetch` installs by default. `kubernetes/go.mod` pins the same.
pub const PINNED_KUBERNETES: &str = "v1.37.1";

/// The etcd version for [`PINNED_KUBERNETES`].
pub const PINNED_ETCD: &str = "v3.7.0";

/// A version such as `v1.37.1` or `v1.38.0-rc.1`. Printed with the leading `v`, parsed with or without it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReleaseVersion {
    major: u64,
    minor: u64,
    patch: u64,
    pre: Vec<Identifier>,
    /// The build metadata after `+`. Unlike in semver it is part of the order, as the last criterion.
    build: String,
}

/// A dot-separated identifier of a pre-release. In semver numeric ones sort first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Identifier {
    Number(u64),
    Text(String),
}

/// A text that is no version.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not a version")]
pub struct VersionError(pub String);

impl VersionError {
    /// A hint for the user.
    pub fn hint(&self) -> Option<String> {
        Some(format!(
            "versions have three numbers, like {PINNED_KUBERNETES}"
        ))
    }
}

impl ReleaseVersion {
    /// Whether it is the version of a build without a version stamp (`v0.0.0-master+…`).
    pub fn is_unstamped(&self) -> bool {
        (self.major, self.minor, self.patch) == (0, 0, 0)
    }
}

impl FromStr for ReleaseVersion {
    type Err = VersionError;

    fn from_str(text: &str) -> Result<Self, VersionError> {
        parse(text).ok_or_else(|| VersionError(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<ReleaseVersion> {
    let text = text.strip_prefix('v').unwrap_or(text);
    let (text, build) = match text.split_once('+') {
        Some((text, build)) => (text, identifiers(build)?.join(".")),
        None => (text, String::new()),
    };
    let (numbers, pre) = match text.split_once('-') {
        Some((numbers, pre)) => (
            numbers,
            identifiers(pre)?.into_iter().map(identifier).collect(),
        ),
        None => (text, Vec::new()),
    };
    let mut numbers = numbers.split('.').map(number);
    let version = ReleaseVersion {
        major: numbers.next()??,
        minor: numbers.next()??,
        patch: numbers.next()??,
        pre,
        build,
    };
    numbers.next().is_none().then_some(version)
}

/// Splits dot-separated identifiers, which consist of letters, digits and `-` and are not empty.
fn identifiers(text: &str) -> Option<Vec<&str>> {
    let is_valid = |identifier: &&str| {
        !identifier.is_empty()
            && identifier
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    text.split('.')
        .map(|identifier| Some(identifier).filter(is_valid))
        .collect()
}

fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let canonical = text == "0" || !text.starts_with('0');
    if digits && canonical {
        text.parse().ok()
    } else {
        None
    }
}

fn identifier(text: &str) -> Identifier {
    number(text).map_or_else(|| Identifier::Text(text.to_owned()), Identifier::Number)
}

impl Ord for ReleaseVersion {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.major, self.minor, self.patch)
            .cmp(&(other.major, other.minor, other.patch))
            // A release sorts after its pre-releases.
            .then(self.pre.is_empty().cmp(&other.pre.is_empty()))
            .then_with(|| self.pre.cmp(&other.pre))
            .then_with(|| self.build.cmp(&other.build))
    }
}

impl PartialOrd for ReleaseVersion {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for ReleaseVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}.{}.{}", self.major, self.minor, self.patch)?;
        for (i, part) in self.pre.iter().enumerate() {
            f.write_str(if i == 0 { "-" } else { "." })?;
            match part {
                Identifier::Number(number) => write!(f, "{number}")?,
                Identifier::Text(text) => f.write_str(text)?,
            }
        }
        if !self.build.is_empty() {
            write!(f, "+{}", self.build)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> ReleaseVersion {
        text.parse().unwrap()
    }

    #[test]
    fn versions_are_printed_as_upstream_names_them() {
        for text in [
            "v1.37.1",
            "v1.38.0-rc.1",
            "v1.38.0-alpha.3",
            "v1.31.4+k3s1",
            "v1.2.3-a-b.0+x.y",
        ] {
            assert_eq!(version(text).to_string(), text);
        }
        assert_eq!(version("1.37.1").to_string(), "v1.37.1");
    }

    #[test]
    fn ordered_by_number_with_pre_releases_first() {
        let ascending = [
            "v1.9.20",
            "v1.37.0",
            "v1.37.9",
            "v1.37.10",
            "v1.38.0-alpha.2",
            "v1.38.0-alpha.10",
            "v1.38.0-beta.0",
            "v1.38.0-rc.0",
            "v1.38.0",
            "v1.38.0+k3s1",
            "v2.0.0",
        ];
        for pair in ascending.windows(2) {
            assert!(version(pair[0]) < version(pair[1]), "{pair:?}");
        }
    }

    #[test]
    fn versions_cannot_contain_paths_or_url_syntax() {
        for text in [
            "",
            "v",
            "latest",
            "1.37",
            "v1.37",
            "v1.37.1.1",
            "v1.37.x",
            "vv1.37.1",
            "v1.37.1-",
            "v1.37.1+",
            "v1.37.1-a..b",
            "v01.2.3",
            "v1.37.1/..",
            "../v1.37.1",
            "v1.37.1-../x",
            "v1.37.1?x",
            "v1.37.1 ",
            "v1.37.1\n",
            "v+1.2.3",
            "v99999999999999999999.0.0",
            "v0.0.0-master+$Format:%H$",
        ] {
            assert_eq!(
                text.parse::<ReleaseVersion>(),
                Err(VersionError(text.to_owned())),
                "{text:?}"
            );
        }
    }

    #[test]
    fn unstamped_builds_are_recognized() {
        assert!(version("v0.0.0-master+abc").is_unstamped());
        assert!(!version("v1.37.1").is_unstamped());
    }

    #[test]
    fn pinned_versions_parse() {
        version(PINNED_KUBERNETES);
        version(PINNED_ETCD);
    }
}
