//! Counts faults by their kind.

use std::collections::BTreeMap;
use std::fmt;

use crate::fault::Fault;
use crate::inject::Injected;
use crate::plan::distance;

/// A kind that was chosen this often, but never found a victim, is taken for broken.
const NEVER_THRESHOLD: usize = 3;

/// How many faults were chosen, and how many of them were injected.
#[derive(Debug, Default)]
pub struct Tally {
    kinds: BTreeMap<String, Counts>,
    pairs: BTreeMap<&'static str, Counts>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    chosen: usize,
    injected: usize,
}

impl Counts {
    fn add(&mut self, injected: bool) {
        self.chosen += 1;
        self.injected += usize::from(injected);
    }
}

impl Tally {
    /// Counts the faults of a round. A pair with a missed fault does not count as a pair.
    pub fn count(&mut self, faults: &[Fault], injected: &Injected) {
        let missed = |number: usize| injected.missed.iter().any(|(other, _)| *other == number);
        for (number, fault) in faults.iter().enumerate() {
            let counts = self.kinds.entry(fault.kind.name()).or_default();
            counts.add(!missed(number));
        }
        if let Some(distance) = distance(faults) {
            let counts = self.pairs.entry(distance).or_default();
            counts.add(injected.missed.is_empty());
        }
    }

    /// How many faults were injected.
    pub fn injected(&self) -> usize {
        self.kinds.values().map(|counts| counts.injected).sum()
    }

    /// The kinds that were chosen often enough, but never injected.
    pub fn never_injected(&self) -> Vec<&str> {
        let never = |(_, counts): &(&String, &Counts)| {
            counts.injected == 0 && counts.chosen >= NEVER_THRESHOLD
        };
        let kinds = self.kinds.iter().filter(never);
        kinds.map(|(name, _)| name.as_str()).collect()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, chosen: &str, injected: &str| {
            writeln!(f, "{name:<44} {chosen:>8} {injected:>8}")
        };
        row("fault", "chosen", "injected")?;
        let kinds = self
            .kinds
            .iter()
            .map(|(name, counts)| (name.as_str(), counts));
        let pairs = self.pairs.iter().map(|(name, counts)| (*name, counts));
        for (name, counts) in kinds.chain(pairs) {
            let Counts { chosen, injected } = counts;
            row(name, &chosen.to_string(), &injected.to_string())?;
        }
        let chosen: usize = self.kinds.values().map(|counts| counts.chosen).sum();
        row(
            "all faults",
            &chosen.to_string(),
            &self.injected().to_string(),
        )
    }
}
