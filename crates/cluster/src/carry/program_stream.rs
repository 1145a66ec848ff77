//! This program as a stream for a node's shell ([`super::script`] receives it).

use std::fs::File;
use std::io::{self, Read, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};
use tokio::process::ChildStdin;
use tokio::task::JoinHandle;

/// The stream consists of blocks of this size. `dd` reads exactly those, and leaves the rest of the pipe to the program. The last block is
/// filled with zeros, which gzip ignores.
pub const CARRY_BLOCK_SIZE: usize = 64 * 1024;

/// This program, compressed: `srun` sends it to each node in turn.
#[derive(Debug)]
pub struct ProgramStream {
    bytes: Vec<u8>,
    digest: String,
}

impl ProgramStream {
    /// The running program, even if its file was replaced or deleted.
    pub async fn of_this_program() -> io::Result<Self> {
        tokio::task::spawn_blocking(|| Self::compress(File::open("/proc/self/exe")?)).await?
    }

    pub(super) fn compress(mut program: impl Read) -> io::Result<Self> {
        let mut hasher = Sha256::new();
        let mut compressed = GzEncoder::new(Vec::new(), Compression::fast());
        let mut block = vec![0; CARRY_BLOCK_SIZE];
        loop {
            let read = program.read(&mut block)?;
            if read == 0 {
                break;
            }
            hasher.update(&block[..read]);
            compressed.write_all(&block[..read])?;
        }
        let mut bytes = compressed.finish()?;
        bytes.resize(bytes.len().next_multiple_of(CARRY_BLOCK_SIZE), 0);
        Ok(Self {
            bytes,
            digest: hasher
                .finalize()
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect(),
        })
    }

    /// The number of blocks in the stream.
    pub fn blocks(&self) -> usize {
        self.bytes.len() / CARRY_BLOCK_SIZE
    }

    /// The SHA-256 digest of the program, in hexadecimal.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The blocks.
    #[cfg(test)]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Writes the stream, and then `rest`, to the standard input of `srun`, in the background.
    pub fn send(
        self,
        stdin: Option<ChildStdin>,
        rest: impl FnOnce(&mut File) -> io::Result<()> + Send + 'static,
    ) -> JoinHandle<io::Result<()>> {
        tokio::task::spawn_blocking(move || {
            let stdin = stdin.ok_or_else(|| io::Error::other("no pipe to srun"))?;
            let mut pipe = File::from(stdin.into_owned_fd()?);
            pipe.write_all(&self.bytes)?;
            rest(&mut pipe)
        })
    }
}
