//! Pulls from a registry in this process that can be told to misbehave.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]

mod common;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, Request, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use base64::Engine as _;
use common::*;
use futures::StreamExt;
use images::{Credential, Digest, Event, ImageError, PullPolicy, RegistryConfig, Secret, ensure};

/// How it behaves.
#[derive(Default)]
struct Behaviour {
    /// Manifests by `repository:version`, with their media type.
    manifests: HashMap<String, (String, Vec<u8>)>,
    blobs: HashMap<String, Vec<u8>>,
    /// Wants this token, which the token server gives to this user and password (or to all).
    token: Option<(String, Option<(String, String)>)>,
    basic: Option<(String, String)>,
    /// Knows this user, but lets him in nowhere.
    forbidden: Option<(String, String)>,
    /// Breaks the connection of the next blobs after so many bytes.
    breaks: Vec<usize>,
    ignore_ranges: bool,
    /// Answers the next requests with this.
    statuses: Vec<StatusCode>,
    slow: bool,
    /// Says on HEAD that all that is asked for is this, whether it has it or not.
    claims: Option<Digest>,
    requests: Vec<String>,
    scopes: Vec<String>,
    /// The token server that it names, if not itself.
    realm: Option<String>,
    /// Where the token server and blobs are said to be instead.
    moved_tokens: Option<String>,
    moved_blobs: Option<String>,
    /// All credentials that were sent here.
    credentials: Vec<String>,
}

type Shared = Arc<Mutex<Behaviour>>;

struct Fake {
    address: SocketAddr,
    behaviour: Shared,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Fake {
    async fn start() -> Fake {
        let behaviour = Shared::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/token", any(token))
            .fallback(any(registry))
            .with_state(behaviour.clone());
        let server = tokio::spawn(async move {
            let _ = axum::serve(listener, router).await;
        });
        Fake {
            address,
            behaviour,
            server,
        }
    }

    /// With the usual image as `app:1`.
    async fn with(image: &TestImage) -> Fake {
        let fake = Fake::start().await;
        fake.add("app", "1", image);
        fake
    }

    fn add(&self, repository: &str, tag: &str, image: &TestImage) {
        let mut behaviour = self.behaviour.lock().unwrap();
        let manifest = (image.media_type.to_owned(), image.manifest.clone());
        for version in [tag.to_owned(), image.digest().to_string()] {
            behaviour
                .manifests
                .insert(format!("{repository}:{version}"), manifest.clone());
        }
        for blob in image.blobs() {
            behaviour
                .blobs
                .insert(Digest::of(blob).to_string(), blob.clone());
        }
    }

    fn set(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.behaviour.lock().unwrap());
    }

    /// Plain HTTP is allowed for this registry.
    fn config(&self) -> RegistryConfig {
        insecure(&[self.address])
    }

    /// What it was shown.
    fn credentials(&self) -> Vec<String> {
        self.behaviour.lock().unwrap().credentials.clone()
    }

    fn reference(&self) -> String {
        format!("{}/app:1", self.address)
    }

    /// What opens it to its user, with this password.
    fn credential(&self, password: &str) -> Credential {
        Credential {
            pattern: self.address.to_string(),
            secret: Secret::Password {
                username: "user".into(),
                password: password.into(),
            },
        }
    }

    fn requests(&self, containing: &str) -> usize {
        let behaviour = self.behaviour.lock().unwrap();
        behaviour
            .requests
            .iter()
            .filter(|r| r.contains(containing))
            .count()
    }
}

fn authorization(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::AUTHORIZATION)?.to_str();
    value.ok().map(str::to_owned)
}

fn basic_of(headers: &HeaderMap) -> Option<(String, String)> {
    let header = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let decoded = base64::engine::general_purpose::STANDARD.decode(header.strip_prefix("Basic ")?);
    let text = String::from_utf8(decoded.ok()?).ok()?;
    let (user, password) = text.split_once(':')?;
    Some((user.to_owned(), password.to_owned()))
}

async fn token(
    State(state): State<Shared>,
    uri: Uri,
    headers: HeaderMap,
    body: String,
) -> Response {
    let mut state = state.lock().unwrap();
    state.credentials.extend(authorization(&headers));
    state.credentials.extend((!body.is_empty()).then_some(body));
    if let Some(moved) = &state.moved_tokens {
        return axum::response::Redirect::temporary(moved).into_response();
    }
    let url = reqwest::Url::parse(&format!("http://fake{uri}")).unwrap();
    let scope = url.query_pairs().find(|(key, _)| key == "scope");
    state
        .scopes
        .push(scope.map_or_else(String::new, |(_, scope)| scope.into_owned()));
    let Some((token, wanted)) = &state.token else {
        return StatusCode::NOT_FOUND.into_response();
    };
    match wanted {
        Some(wanted) if basic_of(&headers).as_ref() != Some(wanted) => {
            StatusCode::UNAUTHORIZED.into_response()
        }
        _ => serde_json::json!({"access_token": token})
            .to_string()
            .into_response(),
    }
}

