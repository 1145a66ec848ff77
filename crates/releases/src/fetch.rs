//! Downloads the official release from upstream's servers or a mirror.
//!
//! All checksums come first, so that an unknown version fails before a large download. Then come the files, a few at a time, and at last
//! the release is assembled and published.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use download::Digest;
use futures::{StreamExt, TryStreamExt, stream};
use reqwest::{Client, Url};

use crate::archive::extract_program;
use crate::error::FetchError;
use crate::file_download::{DownloadSource, DownloadedFile, without_credentials};
use crate::release::{Release, ReleaseComponent};
use crate::store::{DownloadLock, ReleaseStore, ReleaseStoreError, StagedRelease};
use crate::version::ReleaseVersion;
use console::DownloadProgress;
use console::print_stderr;

const UPSTREAM: &str = "https://dl.k8s.io";
const UPSTREAM_ETCD: &str = "https://github.com/etcd-io/etcd/releases/download";

/// Limit on concurrent downloads.
const MAX_CONCURRENT: usize = 3;

/// The parameters of `coracle kubernetes fetch`.
#[derive(Debug)]
pub struct FetchOptions {
    /// The version of Kubernetes.
    pub version: String,
    /// The version of etcd.
    pub etcd_version: String,
    /// The URL of a copy of upstream's download server, with etcd's releases below `URL/etcd/V/`.
    pub mirror: Option<String>,
    /// A root other than the user's own.
    pub into: Option<PathBuf>,
    /// Replace an installed release.
    pub force: bool,
}

/// The files to download, and their URLs.
#[derive(Debug)]
struct FetchPlan {
    version: ReleaseVersion,
    etcd_version: ReleaseVersion,
    arch: &'static str,
    kubernetes_base: Url,
    etcd_base: Url,
}

/// A file to download, and the list of checksums that names it.
#[derive(Debug)]
struct FetchItem {
    name: String,
    source: DownloadSource,
    checksums: DownloadSource,
}

/// Downloads and installs a release. The flag is set if it was installed already.
pub async fn fetch(options: &FetchOptions) -> Result<(Release, bool), FetchError> {
    let plan = FetchPlan::new(options)?;
    let store = ReleaseStore::open(options.into.as_deref())?;
    if let Some(release) = store.installed(&plan.version).filter(|_| !options.force) {
        return Ok((release, true));
    }
    if plan.kubernetes_base.scheme() == "http" {
        print_stderr(format_args!(
            "warning: {} does not use TLS: checksums detect damaged files, but not forged ones",
            without_credentials(&plan.kubernetes_base)
        ));
    }
    let client = download::client_builder()
        .build()
        .map_err(FetchError::Client)?;
    let lock = store
        .lock_downloads(&format!("{}-{}", plan.version, plan.arch))
        .await?;
    // Another process may have installed it during the wait for the lock.
    if let Some(release) = store.installed(&plan.version).filter(|_| !options.force) {
        lock.remove_dir();
        return Ok((release, true));
    }
    print_stderr(format_args!(
        "downloading Kubernetes {} and etcd {} for linux/{}",
        plan.version, plan.etcd_version, plan.arch
    ));
    let items = plan.items()?;
    let parts = download_all(&client, &items, &lock).await?;
    let staging = store.staging()?;
    // In a thread of its own, because unpacking and syncing take seconds.
    let release = tokio::task::spawn_blocking(move || {
        plan.assemble(&parts, &staging)?;
        let release = store.publish(staging, &plan.version, &plan.version_file())?;
        lock.remove_dir();
        Ok::<_, FetchError>(release)
    });
    let release = release.await.map_err(|e| ReleaseStoreError::Io {
        operation: "install into",
        path: options.into.clone().unwrap_or_default(),
        source: std::io::Error::other(e),
    })??;
    Ok((release, false))
}

impl FetchPlan {
    fn new(options: &FetchOptions) -> Result<FetchPlan, FetchError> {
        let (kubernetes_base, etcd_base) = match &options.mirror {
            Some(mirror) => (mirror_base(mirror, "")?, mirror_base(mirror, "/etcd")?),
            None => (mirror_base(UPSTREAM, "")?, mirror_base(UPSTREAM_ETCD, "")?),
        };
        Ok(FetchPlan {
            version: options.version.parse()?,
            etcd_version: options.etcd_version.parse()?,
            arch: upstream_arch(std::env::consts::ARCH)?,
            kubernetes_base,
            etcd_base,
        })
    }

