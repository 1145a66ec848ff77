//! Downloads one blob from one source.

use download::{DownloadError, DownloadEvent, DownloadFailure, FileSize};

use super::error::RegistryError;
use super::source::PullSource;
use crate::manifest::Descriptor;
use crate::progress::{PullEvent, PullProgress};
use crate::store::{Grant, PartialBlob};

/// Downloads the rest of `blob` into `partial`, and verifies it. Returns the grant under which the source sent each part.
pub async fn download(
    source: &PullSource,
    blob: &Descriptor,
    partial: &mut PartialBlob,
    progress: &dyn PullProgress,
) -> Result<Vec<Grant>, RegistryError> {
    let mut grants = Vec::new();
    let request = async |headers| {
        let sent = source.blob(blob.digest, &headers).await;
        let (response, grant) = sent.map_err(DownloadFailure::Request)?;
        grants.push(grant);
        Ok(response)
    };
    let (digest, size) = (blob.digest, FileSize::Exactly(blob.size));
    let report = |event| progress.event(pull_event(blob, event));
    match download::download(request, digest, size, &mut partial.file, report).await {
        Ok(()) => Ok(grants),
        Err(error) => Err(registry_error(source, blob, partial, error)),
    }
}

fn pull_event(blob: &Descriptor, event: DownloadEvent) -> PullEvent {
    let (blob, total) = (blob.digest, blob.size);
    match event {
        DownloadEvent::Begin { at, .. } => PullEvent::Begin { blob, at, total },
        DownloadEvent::Advance { at } => PullEvent::Advance { blob, at },
        DownloadEvent::Note(text) => PullEvent::Note { text },
    }
}

fn registry_error(
    source: &PullSource,
    blob: &Descriptor,
    partial: &PartialBlob,
    error: DownloadError<RegistryError>,
) -> RegistryError {
    let (subject, host) = (blob.digest.to_string(), source.host().to_owned());
    let detail = match error.failure {
        DownloadFailure::Request(error) => return error,
        DownloadFailure::Connection(cause) => return source.connection_error(error.tries, cause),
        DownloadFailure::File { source, .. } => return partial.write_error(source).into(),
        DownloadFailure::WrongDigest(got) => {
            let expected = blob.digest;
            return RegistryError::DigestMismatch {
                host,
                expected,
                got,
            };
        }
        DownloadFailure::Status(status) => format!("answered {status}"),
        DownloadFailure::AnotherRange => "sent another range".to_owned(),
        DownloadFailure::TooShort => "sent fewer bytes than the manifest says".to_owned(),
        DownloadFailure::TooLarge => "sent more bytes than the manifest says".to_owned(),
    };
    RegistryError::InvalidResponse {
        subject,
        host,
        detail,
    }
}