async fn registry(State(state): State<Shared>, request: Request<Body>) -> Response {
    let mut state = state.lock().unwrap();
    let path = request.uri().path().to_owned();
    state.requests.push(path.clone());
    let shown = authorization(request.headers());
    state.credentials.extend(shown);
    if path == "/v2/" {
        return StatusCode::OK.into_response();
    }
    if !state.statuses.is_empty() {
        let status = state.statuses.remove(0);
        return (
            status,
            r#"{"errors":[{"code":"X","message":"in the registry's words"}]}"#,
        )
            .into_response();
    }
    let authorization = request.headers().get(header::AUTHORIZATION);
    if let Some((token, _)) = &state.token
        && authorization.is_none_or(|given| *given != format!("Bearer {token}"))
    {
        let host = request.headers()[header::HOST].to_str().unwrap();
        let own = format!("http://{host}/token");
        let realm = state.realm.as_ref().unwrap_or(&own);
        let challenge =
            format!(r#"Bearer realm="{realm}",service="fake",scope="repository:app:pull""#);
        return (
            StatusCode::UNAUTHORIZED,
            [(header::WWW_AUTHENTICATE, challenge)],
        )
            .into_response();
    }
    if state.forbidden.is_some() && basic_of(request.headers()) == state.forbidden {
        return StatusCode::FORBIDDEN.into_response();
    }
    if let Some(wanted) = &state.basic
        && basic_of(request.headers()).as_ref() != Some(wanted)
    {
        let challenge = "Basic realm=\"fake\"".to_owned();
        return (
            StatusCode::UNAUTHORIZED,
            [(header::WWW_AUTHENTICATE, challenge)],
        )
            .into_response();
    }
    let rest = path.trim_start_matches("/v2/");
    if let Some((repository, version)) = rest.split_once("/manifests/") {
        let digest = HeaderName::from_static("docker-content-digest");
        if let (Some(claimed), &axum::http::Method::HEAD) = (state.claims, request.method()) {
            return [(digest, claimed.to_string())].into_response();
        }
        return match state.manifests.get(&format!("{repository}:{version}")) {
            Some((media_type, bytes)) => {
                let headers = [
                    (header::CONTENT_TYPE, media_type.clone()),
                    (digest, Digest::of(bytes).to_string()),
                ];
                (headers, bytes.clone()).into_response()
            }
            None => StatusCode::NOT_FOUND.into_response(),
        };
    }
    if let Some(moved) = &state.moved_blobs {
        return axum::response::Redirect::temporary(&format!("{moved}{path}")).into_response();
    }
    let digest = rest.rsplit('/').next().unwrap_or_default();
    let Some(blob) = state.blobs.get(digest).cloned() else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let range = request
        .headers()
        .get(header::RANGE)
        .map(|r| r.to_str().unwrap().to_owned());
    let start = match range.filter(|_| !state.ignore_ranges) {
        Some(range) => range
            .trim_start_matches("bytes=")
            .trim_end_matches('-')
            .parse()
            .unwrap(),
        None => 0,
    };
    let slow = state.slow;
    let body = match state.breaks.pop() {
        Some(after) if blob.len() > start + after => {
            let part = blob[start..start + after].to_vec();
            let broken = futures::stream::iter([Ok(part), Err(std::io::Error::other("cut"))]);
            Body::from_stream(broken)
        }
        _ if slow => {
            let parts: Vec<_> = blob[start..].chunks(64 << 10).map(<[u8]>::to_vec).collect();
            Body::from_stream(futures::stream::iter(parts).then(|part| async move {
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                Ok::<_, std::io::Error>(part)
            }))
        }
        _ => Body::from(blob[start..].to_vec()),
    };
    let status = if start > 0 {
        StatusCode::PARTIAL_CONTENT
    } else {
        StatusCode::OK
    };
    let range = format!(
        "bytes {start}-{}/{}",
        blob.len().saturating_sub(1),
        blob.len()
    );
    (status, [(header::CONTENT_RANGE, range)], body).into_response()
}

async fn pull(
    place: &Place,
    fake: &Fake,
    recorder: &Recorder,
) -> Result<images::Image, ImageError> {
    let request = request(&fake.reference(), PullPolicy::IfNotPresent);
    ensure(
        &place.store,
        &place.layers,
        &request,
        &fake.config(),
        recorder,
    )
    .await
}

fn downloads(recorder: &Recorder) -> usize {
    recorder.count(|event| matches!(event, Event::Downloaded { .. }))
}

#[tokio::test]
async fn an_image_is_pulled_once_and_unpacked_once_per_node() {
    for media_type in [OCI, DOCKER] {
        let image = TestImage::usual(media_type);
        let fake = Fake::with(&image).await;
        let (place, recorder) = (Place::new(), Recorder::default());
        let pulled = pull(&place, &fake, &recorder).await.unwrap();
        assert!(pulled.pulled);
        assert_eq!(
            pulled.id,
            format!("{}/app@{}", fake.address, image.digest())
        );
        assert_eq!(pulled.config.cmd, ["/bin/app"]);
        assert_eq!(pulled.config.user, "1000");
        assert_eq!(pulled.layers.len(), 3);
        assert_eq!(
            std::fs::read(pulled.layers[0].join("bin/app")).unwrap(),
            b"one"
        );
        assert_eq!(
            std::fs::read(pulled.layers[1].join("bin/app")).unwrap(),
            b"two"
        );
        assert_eq!(downloads(&recorder), 4);
        let size: usize = image.blobs().map(Vec::len).sum();
        assert_eq!(pulled.size, size as u64);
        // Again here, and on another node: no registry is asked.
        fake.set(|b| b.requests.clear());
        let again = pull(&place, &fake, &recorder).await.unwrap();
        assert!(!again.pulled && again.layers == pulled.layers);
        let request = request(&fake.reference(), PullPolicy::Never);
        let other = place.other_node("other");
        let there = ensure(&place.store, &other, &request, &fake.config(), &recorder).await;
        assert_eq!(there.unwrap().layers.len(), 3);
        assert_eq!(fake.requests(""), 0);
        // A node that has it unpacked needs no blob.
        for blob in place.blobs() {
            if std::fs::metadata(&blob).unwrap().len() > 250_000 {
                std::fs::remove_file(blob).unwrap();
            }
        }
        assert!(!pull(&place, &fake, &recorder).await.unwrap().pulled);
        // By its digest it is the same image.
        let pinned = format!("{}/app@{}", fake.address, image.digest());
        let request = common::request(&pinned, PullPolicy::Never);
        let found = ensure(
            &place.store,
            &place.layers,
            &request,
            &fake.config(),
            &recorder,
        )
        .await;
        assert_eq!(found.unwrap().id, pulled.id);
    }
}

#[tokio::test]
async fn policies() {
    let (first, place, recorder) = (TestImage::usual(OCI), Place::new(), Recorder::default());
    let fake = Fake::with(&first).await;
    let get = async |policy| {
        let request = request(&fake.reference(), policy);
        ensure(
            &place.store,
            &place.layers,
            &request,
            &fake.config(),
            &recorder,
        )
        .await
    };
    let error = get(PullPolicy::Never).await.unwrap_err();
    assert_eq!(error.reason(), "ErrImageNeverPull");
    assert_eq!(
        error.to_string(),
        format!(
            "Container image \"{}\" is not present with pull policy of Never",
            fake.reference()
        )
    );
    assert_eq!(fake.requests(""), 0);
    get(PullPolicy::IfNotPresent).await.unwrap();
    // The tag moves.
    let second = TestImage::new(&[(layer(&[("new", b"x")]), Packing::Gzip)], DOCKER);
    fake.add("app", "1", &second);
    let same = get(PullPolicy::IfNotPresent).await.unwrap();
    assert!(same.id.ends_with(&first.digest().to_string()));
    let new = get(PullPolicy::Always).await.unwrap();
    assert!(new.pulled && new.id.ends_with(&second.digest().to_string()));
    assert_eq!(new.layers.len(), 1);
    // Always asks, but downloads nothing twice.
    let before = downloads(&recorder);
    fake.set(|b| b.requests.clear());
    assert!(get(PullPolicy::Always).await.unwrap().pulled);
    assert_eq!(
        (downloads(&recorder), fake.requests("/manifests/")),
        (before, 1)
    );
}

#[tokio::test]
async fn the_image_for_this_machine_is_chosen() {
    let (image, foreign) = (TestImage::usual(OCI), TestImage::usual(DOCKER));
    let fake = Fake::with(&image).await;
    let entry = |image: &TestImage, architecture: &str| {
        let mut entry = descriptor(&image.manifest, image.media_type);
        entry["platform"] = serde_json::json!({"os": "linux", "architecture": architecture});
        entry
    };
    let index = serde_json::json!({"schemaVersion": 2, "mediaType": OCI_INDEX,
        "manifests": [entry(&foreign, "s390x"), entry(&image, images::architecture())]});
    let index = index.to_string().into_bytes();
    fake.set(|b| {
        b.manifests
            .insert("app:1".into(), (OCI_INDEX.into(), index.clone()));
        b.manifests.insert(
            format!("app:{}", image.digest()),
            (OCI.into(), image.manifest.clone()),
        );
    });
    let (place, recorder) = (Place::new(), Recorder::default());
    let pulled = pull(&place, &fake, &recorder).await.unwrap();
    assert_eq!(
        pulled.id,
        format!("{}/app@{}", fake.address, Digest::of(&index))
    );
    assert_eq!(pulled.layers.len(), 3);
    assert!(!pull(&place, &fake, &recorder).await.unwrap().pulled);
    // Only for others.
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [entry(&foreign, "s390x")]});
    fake.set(|b| {
        drop(b.manifests.insert(
            "app:1".into(),
            (OCI_INDEX.into(), index.to_string().into_bytes()),
        ))
    });
    let error = pull(&Place::new(), &fake, &recorder).await.unwrap_err();
    assert_eq!(error.reason(), "ErrImagePull");
    assert!(
        error.to_string().contains("no match for platform"),
        "{error}"
    );
}