    /// The four programs of Kubernetes and the archive of etcd, with a checksum beside each.
    fn items(&self) -> Result<Vec<FetchItem>, FetchError> {
        let mut items = Vec::new();
        for component in ReleaseComponent::ALL
            .into_iter()
            .filter(|component| *component != ReleaseComponent::Etcd)
        {
            let path = format!(
                "release/{}/bin/linux/{}/{component}",
                self.version, self.arch
            );
            let source =
                |path: &str| source("Kubernetes", &self.version, &self.kubernetes_base, path);
            items.push(FetchItem {
                name: component.name().to_owned(),
                source: source(&path)?,
                checksums: source(&format!("{path}.sha256"))?,
            });
        }
        let archive = format!("{}.tar.gz", self.etcd_dir());
        let source = |file: &str| {
            source(
                "etcd",
                &self.etcd_version,
                &self.etcd_base,
                &format!("{}/{file}", self.etcd_version),
            )
        };
        items.push(FetchItem {
            source: source(&archive)?,
            checksums: source("SHA256SUMS")?,
            name: archive,
        });
        Ok(items)
    }

    fn etcd_dir(&self) -> String {
        format!("etcd-{}-linux-{}", self.etcd_version, self.arch)
    }

    /// The contents of the file VERSION, in the format of `kubernetes/build`.
    fn version_file(&self) -> String {
        format!(
            "kubernetes {}\netcd {}\nfrom {}\n",
            self.version,
            self.etcd_version,
            without_credentials(&self.kubernetes_base)
        )
    }

    /// Moves the downloads to the staging directory. Extraction comes first, because it may fail: the downloads then stay in place for the
    /// next run.
    fn assemble(
        &self,
        parts: &[DownloadedFile],
        staging: &StagedRelease,
    ) -> Result<(), FetchError> {
        let is_archive = |part: &&DownloadedFile| part.name.ends_with(".tar.gz");
        for archive in parts.iter().filter(is_archive) {
            let etcd = staging.path().join(ReleaseComponent::Etcd.name());
            let extracted =
                extract_program(&archive.path, &format!("{}/etcd", self.etcd_dir()), &etcd);
            if let Err(error @ crate::archive::ArchiveError::Unexpected { .. }) = extracted {
                let _ = fs::remove_file(&archive.path);
                return Err(error.into());
            }
            extracted?;
        }
        for part in parts.iter().filter(|part| !is_archive(part)) {
            let to = staging.path().join(&part.name);
            let failed = |e| ReleaseStoreError::writing("install", &to, None, e);
            fs::set_permissions(&part.path, fs::Permissions::from_mode(0o755)).map_err(failed)?;
            fs::rename(&part.path, &to).map_err(failed)?;
        }
        Ok(())
    }
}

async fn download_all(
    client: &Client,
    items: &[FetchItem],
    lock: &DownloadLock,
) -> Result<Vec<DownloadedFile>, FetchError> {
    let digests: Vec<Digest> = stream::iter(items)
        .map(|item| published_digest(client, item))
        .buffered(items.len())
        .try_collect()
        .await?;
    let progress = DownloadProgress::on_stderr();
    stream::iter(items.iter().zip(digests))
        .map(|(item, digest)| {
            let file_progress = progress.file(&item.name);
            let source = &item.source;
            source.download(client, &item.name, digest, lock.dir(), file_progress)
        })
        .buffer_unordered(MAX_CONCURRENT)
        .try_collect()
        .await
}

/// The published digest of a file.
async fn published_digest(client: &Client, item: &FetchItem) -> Result<Digest, FetchError> {
    let text = item.checksums.download_text(client).await?;
    find_digest(&text, &item.name).ok_or_else(|| FetchError::NoChecksum {
        url: without_credentials(&item.checksums.url),
        file: item.name.clone(),
    })
}

/// Finds a file's digest in the output of `sha256sum`, or in a text that consists of one digest.
fn find_digest(text: &str, name: &str) -> Option<Digest> {
    let parse = |hex: &str| Digest::from_hex(&hex.to_ascii_lowercase());
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let named = |line: &str| {
        let (digest, file) = line.split_once(char::is_whitespace)?;
        // A `*` marks binary mode; a directory may precede the name.
        let file = file.trim().trim_start_matches('*');
        (file.rsplit('/').next() == Some(name)).then(|| parse(digest))?
    };
    if let Some(digest) = lines.clone().find_map(named) {
        return Some(digest);
    }
    match (lines.next(), lines.next()) {
        (Some(only), None) => parse(only.trim()),
        _ => None,
    }
}

fn source(
    product: &'static str,
    version: &ReleaseVersion,
    base: &Url,
    path: &str,
) -> Result<DownloadSource, FetchError> {
    // Join as text: `Url::join` would replace the last segment of a mirror's path.
    let text = format!("{}/{path}", base.as_str().trim_end_matches('/'));
    let url = Url::parse(&text).map_err(|e| FetchError::Mirror {
        url: without_credentials(base),
        reason: e.to_string(),
    })?;
    Ok(DownloadSource {
        product,
        version: version.to_string(),
        url,
    })
}

