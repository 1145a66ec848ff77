//! The images of one sandbox: pulled on request, remembered, and held so that garbage collection does not remove their layers.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

use super::protocol::{PullCommand, PullFailure, PullOutput};
use super::{ImagePuller, PullProcess};
use crate::layers::{ImageLimits, LayerHolds};
use crate::pull::{LocalImage, PullPolicy, PullRequest};

/// Pulls of an image whose layers are removed before they are held.
const MAX_PULLS: u32 = 3;

/// The images that a sandbox uses.
#[derive(Debug)]
pub struct HeldImages {
    puller: ImagePuller,
    store: PathBuf,
    layers: PathBuf,
    /// The images, by the name in the request, so that a restarted container does not need another pull.
    present: RefCell<HashMap<String, LocalImage>>,
    /// Holds on the layers of these images.
    holds: LayerHolds,
}

/// An image is not available.
#[derive(Debug)]
pub enum HeldImageError {
    /// All fork servers were killed, so this process cannot pull any more.
    NoForkServer,
    /// The image cannot be pulled.
    Failed(PullFailure),
}

impl From<PullFailure> for HeldImageError {
    fn from(failure: PullFailure) -> Self {
        Self::Failed(failure)
    }
}

impl HeldImages {
    /// No images yet. They are stored in the directory `store` and unpacked in the directory `layers`.
    pub fn new(puller: ImagePuller, store: PathBuf, layers: PathBuf) -> Self {
        Self {
            puller,
            store,
            holds: LayerHolds::new(layers.clone()),
            layers,
            present: RefCell::default(),
        }
    }

    /// Makes an image ready to run, and holds its layers.
    pub async fn ensure(
        &self,
        request: PullRequest,
        limits: ImageLimits,
    ) -> Result<LocalImage, HeldImageError> {
        let present = self.present.borrow().get(&request.reference).cloned();
        if let (Some(image), PullPolicy::IfNotPresent | PullPolicy::Never) =
            (present, request.policy)
        {
            return Ok(image);
        }
        let command = PullCommand {
            store: self.store.clone(),
            layers: self.layers.clone(),
            limits,
            request,
        };
        let image = self.pull_and_hold(&command).await?;
        let mut present = image.clone();
        present.pulled = false;
        let name = command.request.reference;
        self.present.borrow_mut().insert(name, present);
        Ok(image)
    }

    async fn pull_and_hold(&self, command: &PullCommand) -> Result<LocalImage, HeldImageError> {
        let mut pulls = 0;
        loop {
            let image = self.pull(command).await?;
            pulls += 1;
            match self.holds.hold(&image.layers).await {
                Ok(()) => return Ok(image),
                // Garbage collection removed a layer after the pull.
                Err(error) if pulls < MAX_PULLS => {
                    tracing::debug!(%error, "a layer was removed after the pull; pulling again")
                }
                Err(error) => return Err(PullFailure::local(&error).into()),
            }
        }
    }

    async fn pull(&self, command: &PullCommand) -> Result<LocalImage, HeldImageError> {
        let process = self.puller.start().await.map_err(|error| {
            if error.kind() == io::ErrorKind::BrokenPipe {
                return HeldImageError::NoForkServer;
            }
            let message = format!("cannot start a process for the pull: {error}");
            PullFailure::pull_error(message).into()
        })?;
        match run_command(process, command).await {
            Ok(Some(PullOutput::Done(image))) => Ok(*image),
            Ok(Some(PullOutput::Failed(failure))) => Err(failure.into()),
            Ok(Some(PullOutput::Progress(_)) | None) => {
                let message = "the process of the pull exited without a result".to_owned();
                Err(PullFailure::pull_error(message).into())
            }
            Err(error) => Err(PullFailure::local(&error).into()),
        }
    }
}

/// Sends a command to the process of a pull, and returns the last line that it writes.
async fn run_command(
    mut process: PullProcess,
    command: &PullCommand,
) -> io::Result<Option<PullOutput>> {
    let mut line = serde_json::to_string(command)?;
    line.push('\n');
    process.input.write_all(line.as_bytes()).await?;
    let mut lines = BufReader::new(&mut process.output).lines();
    let mut last = None;
    while let Some(line) = lines.next_line().await? {
        last = Some(serde_json::from_str(&line)?);
    }
    Ok(last)
}
