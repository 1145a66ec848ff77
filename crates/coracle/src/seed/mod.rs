//! Finds or makes the store that new clusters start from (see `control_plane::seed`).
//!
//! A seed belongs to a release and a service range. It lies beside the release when that directory could
//! be written to (as when the release was imported), and in the user's cache otherwise. Where neither can be
//! written, clusters start from an empty store, some two seconds slower. One that is damaged is made again.

mod digest;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use control_plane::port::ReservedPort;
use control_plane::{ClusterConfig, Event, Pki};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::Api;

use crate::kubernetes::{Component, Release};
use crate::progress::Progress;
use crate::run::{ControlPlane, objects};

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
    for place in places.iter().filter(|place| place.is_dir()) {
        if is_whole(place) {
            return Some(place.join(STORE));
        }
        progress.line(&format!(
            "warning: the prepared store {} is damaged; it is made again",
            place.display()
        ));
        // If that is not for us to do, the next place is tried.
        let _ = std::fs::remove_dir_all(place);
    }
    places.retain(|place| !place.exists());
    progress.phase("prepared the store of new clusters, once for this release");
    match make_in_first(&places, release, service_cidr).await {
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
    let mut places = places(release, service_cidr).into_iter();
    places.find(|place| place.is_dir() && is_whole(place))
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
) -> anyhow::Result<PathBuf> {
    let mut problem = anyhow::anyhow!("there is no place for it");
    for place in places {
        let parent = place.parent().context("a seed has a parent directory")?;
        sweep(parent);
        let new = parent.join(format!("{UNFINISHED}{}", crate::token::new()?));
        match std::fs::create_dir_all(parent).and_then(|()| std::fs::create_dir(&new)) {
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
    let pki = Pki::new(PATIENCE * 10)?;
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
        tightens_memory: release.is_our_build(),
        log_dir: None,
        verbose: false,
        files,
        admin_kubeconfig: String::new(),
    };
    let mut control_plane = ControlPlane::start(config).await?;
    let settled = tokio::time::timeout(PATIENCE, async {
        while control_plane.next().await? != Event::ApiAnswers {}
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
