//! `coracle internal image-pull`: one pull for a pod, in a process of its own, so that what TLS and
//! decompression need is given back when it ends. A request comes as one line of JSON on standard input;
//! progress and the result go as lines of JSON to standard output.

use std::io::{self, BufRead, Write};
use std::process::ExitCode;

use anyhow::Context;
use images::protocol::{PullCommand, PullOutput};
use images::{ImageError, ImageStore, Layers, PullEvent, PullProgress, RegistryConfig};

use crate::exit;
use crate::settings::image_limits;

/// Pulls and unpacks one image.
pub async fn main() -> anyhow::Result<ExitCode> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    let command: PullCommand = serde_json::from_str(&line).context("the request is malformed")?;
    drop(line);
    let (last, code) = match pull(&command).await {
        Ok(image) => (PullOutput::Done(Box::new(image)), 0),
        Err(failed) => (failed, 1),
    };
    write(&last)?;
    Ok(exit::code(code))
}

async fn pull(command: &PullCommand) -> Result<images::LocalImage, PullOutput> {
    let failed = |reason: &str, error: &(dyn std::error::Error + 'static)| PullOutput::Failed {
        reason: reason.to_owned(),
        message: images::error_chain(error),
    };
    let here = |error: &(dyn std::error::Error + 'static)| failed("ErrImagePull", error);
    let store = ImageStore::open(&command.store).map_err(|error| here(&error))?;
    let layers = Layers::open(&command.layers).map_err(|error| here(&error))?;
    let config = RegistryConfig::from_environment().map_err(|error| here(&error))?;
    let limits = image_limits::from_environment().map_err(|error| here(error.as_ref()))?;
    let layers = layers.with_limits(limits);
    images::ensure(&store, &layers, &command.request, &config, &Lines)
        .await
        .map_err(|error: ImageError| failed(error.reason(), &error))
}

/// Progress as lines.
struct Lines;

impl PullProgress for Lines {
    fn event(&self, event: PullEvent) {
        if write(&PullOutput::Progress(event)).is_err() {
            // Whoever wanted the image is gone. What was downloaded stays for the next.
            std::process::exit(1);
        }
    }
}

fn write(line: &PullOutput) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&text)?;
    out.flush()
}