#[tokio::test]
async fn names_and_images_that_do_not_exist() {
    let fake = Fake::start().await;
    let (place, recorder) = (Place::new(), Recorder::default());
    let error = pull(&place, &fake, &recorder).await.unwrap_err();
    assert_eq!(error.reason(), "ErrImagePull");
    assert!(error.to_string().ends_with("app:1: not found"), "{error}");
    let get = async |name: &str| {
        let request = request(name, PullPolicy::Always);
        ensure(
            &place.store,
            &place.layers,
            &request,
            &fake.config(),
            &recorder,
        )
        .await
        .unwrap_err()
    };
    assert_eq!(get("Not/A//Name").await.reason(), "InvalidImageName");
    // Nobody listens there.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let error = get(&format!("{address}/app")).await;
    assert_eq!(error.reason(), "RegistryUnavailable", "{error}");
    assert!(place.blobs().is_empty());
}

#[tokio::test]
async fn tokens_and_passwords() {
    let image = TestImage::usual(OCI);
    let fake = Fake::with(&image).await;
    let user = Some(("user".to_owned(), "right".to_owned()));
    let credential = |password: &str| fake.credential(password);
    let get = async |credentials: Vec<Credential>| {
        let (place, recorder) = (Place::new(), Recorder::default());
        let mut request = request(&fake.reference(), PullPolicy::IfNotPresent);
        request.credentials = credentials;
        ensure(
            &place.store,
            &place.layers,
            &request,
            &fake.config(),
            &recorder,
        )
        .await
    };
    // A token for everybody.
    fake.set(|b| b.token = Some(("open".into(), None)));
    get(Vec::new()).await.unwrap();
    assert!(
        fake.behaviour
            .lock()
            .unwrap()
            .scopes
            .iter()
            .all(|s| s == "repository:app:pull")
    );
    // A token for one user; the wrong password is tried, then the right one.
    fake.set(|b| b.token = Some(("closed".into(), user.clone())));
    let error = get(vec![credential("wrong")]).await.unwrap_err();
    assert_eq!(error.reason(), "ErrImagePull");
    assert!(error.to_string().contains("pull access denied"), "{error}");
    assert!(!error.to_string().contains("wrong"));
    get(vec![credential("wrong"), credential("right")])
        .await
        .unwrap();
    // Basic, by each request.
    fake.set(|b| {
        b.token = None;
        b.basic = user.clone();
    });
    assert!(get(Vec::new()).await.is_err());
    assert!(get(vec![credential("wrong")]).await.is_err());
    get(vec![credential("wrong"), credential("right")])
        .await
        .unwrap();
    // The first is known, but may not.
    fake.set(|b| b.forbidden = Some(("user".to_owned(), "known".to_owned())));
    assert!(get(vec![credential("known")]).await.is_err());
    get(vec![credential("known"), credential("right")])
        .await
        .unwrap();
    // For another registry: not used.
    let mut other = credential("right");
    other.pattern = "registry.example".into();
    assert!(get(vec![other]).await.is_err());
    // From the user's own file.
    let place = Place::new();
    let auth = base64::engine::general_purpose::STANDARD.encode("user:right");
    let text = format!(r#"{{"auths":{{"{}":{{"auth":"{auth}"}}}}}}"#, fake.address);
    std::fs::write(place.dir.path().join("config.json"), text).unwrap();
    let config = fake.config().with_docker_config(place.dir.path());
    let request = request(&fake.reference(), PullPolicy::Always);
    ensure(
        &place.store,
        &place.layers,
        &request,
        &config,
        &Recorder::default(),
    )
    .await
    .unwrap();
}

#[tokio::test]
async fn a_token_that_runs_out_is_renewed() {
    let image = TestImage::usual(OCI);
    let fake = Fake::with(&image).await;
    fake.set(|b| b.token = Some(("first".into(), None)));
    let place = Place::new();
    // The token changes as soon as the manifest was fetched.
    struct Change<'a>(&'a Fake);
    impl images::Progress for Change<'_> {
        fn event(&self, event: Event) {
            if matches!(event, Event::Downloaded { .. }) {
                self.0
                    .set(|b| b.token = Some((format!("token {}", b.requests.len()), None)));
            }
        }
    }
    let request = request(&fake.reference(), PullPolicy::Always);
    let config = fake.config();
    ensure(
        &place.store,
        &place.layers,
        &request,
        &config,
        &Change(&fake),
    )
    .await
    .unwrap();
}

#[tokio::test]
async fn broken_connections_are_resumed() {
    let big = layer(&[("big", &pseudo_random(3 << 20))]);
    let image = TestImage::new(&[(big, Packing::Plain)], OCI);
    for ignore_ranges in [false, true] {
        let fake = Fake::with(&image).await;
        fake.set(|b| {
            b.breaks = vec![2 << 20, 1 << 20, 0];
            b.ignore_ranges = ignore_ranges;
        });
        let (place, recorder) = (Place::new(), Recorder::default());
        let pulled = pull(&place, &fake, &recorder).await.unwrap();
        assert_eq!(
            std::fs::metadata(pulled.layers[0].join("big"))
                .unwrap()
                .len(),
            3 << 20
        );
        let resumed = recorder.count(|e| matches!(e, Event::Begin { at, .. } if *at >= 1 << 20));
        assert_eq!(resumed > 0, !ignore_ranges);
        assert!(
            recorder
                .notes()
                .iter()
                .any(|note| note.contains("trying again"))
        );
    }
}

