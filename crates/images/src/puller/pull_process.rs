//! One image pull, in a separate process, so that its memory (TLS, decompression) is freed when it exits.
//!
//! A fork server of the sandbox forks it. The request is one line of JSON; progress and the result are lines of JSON.

use std::io::{self, BufRead, Write};
use std::sync::Mutex;

use download::error_chain;

use super::protocol::{PullCommand, PullFailure, PullOutput};
use crate::layers::Layers;
use crate::progress::{PullEvent, PullProgress};
use crate::pull::{LocalImage, ensure};
use crate::registry::RegistryConfig;
use crate::store::ImageStore;

/// Reads a request, pulls and unpacks its image, and writes the result.
pub(super) async fn run(mut input: impl BufRead, output: impl Write + Send) -> io::Result<()> {
    let mut line = String::new();
    input.read_line(&mut line)?;
    let command: PullCommand = serde_json::from_str(&line)?;
    drop(line);
    let lines = PullOutputLines(Mutex::new(output));
    let last = match pull(&command, &lines).await {
        Ok(image) => PullOutput::Done(Box::new(image)),
        Err(failure) => PullOutput::Failed(failure),
    };
    lines.write(&last)
}

async fn pull(
    command: &PullCommand,
    progress: &dyn PullProgress,
) -> Result<LocalImage, PullFailure> {
    let store = ImageStore::open(&command.store).map_err(|error| PullFailure::local(&error))?;
    let layers = Layers::open(&command.layers).map_err(|error| PullFailure::local(&error))?;
    let config = RegistryConfig::from_environment().map_err(|error| PullFailure::local(&error))?;
    let layers = layers.with_limits(command.limits);
    let image = ensure(&store, &layers, &command.request, &config, progress).await;
    image.map_err(|error| PullFailure {
        reason: error.reason().to_owned(),
        message: error_chain(&error),
    })
}

/// Writes progress and the result as lines of JSON.
struct PullOutputLines<W>(Mutex<W>);

impl<W: Write> PullOutputLines<W> {
    fn write(&self, line: &PullOutput) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        let mut output = self.0.lock().unwrap();
        output.write_all(&text)?;
        output.flush()
    }
}

impl<W: Write + Send> PullProgress for PullOutputLines<W> {
    fn event(&self, event: PullEvent) {
        if self.write(&PullOutput::Progress(event)).is_err() {
            // The sandbox has exited or dropped the pull. Downloaded blobs stay for the next pull.
            std::process::exit(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::layers::ImageLimits;

    fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        for (name, content) in files {
            let mut header = tar::Header::new_ustar();
            header.set_size(content.len() as u64);
            header.set_mode(0o755);
            tar.append_data(&mut header, name, *content).unwrap();
        }
        tar.into_inner().unwrap()
    }

    /// Puts an image with one file into a store.
    fn load(store: &Path, name: &str) {
        let layer = tar(&[("bin/app", b"one")]);
        let digest = download::Digest::of(&layer);
        let config = json!({"os": "linux", "config": {"Cmd": ["/bin/app"]},
            "rootfs": {"type": "layers", "diff_ids": [digest.to_string()]}});
        let list = json!([{"Config": "c.json", "RepoTags": [name], "Layers": ["layer.tar"]}]);
        let archive = tar(&[
            ("layer.tar", &layer),
            ("c.json", config.to_string().as_bytes()),
            ("manifest.json", list.to_string().as_bytes()),
        ]);
        let store = ImageStore::open(store).unwrap();
        crate::archive::load(&store, &archive[..], None, ImageLimits::default()).unwrap();
    }

    #[tokio::test]
    async fn result_is_the_last_line() {
        let home = tempfile::tempdir().unwrap();
        let [store, layers] = ["images", "layers"].map(|name| home.path().join(name));
        load(&store, "app:1");
        let pull = async |name: &str| {
            let request = json!({"store": store, "layers": layers, "limits": ImageLimits::default(),
                "request": {"reference": name, "policy": "Never"}});
            let mut output = Vec::new();
            run(request.to_string().as_bytes(), &mut output)
                .await
                .unwrap();
            let lines = output.split(|byte| *byte == b'\n');
            let lines = lines.filter(|line| !line.is_empty());
            let lines = lines.map(|line| serde_json::from_slice::<Value>(line).unwrap());
            lines.collect::<Vec<_>>()
        };
        let lines = pull("app:1").await;
        assert_eq!(lines[0]["event"], "unpacking");
        let done = lines.last().unwrap();
        assert_eq!(done["type"], "done");
        assert_eq!(done["config"]["cmd"][0], "/bin/app");
        let layer = Path::new(done["layers"][0].as_str().unwrap());
        assert_eq!(std::fs::read(layer.join("bin/app")).unwrap(), b"one");
        let lines = pull("app:2").await;
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0]["reason"], "ErrImageNeverPull");
        let mut output = Vec::new();
        let malformed = run(&b"{"[..], &mut output).await;
        assert!(malformed.is_err() && output.is_empty());
    }
}
