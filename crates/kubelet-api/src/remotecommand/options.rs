//! The query parameters of exec and attach.

use crate::pod_source::RequestedStreams;

/// The streams and the command that a client requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteCommandOptions {
    pub(super) streams: RequestedStreams,
    pub(super) command: Vec<String>,
}

/// The client requests no stream; the message is upstream's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("you must specify at least 1 of stdin, stdout, stderr")]
pub(super) struct NoStreamRequested;

pub(super) fn parse(query: &str) -> Result<RemoteCommandOptions, NoStreamRequested> {
    let mut command = Vec::new();
    let (mut stdin, mut stdout, mut stderr, mut tty) = (None, None, None, None);
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        let flag = match &*name {
            "command" => {
                command.push(value.into_owned());
                continue;
            }
            "input" => &mut stdin,
            "output" => &mut stdout,
            "error" => &mut stderr,
            "tty" => &mut tty,
            _ => continue,
        };
        // Like upstream: only the first value counts, and only "1" is true.
        flag.get_or_insert(value == "1");
    }
    let [stdin, stdout, stderr, tty] = [stdin, stdout, stderr, tty].map(|flag| flag == Some(true));
    let streams = RequestedStreams {
        stdin,
        stdout,
        // A terminal merges stdout and stderr.
        stderr: stderr && !tty,
        tty,
    };
    if !(streams.stdin || streams.stdout || streams.stderr) {
        return Err(NoStreamRequested);
    }
    Ok(RemoteCommandOptions { streams, command })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_query_of_the_api_server() {
        let options = parse("command=sh&command=-c&command=echo+a%26b&error=1&input=1&output=1");
        let options = options.unwrap();
        assert_eq!(options.command, ["sh", "-c", "echo a&b"]);
        let streams = RequestedStreams {
            stdin: true,
            stdout: true,
            stderr: true,
            tty: false,
        };
        assert_eq!(options.streams, streams);
    }

    #[test]
    fn tty_disables_stderr() {
        let streams = parse("tty=1&error=1&output=1").unwrap().streams;
        assert!(streams.tty && streams.stdout && !streams.stderr);
        assert_eq!(parse("tty=1&error=1"), Err(NoStreamRequested));
    }

    #[test]
    fn only_the_value_one_is_true() {
        assert_eq!(parse("input=true&output=0&error="), Err(NoStreamRequested));
        assert_eq!(parse("output=0&output=1"), Err(NoStreamRequested));
    }
}