/// Bytes that no compression makes smaller.
fn pseudo_random(n: usize) -> Vec<u8> {
    let mut state = 1u64;
    let next = move || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as u8
    };
    std::iter::repeat_with(next).take(n).collect()
}

#[tokio::test]
async fn a_pull_that_was_killed_is_resumed_by_the_next() {
    let big = layer(&[("big", &pseudo_random(3 << 20))]);
    let fake = Fake::with(&TestImage::new(&[(big, Packing::Plain)], OCI)).await;
    fake.set(|b| b.slow = true);
    let (place, recorder) = (Place::new(), Recorder::default());
    let killed = tokio::time::timeout(
        std::time::Duration::from_millis(1200),
        pull(&place, &fake, &recorder),
    );
    assert!(killed.await.is_err());
    assert!(place.store.list().unwrap().is_empty());
    let recorder = Recorder::default();
    pull(&place, &fake, &recorder).await.unwrap();
    assert!(recorder.count(|e| matches!(e, Event::Begin { at, .. } if *at > 0)) > 0);
}

#[tokio::test]
async fn a_registry_in_trouble_is_asked_again() {
    let image = TestImage::usual(OCI);
    let fake = Fake::with(&image).await;
    fake.set(|b| b.statuses = vec![StatusCode::BAD_GATEWAY, StatusCode::TOO_MANY_REQUESTS]);
    pull(&Place::new(), &fake, &Recorder::default())
        .await
        .unwrap();
    fake.set(|b| b.statuses = vec![StatusCode::SERVICE_UNAVAILABLE; 50]);
    let error = pull(&Place::new(), &fake, &Recorder::default())
        .await
        .unwrap_err();
    assert_eq!(error.reason(), "RegistryUnavailable");
    assert!(
        error
            .to_string()
            .ends_with("503 Service Unavailable: in the registry's words"),
        "{error}"
    );
    fake.set(|b| b.statuses = vec![StatusCode::IM_A_TEAPOT]);
    let error = pull(&Place::new(), &fake, &Recorder::default())
        .await
        .unwrap_err();
    assert_eq!(error.reason(), "ErrImagePull");
}

#[tokio::test]
async fn wrong_content_never_gets_into_the_store() {
    let image = TestImage::usual(OCI);
    let evil = |fake: &Fake, blob: &[u8], replacement: Vec<u8>| {
        fake.set(|b| drop(b.blobs.insert(Digest::of(blob).to_string(), replacement)));
    };
    let layer = &image.layers[2];
    let mut changed = layer.clone();
    changed[1000] ^= 1;
    let longer = [&layer[..], b"x"].concat();
    let cases: [(Vec<u8>, &str); 3] = [
        (changed, "instead of sha256:"),
        (longer, "sends more than the manifest says"),
        (layer[..1000].to_vec(), "sent less than it should have"),
    ];
    for (replacement, words) in cases {
        let fake = Fake::with(&image).await;
        evil(&fake, layer, replacement);
        let place = Place::new();
        let error = pull(&place, &fake, &Recorder::default()).await.unwrap_err();
        assert_eq!(error.reason(), "ErrImagePull");
        assert!(error.to_string().contains(words), "{error}");
        let bad = place
            .store
            .path()
            .join("blobs/sha256")
            .join(Digest::of(layer).hex());
        assert!(!bad.exists());
        // The registry is mended: the same store goes on.
        evil(&fake, layer, layer.clone());
        pull(&place, &fake, &Recorder::default()).await.unwrap();
    }
    // A manifest that isn't the one that was asked for.
    let fake = Fake::with(&image).await;
    let asked = Digest::of(b"something else");
    fake.set(|b| {
        drop(
            b.manifests
                .insert(format!("app:{asked}"), (OCI.into(), image.manifest.clone())),
        )
    });
    let place = Place::new();
    let request = request(&format!("{}/app@{asked}", fake.address), PullPolicy::Always);
    let error = ensure(
        &place.store,
        &place.layers,
        &request,
        &fake.config(),
        &Recorder::default(),
    )
    .await;
    assert!(error.unwrap_err().to_string().contains("instead of"));
}

#[tokio::test]
async fn layers_that_unpack_to_something_else_are_refused() {
    // The blob is what the manifest says, but not what the configuration says.
    let mut image = TestImage::usual(OCI);
    let ids = [
        Digest::of(b"other"),
        Digest::of(b"other2"),
        Digest::of(b"other3"),
    ];
    image.config = config(&ids, images::architecture());
    let mut manifest: serde_json::Value = serde_json::from_slice(&image.manifest).unwrap();
    manifest["config"] = descriptor(&image.config, "");
    image.manifest = manifest.to_string().into_bytes();
    let fake = Fake::with(&image).await;
    let error = pull(&Place::new(), &fake, &Recorder::default())
        .await
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("as the image's configuration says"),
        "{error}"
    );
}

#[tokio::test]
async fn a_blob_that_went_bad_on_disk_is_fetched_again() {
    let image = TestImage::usual(OCI);
    let fake = Fake::with(&image).await;
    let (place, recorder) = (Place::new(), Recorder::default());
    pull(&place, &fake, &recorder).await.unwrap();
    let blob = place
        .store
        .path()
        .join("blobs/sha256")
        .join(Digest::of(&image.layers[2]).hex());
    let mut bytes = std::fs::read(&blob).unwrap();
    bytes[2000] ^= 1;
    std::fs::write(&blob, bytes).unwrap();
    let request = request(&fake.reference(), PullPolicy::IfNotPresent);
    let other = place.other_node("other");
    ensure(&place.store, &other, &request, &fake.config(), &recorder)
        .await
        .unwrap();
    assert_eq!(
        Digest::of(&std::fs::read(&blob).unwrap()),
        Digest::of(&image.layers[2])
    );
}

#[tokio::test]
async fn documents_without_measure_are_refused() {
    let image = TestImage::usual(OCI);
    let fake = Fake::with(&image).await;
    let huge = vec![b' '; 5 << 20];
    fake.set(|b| drop(b.manifests.insert("app:1".into(), (OCI.into(), huge))));
    let error = pull(&Place::new(), &fake, &Recorder::default())
        .await
        .unwrap_err();
    assert!(error.to_string().contains("too large"), "{error}");
    for nonsense in ["", "[]", "<html>", r#"{"schemaVersion":1}"#] {
        fake.set(|b| {
            drop(
                b.manifests
                    .insert("app:1".into(), (OCI.into(), nonsense.into())),
            )
        });
        let error = pull(&Place::new(), &fake, &Recorder::default())
            .await
            .unwrap_err();
        assert_eq!(error.reason(), "ErrImagePull", "{nonsense}");
    }
    // Limits of the unpacked size hold for the whole image.
    fake.add("app", "1", &image);
    let mut place = Place::new();
    place.layers = place.layers.with_limits(images::Limits {
        bytes: 305_000,
        entries: 100,
    });
    let error = pull(&place, &fake, &Recorder::default()).await.unwrap_err();
    assert!(error.to_string().contains("allowed"), "{error}");
}

