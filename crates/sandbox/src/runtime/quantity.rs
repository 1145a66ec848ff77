//! Quantities of the API as numbers that the kernel understands.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Whole units, such as bytes, rounded up. `None` for nothing, and for what is no quantity: neither is a limit.
pub fn whole(quantity: Option<&Quantity>) -> Option<u64> {
    some(parse(&quantity?.0)?.div_ceil(1000))
}

/// Thousandths, rounded up; `None` as above.
pub fn milli(quantity: Option<&Quantity>) -> Option<u64> {
    some(parse(&quantity?.0)?)
}

fn some(number: u128) -> Option<u64> {
    (number > 0).then(|| u64::try_from(number).unwrap_or(u64::MAX))
}

/// Thousandths. The API server has made sure that it is a quantity, so no word is lost about one that isn't.
fn parse(text: &str) -> Option<u128> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let (factor, exponent): (u128, i32) = match suffix {
        "n" => (1, -9),
        "u" => (1, -6),
        "m" => (1, -3),
        "" => (1, 0),
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
        other => (1, other.strip_prefix(['e', 'E'])?.parse().ok()?),
    };
    let value = digits.checked_mul(factor)?;
    let power = exponent + 3 - i32::try_from(fraction.len()).ok()?;
    let ten = 10_u128.checked_pow(power.unsigned_abs())?;
    if power < 0 {
        Some(value.div_ceil(ten))
    } else {
        value.checked_mul(ten)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities() {
        let of = |text: &str| {
            let quantity = Quantity(text.to_owned());
            (milli(Some(&quantity)), whole(Some(&quantity)))
        };
        assert_eq!(of("250m"), (Some(250), Some(1)));
        assert_eq!(of("1.5"), (Some(1500), Some(2)));
        assert_eq!(of("64Mi"), (Some((64 << 20) * 1000), Some(64 << 20)));
        assert_eq!(of("1.5Gi").1, Some(3 << 29));
        assert_eq!(of("100M").1, Some(100_000_000));
        assert_eq!(of("2e3").1, Some(2000));
        assert_eq!(of("1E").1, Some(1_000_000_000_000_000_000));
        assert_eq!(of("1n"), (Some(1), Some(1)));
        for none in ["0", "", "-1", "x", "1x", "1.2.3", "1e99", "."] {
            assert_eq!(of(none), (None, None), "{none}");
        }
        assert_eq!(milli(None), None);
    }
}
