//! Totals over processes that never decrease.

/// A sum over the processes of a group decreases when a process exits that its parent does not wait for. This adds the lost
/// part back, because usage is cumulative.
#[derive(Clone, Copy, Debug, Default)]
pub struct MonotonicSum {
    last: u64,
    lost: u64,
}

impl MonotonicSum {
    /// Records the newest sum and returns the cumulative total.
    pub fn record(&mut self, sum: u64) -> u64 {
        self.lost += self.last.saturating_sub(sum);
        self.last = sum;
        self.lost.saturating_add(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_never_decreases() {
        let mut total = MonotonicSum::default();
        let totals = [10, 15, 5, 7, 0, 1].map(|sum| total.record(sum));
        assert_eq!(totals, [10, 15, 15, 17, 17, 18]);
    }
}