#[tokio::test]
async fn many_who_want_it_download_it_once() {
    let image = TestImage::usual(OCI);
    let fake = Arc::new(Fake::with(&image).await);
    fake.set(|b| b.slow = true);
    let place = Arc::new(Place::new());
    let recorder = Arc::new(Recorder::default());
    let pulls = (0..8).map(|node| {
        let (place, fake, recorder) = (place.clone(), fake.clone(), recorder.clone());
        async move {
            // Each with descriptors of its own, as other processes and nodes have them.
            let store = images::Store::open(place.store.path()).unwrap();
            let layers = place.other_node(&format!("node{}", node % 3));
            let request = request(&fake.reference(), PullPolicy::IfNotPresent);
            ensure(&store, &layers, &request, &fake.config(), &*recorder)
                .await
                .unwrap()
        }
    });
    let all = futures::future::join_all(pulls).await;
    assert!(all.iter().all(|image| image.layers.len() == 3));
    assert_eq!(downloads(&recorder), 4, "three layers and a configuration");
    assert!(recorder.count(|event| matches!(event, Event::Waiting { .. })) > 0);
    assert!(recorder.count(|event| matches!(event, Event::Unpacked { .. })) >= 9);
    assert_eq!(
        std::fs::read_dir(place.store.path().join("partial"))
            .unwrap()
            .count(),
        0
    );
}

#[tokio::test]
async fn mirrors_come_first_and_may_fail() {
    let image = TestImage::usual(OCI);
    let (origin, mirror) = (Fake::with(&image).await, Fake::start().await);
    mirror.add("hub/app", "1", &image);
    let place = Place::new();
    let toml = place.dir.path().join("registries.toml");
    let text = format!(
        "[registry.\"{}\"]\ninsecure = true\nmirrors = [\"http://127.0.0.1:1/nobody\", \"{}/hub\"]\n\
         [registry.\"{}\"]\ninsecure = true\n",
        origin.address, mirror.address, mirror.address
    );
    std::fs::write(&toml, text).unwrap();
    let config = RegistryConfig::read(&toml).unwrap();
    let recorder = Recorder::default();
    let get = async |place: &Place| {
        let request = request(&origin.reference(), PullPolicy::Always);
        ensure(&place.store, &place.layers, &request, &config, &recorder).await
    };
    let pulled = get(&place).await.unwrap();
    assert!(pulled.reference.starts_with(&origin.address.to_string()));
    assert_eq!(origin.requests(""), 0);
    assert!(
        recorder
            .notes()
            .iter()
            .any(|note| note.contains("a mirror can't be used"))
    );
    // The mirror has lost a blob.
    mirror.set(|b| b.blobs.clear());
    get(&Place::new()).await.unwrap();
    assert!(origin.requests("/blobs/") > 0);
    // It doesn't know the image at all.
    mirror.set(|b| b.manifests.clear());
    get(&Place::new()).await.unwrap();
    // Nobody does: the registry's own answer counts.
    origin.set(|b| b.manifests.clear());
    let error = get(&Place::new()).await.unwrap_err();
    assert!(error.to_string().contains("not found"), "{error}");
}

#[tokio::test]
async fn a_layer_that_appears_twice_is_stacked_once() {
    let (a, b) = (layer(&[("a", b"x")]), layer(&[("b", b"x")]));
    let layers = [
        (a.clone(), Packing::Gzip),
        (b, Packing::Gzip),
        (a, Packing::Gzip),
    ];
    let fake = Fake::with(&TestImage::new(&layers, OCI)).await;
    let place = Place::new();
    let pulled = pull(&place, &fake, &Recorder::default()).await.unwrap();
    assert_eq!(pulled.layers.len(), 2);
    assert!(pulled.layers[1].join("a").exists());
}

#[tokio::test]
async fn an_image_that_needed_a_secret_is_for_those_who_have_it() {
    let image = TestImage::usual(OCI);
    let fake = Fake::with(&image).await;
    fake.set(|b| b.basic = Some(("user".to_owned(), "right".to_owned())));
    let (place, recorder) = (Place::new(), Recorder::default());
    let pinned = format!("{}/app@{}", fake.address, image.digest());
    let get = async |reference: &str, policy, password: Option<&str>| {
        let mut request = request(reference, policy);
        request
            .credentials
            .extend(password.map(|password| fake.credential(password)));
        let config = fake.config();
        ensure(&place.store, &place.layers, &request, &config, &recorder).await
    };
    let app = fake.reference();
    let asked = || std::mem::take(&mut fake.behaviour.lock().unwrap().requests).len();
    assert!(
        get(&app, PullPolicy::IfNotPresent, Some("right"))
            .await
            .unwrap()
            .pulled
    );
    asked();
    // Who has it need not ask.
    for reference in [&app, &pinned] {
        for policy in [PullPolicy::IfNotPresent, PullPolicy::Never] {
            let same = get(reference, policy, Some("right")).await.unwrap();
            assert!(!same.pulled);
        }
    }
    assert_eq!(asked(), 0);
    // Who hasn't is not let in, and is not told that it is here.
    for reference in [&app, &pinned] {
        for password in [None, Some("guess")] {
            let refused = get(reference, PullPolicy::Never, password)
                .await
                .unwrap_err();
            assert_eq!(refused.reason(), "ErrImageNeverPull");
            assert_eq!(asked(), 0);
            for policy in [PullPolicy::IfNotPresent, PullPolicy::Always] {
                let refused = get(reference, policy, password).await.unwrap_err();
                assert_eq!(refused.reason(), "ErrImagePull");
                assert!(asked() > 0);
            }
        }
    }
    // One more secret that the registry knows: all of it is downloaded once more, for nothing less shows that it may.
    let before = downloads(&recorder);
    fake.set(|b| b.basic = Some(("user".to_owned(), "new".to_owned())));
    assert!(
        get(&pinned, PullPolicy::IfNotPresent, Some("new"))
            .await
            .unwrap()
            .pulled
    );
    assert!(
        !get(&app, PullPolicy::Never, Some("new"))
            .await
            .unwrap()
            .pulled
    );
    assert!(
        !get(&app, PullPolicy::Never, Some("right"))
            .await
            .unwrap()
            .pulled
    );
    assert_eq!(downloads(&recorder), before + 4);
    // And what needed none is everybody's.
    fake.set(|b| b.basic = None);
    assert!(
        get(&app, PullPolicy::IfNotPresent, None)
            .await
            .unwrap()
            .pulled
    );
    assert!(
        !get(&app, PullPolicy::Never, Some("guess"))
            .await
            .unwrap()
            .pulled
    );
    assert_eq!(downloads(&recorder), before + 8);
    // Another repository is another question, also for the same image; but its blobs are everybody's by now.
    let elsewhere = format!("{}/other@{}", fake.address, image.digest());
    assert!(
        get(&elsewhere, PullPolicy::Never, Some("right"))
            .await
            .is_err()
    );
    fake.add("other", "1", &image);
    assert!(
        get(&elsewhere, PullPolicy::IfNotPresent, None)
            .await
            .unwrap()
            .pulled
    );
    assert_eq!(downloads(&recorder), before + 8);
}

