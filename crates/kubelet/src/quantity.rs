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

/// Thousandths of what a quantity says, rounded up; `None` if it says nothing that can be understood.
pub(crate) fn milli(quantity: &Quantity) -> Option<i128> {
    let text = quantity.0.trim();
    let end = text
        .find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-')))
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    // A power of ten, after which all is a whole number times `factor`.
    let (factor, power): (i128, i32) = match suffix {
        "" => (1, 0),
        "n" => (1, -9),
        "u" => (1, -6),
        "m" => (1, -3),
        "k" => (1, 3),
        "M" => (1, 6),
        "G" => (1, 9),
        "T" => (1, 12),
        "P" => (1, 15),
        "E" => (1, 18),
        _ => match SUFFIXES.iter().position(|&binary| binary == suffix) {
            Some(binary) => (1 << (10 * binary), 0),
            None => (1, suffix.strip_prefix(['e', 'E'])?.parse().ok()?),
        },
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
    let digits = digits.checked_mul(factor)?;
    let power = power + 3 - i32::try_from(fraction.len()).ok()?;
    let scale = 10_i128.checked_pow(power.unsigned_abs())?;
    if power >= 0 {
        digits.checked_mul(scale)
    } else {
        Some(digits.div_euclid(scale) + i128::from(digits.rem_euclid(scale) != 0))
    }
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
    fn quantities_are_understood() {
        let read = |text: &str| milli(&Quantity(text.to_owned()));
        assert_eq!(
            ["1", "0.5", "100m", "1.5Gi", "2k", "1e3", "1E", "100u", "-1"].map(read),
            [
                Some(1000),
                Some(500),
                Some(100),
                Some(1536 * 1024 * 1024 * 1000),
                Some(2_000_000),
                Some(1_000_000),
                Some(1_000_000_000_000_000_000_000),
                Some(1),
                Some(-1000),
            ]
        );
        assert_eq!(["", "x", "1x", "1e99"].map(read), [None; 4]);
    }

    #[test]
    fn counts_are_canonical() {
        assert_eq!(
            [0, 8, 110, 1000, 1024, 2_000_000].map(|n| count(n).0),
            ["0", "8", "110", "1k", "1024", "2M"]
        );
    }
}
