//! Builds archives for tests byte by byte: tar libraries refuse to write hostile ones.

/// Builds a tar archive.
pub struct TarBuilder {
    bytes: Vec<u8>,
    owner: (u64, u64),
}

impl TarBuilder {
    pub fn new() -> Self {
        TarBuilder {
            bytes: Vec::new(),
            owner: (0, 0),
        }
    }

    /// Sets the owner of all later entries.
    pub fn owned_by(self, uid: u64, gid: u64) -> Self {
        TarBuilder {
            owner: (uid, gid),
            ..self
        }
    }

    pub fn file(self, name: &str, mode: u32, content: &[u8]) -> Self {
        self.entry(b'0', name, mode, content.len() as u64, "", (0, 0), content)
    }

    /// A file whose header has another size than its content.
    pub fn sized(self, name: &str, size: u64, content: &[u8]) -> Self {
        self.entry(b'0', name, 0o644, size, "", (0, 0), content)
    }

    pub fn directory(self, name: &str, mode: u32) -> Self {
        self.entry(b'5', name, mode, 0, "", (0, 0), b"")
    }

    pub fn symlink(self, name: &str, target: &str) -> Self {
        self.entry(b'2', name, 0o777, 0, target, (0, 0), b"")
    }

    pub fn hard_link(self, name: &str, target: &str) -> Self {
        self.entry(b'1', name, 0o644, 0, target, (0, 0), b"")
    }

    pub fn fifo(self, name: &str, mode: u32) -> Self {
        self.entry(b'6', name, mode, 0, "", (0, 0), b"")
    }

    pub fn device(self, name: &str, kind: u8, major: u32, minor: u32) -> Self {
        self.entry(kind, name, 0o666, 0, "", (major, minor), b"")
    }

    pub fn gnu_long_name(self, name: &str) -> Self {
        self.extension(b'L', &[name.as_bytes(), b"\0"].concat())
    }

    pub fn gnu_long_link(self, name: &str) -> Self {
        self.extension(b'K', &[name.as_bytes(), b"\0"].concat())
    }

    pub fn global(self, content: &[u8]) -> Self {
        self.extension(b'g', content)
    }

    /// Pax records for the next entry.
    pub fn pax(self, records: &[(&str, &[u8])]) -> Self {
        self.extension(b'x', &self::records(records))
    }

    fn extension(self, kind: u8, content: &[u8]) -> Self {
        self.entry(
            kind,
            "ext",
            0o644,
            content.len() as u64,
            "",
            (0, 0),
            content,
        )
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of a header")]
    fn entry(
        mut self,
        kind: u8,
        name: &str,
        mode: u32,
        size: u64,
        link: &str,
        device: (u32, u32),
        content: &[u8],
    ) -> Self {
        let mut header = [0; 512];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &name.as_bytes()[..name.len().min(100)]);
        put(100, format!("{mode:07o}").as_bytes());
        put(108, &number(self.owner.0, 8));
        put(116, &number(self.owner.1, 8));
        put(124, &number(size, 12));
        put(136, &number(1_700_000_000, 12));
        put(148, b"        ");
        put(156, &[kind]);
        put(157, &link.as_bytes()[..link.len().min(100)]);
        put(257, b"ustar\x0000");
        put(329, &number(device.0.into(), 8));
        put(337, &number(device.1.into(), 8));
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.bytes.extend(header);
        self.bytes.extend(content);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self
    }

    pub fn finish(mut self) -> Vec<u8> {
        self.bytes.extend([0; 1024]);
        self.bytes
    }
}

/// Octal, or base-256 if the number is too long.
fn number(value: u64, width: usize) -> Vec<u8> {
    let octal = format!("{value:0width$o}", width = width - 1);
    match octal.len() < width {
        true => octal.into_bytes(),
        false => {
            let bytes = value.to_be_bytes();
            let mut field = vec![0; width.saturating_sub(8)];
            field.extend(&bytes[8usize.saturating_sub(width)..]);
            field[0] |= 0x80;
            field
        }
    }
}

/// Encodes pax records, each with its length in front.
pub fn records(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut all = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let digits = (rest + rest.to_string().len()).to_string().len();
        all.extend(format!("{} {key}=", rest + digits).as_bytes());
        all.extend(*value);
        all.push(b'\n');
    }
    all
}