#[tokio::test]
async fn a_pull_that_ends_halfway_opens_nothing() {
    let image = TestImage::new(&[(layer(&[("a", b"x"), ("b", b"x")]), Packing::Gzip)], OCI);
    let fake = Fake::with(&image).await;
    fake.set(|b| b.basic = Some(("user".to_owned(), "right".to_owned())));
    let (place, recorder) = (Place::new(), Recorder::default());
    let get = async |layers: &images::Layers, reference: &str, policy, has_secret: bool| {
        let mut request = request(reference, policy);
        request
            .credentials
            .extend(has_secret.then(|| fake.credential("right")));
        let config = fake.config();
        let got = ensure(&place.store, layers, &request, &config, &recorder).await;
        got.map_err(|error| error.reason())
    };
    let (tag, layers) = (fake.reference(), &place.layers);
    let pinned = |name: &str| format!("{}/{name}@{}", fake.address, image.digest());
    // All of it is in the store when unpacking fails.
    let small = place.other_node("small").with_limits(images::Limits {
        entries: 1,
        ..Default::default()
    });
    let failed = get(&small, &tag, PullPolicy::IfNotPresent, true).await;
    assert_eq!(failed.unwrap_err(), "ErrImagePull");
    assert_eq!(place.blobs().len(), 3);
    for reference in [&tag, &pinned("app"), &pinned("other")] {
        let refused = get(layers, reference, PullPolicy::Never, false).await;
        assert_eq!(refused.unwrap_err(), "ErrImageNeverPull");
        let refused = get(layers, reference, PullPolicy::IfNotPresent, false).await;
        assert_eq!(refused.unwrap_err(), "ErrImagePull");
    }
    // The next one that has the secret ends it, without a download.
    let before = downloads(&recorder);
    get(layers, &tag, PullPolicy::IfNotPresent, true)
        .await
        .unwrap();
    assert_eq!(downloads(&recorder), before);
    let pinned = pinned("app");
    let refused = get(layers, &pinned, PullPolicy::Never, false).await;
    assert_eq!(refused.unwrap_err(), "ErrImageNeverPull");
    get(layers, &pinned, PullPolicy::Never, true).await.unwrap();
}

#[tokio::test]
async fn a_broken_credential_helper_is_told_of_only_where_nothing_else_helps() {
    let image = TestImage::usual(OCI);
    let fake = Fake::with(&image).await;
    let dir = tempfile::tempdir().unwrap();
    let config = fake.config().with_docker_config(dir.path());
    let get = async |password: Option<&str>| {
        let (place, recorder) = (Place::new(), Recorder::default());
        let mut request = request(&fake.reference(), PullPolicy::IfNotPresent);
        request
            .credentials
            .extend(password.map(|password| fake.credential(password)));
        ensure(&place.store, &place.layers, &request, &config, &recorder).await
    };
    for (text, words) in [
        (
            r#"{"credsStore":"that-is-not-here"}"#,
            "docker-credential-that-is-not-here failed: No such file",
        ),
        ("no JSON", "is not in the format of ~/.docker/config.json"),
    ] {
        std::fs::write(dir.path().join("config.json"), text).unwrap();
        // A token for everybody, then for who has the pod's secret.
        fake.set(|b| b.token = Some(("open".into(), None)));
        get(None).await.unwrap();
        let user = Some(("user".to_owned(), "right".to_owned()));
        fake.set(|b| b.token = Some(("closed".into(), user)));
        get(Some("right")).await.unwrap();
        for password in [None, Some("wrong")] {
            let error = get(password).await.unwrap_err();
            assert_eq!(error.reason(), "ErrImagePull");
            let said = error.to_string();
            assert!(said.contains("pull access denied"), "{said}");
            assert!(said.contains(words), "{said}");
        }
    }
}

