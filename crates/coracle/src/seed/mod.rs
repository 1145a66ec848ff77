//! Finds or makes the store that new clusters start from (see `control_plane::seed`).
//!
//! A seed belongs to a release and a service range. It lies beside the release when that directory could
//! be written to (as when the release was imported), and in the user's cache otherwise. Where neither can be
//! written, clusters start from an empty store, some two seconds slower. One that is damaged is made again; one that
//! other users can write to is not used ([`trust`]).

mod digest;
mod trust;

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use control_plane::port::ReservedPort;
use control_plane::{ClusterConfig, ClusterPki, ControlPlaneEvent};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::Api;

use crate::kubernetes::{Component, Release};
use crate::progress::Progress;
use crate::run::{ControlPlane, objects};
use trust::Trusted;

/// Changed when seeds are made in another way.
const FORMAT: u32 = 2;
/// The store in a seed, and the digest of it.
const STORE: &str = "store";
const DIGEST: &str = "digest";
/// What the name of a seed that isn't complete begins with.
const UNFINISHED: &str = ".new-";
/// Making a seed takes about five seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// The store for clusters of `release` to start from, made now if it is missing; `None` if that isn't
/// possible.
pub async fn ensure(
    release: &Release,
    service_cidr: &str,
    progress: &mut Progress,
) -> Option<PathBuf> {
    let mut places = places(release, service_cidr);
    let trusted = Trusted::for_release(&release.dir);
    for parent in places.iter().filter_map(|place| place.parent()) {
        trust::tighten(parent);
    }
    for place in places.iter().filter(|place| place.is_dir()) {
        let problem = match trusted.check(place) {
            Err(error) => format!("not used: {error}"),
            Ok(()) if is_whole(place) => return Some(place.join(STORE)),
            Ok(()) => "damaged".to_owned(),
        };
        // If that is not for us to do, the next place is tried.
        let removed = is_own(place) && std::fs::remove_dir_all(place).is_ok();
        progress.line(&format!(
            "warning: the prepared store {} is {problem}{}",
            place.display(),
            if removed { "; it is made again" } else { "" }
        ));
    }
    places.retain(|place| !place.exists());
    progress.phase("prepared the store of new clusters, once for this release");
    let made = make_in_first(&places, release, service_cidr, trusted).await;
    // Another user may have been quicker.
    match made.and_then(|seed| Ok(trusted.check(&seed).map(|()| seed)?)) {
        Ok(seed) => Some(seed.join(STORE)),
        Err(error) => {
            progress.abandon();
            progress.line(&format!(
                "warning: cannot keep a prepared store, so every cluster starts slower: {error:#}"
            ));
            None
        }
    }
}

/// The seed for clusters of `release`, if there is one.
pub fn find(release: &Release, service_cidr: &str) -> Option<PathBuf> {
    let trusted = Trusted::for_release(&release.dir);
    let mut places = places(release, service_cidr).into_iter();
    places.find(|place| trusted.check(place).is_ok() && is_whole(place))
}

fn is_own(dir: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    dir.symlink_metadata().is_ok_and(|found| found.uid() == own)
}

fn is_whole(seed: &Path) -> bool {
    let wanted = std::fs::read_to_string(seed.join(DIGEST));
    let found = digest::of(&seed.join(STORE));
    matches!((wanted, found), (Ok(wanted), Ok(found)) if wanted == found)
}

/// Where a seed may be.
fn places(release: &Release, service_cidr: &str) -> Vec<PathBuf> {
    let name = name(release, service_cidr);
    // The control plane, which writes it, works in a directory of its own.
    let dir = std::path::absolute(&release.dir).unwrap_or_else(|_| release.dir.clone());
    let beside = dir.join("seeds").join(&name);
    let cache = cache_dir().map(|cache| cache.join("coracle/seeds").join(&name));
    let mut places: Vec<PathBuf> = std::iter::once(beside).chain(cache).collect();
    if crate::carried::is_ours() {
        // A release that was carried here is about to be removed, with what is beside it.
        places.reverse();
    }
    places
}

/// What a seed depends on: the programs that wrote it, and the range of the service addresses in it.
fn name(release: &Release, service_cidr: &str) -> String {
    let program = release.component(Component::ApiServer);
    let size = program.metadata().map_or(0, |meta| meta.len());
    let cidr = service_cidr.replace('/', "-");
    format!("{}-{size}-{cidr}-{FORMAT}", release.version)
}

fn cache_dir() -> Option<PathBuf> {
    let given = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    given
        .filter(|dir| dir.is_absolute())
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
}

async fn make_in_first(
    places: &[PathBuf],
    release: &Release,
    service_cidr: &str,
    trusted: Trusted,
) -> anyhow::Result<PathBuf> {
    let mut problem = anyhow::anyhow!("there is no place for it");
    for place in places {
        let parent = place.parent().context("a seed has a parent directory")?;
        sweep(parent);
        let new = parent.join(format!("{UNFINISHED}{}", crate::token::new()?));
        let prepared = std::fs::create_dir_all(parent).and_then(|()| {
            trust::tighten(parent);
            trusted.check_parent(parent)?;
            std::fs::create_dir(&new)
        });
        match prepared {
            Ok(()) => {
                let made = make(release, service_cidr, &new.join(STORE)).await;
                let kept = made.and_then(|()| publish(&new, place));
                let _ = std::fs::remove_dir_all(&new);
                // Only if it is empty.
                let _ = std::fs::remove_dir(parent);
                return kept.map(|()| place.clone());
            }
            Err(error) => {
                problem = anyhow::Error::from(error)
                    .context(format!("cannot write to {}", parent.display()));
            }
        }
    }
    Err(problem)
}

