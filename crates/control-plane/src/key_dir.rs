//! A directory with the CAs and the service account key of a cluster that is started more than once.
//!
//! ```text
//! DIR/                      0700
//! DIR/CA.crt, DIR/CA.key    0600; one pair for each CA
//! DIR/service-account.key   0600
//! ```
//!
//! The directory is created under a temporary name and then renamed, so it is never incomplete.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::KeyPair;

use crate::pki::{CertificateAuthority, ClusterPki, PkiError};
use crate::private_file::{create_private_dir, open_private_dir, read_private, write_private};

/// Lifetime of the CAs in a new directory.
const CA_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The file with the service account key.
const SERVICE_ACCOUNT: &str = "service-account.key";

/// Where the CAs and the service account key of a cluster come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClusterKeys {
    /// Generated in memory, for one cluster.
    Generated,
    /// Loaded from this directory; generated there first if it is missing or empty.
    Directory(PathBuf),
}

/// The keys of a cluster cannot be loaded or generated.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// Key generation failed.
    #[error(transparent)]
    Generate(#[from] PkiError),
    /// A file cannot be read or written, or another user may access it.
    #[error("cannot use the keys in {}", .dir.display())]
    Files {
        /// The directory.
        dir: PathBuf,
        /// The cause, with the path.
        source: io::Error,
    },
    /// A file is damaged, or a certificate has expired.
    #[error("cannot use {}: {reason}", .path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
}

impl ClusterPki {
    /// Loads or generates the keys. Certificates that they sign are valid for `lifetime`, but not longer than their CA.
    pub fn open(keys: &ClusterKeys, lifetime: Duration) -> Result<ClusterPki, KeysError> {
        let dir = match keys {
            ClusterKeys::Generated => return Ok(ClusterPki::new(lifetime)?),
            ClusterKeys::Directory(dir) => dir,
        };
        let failed = |source| KeysError::Files {
            dir: dir.clone(),
            source,
        };
        if is_missing_or_empty(dir).map_err(failed)? {
            let new = ClusterPki::new(CA_LIFETIME)?;
            save(&new, dir).map_err(failed)?;
        }
        open_private_dir(dir).map_err(failed)?;
        load(dir, lifetime)
    }
}

fn is_missing_or_empty(dir: &Path) -> io::Result<bool> {
    match std::fs::read_dir(dir) {
        Ok(mut entries) => Ok(entries.next().is_none()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}

fn save(pki: &ClusterPki, dir: &Path) -> io::Result<()> {
    let parent = match dir.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    create_private_dir(parent)?;
    let new = tempfile::Builder::new()
        .prefix(".new-keys-")
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in(parent)?;
    for (name, authority) in pki.authorities() {
        let path = |suffix: &str| new.path().join(format!("{name}.{suffix}"));
        write_private(&path("crt"), authority.cert_pem())?;
        write_private(&path("key"), &authority.key_pem())?;
    }
    let key = pki.service_account().serialize_pem();
    write_private(&new.path().join(SERVICE_ACCOUNT), &key)?;
    match std::fs::rename(new.path(), dir) {
        // Another process has created the directory first. The caller loads its keys.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists
            ) =>
        {
            return Ok(());
        }
        renamed => renamed?,
    }
    File::open(parent)?.sync_all()
}

fn load(dir: &Path, lifetime: Duration) -> Result<ClusterPki, KeysError> {
    let read = |name: &str| {
        let content = read_private(&dir.join(name));
        content.map_err(|source| KeysError::Files {
            dir: dir.to_owned(),
            source,
        })
    };
    let invalid = |name: &str| {
        let path = dir.join(name);
        move |reason: String| KeysError::Invalid { path, reason }
    };
    let authority = |name: &str| {
        let (cert, key) = (format!("{name}.crt"), format!("{name}.key"));
        let loaded = CertificateAuthority::from_pem(&read(&cert)?, &read(&key)?, lifetime);
        loaded.map_err(invalid(&cert))
    };
    let service_account = KeyPair::from_pem(&read(SERVICE_ACCOUNT)?)
        .map_err(|error| invalid(SERVICE_ACCOUNT)(error.to_string()))?;
    ClusterPki::with_authorities(authority, service_account)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const LIFETIME: Duration = Duration::from_secs(60);

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    fn error_text(keys: &ClusterKeys) -> String {
        let error = ClusterPki::open(keys, LIFETIME).err().unwrap();
        let source = std::error::Error::source(&error);
        let source = source.map(ToString::to_string).unwrap_or_default();
        format!("{error}: {source}")
    }

    #[test]
    fn keys_are_generated_once_and_loaded_later() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("state/keys");
        let keys = ClusterKeys::Directory(dir.clone());
        let [first, second] = [(); 2].map(|()| ClusterPki::open(&keys, LIFETIME).unwrap());
        for (a, b) in first.authorities().iter().zip(second.authorities()) {
            assert_eq!(
                (a.1.cert_pem(), a.1.key_pem()),
                (b.1.cert_pem(), b.1.key_pem())
            );
        }
        let file = |pki: &ClusterPki| pki.files(Vec::new()).unwrap()["service-account.key"].clone();
        assert_eq!(file(&first), file(&second));
        assert_eq!(mode(&dir), 0o700);
        let files: Vec<_> = fs::read_dir(&dir).unwrap().flatten().collect();
        assert_eq!(files.len(), 13);
        assert!(files.iter().all(|file| mode(&file.path()) == 0o600));
        // No temporary directory is left.
        assert_eq!(
            fs::read_dir(parent.path().join("state")).unwrap().count(),
            1
        );

        let other = ClusterPki::open(&ClusterKeys::Generated, LIFETIME).unwrap();
        assert_ne!(file(&first), file(&other));
    }

    #[test]
    fn accessible_incomplete_or_mixed_keys_are_refused() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("keys");
        let keys = ClusterKeys::Directory(dir.clone());
        ClusterPki::open(&keys, LIFETIME).unwrap();
        let chmod =
            |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();

        chmod(&dir, 0o755);
        assert!(error_text(&keys).contains("mode 0755 instead of 0700"));
        chmod(&dir, 0o700);
        chmod(&dir.join("join.key"), 0o640);
        assert!(error_text(&keys).contains("join.key has mode 0640 instead of 0600"));
        chmod(&dir.join("join.key"), 0o600);

        fs::copy(dir.join("client.key"), dir.join("join.key")).unwrap();
        assert!(error_text(&keys).contains("join.crt: it is not the certificate of its key"));
        fs::write(dir.join("join.key"), "no key").unwrap();
        assert!(error_text(&keys).contains("join.crt: "));
        fs::remove_file(dir.join("join.key")).unwrap();
        assert!(error_text(&keys).contains("join.key: No such file"));
    }
}
