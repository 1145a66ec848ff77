//! Quantities as exact numbers.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Upstream's precision: nano-units per unit.
const NANO: i128 = 1_000_000_000;
/// Upstream's maximum for numbers with a binary suffix.
const MAX_BINARY: i128 = i64::MAX as i128 * NANO;

/// A fixed-point number with nine decimals. Saturates beyond about 10²⁹.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Amount {
    nano: i128,
}

impl Amount {
    /// Accepts exactly what upstream's parser accepts. Fractions smaller than a nano-unit are rounded away from zero.
    pub fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return None;
        }
        let (negative, rest) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let (whole, rest) = digits(rest);
        let (fraction, suffix) = rest.strip_prefix('.').map_or(("", rest), digits);
        let scale = Scale::of(suffix)?;
        // Least significant digit first. A text without digits is zero, as upstream parses it.
        let mut number: Vec<u8> = whole
            .bytes()
            .chain(fraction.bytes())
            .rev()
            .map(|digit| digit - b'0')
            .collect();
        for _ in 0..scale.kibi {
            multiply(&mut number, 1024);
        }
        let power = scale
            .ten
            .saturating_add(9)
            .saturating_sub_unsigned(fraction.len() as u64);
        let mut nano = scaled(&number, power);
        if scale.kibi > 0 {
            nano = nano.min(MAX_BINARY);
        }
        Some(Self {
            nano: if negative { -nano } else { nano },
        })
    }

    /// Parses a quantity of the API.
    pub fn of(quantity: &Quantity) -> Option<Self> {
        Self::parse(&quantity.0)
    }

    /// Whole units, rounded away from zero.
    pub fn value(self) -> i64 {
        clamp(divide_up(self.nano, NANO))
    }

    /// Thousandths, rounded away from zero.
    pub fn milli_value(self) -> i64 {
        clamp(divide_up(self.nano, NANO / 1000))
    }

    /// The nearest floating-point number.
    pub fn to_f64(self) -> f64 {
        // Convert both parts separately: the mantissa of an f64 is too small for a large number of nano-units.
        (self.nano / NANO) as f64 + (self.nano % NANO) as f64 / NANO as f64
    }

    /// Whether the amount is exactly zero.
    pub fn is_zero(self) -> bool {
        self.nano == 0
    }
}

/// The factor of a suffix: 1024^`kibi` × 10^`ten`.
struct Scale {
    kibi: u32,
    ten: i64,
}

impl Scale {
    fn of(suffix: &str) -> Option<Self> {
        let binary = |kibi| Self { kibi, ten: 0 };
        let decimal = |ten| Self { kibi: 0, ten };
        Some(match suffix {
            "" => decimal(0),
            "n" => decimal(-9),
            "u" => decimal(-6),
            "m" => decimal(-3),
            "k" => decimal(3),
            "M" => decimal(6),
            "G" => decimal(9),
            "T" => decimal(12),
            "P" => decimal(15),
            "E" => decimal(18),
            "Ki" => binary(1),
            "Mi" => binary(2),
            "Gi" => binary(3),
            "Ti" => binary(4),
            "Pi" => binary(5),
            "Ei" => binary(6),
            _ => decimal(suffix.strip_prefix(['e', 'E'])?.parse().ok()?),
        })
    }
}

/// Splits off the leading digits.
fn digits(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit());
    text.split_at(end.unwrap_or(text.len()))
}

fn multiply(number: &mut Vec<u8>, factor: u32) {
    let mut carry = 0;
    for digit in number.iter_mut() {
        carry += u32::from(*digit) * factor;
        *digit = (carry % 10) as u8;
        carry /= 10;
    }
    while carry > 0 {
        number.push((carry % 10) as u8);
        carry /= 10;
    }
}