#[tokio::test]
async fn credentials_go_over_plain_http_only_with_consent() {
    let image = TestImage::usual(OCI);
    let fake = Fake::with(&image).await;
    fake.set(|b| b.basic = Some(("user".to_owned(), "right".to_owned())));
    let place = Place::new();
    let auth = base64::engine::general_purpose::STANDARD.encode("user:right");
    let text = format!(r#"{{"auths":{{"{}":{{"auth":"{auth}"}}}}}}"#, fake.address);
    std::fs::write(place.dir.path().join("config.json"), text).unwrap();
    let own = fake.address;
    for (rules, words) in [
        (String::new(), None),
        // Named as such it is asked, and given nothing.
        (
            format!("[registry.\"{own}\"]\nmirrors = [\"http://{own}\"]\n"),
            Some("`insecure = true`"),
        ),
    ] {
        let config = read_config(&rules).with_docker_config(place.dir.path());
        for secrets in [Vec::new(), vec![fake.credential("right")]] {
            let recorder = Recorder::default();
            let mut request = request(&fake.reference(), PullPolicy::IfNotPresent);
            request.credentials = secrets;
            let failed = ensure(&place.store, &place.layers, &request, &config, &recorder).await;
            assert!(failed.is_err(), "{rules}");
            let notes = recorder.notes();
            assert!(
                words.is_none_or(|words| notes.iter().any(|note| note.contains(words))),
                "{notes:?}"
            );
        }
    }
    assert_eq!(fake.credentials(), Vec::<String>::new());
    let mut request = request(&fake.reference(), PullPolicy::IfNotPresent);
    request.credentials = vec![fake.credential("right")];
    ensure(
        &place.store,
        &place.layers,
        &request,
        &fake.config(),
        &Recorder::default(),
    )
    .await
    .unwrap();
    assert!(!fake.credentials().is_empty());
}

#[tokio::test]
async fn credentials_follow_neither_realms_nor_redirects() {
    let image = TestImage::usual(OCI);
    let (fake, other) = (Fake::with(&image).await, Fake::with(&image).await);
    let secrets = [
        fake.credential("right").secret,
        Secret::IdentityToken("identity".into()),
    ];
    let get = async |secret: &Secret, config: &RegistryConfig| {
        let place = Place::new();
        let mut request = request(&fake.reference(), PullPolicy::IfNotPresent);
        request.credentials = vec![Credential {
            pattern: fake.address.to_string(),
            secret: secret.clone(),
        }];
        let recorder = Recorder::default();
        ensure(&place.store, &place.layers, &request, config, &recorder).await
    };
    fake.set(|b| b.token = Some(("t".into(), None)));
    other.set(|b| b.token = Some(("t".into(), None)));
    let there = format!("http://{}/token", other.address);
    // A token server without TLS that nobody has allowed.
    fake.set(|b| b.realm = Some(there.clone()));
    for secret in &secrets {
        let error = get(secret, &fake.config()).await.unwrap_err().to_string();
        assert!(error.contains("not secure"), "{error}");
    }
    assert_eq!(other.credentials(), Vec::<String>::new());
    let both = insecure(&[fake.address, other.address]);
    get(&secrets[0], &both).await.unwrap();
    assert_eq!(other.credentials().len(), 1);
    // One that sends us elsewhere, even where that is allowed.
    other.set(|b| b.credentials.clear());
    fake.set(|b| {
        b.realm = None;
        b.moved_tokens = Some(there);
    });
    for secret in &secrets {
        let error = get(secret, &both).await.unwrap_err().to_string();
        assert!(error.contains("gets no credentials"), "{error}");
    }
    assert_eq!(other.credentials(), Vec::<String>::new());
    // Blobs may be elsewhere; whoever has them is shown nothing.
    other.set(|b| b.token = None);
    fake.set(|b| {
        b.moved_tokens = None;
        b.moved_blobs = Some(format!("http://{}", other.address));
    });
    get(&secrets[0], &both).await.unwrap();
    assert!(other.requests("/blobs/") > 0);
    assert_eq!(other.credentials(), Vec::<String>::new());
}

/// A store with an image that was pulled with a secret, and somebody without it, who has a registry of their own and knows
/// all digests.
struct Tenants {
    place: Place,
    image: TestImage,
    private: Fake,
    hostile: Fake,
}

impl Tenants {
    async fn new() -> Tenants {
        let tenants = Tenants::before_the_pull(TestImage::usual(OCI)).await;
        tenants.pull_private(&Recorder::default()).await.unwrap();
        tenants
    }

    async fn before_the_pull(image: TestImage) -> Tenants {
        let (private, hostile) = (Fake::with(&image).await, Fake::start().await);
        private.set(|b| b.basic = Some(("user".to_owned(), "right".to_owned())));
        Tenants {
            place: Place::new(),
            image,
            private,
            hostile,
        }
    }

    async fn pull_private(&self, recorder: &Recorder) -> Result<images::Image, ImageError> {
        let mut request = request(&self.private.reference(), PullPolicy::IfNotPresent);
        request.credentials = vec![self.private.credential("right")];
        let (place, config) = (&self.place, self.private.config());
        ensure(&place.store, &place.layers, &request, &config, recorder).await
    }

    /// What a pod without the secret gets by this name, here or on another node.
    async fn steal(
        &self,
        reference: &str,
        policy: PullPolicy,
    ) -> Result<images::Image, ImageError> {
        let config = insecure(&[self.private.address, self.hostile.address]);
        let other = self.place.other_node("other");
        let request = request(reference, policy);
        let get = async |layers| {
            let recorder = Recorder::default();
            ensure(&self.place.store, layers, &request, &config, &recorder).await
        };
        match get(&self.place.layers).await {
            Ok(image) => Ok(image),
            Err(_) => get(&other).await,
        }
    }

    /// Nobody gets anything by this name, now or when something of it may have stayed from the first attempt.
    async fn gets_nothing(&self, reference: &str) {
        for _ in 0..2 {
            for policy in [PullPolicy::IfNotPresent, PullPolicy::Always] {
                let stolen = self.steal(reference, policy).await;
                assert_eq!(stolen.unwrap_err().reason(), "ErrImagePull", "{reference}");
            }
            let stolen = self.steal(reference, PullPolicy::Never).await;
            assert_eq!(stolen.unwrap_err().reason(), "ErrImageNeverPull");
        }
    }

    fn hostile_name(&self, version: &str) -> String {
        let mark = if version.contains(':') { '@' } else { ':' };
        format!("{}/app{mark}{version}", self.hostile.address)
    }

    /// Serves a manifest of the attacker's own, and nothing of what it names; its digest.
    fn serve(&self, tag: &str, document: &serde_json::Value, media_type: &str) -> Digest {
        let bytes = document.to_string().into_bytes();
        let digest = Digest::of(&bytes);
        self.hostile.set(|b| {
            for version in [tag.to_owned(), digest.to_string()] {
                let document = (media_type.to_owned(), bytes.clone());
                b.manifests.insert(format!("app:{version}"), document);
            }
        });
        digest
    }

    fn serve_blob(&self, bytes: &[u8]) {
        let digest = Digest::of(bytes).to_string();
        self.hostile
            .set(|b| drop(b.blobs.insert(digest, bytes.to_vec())));
    }
}

fn manifest(config: &[u8], layers: &[&[u8]]) -> serde_json::Value {
    let layers: Vec<_> = layers.iter().map(|layer| descriptor(layer, "")).collect();
    serde_json::json!({"schemaVersion": 2, "mediaType": OCI, "config": descriptor(config, ""), "layers": layers})
}

#[tokio::test]
async fn a_registry_that_only_names_digests_opens_nothing() {
    let tenants = Tenants::new().await;
    let digest = tenants.image.digest();
    tenants.hostile.set(|b| b.claims = Some(digest));
    tenants
        .gets_nothing(&tenants.hostile_name(&digest.to_string()))
        .await;
    tenants.gets_nothing(&tenants.hostile_name("1")).await;
    // Whoever has access still needs no registry.
    tenants.private.set(|b| b.requests.clear());
    let again = tenants.pull_private(&Recorder::default()).await.unwrap();
    assert!(!again.pulled);
    assert_eq!(tenants.private.requests(""), 0);
}

#[tokio::test]
async fn manifests_of_others_cannot_name_private_blobs() {
    let tenants = Tenants::new().await;
    let image = &tenants.image;
    let layers: Vec<&[u8]> = image.layers.iter().map(|layer| &layer[..]).collect();
    // The private image's own manifest, without blobs.
    let own: serde_json::Value = serde_json::from_slice(&image.manifest).unwrap();
    let own = tenants.serve("same", &own, OCI);
    // Another manifest of the same parts.
    let mut other = manifest(&image.config, &layers);
    other["annotations"] = serde_json::json!({"a": "b"});
    let other = tenants.serve("other", &other, OCI);
    // A configuration of the attacker's own, and private layers.
    let ids: Vec<Digest> =
        serde_json::from_slice::<serde_json::Value>(&image.config).unwrap()["rootfs"]["diff_ids"]
            .as_array()
            .unwrap()
            .iter()
            .map(|id| id.as_str().unwrap().parse().unwrap())
            .collect();
    let config = [config(&ids, images::architecture()), b" ".to_vec()].concat();
    tenants.serve_blob(&config);
    let layered = tenants.serve("layers", &manifest(&config, &layers), OCI);
    // The private configuration, which holds secrets at times, and layers of the attacker's own.
    let harmless: Vec<_> = (0..3)
        .map(|n| layer(&[("file", &[n])]))
        .inspect(|layer| tenants.serve_blob(layer))
        .collect();
    let harmless: Vec<&[u8]> = harmless.iter().map(|layer| &layer[..]).collect();
    let configured = tenants.serve("config", &manifest(&image.config, &harmless), OCI);
    for (tag, digest) in [
        ("same", own),
        ("other", other),
        ("layers", layered),
        ("config", configured),
    ] {
        tenants.gets_nothing(&tenants.hostile_name(tag)).await;
        let pinned = tenants.hostile_name(&digest.to_string());
        tenants.gets_nothing(&pinned).await;
    }
    // An index that leads to the private manifest, which the attacker's registry has not.
    let hostile = &tenants.hostile;
    let known = format!("app:{}", image.digest());
    hostile.set(|b| drop(b.manifests.remove(&known)));
    let mut entry = descriptor(&image.manifest, OCI);
    entry["platform"] = serde_json::json!({"os": "linux", "architecture": images::architecture()});
    let index =
        serde_json::json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]});
    let index = tenants.serve("index", &index, OCI_INDEX);
    tenants.gets_nothing(&tenants.hostile_name("index")).await;
    let pinned = tenants.hostile_name(&index.to_string());
    tenants.gets_nothing(&pinned).await;
    // Whoever has all bytes needs nobody's leave.
    hostile.add("app", "same", image);
    let name = tenants.hostile_name("same");
    let got = tenants.steal(&name, PullPolicy::IfNotPresent).await;
    assert_eq!(got.unwrap().layers.len(), 3);
    // Which tells the private registry's name nothing.
    let private = tenants.private.reference();
    tenants.gets_nothing(&private).await;
}