fn mirror_base(mirror: &str, below: &str) -> Result<Url, FetchError> {
    let invalid = |reason: &str| FetchError::Mirror {
        url: mirror.to_owned(),
        reason: reason.to_owned(),
    };
    let url = Url::parse(&format!("{}{below}", mirror.trim_end_matches('/')))
        .map_err(|e| invalid(&format!("{e}; it must begin with https:// or http://")))?;
    if !matches!(url.scheme(), "https" | "http") {
        return Err(invalid("it must begin with https:// or http://"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(invalid(
            "file names are appended to it, so it must not contain ? or #",
        ));
    }
    Ok(url)
}

/// Upstream's name for an architecture.
fn upstream_arch(rust: &'static str) -> Result<&'static str, FetchError> {
    match rust {
        "x86_64" => Ok("amd64"),
        "aarch64" => Ok("arm64"),
        "powerpc64" if cfg!(target_endian = "little") => Ok("ppc64le"),
        "s390x" => Ok("s390x"),
        other => Err(FetchError::Architecture(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urls(mirror: Option<&str>) -> Vec<String> {
        let options = FetchOptions {
            version: "1.36.2".into(),
            etcd_version: "v3.7.0".into(),
            mirror: mirror.map(str::to_owned),
            into: None,
            force: false,
        };
        let plan = FetchPlan {
            arch: "amd64",
            ..FetchPlan::new(&options).unwrap()
        };
        let items = plan.items().unwrap();
        items
            .into_iter()
            .flat_map(|item| [item.source.url.into(), item.checksums.url.into()])
            .collect()
    }

    #[test]
    fn official_urls_are_built() {
        let expected = "\
https://dl.k8s.io/release/v1.36.2/bin/linux/amd64/kube-apiserver
https://dl.k8s.io/release/v1.36.2/bin/linux/amd64/kube-apiserver.sha256
https://dl.k8s.io/release/v1.36.2/bin/linux/amd64/kube-controller-manager
https://dl.k8s.io/release/v1.36.2/bin/linux/amd64/kube-controller-manager.sha256
https://dl.k8s.io/release/v1.36.2/bin/linux/amd64/kube-scheduler
https://dl.k8s.io/release/v1.36.2/bin/linux/amd64/kube-scheduler.sha256
https://dl.k8s.io/release/v1.36.2/bin/linux/amd64/kubectl
https://dl.k8s.io/release/v1.36.2/bin/linux/amd64/kubectl.sha256
https://github.com/etcd-io/etcd/releases/download/v3.7.0/etcd-v3.7.0-linux-amd64.tar.gz
https://github.com/etcd-io/etcd/releases/download/v3.7.0/SHA256SUMS";
        assert_eq!(urls(None).join("\n"), expected);
    }

    #[test]
    fn mirror_urls_are_built() {
        let urls = urls(Some("http://mirror.example:8080/k8s/"));
        assert_eq!(
            urls[0],
            "http://mirror.example:8080/k8s/release/v1.36.2/bin/linux/amd64/kube-apiserver"
        );
        assert_eq!(
            urls[9],
            "http://mirror.example:8080/k8s/etcd/v3.7.0/SHA256SUMS"
        );
    }

    #[test]
    fn invalid_mirrors_are_refused() {
        for bad in [
            "",
            "mirror.example/k8s",
            "/srv/mirror",
            "ftp://mirror.example",
            "https://m.example/?a=b",
            "file:///srv",
        ] {
            assert!(
                matches!(mirror_base(bad, ""), Err(FetchError::Mirror { .. })),
                "{bad}"
            );
        }
    }

    #[test]
    fn digests_are_found_in_both_formats() {
        let (a, b) = ("a".repeat(64), "b".repeat(64));
        let digest = |text: &str| find_digest(text, "etcd.tar.gz").map(|digest| digest.hex());
        assert_eq!(digest(&a), Some(a.clone()));
        assert_eq!(digest(&a.to_uppercase()), Some(a.clone()));
        assert_eq!(digest(&format!("{a}\n")), Some(a.clone()));
        assert_eq!(digest(&format!("{a}  etcd.tar.gz\n")), Some(a.clone()));
        assert_eq!(
            digest(&format!("{a}  other.tar.gz\n{b} *etcd.tar.gz\n")),
            Some(b.clone())
        );
        assert_eq!(
            digest(&format!("{a}  release/etcd.tar.gz\n{b}  etcd.tar.gz.asc\n")),
            Some(a.clone())
        );
        for bad in [
            "",
            "<html>",
            &format!("{a}  other"),
            &format!("{a}\n{b}\n"),
            "abc  etcd.tar.gz",
        ] {
            assert_eq!(digest(bad), None, "{bad}");
        }
    }
}
