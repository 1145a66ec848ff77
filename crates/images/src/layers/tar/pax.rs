//! Pax extension headers: records of the form `LENGTH KEY=VALUE\n`.

use std::io;

use super::invalid;

/// The records for the next entry.
#[derive(Debug, Default)]
pub struct PaxRecords {
    pub path: Option<Vec<u8>>,
    pub link: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub uid: Option<u64>,
    pub gid: Option<u64>,
    pub mtime: Option<(i64, u32)>,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub sparse: PaxSparse,
}

/// GNU's records of a sparse file, versions 0.0, 0.1 and 1.0.
#[derive(Debug, Default)]
pub struct PaxSparse {
    pub name: Option<Vec<u8>>,
    pub major: Option<u64>,
    pub size: Option<u64>,
    /// Alternating offsets and lengths.
    pub map: Vec<u64>,
}

impl PaxRecords {
    pub fn parse(mut bytes: &[u8]) -> io::Result<PaxRecords> {
        let malformed = || invalid("a pax header is malformed");
        let mut records = PaxRecords::default();
        while !bytes.is_empty() {
            let space = bytes.iter().position(|byte| *byte == b' ');
            let space = space.filter(|at| *at <= 10).ok_or_else(malformed)?;
            let length = decimal(&bytes[..space])?;
            let length = usize::try_from(length).map_err(|_| malformed())?;
            if length <= space + 1 || length > bytes.len() || bytes[length - 1] != b'\n' {
                return Err(malformed());
            }
            let record = &bytes[space + 1..length - 1];
            let equals = record.iter().position(|byte| *byte == b'=');
            let (key, value) = record.split_at(equals.ok_or_else(malformed)?);
            records.set(key, &value[1..])?;
            bytes = &bytes[length..];
        }
        Ok(records)
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
            self.xattrs.push((name.to_vec(), value.to_vec()));
            return Ok(());
        }
        match key {
            // An empty value removes an earlier record.
            b"path" => self.path = text(value)?,
            b"linkpath" => self.link = text(value)?,
            b"size" => self.size = optional(value)?,
            b"uid" => self.uid = optional(value)?,
            b"gid" => self.gid = optional(value)?,
            b"mtime" => self.mtime = time(value)?,
            b"GNU.sparse.name" => self.sparse.name = text(value)?,
            b"GNU.sparse.major" => self.sparse.major = optional(value)?,
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => self.sparse.size = optional(value)?,
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => self.sparse.map.push(decimal(value)?),
            b"GNU.sparse.map" => {
                let numbers = value.split(|byte| *byte == b',');
                self.sparse.map = numbers
                    .filter(|number| !number.is_empty())
                    .map(decimal)
                    .collect::<io::Result<_>>()?;
            }
            _ => {}
        }
        Ok(())
    }
}

fn text(value: &[u8]) -> io::Result<Option<Vec<u8>>> {
    match value {
        b"" => Ok(None),
        value if value.contains(&0) => Err(invalid("a name contains a NUL byte")),
        value => Ok(Some(value.to_vec())),
    }
}

fn optional(value: &[u8]) -> io::Result<Option<u64>> {
    match value {
        b"" => Ok(None),
        value => decimal(value).map(Some),
    }
}

pub(super) fn decimal(value: &[u8]) -> io::Result<u64> {
    let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(value).ok().filter(|_| digits);
    text.and_then(|text| text.parse().ok())
        .ok_or_else(|| invalid("a number in a pax header is malformed"))
}

/// Seconds, optionally negative, optionally with a fraction.
fn time(value: &[u8]) -> io::Result<Option<(i64, u32)>> {
    let malformed = || invalid("a time in a pax header is malformed");
    let text = std::str::from_utf8(value).map_err(|_| malformed())?;
    if text.is_empty() {
        return Ok(None);
    }
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(malformed());
    }
    let seconds: i64 = whole.parse().map_err(|_| malformed())?;
    let nanoseconds: String = fraction
        .chars()
        .chain("000000000".chars())
        .take(9)
        .collect();
    let nanoseconds: u32 = nanoseconds.parse().map_err(|_| malformed())?;
    Ok(Some(match whole.starts_with('-') && nanoseconds > 0 {
        true => (seconds.saturating_sub(1), 1_000_000_000 - nanoseconds),
        false => (seconds, nanoseconds),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_parsed() {
        let records = PaxRecords::parse(&super::super::testing::records(&[
            ("path", b"a/b\nc d=e f"),
            ("size", b"100"),
            ("mtime", b"-1.25"),
            ("SCHILY.xattr.user.a", b"x\0y=z\n ab"),
        ]))
        .unwrap();
        assert_eq!(records.path.unwrap(), b"a/b\nc d=e f");
        assert_eq!(records.size, Some(100));
        assert_eq!(records.mtime, Some((-2, 750_000_000)));
        assert_eq!(records.xattrs[0].0, b"user.a");
    }

    #[test]
    fn malformed_records_are_rejected() {
        for bad in [
            &b"x"[..],
            b"5 a=b",
            b"99 a=b\n",
            b"0 a=b\n",
            b"3 \n",
            b"5 ab\n",
            b"-6 a=b\n",
            b"18446744073709551616 a=b\n",
            b"10 size=-1\n",
            b"11 path=a\0b\n",
            b"12 mtime=1x\n",
        ] {
            assert!(PaxRecords::parse(bad).is_err(), "{}", bad.escape_ascii());
        }
    }

    proptest::proptest! {
        #[test]
        fn parsing_never_panics(bytes: Vec<u8>) {
            let _ = PaxRecords::parse(&bytes);
        }
    }
}
