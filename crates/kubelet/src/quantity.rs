//! Quantities in the form that Kubernetes itself prints, so that what we write compares equal to what we read.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

const SUFFIXES: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

/// Bytes with the largest binary suffix that leaves a whole number: `16303428Ki`, `8Gi`.
pub(crate) fn bytes(count: u64) -> Quantity {
    let (mut number, mut power) = (count, 0);
    while number != 0 && number % 1024 == 0 && power + 1 < SUFFIXES.len() {
        number /= 1024;
        power += 1;
    }
    Quantity(format!("{number}{}", SUFFIXES[power]))
}

/// A plain count, with the largest decimal suffix that leaves a whole number: `8`, `110`, `2k`.
pub(crate) fn count(count: u64) -> Quantity {
    let (mut number, mut power) = (count, 0);
    let suffixes = ["", "k", "M", "G", "T", "P", "E"];
    while number != 0 && number % 1000 == 0 && power + 1 < suffixes.len() {
        number /= 1000;
        power += 1;
    }
    Quantity(format!("{number}{}", suffixes[power]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_canonical() {
        let printed =
            [0, 1, 1000, 1024, 1536, 8 << 30, 16_303_428 << 10, u64::MAX].map(|n| bytes(n).0);
        assert_eq!(
            printed,
            [
                "0",
                "1",
                "1000",
                "1Ki",
                "1536",
                "8Gi",
                "16303428Ki",
                "18446744073709551615"
            ]
        );
    }

    #[test]
    fn counts_are_canonical() {
        assert_eq!(
            [0, 8, 110, 1000, 1024, 2_000_000].map(|n| count(n).0),
            ["0", "8", "110", "1k", "1024", "2M"]
        );
    }
}
