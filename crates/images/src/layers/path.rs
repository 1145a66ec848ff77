//! Names in an archive, made harmless.

/// The components of a name: none is empty, `.`, `..` or holds a slash or a zero byte. No component at
/// all is the root of the layer.
pub type Components<'a> = Vec<&'a [u8]>;

/// Longer names can't be used on Linux.
const LONGEST_PATH: usize = 4095;
const LONGEST_NAME: usize = 255;

/// Takes a name apart, as if the root of the layer were the root of the file system. `Err` says why it
/// can't be used.
pub fn components(name: &[u8]) -> Result<Components<'_>, &'static str> {
    if name.len() > LONGEST_PATH {
        return Err("its name is too long");
    }
    if name.contains(&0) {
        return Err("its name holds a zero byte");
    }
    let mut components = Vec::new();
    for component in name.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." => {}
            // Go's Clean does the same; what would leave the root is an attack.
            b".." => {
                components
                    .pop()
                    .ok_or("its name leads out of the layer by \"..\"")?;
            }
            name if name.len() > LONGEST_NAME => return Err("its name is too long"),
            name => components.push(name),
        }
    }
    Ok(components)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
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
        fn what_comes_out_is_harmless(name in proptest::collection::vec(
            proptest::sample::select(vec![&b"a"[..], b"b", b".", b"..", b"/", b"\0", b"\xff", b".wh."]), 0..24)) {
            let name = name.concat();
            if let Ok(components) = components(&name) {
                for component in &components {
                    proptest::prop_assert!(!component.is_empty());
                    proptest::prop_assert!(*component != b"." && *component != b"..");
                    proptest::prop_assert!(!component.contains(&b'/') && !component.contains(&0));
                }
                // The lexical meaning is kept: what a shell would find from the root.
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
