//! Parses the ports in the query of a WebSocket request.

/// Why the ports are invalid; the messages are upstream's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum PortQueryError {
    #[error("query parameter \"port\" is required")]
    Missing,
    #[error("query parameter \"port\" cannot be empty")]
    Empty,
    #[error("unable to parse {0:?} as a port")]
    NotANumber(String),
    #[error("port {0:?} must be > 0")]
    Zero(String),
    #[error("only {MAX_PORTS} ports can be forwarded over one connection")]
    TooMany,
}

/// Each port has two channels, and a channel number is one byte.
const MAX_PORTS: usize = 127;

pub(super) fn parse(query: &str) -> Result<Vec<u16>, PortQueryError> {
    let mut ports = Vec::new();
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        if name != "port" {
            continue;
        }
        if value.is_empty() {
            return Err(PortQueryError::Empty);
        }
        for text in value.split(',') {
            ports.push(number(text).map_err(|variant| variant(value.clone().into_owned()))?);
        }
    }
    match ports.len() {
        0 => Err(PortQueryError::Missing),
        1..=MAX_PORTS => Ok(ports),
        _ => Err(PortQueryError::TooMany),
    }
}

/// Parses a port. The error is the variant to report.
pub(super) fn number(text: &str) -> Result<u16, fn(String) -> PortQueryError> {
    match text.parse() {
        Ok(0) => Err(PortQueryError::Zero),
        Ok(port) => Ok(port),
        Err(_) => Err(PortQueryError::NotANumber),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_repeated_and_comma_separated_ports() {
        assert_eq!(
            parse("port=80&port=443,8080&other=1"),
            Ok(vec![80, 443, 8080])
        );
    }

    #[test]
    fn invalid_ports_are_rejected() {
        assert_eq!(parse(""), Err(PortQueryError::Missing));
        assert_eq!(parse("port="), Err(PortQueryError::Empty));
        assert_eq!(
            parse("port=http"),
            Err(PortQueryError::NotANumber("http".to_owned()))
        );
        assert_eq!(
            parse("port=65536"),
            Err(PortQueryError::NotANumber("65536".to_owned()))
        );
        assert_eq!(parse("port=0"), Err(PortQueryError::Zero("0".to_owned())));
        let many = vec!["port=1"; 128].join("&");
        assert_eq!(parse(&many), Err(PortQueryError::TooMany));
    }
}
