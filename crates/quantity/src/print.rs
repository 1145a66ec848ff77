//! Prints quantities in upstream's canonical form, so that written and read objects compare equal.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Bytes, with the largest binary suffix that leaves a whole number: `16303428Ki`, `8Gi`.
pub fn binary(count: u64) -> Quantity {
    if count < 1024 {
        return decimal(count);
    }
    with_suffix(count, 1024, ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"])
}

/// A plain count, with the largest decimal suffix that leaves a whole number: `8`, `110`, `2k`.
pub fn decimal(count: u64) -> Quantity {
    with_suffix(count, 1000, ["", "k", "M", "G", "T", "P", "E"])
}

fn with_suffix(count: u64, step: u64, suffixes: [&str; 7]) -> Quantity {
    let (mut number, mut power) = (count, 0);
    while number != 0 && number.is_multiple_of(step) && power + 1 < suffixes.len() {
        number /= step;
        power += 1;
    }
    Quantity(format!("{number}{}", suffixes[power]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Amount;

    #[test]
    fn binary_form_is_canonical() {
        let printed = [
            0,
            1,
            1000,
            1024,
            1536,
            8 << 30,
            16_303_428 << 10,
            1 << 60,
            u64::MAX,
        ]
        .map(|n| binary(n).0);
        assert_eq!(
            printed,
            [
                "0",
                "1",
                "1k",
                "1Ki",
                "1536",
                "8Gi",
                "16303428Ki",
                "1Ei",
                "18446744073709551615"
            ]
        );
    }

    #[test]
    fn decimal_form_is_canonical() {
        assert_eq!(
            [0, 8, 110, 1000, 1024, 2_000_000].map(|n| decimal(n).0),
            ["0", "8", "110", "1k", "1024", "2M"]
        );
    }

    proptest! {
        #[test]
        fn printed_quantities_parse_back(number in 0..i64::MAX, zeros in 0_u32..63) {
            let number = number >> zeros << zeros;
            for printed in [binary(number.unsigned_abs()), decimal(number.unsigned_abs())] {
                prop_assert_eq!(Amount::of(&printed).map(Amount::value), Some(number), "{:?}", printed);
            }
        }
    }
}
