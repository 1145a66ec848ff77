//! Signals by the names that the API uses.

/// SIGTERM.
#[cfg(test)]
pub const TERM: i32 = 15;
/// SIGKILL.
pub const KILL: i32 = 9;

/// The number of a signal such as `SIGTERM` or `SIGRTMIN+3`.
pub fn number(name: &str) -> Option<i32> {
    const NAMES: [&str; 31] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2",
        "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG",
        "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
    ];
    const RTMIN: i32 = 34;
    const RTMAX: i32 = 64;
    let name = name.strip_prefix("SIG")?;
    let offset = |text: &str| match text {
        "" => Some(0),
        _ => text[1..].parse::<i32>().ok(),
    };
    if let Some(rest) = name.strip_prefix("RTMIN") {
        return Some(RTMIN + offset(rest)?).filter(|n| (RTMIN..=RTMAX).contains(n));
    }
    if let Some(rest) = name.strip_prefix("RTMAX") {
        return Some(RTMAX - offset(rest)?).filter(|n| (RTMIN..=RTMAX).contains(n));
    }
    let name = match name {
        "IOT" => "ABRT",
        "CLD" => "CHLD",
        "POLL" => "IO",
        other => other,
    };
    let place = NAMES.iter().position(|known| *known == name)?;
    i32::try_from(place + 1).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (name, want) in [
            ("SIGTERM", Some(TERM)),
            ("SIGKILL", Some(KILL)),
            ("SIGUSR1", Some(10)),
            ("SIGWINCH", Some(28)),
            ("SIGRTMIN", Some(34)),
            ("SIGRTMIN+3", Some(37)),
            ("SIGRTMAX-2", Some(62)),
            ("SIGRTMAX", Some(64)),
            ("SIGRTMIN+99", None),
            ("TERM", None),
            ("SIGWHAT", None),
        ] {
            assert_eq!(number(name), want, "{name}");
        }
    }
}
