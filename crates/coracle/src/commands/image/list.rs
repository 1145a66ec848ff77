//! `coracle image ls`.

use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use images::{ImageStore, ImageSummary};
use indicatif::HumanBytes;

/// Lists the store on standard output.
pub fn ls(store: &ImageStore, json: bool) -> anyhow::Result<()> {
    let images = store.list()?;
    let text = match json {
        true => format!("{}\n", serde_json::to_string_pretty(&images)?),
        false => table(&images, SystemTime::now()),
    };
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // `ls | head -1` closes the pipe early, which is no error.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => Ok(done?),
    }
}

fn table(images: &[ImageSummary], now: SystemTime) -> String {
    let mut rows = vec![["IMAGE", "DIGEST", "SIZE", "USED"].map(str::to_owned)];
    for image in images {
        let size = match image.complete {
            true => HumanBytes(image.size).to_string(),
            false => "incomplete".to_owned(),
        };
        let digest = format!("sha256:{}", &image.digest.hex()[..12]);
        rows.push([image.reference.clone(), digest, size, age(now, image.used)]);
    }
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let (name, size) = (width(0), width(2));
    let line = |row: &[String; 4]| {
        let [reference, digest, bytes, used] = row;
        format!("{reference:name$}  {digest:19}  {bytes:>size$}  {used}\n")
    };
    rows.iter().map(line).collect()
}

fn age(now: SystemTime, then: u64) -> String {
    let now = now
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    match now.saturating_sub(then) {
        seconds @ 0..120 => format!("{seconds} s ago"),
        seconds @ 120..7200 => format!("{} min ago", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h ago", seconds / 3600),
        seconds => format!("{} days ago", seconds / 86400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn columns_are_aligned() {
        let now = UNIX_EPOCH + Duration::from_secs(1_000_000);
        let row = |name: &str, size, used, complete| ImageSummary {
            reference: name.to_owned(),
            digest: images::Digest::from_hex(&"ab".repeat(32)).unwrap(),
            size,
            pulled: 0,
            used,
            complete,
        };
        let images = [
            row("docker.io/library/busybox:latest", 2 << 20, 999_999, true),
            row("a.example/b:1", 5, 600_000, true),
            row("a.example/c:1", 0, 990_000, false),
        ];
        assert_eq!(
            table(&images, now),
            "\
IMAGE                             DIGEST                     SIZE  USED
docker.io/library/busybox:latest  sha256:abababababab    2.00 MiB  1 s ago
a.example/b:1                     sha256:abababababab         5 B  4 days ago
a.example/c:1                     sha256:abababababab  incomplete  2 h ago
"
        );
    }
}