/// `number` × 10^`power`, rounded up and saturating.
fn scaled(number: &[u8], power: i64) -> i128 {
    let dropped = usize::try_from(power.saturating_neg()).unwrap_or(0);
    let (dropped, kept) = number.split_at(dropped.min(number.len()));
    let kept = kept.iter().rev().try_fold(0_i128, |sum, &digit| {
        sum.checked_mul(10)?.checked_add(digit.into())
    });
    let kept = match (kept, u32::try_from(power)) {
        (Some(0), _) => 0,
        (Some(kept), Ok(power)) => {
            kept.saturating_mul(10_i128.checked_pow(power).unwrap_or(i128::MAX))
        }
        (Some(kept), Err(_)) if power < 0 => kept,
        _ => i128::MAX,
    };
    let round_up = dropped.iter().any(|&digit| digit != 0);
    kept.saturating_add(round_up.into())
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
    use proptest::prelude::*;

    use super::*;

    fn value(text: &str) -> Option<i64> {
        Amount::parse(text).map(Amount::value)
    }

    #[test]
    fn parses_what_upstream_parses() {
        for (text, expected) in [
            ("0", 0),
            ("1500m", 2),
            ("1.5Gi", 3 << 29),
            ("100M", 100_000_000),
            ("2e3", 2000),
            ("2E3", 2000),
            ("2e+3", 2000),
            ("12E-1", 2),
            ("1E", 1_000_000_000_000_000_000),
            ("1Ei", 1 << 60),
            ("+.5k", 500),
            ("5.", 5),
            ("1.G", 1_000_000_000),
            ("-1.5", -2),
            ("-1Ki", -1024),
            ("0.1n", 1),
            ("000000000000000000000000000000000000000000000001", 1),
            ("1.00000000000000000000000000000000000000000000", 1),
            ("0.00000000000000000000000000000000000000001e41", 1),
            // Texts without digits are zero.
            ("+", 0),
            (".", 0),
            ("e3", 0),
            ("Mi", 0),
        ] {
            assert_eq!(value(text), Some(expected), "{text}");
        }
        for invalid in [
            "",
            "x",
            "1x",
            "1.2.3",
            "1.1.M",
            "1+1.0M",
            "1Kb",
            "1i",
            ".5i",
            "1mi",
            "1e",
            "1e-",
            "-3.01e-",
            "1ee3",
            " 1",
            "1 ",
            "1 Gi",
            "--1",
            "+-1",
            "infinity",
            "é",
            "1é",
            "1e３",
            "1e9223372036854775808",
        ] {
            assert_eq!(value(invalid), None, "{invalid}");
        }
    }

    #[test]
    fn fractions_are_rounded_away_from_zero() {
        let milli = |text| Amount::parse(text).map(Amount::milli_value);
        assert_eq!(milli("250m"), Some(250));
        assert_eq!(milli("1u"), Some(1));
        assert_eq!(milli("-1u"), Some(-1));
        assert_eq!(Amount::parse("1e-200"), Amount::parse("1n"));
        assert_eq!(Amount::parse("1e-9223372036854775808"), Amount::parse("1n"));
        assert_eq!(Amount::parse("0.0009765625Ki"), Amount::parse("1"));
        // Smaller than a nano-unit only before the suffix is applied.
        assert_eq!(Amount::parse("0.000000000001Gi"), Amount::parse("1073742n"));
    }

    #[test]
    fn large_numbers_saturate() {
        for text in ["100Ei", "1e19", "1e200", "1e9223372036854775807"] {
            assert_eq!(value(text), Some(i64::MAX), "{text}");
        }
        assert_eq!(value("-1e200"), Some(i64::MIN));
        assert_eq!(value(&"9".repeat(300)), Some(i64::MAX));
        assert_eq!(value("0e200"), Some(0));
        assert_eq!(Amount::parse("8Ei"), Amount::parse("9223372036854775807"));
        assert!(Amount::parse("8Ei") < Amount::parse("10E"));
    }

    #[test]
    fn converts_to_f64() {
        for (text, expected) in [
            ("250m", 0.25),
            ("-1.5", -1.5),
            ("64Mi", 67_108_864.0),
            ("2E", 2e18),
            ("1Ei", 1024_f64.powi(6)),
            ("12E-1", 1.2),
        ] {
            assert_eq!(
                Amount::parse(text).map(Amount::to_f64),
                Some(expected),
                "{text}"
            );
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in ".{0,40}") {
            let _ = Amount::parse(&text)
                .map(|amount| (amount.value(), amount.milli_value(), amount.to_f64()));
        }

        #[test]
        fn number_like_text_never_panics(text in "[-+]?[0-9]{0,60}[.]?[0-9]{0,60}([numkMGTPE]|[KMGTPE]i|e-?[0-9]{1,22})?") {
            let _ = Amount::parse(&text)
                .map(|amount| (amount.value(), amount.milli_value(), amount.to_f64()));
        }

        #[test]
        fn sign_does_not_change_the_magnitude(text in "[0-9]{1,17}[.]?[0-9]{0,12}[numkMGT]?") {
            let (plus, minus) = (Amount::parse(&text).unwrap(), Amount::parse(&format!("-{text}")).unwrap());
            prop_assert_eq!(plus.nano, -minus.nano);
            prop_assert_eq!(Amount::parse(&format!("+{text}")), Some(plus));
        }

        #[test]
        fn whole_numbers_are_exact(number in 0..1_u64 << 50, (suffix, factor) in prop::sample::select(vec![
            ("", 1_u128), ("k", 1000), ("M", 1_000_000), ("Ki", 1 << 10), ("Mi", 1 << 20),
            ("Gi", 1 << 30), ("Ei", 1 << 60), ("E", 1_000_000_000_000_000_000), ("e1", 10), ("E+2", 100),
        ])) {
            let exact = u128::from(number) * factor;
            let expected = i64::try_from(exact).unwrap_or(i64::MAX);
            prop_assert_eq!(value(&format!("{number}{suffix}")), Some(expected));
        }

        #[test]
        fn fractions_are_exact(whole in 0..1_u64 << 40, nano in 0..1_000_000_000_u32) {
            let amount = Amount::parse(&format!("{whole}.{nano:09}")).unwrap();
            prop_assert_eq!(amount.nano, i128::from(whole) * NANO + i128::from(nano));
            let kibi = Amount::parse(&format!("{whole}.{nano:09}Ki")).unwrap();
            prop_assert_eq!(kibi.nano, amount.nano * 1024);
        }
    }
}
