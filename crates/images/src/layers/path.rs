//! Splits paths of archive entries into safe components.

/// The components of a path. None is empty, `.` or `..`, or contains a slash or a NUL byte. No components means the root
/// of the layer.
pub type PathComponents<'a> = Vec<&'a [u8]>;

/// Linux's PATH_MAX and NAME_MAX.
const MAX_PATH_LEN: usize = 4095;
const MAX_NAME_LEN: usize = 255;

/// Splits a path, relative to the root of the layer. `Err` is the reason for a rejection.
pub fn components(name: &[u8]) -> Result<PathComponents<'_>, &'static str> {
    if name.len() > MAX_PATH_LEN {
        return Err("its name is too long");
    }
    if name.contains(&0) {
        return Err("its name contains a NUL byte");
    }
    let mut components = Vec::new();
    for component in name.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." => {}
            // Like Go's path.Clean, but a path that leaves the root is an attack.
            b".." => {
                components
                    .pop()
                    .ok_or("its name leaves the layer by \"..\"")?;
            }
            name if name.len() > MAX_NAME_LEN => return Err("its name is too long"),
            name => components.push(name),
        }
    }
    Ok(components)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_split_or_rejected() {
        let good = |name: &str| -> Vec<String> {
            let parts = components(name.as_bytes()).unwrap().into_iter();
            parts
                .map(|part| String::from_utf8(part.to_vec()).unwrap())
                .collect()
        };
        assert_eq!(good("a/b"), ["a", "b"]);
        assert_eq!(good("./a//b/."), ["a", "b"]);
        assert_eq!(good("/etc/passwd"), ["etc", "passwd"]);
        assert_eq!(good("a/../b"), ["b"]);
        assert!(good("./").is_empty());
        assert!(good("").is_empty());
        for bad in ["..", "../a", "a/../../b", "/..", "a\0b"] {
            assert!(components(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(components(&[b'a'; 256]).is_err());
        assert!(components("a/".repeat(2100).as_bytes()).is_err());
    }

    proptest::proptest! {
        #[test]
        fn components_are_always_safe(name in proptest::collection::vec(
            proptest::sample::select(vec![&b"a"[..], b"b", b".", b"..", b"/", b"\0", b"\xff", b".wh."]), 0..24)) {
            let name = name.concat();
            if let Ok(components) = components(&name) {
                for component in &components {
                    proptest::prop_assert!(!component.is_empty());
                    proptest::prop_assert!(*component != b"." && *component != b"..");
                    proptest::prop_assert!(!component.contains(&b'/') && !component.contains(&0));
                }
                // The lexical meaning is unchanged.
                let mut expected = Vec::new();
                for part in name.split(|byte| *byte == b'/') {
                    match part {
                        b"" | b"." => {}
                        b".." => { expected.pop(); }
                        part => expected.push(part),
                    }
                }
                proptest::prop_assert_eq!(components, expected);
            }
        }
    }
}
