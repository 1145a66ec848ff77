//! Durations in the format of Go.

use std::time::Duration;

/// Formats a duration as Go does, because upstream's messages and settings contain such durations.
pub fn go_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let millis = duration.subsec_millis();
    if seconds == 0 && duration.is_zero() {
        return "0s".to_owned();
    }
    if seconds == 0 {
        return format!("{millis}ms");
    }
    let fraction = if millis == 0 {
        String::new()
    } else {
        format!(".{millis:03}").trim_end_matches('0').to_owned()
    };
    match (hours, minutes) {
        (0, 0) => format!("{rest}{fraction}s"),
        (0, _) => format!("{minutes}m{rest}{fraction}s"),
        _ => format!("{hours}h{minutes}m{rest}{fraction}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_durations_like_go() {
        for (millis, text) in [
            (0, "0s"),
            (250, "250ms"),
            (10_000, "10s"),
            (1_500, "1.5s"),
            (80_000, "1m20s"),
            (300_000, "5m0s"),
            (3_600_000, "1h0m0s"),
            (4 * 3_600_000, "4h0m0s"),
        ] {
            assert_eq!(go_duration(Duration::from_millis(millis)), text);
        }
    }
}
