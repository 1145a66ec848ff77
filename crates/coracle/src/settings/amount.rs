//! Parses durations and sizes in settings.

use std::time::Duration;

/// Parses `90s`, `30m`, `12h`, `30d`, `4w`; a number without a unit is seconds.
pub fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let seconds = match unit {
        "" | "s" => 1,
        "m" | "min" => 60,
        "h" => 3600,
        "d" => 24 * 3600,
        "w" => 7 * 24 * 3600,
        _ => return Err("a time is a number with s, m, h, d or w".to_owned()),
    };
    product(number, seconds).map(Duration::from_secs)
}

/// Parses `500M`, `20G`, `1Ti`, `20GiB`, in powers of 1024; a number without a unit is bytes.
pub fn bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text);
    let unit = unit.trim_end_matches(['B', 'b']).trim_end_matches('i');
    let power = match unit.to_ascii_uppercase().as_str() {
        "" => 0,
        "K" => 1,
        "M" => 2,
        "G" => 3,
        "T" => 4,
        _ => return Err("a size is a number with K, M, G or T".to_owned()),
    };
    product(number, 1 << (10 * power))
}

fn split(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    (number, unit.trim())
}

fn product(number: &str, factor: u64) -> Result<u64, String> {
    let number: u64 = number.parse().map_err(|_| "expected a number".to_owned())?;
    number
        .checked_mul(factor)
        .ok_or_else(|| "it is too large".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_durations_and_sizes() {
        assert_eq!(duration("30d"), Ok(Duration::from_secs(30 * 24 * 3600)));
        assert_eq!(duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!(bytes("20G"), Ok(20 << 30));
        assert_eq!(bytes("1Ti"), Ok(1 << 40));
        assert_eq!(bytes("500 MiB"), Ok(500 << 20));
        assert_eq!(bytes("7"), Ok(7));
        for bad in ["", "d", "-1d", "3y", "99999999999999999999w", "1.5h"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
        assert!(bytes("99999999999T").is_err());
    }
}
