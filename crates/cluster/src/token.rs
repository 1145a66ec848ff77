//! Random tokens.

/// 256 random bits, as text.
pub fn generate() -> anyhow::Result<String> {
    let mut bytes = [0; 32];
    let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    anyhow::ensure!(count == bytes.len(), "the kernel gave too few random bytes");
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Compares two tokens in constant time.
pub fn equal(a: &str, b: &str) -> bool {
    a.len() == b.len()
        && a.bytes()
            .zip(b.bytes())
            .fold(0, |diff, (x, y)| diff | (x ^ y))
            == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_differ_and_compare() {
        let (a, b) = (generate().unwrap(), generate().unwrap());
        assert!(equal(&a, &a) && !equal(&a, &b) && !equal(&a, &a[1..]));
    }
}