/// Removes what processes that were killed left unfinished.
fn sweep(dir: &Path) {
    let is_old = |path: &Path| {
        let age = path.metadata().and_then(|meta| meta.modified()).ok();
        age.and_then(|time| time.elapsed().ok())
            .is_some_and(|age| age > 10 * PATIENCE)
    };
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let unfinished = entry.file_name().to_string_lossy().starts_with(UNFINISHED);
        if unfinished && is_old(&entry.path()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Boots a control plane on an empty store, lets it settle, and saves the store to `path`.
async fn make(release: &Release, service_cidr: &str, path: &Path) -> anyhow::Result<()> {
    let port = ReservedPort::new(0)?;
    let pki = ClusterPki::new(PATIENCE * 10)?;
    let admin = pki.administrator()?;
    let mut files = pki.files(vec!["127.0.0.1".to_owned()])?;
    files.insert(
        "tokens.csv".into(),
        format!("{},nobody,1\n", crate::token::new()?),
    );
    let config = ClusterConfig {
        name: "seed".into(),
        release: release.dir.clone(),
        addresses: linux::address::host_addresses()?,
        api_port: port.number(),
        service_cidr: service_cidr.to_owned(),
        pod_cidr: "100.64.0.0/11".to_owned(),
        seed: None,
        workload: None,
        lowers_gogc: release.is_our_build(),
        log_dir: None,
        verbose: false,
        files,
        admin_kubeconfig: String::new(),
    };
    let mut control_plane = ControlPlane::start(config).await?;
    let settled = tokio::time::timeout(PATIENCE, async {
        while control_plane.next().await? != ControlPlaneEvent::ApiServerResponds {}
        let api = std::net::SocketAddr::from(([127, 0, 0, 1], port.number()));
        let client = crate::client::connect(api, pki.cluster.cert_pem(), &admin).await?;
        settle(&client).await;
        objects::add_standing(&client).await
    });
    settled
        .await
        .context("the control plane did not settle")??;
    control_plane.stop_and_save(path).await
}

/// Waits for what upstream writes into an empty store.
async fn settle(client: &kube::Client) {
    let ready = || http::Request::get("/readyz").body(Vec::new());
    loop {
        if let Ok(request) = ready()
            && client.request_text(request).await.is_ok()
        {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for namespace in ["default", "kube-system", "kube-public", "kube-node-lease"] {
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
        while accounts.get("default").await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Puts the seed in its place, readable by everybody: it holds no secret.
fn publish(new: &Path, place: &Path) -> anyhow::Result<()> {
    std::fs::write(new.join(DIGEST), digest::of(&new.join(STORE))?)?;
    open_to_all(new)?;
    match std::fs::rename(new, place) {
        // Somebody else was quicker with the same.
        Err(_) if place.is_dir() => Ok(()),
        other => other.with_context(|| format!("cannot write {}", place.display())),
    }
}

fn open_to_all(path: &Path) -> std::io::Result<()> {
    let mode = if path.is_dir() { 0o755 } else { 0o644 };
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    if path.is_dir() {
        for entry in std::fs::read_dir(path)? {
            open_to_all(&entry?.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::chown;

    const CIDR: &str = "100.96.0.0/16";
    const OTHER: u32 = 2002;

    /// A release with a seed beside it.
    fn release_with_seed(dir: &Path) -> (Release, PathBuf) {
        let release = Release {
            dir: dir.to_owned(),
            version: "v1".into(),
        };
        let seed = dir.join("seeds").join(name(&release, CIDR));
        std::fs::create_dir_all(seed.join("store/member")).unwrap();
        std::fs::write(seed.join("store/member/db"), "data").unwrap();
        std::fs::write(seed.join(DIGEST), digest::of(&seed.join(STORE)).unwrap()).unwrap();
        open_to_all(&seed).unwrap();
        (release, seed)
    }

    fn mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn seeds_that_others_can_write_are_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let (release, seed) = release_with_seed(dir.path());
        let found = || find(&release, CIDR);
        let parent = seed.parent().unwrap();
        mode(parent, 0o755);
        assert_eq!(found().as_ref(), Some(&seed));
        for (path, open, closed) in [
            (seed.join("store/member/db"), 0o664, 0o644),
            (seed.join(DIGEST), 0o646, 0o644),
            (seed.join("store/member"), 0o775, 0o755),
            (seed.clone(), 0o777, 0o755),
            (parent.to_owned(), 0o777, 0o755),
        ] {
            mode(&path, open);
            assert_eq!(found(), None, "{}", path.display());
            mode(&path, closed);
            assert_eq!(found().as_ref(), Some(&seed), "{}", path.display());
        }
        // Nobody can rename what is in it.
        mode(parent, 0o1777);
        assert_eq!(found().as_ref(), Some(&seed));
        mode(parent, 0o775);
        trust::tighten(parent);
        assert_eq!(found().as_ref(), Some(&seed));

        let link = seed.join("store/link");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        assert_eq!(found(), None, "a link");
        std::fs::remove_file(&link).unwrap();
        if !rustix::process::geteuid().is_root() {
            return;
        }
        for path in [seed.join("store/member/db"), seed.clone()] {
            chown(&path, Some(OTHER), None).unwrap();
            assert_eq!(found(), None, "{} of another user", path.display());
            // Whose programs we execute may also make the store.
            chown(dir.path(), Some(OTHER), None).unwrap();
            assert_eq!(found().as_ref(), Some(&seed));
            chown(dir.path(), Some(0), None).unwrap();
            chown(&path, Some(0), None).unwrap();
        }
    }
}
