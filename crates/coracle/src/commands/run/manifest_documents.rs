//! Splits a manifest file into its documents, as kubectl does, and parses them.

use serde_json::Value;
use serde_saphyr::{DuplicateKeyPolicy, Options};

/// A document of a manifest file.
#[derive(Debug, PartialEq)]
pub struct ManifestDocument {
    /// The line at which it begins.
    pub line: usize,
    /// Its contents.
    pub value: Value,
}

/// A file that cannot be parsed.
#[derive(Debug, PartialEq)]
pub struct SyntaxError {
    /// The line of the problem.
    pub line: usize,
    /// The problem.
    pub problem: String,
}

/// Parses the documents of a file; empty ones are skipped. A file that begins with a brace is JSON, or several JSON objects.
pub fn parse(text: &str) -> Result<Vec<ManifestDocument>, SyntaxError> {
    if text.trim_start().starts_with('{')
        && let Some(documents) = parse_json(text)
    {
        return Ok(documents);
    }
    let mut documents = Vec::new();
    for (before, text) in split_yaml(text)? {
        let value = parse_yaml(&text).map_err(|error| SyntaxError {
            line: before + error.line,
            ..error
        })?;
        if !value.is_null() {
            let blank = text.lines().take_while(|line| is_blank(line)).count();
            let line = before + blank + 1;
            documents.push(ManifestDocument { line, value });
        }
    }
    Ok(documents)
}

fn is_blank(line: &str) -> bool {
    let line = line.trim();
    line.is_empty() || line.starts_with('#')
}

/// `None` if it is not JSON: it may be YAML with braces.
fn parse_json(text: &str) -> Option<Vec<ManifestDocument>> {
    let mut documents = Vec::new();
    let mut stream = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    loop {
        let rest = &text[stream.byte_offset()..];
        let blank = rest.len() - rest.trim_start().len();
        let begin = stream.byte_offset() + blank;
        let line = 1 + text[..begin].matches('\n').count();
        match stream.next() {
            Some(Ok(value)) => documents.push(ManifestDocument { line, value }),
            Some(Err(_)) => return None,
            None => return Some(documents),
        }
    }
}

/// Splits at lines that begin with `---`, like kubectl's YAML reader. Returns each part with the number of lines before it.
fn split_yaml(text: &str) -> Result<Vec<(usize, String)>, SyntaxError> {
    let mut parts = vec![(0, String::new())];
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        match line.strip_prefix("---") {
            Some(rest) => {
                let rest = rest.trim();
                if !rest.is_empty() && !rest.starts_with('#') {
                    return Err(SyntaxError {
                        line: number,
                        problem: format!("invalid document separator {line:?}"),
                    });
                }
                parts.push((number, String::new()));
            }
            None => {
                if let Some((_, part)) = parts.last_mut() {
                    part.push_str(line);
                    part.push('\n');
                }
            }
        }
    }
    Ok(parts)
}

fn parse_yaml(text: &str) -> Result<Value, SyntaxError> {
    // Lenient where kubectl is: it decides about everything but syntax and structure.
    let mut options = Options::default();
    options.duplicate_keys = DuplicateKeyPolicy::LastWins;
    options.legacy_octal_numbers = true;
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let error = error.without_snippet();
        let line = error.location().map_or(1, |location| location.line());
        let message = error.to_string();
        SyntaxError {
            line: usize::try_from(line).unwrap_or(1),
            problem: without_position(message.lines().next().unwrap_or_default()),
        }
    })
}

/// Removes `at line 1, column 7`, which counts from the start of the document.
fn without_position(message: &str) -> String {
    let end = message.rfind(" at line ").unwrap_or(message.len());
    message[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        let documents = parse(text).unwrap();
        documents.iter().map(|document| document.line).collect()
    }

    #[test]
    fn documents_are_split_like_kubectl_does() {
        assert_eq!(
            lines("a: 1\n---\n# only a comment\n--- # next\n\nb: 2\n---\n"),
            [1, 6]
        );
        assert_eq!(lines("---\na: 1\n"), [2]);
        assert_eq!(lines("# x\n"), [0; 0]);
        assert_eq!(lines("\n{\"a\": 1}\n{\"b\":\n2}\n"), [2, 3]);
        assert_eq!(lines("{a: 1, b: [x, y]}\n---\nc: 3\n"), [1, 3]);
        // Not at the beginning of a line.
        assert_eq!(lines("script: |\n  ---\n  echo\n"), [1]);
    }

    #[test]
    fn kubectls_leniency_is_kept() {
        let text = "a: 1\na: 2\nmode: 0755\nb: yes\nbase: &x {c: 1}\nd: {<<: *x}\nempty:\n";
        let documents = parse(text).unwrap();
        assert_eq!(documents[0].value["a"], 2);
        assert_eq!(documents[0].value["d"]["c"], 1);
    }

    #[test]
    fn line_of_a_syntax_error_is_named() {
        let error = |text: &str| {
            let error = parse(text).unwrap_err();
            (error.line, error.problem)
        };
        assert_eq!(error("a: 1\n---\nb: [1\nc: 2\n").0, 4);
        assert_eq!(
            error("a: 1\n---x\n"),
            (2, "invalid document separator \"---x\"".to_owned())
        );
    }
}
