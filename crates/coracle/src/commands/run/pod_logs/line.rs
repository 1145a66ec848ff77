//! Splits logs into lines of bounded length, and makes them safe for a terminal.

/// A longer line is printed in pieces. Bounds the memory of each stream.
pub const MAX_LINE: usize = 16 * 1024;

/// A line, or a piece of a long one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinePiece {
    /// Without the line break.
    pub text: Vec<u8>,
    pub starts_line: bool,
    pub ends_line: bool,
}

/// Splits a stream of bytes into lines.
#[derive(Debug, Default)]
pub struct LineSplitter {
    partial: Vec<u8>,
    /// A piece of the current line was returned.
    in_line: bool,
}

impl LineSplitter {
    /// Appends bytes of the stream and passes complete pieces to `on_piece`.
    pub fn push(&mut self, mut bytes: &[u8], mut on_piece: impl FnMut(LinePiece)) {
        while !bytes.is_empty() {
            let room = MAX_LINE - self.partial.len();
            let end = bytes.iter().take(room).position(|&byte| byte == b'\n');
            let count = end.unwrap_or(bytes.len().min(room));
            self.partial.extend_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            if end.is_some() {
                bytes = &bytes[1..];
                on_piece(self.take(true));
            } else if self.partial.len() == MAX_LINE {
                on_piece(self.take(false));
            }
        }
    }

    /// The last line, if it has no line break.
    pub fn finish(mut self) -> Option<LinePiece> {
        (self.in_line || !self.partial.is_empty()).then(|| self.take(true))
    }

    fn take(&mut self, ends_line: bool) -> LinePiece {
        let piece = LinePiece {
            text: std::mem::take(&mut self.partial),
            starts_line: !self.in_line,
            ends_line,
        };
        self.in_line = !ends_line;
        piece
    }
}

/// Makes a line safe for a terminal: removes escape sequences, and replaces other control characters by their escapes. A carriage return
/// starts another line, as of a progress bar.
pub fn printable_lines(text: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(text);
    let text = text.trim_end_matches('\r');
    let mut lines = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\r' => lines.push(String::new()),
            '\x1b' => skip_escape_sequence(&mut chars),
            _ => {
                let Some(line) = lines.last_mut() else { break };
                if is_unsafe(c) {
                    line.extend(c.escape_default());
                } else {
                    line.push(c);
                }
            }
        }
    }
    let has_text = lines.iter().any(|line| !line.is_empty());
    lines.retain(|line| !has_text || !line.is_empty());
    lines.truncate(if has_text { usize::MAX } else { 1 });
    lines
}

/// Makes a text safe for a terminal, on one line.
pub fn printable(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    printable_lines(line.as_bytes()).join(" ")
}

/// Characters that move the cursor, change the terminal's state, or reorder text.
fn is_unsafe(c: char) -> bool {
    (c.is_control() && c != '\t')
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Skips the rest of a sequence after ESC: `[` up to a final byte, a string up to BEL or ESC, or one character.
fn skip_escape_sequence(chars: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    match chars.next() {
        Some('[') => while chars.next_if(|c| ('\x20'..='\x3f').contains(c)).is_some() {},
        Some(']' | 'P' | 'X' | '^' | '_') => {
            while chars.next_if(|&c| c != '\x07' && c != '\x1b').is_some() {}
            if chars.next() == Some('\x1b') {
                chars.next_if_eq(&'\\');
            }
            return;
        }
        _ => return,
    }
    // The final byte. Anything else is no part of the sequence.
    chars.next_if(|c| ('\x40'..='\x7e').contains(c));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_pods_becomes_one_safe_line() {
        let text = "probe failed:\x1b]52;c;Zm9v\x07 no\ncoracle-control: finished\r\x08";
        let line = printable(text);
        assert!(!line.chars().any(char::is_control), "{line:?}");
        assert!(line.starts_with("probe failed:"), "{line:?}");
    }

    fn split(text: &[u8], chunk: usize) -> Vec<LinePiece> {
        let mut splitter = LineSplitter::default();
        let mut pieces = Vec::new();
        for chunk in text.chunks(chunk) {
            splitter.push(chunk, |piece| pieces.push(piece));
            assert!(splitter.partial.len() < MAX_LINE);
        }
        pieces.extend(splitter.finish());
        pieces
    }

    #[test]
    fn lines_are_split_and_bounded() {
        let long = "x".repeat(MAX_LINE * 2 + 5);
        let text = format!("one\n\n{long}\nend");
        for chunk in [1, 7, MAX_LINE, MAX_LINE + 1, text.len()] {
            let pieces = split(text.as_bytes(), chunk);
            let lengths: Vec<_> = pieces
                .iter()
                .map(|piece| (piece.text.len(), piece.starts_line, piece.ends_line))
                .collect();
            assert_eq!(
                lengths,
                [
                    (3, true, true),
                    (0, true, true),
                    (MAX_LINE, true, false),
                    (MAX_LINE, false, false),
                    (5, false, true),
                    (3, true, true)
                ]
            );
        }
        let exact = format!("{}\n", "x".repeat(MAX_LINE));
        let joined: Vec<u8> = split(exact.as_bytes(), 100)
            .into_iter()
            .flat_map(|piece| piece.text)
            .collect();
        assert_eq!(joined.len(), MAX_LINE);
        assert_eq!(split(b"", 1), []);
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        for (text, expected) in [
            (&b"plain \xc3\xa9 \ttext"[..], &["plain é \ttext"][..]),
            (b"\x1b[1;32mgreen\x1b[0m", &["green"]),
            (b"\x1b]0;title\x07after", &["after"]),
            (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", &["link"]),
            (b"\x1bPdcs\x1b\\x", &["x"]),
            (b"\x1b[2J\x1b[Hcleared\x1bc", &["cleared"]),
            (b"bell\x07 back\x08", &["bell\\u{7} back\\u{8}"]),
            (b"c1 \xc2\x9b31m", &["c1 \\u{9b}31m"]),
            (b"\xff\xfe", &["\u{fffd}\u{fffd}"]),
            ("rtl \u{202e}x".as_bytes(), &["rtl \\u{202e}x"]),
            (b"10%\r20%\r100%\r", &["10%", "20%", "100%"]),
            (b"dos\r", &["dos"]),
            (b"", &[""]),
            (b"\r\r", &[""]),
            (b"\x1b", &[""]),
            (b"\x1b[31", &[""]),
        ] {
            assert_eq!(printable_lines(text), expected, "{text:?}");
        }
    }
}
