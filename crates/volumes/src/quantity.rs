//! Kubernetes' quantities as exact numbers.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The finest part that upstream keeps.
const NANO: i128 = 1_000_000_000;

/// A number with nine decimals, exact as upstream's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Amount(i128);

impl Amount {
    /// Reads `1500m`, `1.5Gi`, `2e3`, …; finer parts than nano are rounded away from zero.
    pub fn parse(text: &str) -> Option<Self> {
        let (negative, rest) = match text.as_bytes().first()? {
            b'-' => (true, &text[1..]),
            b'+' => (false, &text[1..]),
            _ => (false, text),
        };
        let end = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(rest.len());
        let (number, suffix) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
            return None;
        }
        let mut digits: i128 = 0;
        for digit in whole.bytes().chain(fraction.bytes()) {
            digits = digits
                .checked_mul(10)?
                .checked_add(i128::from(digit - b'0'))?;
        }
        let (binary, exponent) = scale(suffix)?;
        let numerator = digits.checked_mul(binary)?;
        // The value in nano is numerator × 10^power.
        let power = exponent + 9 - i32::try_from(fraction.len()).ok()?;
        let ten = 10_i128.checked_pow(power.unsigned_abs());
        let nano = match (power >= 0, ten) {
            (true, Some(ten)) => numerator.checked_mul(ten)?,
            (true, None) => return (numerator == 0).then_some(Self(0)),
            (false, Some(ten)) => divide_up(numerator, ten),
            // Smaller than a nano: rounded up to one.
            (false, None) => i128::from(numerator != 0),
        };
        Some(Self(if negative { -nano } else { nano }))
    }

    /// The same for a quantity of the API.
    pub fn of(quantity: &Quantity) -> Option<Self> {
        Self::parse(&quantity.0)
    }

    /// Whole units, rounded up.
    pub fn value(self) -> i64 {
        clamp(divide_up(self.0, NANO))
    }

    /// Thousandths, rounded up.
    pub fn milli_value(self) -> i64 {
        clamp(divide_up(self.0, NANO / 1000))
    }

    /// Nothing at all.
    pub fn is_zero(self) -> bool {
        self.0 == 0
    }
}

/// Whole bytes of a quantity, for sizes; `None` if it is no number, or negative.
pub fn bytes(quantity: &Quantity) -> Option<u64> {
    u64::try_from(Amount::of(quantity)?.value()).ok()
}

/// The binary factor and the decimal exponent of a suffix.
fn scale(suffix: &str) -> Option<(i128, i32)> {
    Some(match suffix {
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
        "Ki" => (1 << 10, 0),
        "Mi" => (1 << 20, 0),
        "Gi" => (1 << 30, 0),
        "Ti" => (1 << 40, 0),
        "Pi" => (1 << 50, 0),
        "Ei" => (1 << 60, 0),
        _ => {
            let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            // Beyond this nothing is left of any number, or no number can hold it.
            (1, exponent.clamp(-100, 100))
        }
    })
}

/// Rounds away from zero.
fn divide_up(number: i128, by: i128) -> i128 {
    let quotient = number / by;
    if number % by == 0 {
        quotient
    } else {
        quotient + number.signum()
    }
}

fn clamp(number: i128) -> i64 {
    i64::try_from(number).unwrap_or(if number < 0 { i64::MIN } else { i64::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_upstream_does() {
        let value = |text| Amount::parse(text).map(Amount::value);
        assert_eq!(value("0"), Some(0));
        assert_eq!(value("1500m"), Some(2));
        assert_eq!(value("1.5Gi"), Some(3 << 29));
        assert_eq!(value("2e3"), Some(2000));
        assert_eq!(value("2E3"), Some(2000));
        assert_eq!(value("1E"), Some(1_000_000_000_000_000_000));
        assert_eq!(value("100Ei"), Some(i64::MAX));
        assert_eq!(value("+.5k"), Some(500));
        assert_eq!(value("5."), Some(5));
        assert_eq!(value("-1.5"), Some(-2));
        assert_eq!(value("0.1n"), Some(1));
        for wrong in ["", ".", "-", "1.2.3", "1Kb", "1 Gi", "e3", "1e", "x"] {
            assert_eq!(value(wrong), None, "{wrong}");
        }
        assert_eq!(Amount::parse("250m").map(Amount::milli_value), Some(250));
        assert_eq!(Amount::parse("1u").map(Amount::milli_value), Some(1));
        assert_eq!(Amount::parse("1e-200"), Amount::parse("1n"));
        assert_eq!(Amount::parse("0e200"), Some(Amount(0)));
        assert!(Amount::parse("1e200").is_none());
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in ".{0,40}") {
            let _ = Amount::parse(&text).map(|amount| (amount.value(), amount.milli_value()));
        }
        #[test]
        fn no_number_panics(text in "[-+]?[0-9.]{0,60}([numkMGTPE]i?|e-?[0-9]{1,5})?") {
            let _ = Amount::parse(&text).map(|amount| (amount.value(), amount.milli_value()));
        }
    }
}
