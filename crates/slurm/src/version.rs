//! Slurm's version.

use std::fmt;

/// A Slurm release such as 22.05.8. Ordered, so that `version >= SlurmVersion::new(23, 11)` works.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SlurmVersion {
    /// Year of the release (22).
    pub major: u16,
    /// Month of the release (5 for 22.05).
    pub minor: u16,
    /// Patch level.
    pub micro: u16,
}

impl SlurmVersion {
    /// The oldest supported release.
    pub const OLDEST: Self = Self::new(22, 5);

    /// The first patch of a release.
    pub const fn new(major: u16, minor: u16) -> Self {
        Self {
            major,
            minor,
            micro: 0,
        }
    }

    /// Reads `slurm 22.05.8`, `slurm-wlm 22.05.8` (Debian) and `slurm 26.05.0-rc1`; other lines are ignored,
    /// since site wrappers may print some first.
    pub fn parse(text: &str) -> Option<Self> {
        text.lines().find_map(|line| {
            let (name, rest) = line.trim().split_once(' ')?;
            name.starts_with("slurm")
                .then(|| Self::parse_number(rest.trim()))?
        })
    }

    fn parse_number(text: &str) -> Option<Self> {
        let number = text
            .split(|c: char| !c.is_ascii_digit() && c != '.')
            .next()?;
        let mut parts = number.split('.').map(|part| part.parse::<u16>().ok());
        Some(Self {
            major: parts.next()??,
            minor: parts.next()??,
            micro: parts.next().flatten().unwrap_or(0),
        })
    }
}

impl fmt::Display for SlurmVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}.{}", self.major, self.minor, self.micro)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_output_of_srun_version() {
        let show = |text| SlurmVersion::parse(text).map(|v| v.to_string());
        assert_eq!(show("slurm 22.05.8\n").as_deref(), Some("22.05.8"));
        assert_eq!(show("slurm-wlm 22.05.8\n").as_deref(), Some("22.05.8"));
        assert_eq!(show("slurm 26.05.0-rc1").as_deref(), Some("26.05.0"));
        assert_eq!(
            show("Welcome!\nslurm 24.11.5-2+deb13\n").as_deref(),
            Some("24.11.5")
        );
        for bad in [
            "",
            "slurm",
            "slurm twenty",
            "slurm 22",
            "lurms 22.05.8",
            "slurm 99999999.1.1",
        ] {
            assert_eq!(show(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn versions_are_ordered() {
        assert!(SlurmVersion::new(22, 5) < SlurmVersion::new(22, 11));
        assert!(SlurmVersion::new(26, 5) > SlurmVersion::OLDEST);
    }
}