#[tokio::test]
async fn a_private_layer_is_not_found_by_its_diff_id() {
    let tenants = Tenants::new().await;
    let archive = layer(&[("bin/app", b"one"), ("etc/old", b"x")]);
    assert_eq!(pack(&archive, Packing::Gzip), tenants.image.layers[0]);
    let config = config(&[Digest::of(&archive)], images::architecture());
    let decoy = layer(&[("file", b"decoy")]);
    tenants.serve_blob(&config);
    tenants.serve_blob(&decoy);
    let digest = tenants.serve("1", &manifest(&config, &[&decoy]), OCI);
    tenants.gets_nothing(&tenants.hostile_name("1")).await;
    let pinned = tenants.hostile_name(&digest.to_string());
    tenants.gets_nothing(&pinned).await;
    // The same layer, compressed otherwise, is the same layer.
    let packed = pack(&archive, Packing::Zstd);
    tenants.serve_blob(&packed);
    tenants.serve("1", &manifest(&config, &[&packed]), OCI);
    let name = tenants.hostile_name("1");
    let got = tenants.steal(&name, PullPolicy::IfNotPresent).await;
    assert_eq!(got.unwrap().layers.len(), 1);
}

#[tokio::test]
async fn downloads_of_others_are_not_resumed() {
    let big = layer(&[("big", &pseudo_random(3 << 20))]);
    let image = TestImage::new(&[(big, Packing::Plain)], OCI);
    let tenants = Tenants::before_the_pull(image).await;
    let (private, image) = (&tenants.private, &tenants.image);
    private.set(|b| b.slow = true);
    let recorder = Recorder::default();
    let killed = tokio::time::timeout(
        std::time::Duration::from_millis(1200),
        tenants.pull_private(&recorder),
    );
    assert!(killed.await.is_err());
    let partial = std::fs::read_dir(tenants.place.store.path().join("partial")).unwrap();
    let length = |entry: std::fs::DirEntry| entry.metadata().unwrap().len();
    let have = partial.flatten().map(length).max().unwrap();
    assert!(have > 0);
    // The attacker knows only the rest.
    let mut rest = image.layers[0].clone();
    rest[..usize::try_from(have).unwrap()].fill(0);
    tenants.hostile.add("app", "1", image);
    let digest = Digest::of(&image.layers[0]).to_string();
    tenants.hostile.set(|b| drop(b.blobs.insert(digest, rest)));
    tenants.gets_nothing(&tenants.hostile_name("1")).await;
    // Who began it goes on.
    private.set(|b| b.slow = false);
    let recorder = Recorder::default();
    tenants.pull_private(&recorder).await.unwrap();
    assert!(recorder.count(|e| matches!(e, Event::Begin { at, .. } if *at > 0)) > 0);
}

#[tokio::test]
async fn public_layers_are_downloaded_once_for_all_images() {
    let base = layer(&[("base", b"x")]);
    let on_base = |name: &str| {
        let own = layer(&[(name, b"y")]);
        TestImage::new(&[(base.clone(), Packing::Gzip), (own, Packing::Gzip)], OCI)
    };
    let fake = Fake::with(&on_base("one")).await;
    fake.add("other", "1", &on_base("two"));
    let (place, recorder) = (Place::new(), Recorder::default());
    pull(&place, &fake, &recorder).await.unwrap();
    assert_eq!(downloads(&recorder), 3);
    let other = request(&format!("{}/other:1", fake.address), PullPolicy::Always);
    let config = fake.config();
    ensure(&place.store, &place.layers, &other, &config, &recorder)
        .await
        .unwrap();
    assert_eq!(downloads(&recorder), 5);
}

#[tokio::test]
async fn an_archive_brings_all_that_it_names() {
    let tenants = Tenants::new().await;
    let archive = tempfile::tempdir().unwrap();
    let blobs = archive.path().join("blobs/sha256");
    std::fs::create_dir_all(&blobs).unwrap();
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [descriptor(&tenants.image.manifest, OCI)]});
    std::fs::write(archive.path().join("index.json"), index.to_string()).unwrap();
    let write = |bytes: &[u8]| {
        std::fs::write(blobs.join(Digest::of(bytes).hex()), bytes).unwrap();
    };
    write(&tenants.image.manifest);
    let name = "loaded.example/app:1".parse().unwrap();
    let load =
        || images::archive::load_directory(&tenants.place.store, archive.path(), Some(&name));
    assert!(load().is_err());
    let stolen = tenants
        .steal("loaded.example/app:1", PullPolicy::Never)
        .await;
    assert!(stolen.is_err());
    tenants.image.blobs().for_each(|blob| write(blob));
    load().unwrap();
    let loaded = tenants
        .steal("loaded.example/app:1", PullPolicy::Never)
        .await;
    assert_eq!(loaded.unwrap().layers.len(), 3);
}
