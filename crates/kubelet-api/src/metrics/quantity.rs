//! Quantities as numbers: `250m`, `64Mi`, `1e3`.

/// Its value; `None` if it is none.
pub(super) fn parse(text: &str) -> Option<f64> {
    let text = text.trim();
    let end = text
        .find(|c: char| c.is_ascii_alphabetic() && c != 'e' && c != 'E')
        .unwrap_or(text.len());
    // A lone `E` is exa, and not the beginning of an exponent.
    let end = match text[..end].find(['e', 'E']) {
        Some(at)
            if !text[at + 1..]
                .starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '+') =>
        {
            at
        }
        _ => end,
    };
    let (number, suffix) = text.split_at(end);
    let factor = match suffix {
        "" => 1.0,
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1024f64.powi(2),
        "Gi" => 1024f64.powi(3),
        "Ti" => 1024f64.powi(4),
        "Pi" => 1024f64.powi(5),
        "Ei" => 1024f64.powi(6),
        _ => return None,
    };
    let number: f64 = number.parse().ok()?;
    number.is_finite().then_some(number * factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_numbers() {
        for (text, value) in [
            ("250m", 0.25),
            ("2", 2.0),
            ("1.5", 1.5),
            ("64Mi", 64.0 * 1024.0 * 1024.0),
            ("1e3", 1000.0),
            ("1E3", 1000.0),
            ("2E", 2e18),
            ("1Ei", 1024f64.powi(6)),
            ("12E-1", 1.2),
        ] {
            assert_eq!(parse(text), Some(value), "{text}");
        }
        for odd in ["", "m", "1x", "e", "1 Mi", "infinity", "é"] {
            assert_eq!(parse(odd), None, "{odd}");
        }
    }
}
