//! The ports that a WebSocket's query names.

/// Why the ports make no sense; the words are upstream's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadPorts {
    #[error("query parameter \"port\" is required")]
    Missing,
    #[error("query parameter \"port\" cannot be empty")]
    Empty,
    #[error("unable to parse {0:?} as a port")]
    NoNumber(String),
    #[error("port {0:?} must be > 0")]
    Zero(String),
    #[error("only {MAX} ports can be forwarded over one connection")]
    TooMany,
}

/// Each port has two channels, whose numbers are bytes.
const MAX: usize = 127;

pub(super) fn parse(query: &str) -> Result<Vec<u16>, BadPorts> {
    let mut ports = Vec::new();
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        if name != "port" {
            continue;
        }
        if value.is_empty() {
            return Err(BadPorts::Empty);
        }
        for text in value.split(',') {
            ports.push(number(text).map_err(|wrong| wrong(value.clone().into_owned()))?);
        }
    }
    match ports.len() {
        0 => Err(BadPorts::Missing),
        1..=MAX => Ok(ports),
        _ => Err(BadPorts::TooMany),
    }
}

/// A port, or what to call that which is none.
pub(super) fn number(text: &str) -> Result<u16, fn(String) -> BadPorts> {
    match text.parse() {
        Ok(0) => Err(BadPorts::Zero),
        Ok(port) => Ok(port),
        Err(_) => Err(BadPorts::NoNumber),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_however_they_are_listed() {
        assert_eq!(
            parse("port=80&port=443,8080&other=1"),
            Ok(vec![80, 443, 8080])
        );
    }

    #[test]
    fn what_is_no_port_is_refused() {
        assert_eq!(parse(""), Err(BadPorts::Missing));
        assert_eq!(parse("port="), Err(BadPorts::Empty));
        assert_eq!(
            parse("port=http"),
            Err(BadPorts::NoNumber("http".to_owned()))
        );
        assert_eq!(
            parse("port=65536"),
            Err(BadPorts::NoNumber("65536".to_owned()))
        );
        assert_eq!(parse("port=0"), Err(BadPorts::Zero("0".to_owned())));
        let many = vec!["port=1"; 128].join("&");
        assert_eq!(parse(&many), Err(BadPorts::TooMany));
    }
}
