//! `fieldRef`: fields of the pod.

use std::collections::BTreeMap;
use std::fmt::Write;

use k8s_openapi::api::core::v1::Pod;

use super::ContentError;

/// The value of a field that volumes and environment variables both support.
pub fn field(pod: &Pod, path: &str) -> Result<String, ContentError> {
    let metadata = &pod.metadata;
    if let Some((path_of_map, key)) = subscript(path) {
        let map = match path_of_map {
            "metadata.annotations" => &metadata.annotations,
            "metadata.labels" => &metadata.labels,
            _ => return Err(ContentError::UnsupportedSubscript(path.to_owned())),
        };
        return Ok(map
            .as_ref()
            .and_then(|map| map.get(key))
            .cloned()
            .unwrap_or_default());
    }
    let text = match path {
        "metadata.annotations" => {
            return Ok(format_map(metadata.annotations.iter().flatten()));
        }
        "metadata.labels" => return Ok(format_map(metadata.labels.iter().flatten())),
        "metadata.name" => &metadata.name,
        "metadata.namespace" => &metadata.namespace,
        "metadata.uid" => &metadata.uid,
        _ => return Err(ContentError::UnsupportedField(path.to_owned())),
    };
    Ok(text.clone().unwrap_or_default())
}

/// `metadata.labels['a']` → (`metadata.labels`, `a`).
fn subscript(path: &str) -> Option<(&str, &str)> {
    let (path, key) = path.strip_suffix("']")?.split_once("['")?;
    (!path.is_empty()).then_some((path, key))
}

/// One line per entry, `key="value"`, sorted by key, without a trailing newline.
pub fn format_map<'a>(map: impl IntoIterator<Item = (&'a String, &'a String)>) -> String {
    let sorted: BTreeMap<_, _> = map.into_iter().collect();
    let mut text = String::new();
    for (key, value) in sorted {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(key);
        text.push('=');
        quote(&mut text, value);
    }
    text
}

/// Like Go's strconv.Quote, since programs parse these files by Go's rules.
fn quote(text: &mut String, value: &str) {
    text.push('"');
    for c in value.chars() {
        match c {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\x07' => text.push_str("\\a"),
            '\x08' => text.push_str("\\b"),
            '\x0c' => text.push_str("\\f"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\x0b' => text.push_str("\\v"),
            // Writing to a String never fails.
            '\0'..' ' | '\x7f' => _ = write!(text, "\\x{:02x}", u32::from(c)),
            c if printable(c) => text.push(c),
            c if u32::from(c) < 0x1_0000 => _ = write!(text, "\\u{:04x}", u32::from(c)),
            c => _ = write!(text, "\\U{:08x}", u32::from(c)),
        }
    }
    text.push('"');
}

/// Approximates Go's unicode.IsPrint: Rust's Debug escapes the same characters, except for combining marks.
fn printable(c: char) -> bool {
    c == ' ' || !(c.is_control() || c.is_whitespace() || is_escaped_by_debug(c))
}

fn is_escaped_by_debug(c: char) -> bool {
    let mut escaped = c.escape_debug();
    let first = escaped.next();
    // Debug escapes combining marks at the start of a string; Go prints them.
    first == Some('\\') && c != '\'' && !is_mark(c)
}

/// Combining marks of the common Unicode blocks.
fn is_mark(c: char) -> bool {
    matches!(u32::from(c),
        0x0300..=0x036f | 0x0483..=0x0489 | 0x0591..=0x05c7 | 0x0610..=0x061a | 0x064b..=0x065f | 0x1ab0..=0x1aff
        | 0x1dc0..=0x1dff | 0x20d0..=0x20f0 | 0xfe00..=0xfe0f | 0xfe20..=0xfe2f)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Pod {
        let mut pod = Pod::default();
        pod.metadata.name = Some("web".to_owned());
        pod.metadata.namespace = Some("shop".to_owned());
        pod.metadata.uid = Some("1-2-3".to_owned());
        let text = |s: &str| s.to_owned();
        pod.metadata.labels = Some(BTreeMap::from([
            (text("b"), text("two")),
            (text("a"), text("one")),
        ]));
        pod.metadata.annotations = Some(BTreeMap::from([(
            text("odd"),
            text("q\"b\\n\nt\tß\u{1}\u{7f}é世\u{2028}\u{feff}e\u{301}'\u{ad}😀\u{e000}"),
        )]));
        pod
    }

    #[test]
    fn field_values_and_errors() {
        let pod = pod();
        let value = |path| field(&pod, path).map_err(|error| error.to_string());
        insta::assert_debug_snapshot!([
            value("metadata.name"),
            value("metadata.namespace"),
            value("metadata.uid"),
            value("metadata.labels"),
            value("metadata.labels['a']"),
            value("metadata.labels['none']"),
            value("metadata.annotations"),
            value("metadata.name['x']"),
            value("spec.nodeName"),
        ]);
    }

    #[test]
    fn maps_are_quoted_like_go() {
        // The output of Go's strconv.Quote for the same text.
        assert_eq!(
            field(&pod(), "metadata.annotations").unwrap(),
            "odd=\"q\\\"b\\\\n\\nt\\tß\\x01\\x7fé世\\u2028\\ufeffe\u{301}'\\u00ad😀\\ue000\""
        );
    }
}
