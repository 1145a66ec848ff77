//! Pulls from a fake registry in this process, with configurable faults.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

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
use images::{
    Digest, ImageError, PullEvent, PullPolicy, RegistryConfig, RegistryCredential, RegistrySecret,
    ensure,
};

/// The content and the faults of the registry.
#[derive(Default)]
struct FakeState {
    /// Manifests by `repository:version`, with their media type.
    manifests: HashMap<String, (String, Vec<u8>)>,
    blobs: HashMap<String, Vec<u8>>,
    /// Requires this token, which the token server gives to this user and password, or to anyone.
    token: Option<(String, Option<(String, String)>)>,
    basic: Option<(String, String)>,
    /// Answers 403 to this user.
    forbidden: Option<(String, String)>,
    /// Cuts the connections of the next blob requests after this many bytes, last element first.
    cut_after: Vec<usize>,
    ignore_ranges: bool,
    /// The statuses for the next requests.
    statuses: Vec<StatusCode>,
    slow: bool,
    /// Answers every HEAD request for a manifest with this digest.
    claimed_digest: Option<Digest>,
    requests: Vec<String>,
    scopes: Vec<String>,
    /// The URL of another token server.
    realm: Option<String>,
    /// Redirects token requests or blob requests to these URLs.
    redirect_tokens: Option<String>,
    redirect_blobs: Option<String>,
    /// All credentials that the registry received.
    credentials: Vec<String>,
}

type Shared = Arc<Mutex<FakeState>>;

struct FakeRegistry {
    address: SocketAddr,
    state: Shared,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for FakeRegistry {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl FakeRegistry {
    async fn start() -> FakeRegistry {
        let state = Shared::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/token", any(token))
            .fallback(any(registry))
            .with_state(state.clone());
        let server = tokio::spawn(async move {
            let _ = axum::serve(listener, router).await;
        });
        FakeRegistry {
            address,
            state,
            server,
        }
    }

    /// A registry with `image` as `app:1`.
    async fn with_image(image: &TestImage) -> FakeRegistry {
        let fake = FakeRegistry::start().await;
        fake.add("app", "1", image);
        fake
    }

    fn add(&self, repository: &str, tag: &str, image: &TestImage) {
        let mut state = self.state.lock().unwrap();
        let manifest = (image.media_type.to_owned(), image.manifest.clone());
        for version in [tag.to_owned(), image.digest().to_string()] {
            state
                .manifests
                .insert(format!("{repository}:{version}"), manifest.clone());
        }
        for blob in image.blobs() {
            state
                .blobs
                .insert(Digest::of(blob).to_string(), blob.clone());
        }
    }

    fn set(&self, change: impl FnOnce(&mut FakeState)) {
        change(&mut self.state.lock().unwrap());
    }

    /// A configuration that allows plain HTTP for this registry.
    fn config(&self) -> RegistryConfig {
        insecure(&[self.address])
    }

    /// All credentials that the registry received.
    fn credentials(&self) -> Vec<String> {
        self.state.lock().unwrap().credentials.clone()
    }

    fn reference(&self) -> String {
        format!("{}/app:1", self.address)
    }

    /// A credential of `user` with this password.
    fn credential(&self, password: &str) -> RegistryCredential {
        RegistryCredential {
            pattern: self.address.to_string(),
            secret: RegistrySecret::Password {
                username: "user".into(),
                password: password.into(),
            },
        }
    }

    fn requests(&self, containing: &str) -> usize {
        let state = self.state.lock().unwrap();
        state
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
    if let Some(moved) = &state.redirect_tokens {
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
            r#"{"errors":[{"code":"X","message":"message of the registry"}]}"#,
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
        if let (Some(claimed), &axum::http::Method::HEAD) = (state.claimed_digest, request.method())
        {
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
    if let Some(moved) = &state.redirect_blobs {
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
    let body = match state.cut_after.pop() {
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
    node: &TestNode,
    fake: &FakeRegistry,
    recorder: &Recorder,
) -> Result<images::LocalImage, ImageError> {
    let request = request(&fake.reference(), PullPolicy::IfNotPresent);
    ensure(
        &node.store,
        &node.layers,
        &request,
        &fake.config(),
        recorder,
    )
    .await
}

fn downloads(recorder: &Recorder) -> usize {
    recorder.count(|event| matches!(event, PullEvent::Downloaded { .. }))
}

#[tokio::test]
async fn image_is_pulled_once_and_unpacked_per_node() {
    for media_type in [OCI, DOCKER] {
        let image = TestImage::usual(media_type);
        let fake = FakeRegistry::with_image(&image).await;
        let (node, recorder) = (TestNode::new(), Recorder::default());
        let pulled = pull(&node, &fake, &recorder).await.unwrap();
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
        // A second pull here, and one on another node, send no request.
        fake.set(|b| b.requests.clear());
        let again = pull(&node, &fake, &recorder).await.unwrap();
        assert!(!again.pulled && again.layers == pulled.layers);
        let request = request(&fake.reference(), PullPolicy::Never);
        let other = node.other_node("other");
        let there = ensure(&node.store, &other, &request, &fake.config(), &recorder).await;
        assert_eq!(there.unwrap().layers.len(), 3);
        assert_eq!(fake.requests(""), 0);
        // A node with the unpacked layers needs no blob.
        for blob in node.blobs() {
            if std::fs::metadata(&blob).unwrap().len() > 250_000 {
                std::fs::remove_file(blob).unwrap();
            }
        }
        assert!(!pull(&node, &fake, &recorder).await.unwrap().pulled);
        // The digest refers to the same image.
        let pinned = format!("{}/app@{}", fake.address, image.digest());
        let request = common::request(&pinned, PullPolicy::Never);
        let found = ensure(
            &node.store,
            &node.layers,
            &request,
            &fake.config(),
            &recorder,
        )
        .await;
        assert_eq!(found.unwrap().id, pulled.id);
    }
}

#[tokio::test]
async fn pull_policies_are_followed() {
    let (first, node, recorder) = (TestImage::usual(OCI), TestNode::new(), Recorder::default());
    let fake = FakeRegistry::with_image(&first).await;
    let get = async |policy| {
        let request = request(&fake.reference(), policy);
        ensure(
            &node.store,
            &node.layers,
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
    // `Always` asks the registry, but downloads no blob twice.
    let before = downloads(&recorder);
    fake.set(|b| b.requests.clear());
    assert!(get(PullPolicy::Always).await.unwrap().pulled);
    assert_eq!(
        (downloads(&recorder), fake.requests("/manifests/")),
        (before, 1)
    );
}

#[tokio::test]
async fn image_of_this_platform_is_selected() {
    let (image, foreign) = (TestImage::usual(OCI), TestImage::usual(DOCKER));
    let fake = FakeRegistry::with_image(&image).await;
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
    let (node, recorder) = (TestNode::new(), Recorder::default());
    let pulled = pull(&node, &fake, &recorder).await.unwrap();
    assert_eq!(
        pulled.id,
        format!("{}/app@{}", fake.address, Digest::of(&index))
    );
    assert_eq!(pulled.layers.len(), 3);
    assert!(!pull(&node, &fake, &recorder).await.unwrap().pulled);
    // An index without this platform.
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [entry(&foreign, "s390x")]});
    fake.set(|b| {
        drop(b.manifests.insert(
            "app:1".into(),
            (OCI_INDEX.into(), index.to_string().into_bytes()),
        ))
    });
    let error = pull(&TestNode::new(), &fake, &recorder).await.unwrap_err();
    assert_eq!(error.reason(), "ErrImagePull");
    assert!(
        error.to_string().contains("no match for platform"),
        "{error}"
    );
}

#[tokio::test]
async fn invalid_names_and_missing_images_fail() {
    let fake = FakeRegistry::start().await;
    let (node, recorder) = (TestNode::new(), Recorder::default());
    let error = pull(&node, &fake, &recorder).await.unwrap_err();
    assert_eq!(error.reason(), "ErrImagePull");
    assert!(error.to_string().ends_with("app:1: not found"), "{error}");
    let get = async |name: &str| {
        let request = request(name, PullPolicy::Always);
        ensure(
            &node.store,
            &node.layers,
            &request,
            &fake.config(),
            &recorder,
        )
        .await
        .unwrap_err()
    };
    assert_eq!(get("Not/A//Name").await.reason(), "InvalidImageName");
    // No listener on this port.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let error = get(&format!("{address}/app")).await;
    assert_eq!(error.reason(), "RegistryUnavailable", "{error}");
    assert!(node.blobs().is_empty());
}

#[tokio::test]
async fn tokens_and_passwords_authenticate() {
    let image = TestImage::usual(OCI);
    let fake = FakeRegistry::with_image(&image).await;
    let user = Some(("user".to_owned(), "right".to_owned()));
    let credential = |password: &str| fake.credential(password);
    let get = async |credentials: Vec<RegistryCredential>| {
        let (node, recorder) = (TestNode::new(), Recorder::default());
        let mut request = request(&fake.reference(), PullPolicy::IfNotPresent);
        request.credentials = credentials;
        ensure(
            &node.store,
            &node.layers,
            &request,
            &fake.config(),
            &recorder,
        )
        .await
    };
    // An anonymous token.
    fake.set(|b| b.token = Some(("open".into(), None)));
    get(Vec::new()).await.unwrap();
    assert!(
        fake.state
            .lock()
            .unwrap()
            .scopes
            .iter()
            .all(|s| s == "repository:app:pull")
    );
    // A token for one user: the wrong password is tried, then the right one.
    fake.set(|b| b.token = Some(("closed".into(), user.clone())));
    let error = get(vec![credential("wrong")]).await.unwrap_err();
    assert_eq!(error.reason(), "ErrImagePull");
    assert!(error.to_string().contains("pull access denied"), "{error}");
    assert!(!error.to_string().contains("wrong"));
    get(vec![credential("wrong"), credential("right")])
        .await
        .unwrap();
    // Basic authentication.
    fake.set(|b| {
        b.token = None;
        b.basic = user.clone();
    });
    assert!(get(Vec::new()).await.is_err());
    assert!(get(vec![credential("wrong")]).await.is_err());
    get(vec![credential("wrong"), credential("right")])
        .await
        .unwrap();
    // The first user is known but forbidden.
    fake.set(|b| b.forbidden = Some(("user".to_owned(), "known".to_owned())));
    assert!(get(vec![credential("known")]).await.is_err());
    get(vec![credential("known"), credential("right")])
        .await
        .unwrap();
    // A credential of another registry is not used.
    let mut other = credential("right");
    other.pattern = "registry.example".into();
    assert!(get(vec![other]).await.is_err());
    // A credential from the user's own file.
    let node = TestNode::new();
    let auth = base64::engine::general_purpose::STANDARD.encode("user:right");
    let text = format!(r#"{{"auths":{{"{}":{{"auth":"{auth}"}}}}}}"#, fake.address);
    std::fs::write(node.dir.path().join("config.json"), text).unwrap();
    let config = fake.config().with_docker_config(node.dir.path());
    let request = request(&fake.reference(), PullPolicy::Always);
    ensure(
        &node.store,
        &node.layers,
        &request,
        &config,
        &Recorder::default(),
    )
    .await
    .unwrap();
}

#[tokio::test]
async fn expired_token_is_renewed() {
    let image = TestImage::usual(OCI);
    let fake = FakeRegistry::with_image(&image).await;
    fake.set(|b| b.token = Some(("first".into(), None)));
    let node = TestNode::new();
    // The token changes after each downloaded blob.
    struct ChangeToken<'a>(&'a FakeRegistry);
    impl images::PullProgress for ChangeToken<'_> {
        fn event(&self, event: PullEvent) {
            if matches!(event, PullEvent::Downloaded { .. }) {
                self.0
                    .set(|b| b.token = Some((format!("token {}", b.requests.len()), None)));
            }
        }
    }
    let request = request(&fake.reference(), PullPolicy::Always);
    let config = fake.config();
    ensure(
        &node.store,
        &node.layers,
        &request,
        &config,
        &ChangeToken(&fake),
    )
    .await
    .unwrap();
}

#[tokio::test]
async fn lost_connections_are_resumed() {
    let big = layer(&[("big", &pseudo_random(3 << 20))]);
    let image = TestImage::new(&[(big, Packing::Plain)], OCI);
    for ignore_ranges in [false, true] {
        let fake = FakeRegistry::with_image(&image).await;
        fake.set(|b| {
            b.cut_after = vec![2 << 20, 1 << 20, 0];
            b.ignore_ranges = ignore_ranges;
        });
        let (node, recorder) = (TestNode::new(), Recorder::default());
        let pulled = pull(&node, &fake, &recorder).await.unwrap();
        assert_eq!(
            std::fs::metadata(pulled.layers[0].join("big"))
                .unwrap()
                .len(),
            3 << 20
        );
        let resumed =
            recorder.count(|e| matches!(e, PullEvent::Begin { at, .. } if *at >= 1 << 20));
        assert_eq!(resumed > 0, !ignore_ranges);
        assert!(
            recorder
                .notes()
                .iter()
                .any(|note| note.contains("retrying"))
        );
    }
}

/// Incompressible bytes.
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
async fn next_pull_resumes_a_killed_one() {
    let big = layer(&[("big", &pseudo_random(3 << 20))]);
    let fake = FakeRegistry::with_image(&TestImage::new(&[(big, Packing::Plain)], OCI)).await;
    fake.set(|b| b.slow = true);
    let (node, recorder) = (TestNode::new(), Recorder::default());
    let killed = tokio::time::timeout(
        std::time::Duration::from_millis(1200),
        pull(&node, &fake, &recorder),
    );
    assert!(killed.await.is_err());
    assert!(node.store.list().unwrap().is_empty());
    let recorder = Recorder::default();
    pull(&node, &fake, &recorder).await.unwrap();
    assert!(recorder.count(|e| matches!(e, PullEvent::Begin { at, .. } if *at > 0)) > 0);
}

#[tokio::test]
async fn server_errors_are_retried() {
    let image = TestImage::usual(OCI);
    let fake = FakeRegistry::with_image(&image).await;
    fake.set(|b| b.statuses = vec![StatusCode::BAD_GATEWAY, StatusCode::TOO_MANY_REQUESTS]);
    pull(&TestNode::new(), &fake, &Recorder::default())
        .await
        .unwrap();
    fake.set(|b| b.statuses = vec![StatusCode::SERVICE_UNAVAILABLE; 50]);
    let error = pull(&TestNode::new(), &fake, &Recorder::default())
        .await
        .unwrap_err();
    assert_eq!(error.reason(), "RegistryUnavailable");
    assert!(
        error
            .to_string()
            .ends_with("503 Service Unavailable: message of the registry"),
        "{error}"
    );
    fake.set(|b| b.statuses = vec![StatusCode::IM_A_TEAPOT]);
    let error = pull(&TestNode::new(), &fake, &Recorder::default())
        .await
        .unwrap_err();
    assert_eq!(error.reason(), "ErrImagePull");
}

#[tokio::test]
async fn wrong_content_is_never_stored() {
    let image = TestImage::usual(OCI);
    let evil = |fake: &FakeRegistry, blob: &[u8], replacement: Vec<u8>| {
        fake.set(|b| drop(b.blobs.insert(Digest::of(blob).to_string(), replacement)));
    };
    let layer = &image.layers[2];
    let mut changed = layer.clone();
    changed[1000] ^= 1;
    let longer = [&layer[..], b"x"].concat();
    let cases: [(Vec<u8>, &str); 3] = [
        (changed, "instead of sha256:"),
        (longer, "sent more bytes than the manifest says"),
        (
            layer[..1000].to_vec(),
            "sent fewer bytes than the manifest says",
        ),
    ];
    for (replacement, expected_text) in cases {
        let fake = FakeRegistry::with_image(&image).await;
        evil(&fake, layer, replacement);
        let node = TestNode::new();
        let error = pull(&node, &fake, &Recorder::default()).await.unwrap_err();
        assert_eq!(error.reason(), "ErrImagePull");
        assert!(error.to_string().contains(expected_text), "{error}");
        let bad = node
            .store
            .path()
            .join("blobs/sha256")
            .join(Digest::of(layer).hex());
        assert!(!bad.exists());
        // With a repaired registry the same store works.
        evil(&fake, layer, layer.clone());
        pull(&node, &fake, &Recorder::default()).await.unwrap();
    }
    // A manifest of another digest than requested.
    let fake = FakeRegistry::with_image(&image).await;
    let asked = Digest::of(b"something else");
    fake.set(|b| {
        drop(
            b.manifests
                .insert(format!("app:{asked}"), (OCI.into(), image.manifest.clone())),
        )
    });
    let node = TestNode::new();
    let request = request(&format!("{}/app@{asked}", fake.address), PullPolicy::Always);
    let error = ensure(
        &node.store,
        &node.layers,
        &request,
        &fake.config(),
        &Recorder::default(),
    )
    .await;
    assert!(error.unwrap_err().to_string().contains("instead of"));
}

#[tokio::test]
async fn layers_with_wrong_diff_id_are_rejected() {
    // The blob has the digest of the manifest, but not the diff id of the configuration.
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
    let fake = FakeRegistry::with_image(&image).await;
    let error = pull(&TestNode::new(), &fake, &Recorder::default())
        .await
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("but the image's configuration says"),
        "{error}"
    );
}

#[tokio::test]
async fn damaged_blob_is_downloaded_again() {
    let image = TestImage::usual(OCI);
    let fake = FakeRegistry::with_image(&image).await;
    let (node, recorder) = (TestNode::new(), Recorder::default());
    pull(&node, &fake, &recorder).await.unwrap();
    let blob = node
        .store
        .path()
        .join("blobs/sha256")
        .join(Digest::of(&image.layers[2]).hex());
    let mut bytes = std::fs::read(&blob).unwrap();
    bytes[2000] ^= 1;
    std::fs::write(&blob, bytes).unwrap();
    let request = request(&fake.reference(), PullPolicy::IfNotPresent);
    let other = node.other_node("other");
    ensure(&node.store, &other, &request, &fake.config(), &recorder)
        .await
        .unwrap();
    assert_eq!(
        Digest::of(&std::fs::read(&blob).unwrap()),
        Digest::of(&image.layers[2])
    );
}

#[tokio::test]
async fn oversized_documents_and_images_are_rejected() {
    let image = TestImage::usual(OCI);
    let fake = FakeRegistry::with_image(&image).await;
    let huge = vec![b' '; 5 << 20];
    fake.set(|b| drop(b.manifests.insert("app:1".into(), (OCI.into(), huge))));
    let error = pull(&TestNode::new(), &fake, &Recorder::default())
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
        let error = pull(&TestNode::new(), &fake, &Recorder::default())
            .await
            .unwrap_err();
        assert_eq!(error.reason(), "ErrImagePull", "{nonsense}");
    }
    // The size limit applies to the whole image.
    fake.add("app", "1", &image);
    let mut node = TestNode::new();
    node.layers = node.layers.with_limits(images::ImageLimits {
        bytes: 305_000,
        entries: 100,
    });
    let error = pull(&node, &fake, &Recorder::default()).await.unwrap_err();
    assert!(error.to_string().contains("limit"), "{error}");
}

#[tokio::test]
async fn concurrent_pulls_download_once() {
    let image = TestImage::usual(OCI);
    let fake = Arc::new(FakeRegistry::with_image(&image).await);
    fake.set(|b| b.slow = true);
    let node = Arc::new(TestNode::new());
    let recorder = Arc::new(Recorder::default());
    let pulls = (0..8).map(|number| {
        let (node, fake, recorder) = (node.clone(), fake.clone(), recorder.clone());
        async move {
            // Each with its own descriptors, like other processes and nodes.
            let store = images::ImageStore::open(node.store.path()).unwrap();
            let layers = node.other_node(&format!("node{}", number % 3));
            let request = request(&fake.reference(), PullPolicy::IfNotPresent);
            ensure(&store, &layers, &request, &fake.config(), &*recorder)
                .await
                .unwrap()
        }
    });
    let all = futures::future::join_all(pulls).await;
    assert!(all.iter().all(|image| image.layers.len() == 3));
    assert_eq!(downloads(&recorder), 4, "three layers and a configuration");
    assert!(recorder.count(|event| matches!(event, PullEvent::Waiting { .. })) > 0);
    assert!(recorder.count(|event| matches!(event, PullEvent::Unpacked { .. })) >= 9);
    assert_eq!(
        std::fs::read_dir(node.store.path().join("partial"))
            .unwrap()
            .count(),
        0
    );
}

#[tokio::test]
async fn mirrors_come_first_and_may_fail() {
    let image = TestImage::usual(OCI);
    let (origin, mirror) = (
        FakeRegistry::with_image(&image).await,
        FakeRegistry::start().await,
    );
    mirror.add("hub/app", "1", &image);
    let node = TestNode::new();
    let toml = node.dir.path().join("registries.toml");
    let text = format!(
        "[registry.\"{}\"]\ninsecure = true\nmirrors = [\"http://127.0.0.1:1/nobody\", \"{}/hub\"]\n\
         [registry.\"{}\"]\ninsecure = true\n",
        origin.address, mirror.address, mirror.address
    );
    std::fs::write(&toml, text).unwrap();
    let config = RegistryConfig::read(&toml).unwrap();
    let recorder = Recorder::default();
    let get = async |node: &TestNode| {
        let request = request(&origin.reference(), PullPolicy::Always);
        ensure(&node.store, &node.layers, &request, &config, &recorder).await
    };
    let pulled = get(&node).await.unwrap();
    assert!(pulled.reference.starts_with(&origin.address.to_string()));
    assert_eq!(origin.requests(""), 0);
    assert!(
        recorder
            .notes()
            .iter()
            .any(|note| note.contains("skipping a mirror"))
    );
    // The mirror lacks a blob.
    mirror.set(|b| b.blobs.clear());
    get(&TestNode::new()).await.unwrap();
    assert!(origin.requests("/blobs/") > 0);
    // The mirror lacks the image.
    mirror.set(|b| b.manifests.clear());
    get(&TestNode::new()).await.unwrap();
    // All lack the image: the registry's own error is reported.
    origin.set(|b| b.manifests.clear());
    let error = get(&TestNode::new()).await.unwrap_err();
    assert!(error.to_string().contains("not found"), "{error}");
}

#[tokio::test]
async fn duplicate_layers_are_stacked_once() {
    let (a, b) = (layer(&[("a", b"x")]), layer(&[("b", b"x")]));
    let layers = [
        (a.clone(), Packing::Gzip),
        (b, Packing::Gzip),
        (a, Packing::Gzip),
    ];
    let fake = FakeRegistry::with_image(&TestImage::new(&layers, OCI)).await;
    let node = TestNode::new();
    let pulled = pull(&node, &fake, &Recorder::default()).await.unwrap();
    assert_eq!(pulled.layers.len(), 2);
    assert!(pulled.layers[1].join("a").exists());
}

#[tokio::test]
async fn private_image_needs_the_secret() {
    let image = TestImage::usual(OCI);
    let fake = FakeRegistry::with_image(&image).await;
    fake.set(|b| b.basic = Some(("user".to_owned(), "right".to_owned())));
    let (node, recorder) = (TestNode::new(), Recorder::default());
    let pinned = format!("{}/app@{}", fake.address, image.digest());
    let get = async |reference: &str, policy, password: Option<&str>| {
        let mut request = request(reference, policy);
        request
            .credentials
            .extend(password.map(|password| fake.credential(password)));
        let config = fake.config();
        ensure(&node.store, &node.layers, &request, &config, &recorder).await
    };
    let app = fake.reference();
    let asked = || std::mem::take(&mut fake.state.lock().unwrap().requests).len();
    assert!(
        get(&app, PullPolicy::IfNotPresent, Some("right"))
            .await
            .unwrap()
            .pulled
    );
    asked();
    // Holders of the secret need no request.
    for reference in [&app, &pinned] {
        for policy in [PullPolicy::IfNotPresent, PullPolicy::Never] {
            let same = get(reference, policy, Some("right")).await.unwrap();
            assert!(!same.pulled);
        }
    }
    assert_eq!(asked(), 0);
    // Others are denied, and the image counts as absent.
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
    // A new secret: only a download of all blobs proves its access.
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
    // An image that needed no secret is open to all.
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
    // Access is per repository, also for the same image. Its blobs are open to all by now.
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
async fn incomplete_pull_grants_no_access() {
    let image = TestImage::new(&[(layer(&[("a", b"x"), ("b", b"x")]), Packing::Gzip)], OCI);
    let fake = FakeRegistry::with_image(&image).await;
    fake.set(|b| b.basic = Some(("user".to_owned(), "right".to_owned())));
    let (node, recorder) = (TestNode::new(), Recorder::default());
    let get = async |layers: &images::Layers, reference: &str, policy, has_secret: bool| {
        let mut request = request(reference, policy);
        request
            .credentials
            .extend(has_secret.then(|| fake.credential("right")));
        let config = fake.config();
        let got = ensure(&node.store, layers, &request, &config, &recorder).await;
        got.map_err(|error| error.reason())
    };
    let (tag, layers) = (fake.reference(), &node.layers);
    let pinned = |name: &str| format!("{}/{name}@{}", fake.address, image.digest());
    // Unpacking fails when all blobs are in the store.
    let small = node.other_node("small").with_limits(images::ImageLimits {
        entries: 1,
        ..Default::default()
    });
    let failed = get(&small, &tag, PullPolicy::IfNotPresent, true).await;
    assert_eq!(failed.unwrap_err(), "ErrImagePull");
    assert_eq!(node.blobs().len(), 3);
    for reference in [&tag, &pinned("app"), &pinned("other")] {
        let refused = get(layers, reference, PullPolicy::Never, false).await;
        assert_eq!(refused.unwrap_err(), "ErrImageNeverPull");
        let refused = get(layers, reference, PullPolicy::IfNotPresent, false).await;
        assert_eq!(refused.unwrap_err(), "ErrImagePull");
    }
    // The next pull with the secret completes it without a download.
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
async fn failed_credential_helper_is_reported_on_denial() {
    let image = TestImage::usual(OCI);
    let fake = FakeRegistry::with_image(&image).await;
    let dir = tempfile::tempdir().unwrap();
    let config = fake.config().with_docker_config(dir.path());
    let get = async |password: Option<&str>| {
        let (node, recorder) = (TestNode::new(), Recorder::default());
        let mut request = request(&fake.reference(), PullPolicy::IfNotPresent);
        request
            .credentials
            .extend(password.map(|password| fake.credential(password)));
        ensure(&node.store, &node.layers, &request, &config, &recorder).await
    };
    for (text, expected_text) in [
        (
            r#"{"credsStore":"that-is-not-here"}"#,
            "docker-credential-that-is-not-here failed: No such file",
        ),
        ("no JSON", "is not in the format of ~/.docker/config.json"),
    ] {
        std::fs::write(dir.path().join("config.json"), text).unwrap();
        // An anonymous token, then one that needs the pod's secret.
        fake.set(|b| b.token = Some(("open".into(), None)));
        get(None).await.unwrap();
        let user = Some(("user".to_owned(), "right".to_owned()));
        fake.set(|b| b.token = Some(("closed".into(), user)));
        get(Some("right")).await.unwrap();
        for password in [None, Some("wrong")] {
            let error = get(password).await.unwrap_err();
            assert_eq!(error.reason(), "ErrImagePull");
            let message = error.to_string();
            assert!(message.contains("pull access denied"), "{message}");
            assert!(message.contains(expected_text), "{message}");
        }
    }
}

#[tokio::test]
async fn plain_http_gets_credentials_only_if_insecure() {
    let image = TestImage::usual(OCI);
    let fake = FakeRegistry::with_image(&image).await;
    fake.set(|b| b.basic = Some(("user".to_owned(), "right".to_owned())));
    let node = TestNode::new();
    let auth = base64::engine::general_purpose::STANDARD.encode("user:right");
    let text = format!(r#"{{"auths":{{"{}":{{"auth":"{auth}"}}}}}}"#, fake.address);
    std::fs::write(node.dir.path().join("config.json"), text).unwrap();
    let own = fake.address;
    for (rules, expected_text) in [
        (String::new(), None),
        // An explicit http URL is requested, but without credentials.
        (
            format!("[registry.\"{own}\"]\nmirrors = [\"http://{own}\"]\n"),
            Some("`insecure = true`"),
        ),
    ] {
        let config = read_config(&rules).with_docker_config(node.dir.path());
        for secrets in [Vec::new(), vec![fake.credential("right")]] {
            let recorder = Recorder::default();
            let mut request = request(&fake.reference(), PullPolicy::IfNotPresent);
            request.credentials = secrets;
            let failed = ensure(&node.store, &node.layers, &request, &config, &recorder).await;
            assert!(failed.is_err(), "{rules}");
            let notes = recorder.notes();
            assert!(
                expected_text.is_none_or(|expected_text| notes
                    .iter()
                    .any(|note| note.contains(expected_text))),
                "{notes:?}"
            );
        }
    }
    assert_eq!(fake.credentials(), Vec::<String>::new());
    let mut request = request(&fake.reference(), PullPolicy::IfNotPresent);
    request.credentials = vec![fake.credential("right")];
    ensure(
        &node.store,
        &node.layers,
        &request,
        &fake.config(),
        &Recorder::default(),
    )
    .await
    .unwrap();
    assert!(!fake.credentials().is_empty());
}

#[tokio::test]
async fn credentials_do_not_follow_realms_or_redirects() {
    let image = TestImage::usual(OCI);
    let (fake, other) = (
        FakeRegistry::with_image(&image).await,
        FakeRegistry::with_image(&image).await,
    );
    let secrets = [
        fake.credential("right").secret,
        RegistrySecret::IdentityToken("identity".into()),
    ];
    let get = async |secret: &RegistrySecret, config: &RegistryConfig| {
        let node = TestNode::new();
        let mut request = request(&fake.reference(), PullPolicy::IfNotPresent);
        request.credentials = vec![RegistryCredential {
            pattern: fake.address.to_string(),
            secret: secret.clone(),
        }];
        let recorder = Recorder::default();
        ensure(&node.store, &node.layers, &request, config, &recorder).await
    };
    fake.set(|b| b.token = Some(("t".into(), None)));
    other.set(|b| b.token = Some(("t".into(), None)));
    let there = format!("http://{}/token", other.address);
    // A token server without TLS and without `insecure = true`.
    fake.set(|b| b.realm = Some(there.clone()));
    for secret in &secrets {
        let error = get(secret, &fake.config()).await.unwrap_err().to_string();
        assert!(error.contains("insecure token server"), "{error}");
    }
    assert_eq!(other.credentials(), Vec::<String>::new());
    let both = insecure(&[fake.address, other.address]);
    get(&secrets[0], &both).await.unwrap();
    assert_eq!(other.credentials().len(), 1);
    // A token server that redirects, even to an allowed one.
    other.set(|b| b.credentials.clear());
    fake.set(|b| {
        b.realm = None;
        b.redirect_tokens = Some(there);
    });
    for secret in &secrets {
        let error = get(secret, &both).await.unwrap_err().to_string();
        assert!(error.contains("gets no credentials"), "{error}");
    }
    assert_eq!(other.credentials(), Vec::<String>::new());
    // Blob requests may be redirected, but without credentials.
    other.set(|b| b.token = None);
    fake.set(|b| {
        b.redirect_tokens = None;
        b.redirect_blobs = Some(format!("http://{}", other.address));
    });
    get(&secrets[0], &both).await.unwrap();
    assert!(other.requests("/blobs/") > 0);
    assert_eq!(other.credentials(), Vec::<String>::new());
}

/// A store with an image that was pulled with a secret, and an attacker without the secret, with a registry, and with
/// knowledge of all digests.
struct Tenants {
    node: TestNode,
    image: TestImage,
    private: FakeRegistry,
    hostile: FakeRegistry,
}

impl Tenants {
    async fn new() -> Tenants {
        let tenants = Tenants::before_the_pull(TestImage::usual(OCI)).await;
        tenants.pull_private(&Recorder::default()).await.unwrap();
        tenants
    }

    async fn before_the_pull(image: TestImage) -> Tenants {
        let (private, hostile) = (
            FakeRegistry::with_image(&image).await,
            FakeRegistry::start().await,
        );
        private.set(|b| b.basic = Some(("user".to_owned(), "right".to_owned())));
        Tenants {
            node: TestNode::new(),
            image,
            private,
            hostile,
        }
    }

    async fn pull_private(&self, recorder: &Recorder) -> Result<images::LocalImage, ImageError> {
        let mut request = request(&self.private.reference(), PullPolicy::IfNotPresent);
        request.credentials = vec![self.private.credential("right")];
        let (node, config) = (&self.node, self.private.config());
        ensure(&node.store, &node.layers, &request, &config, recorder).await
    }

    /// A pull by a pod without the secret, here or on another node.
    async fn pull_without_secret(
        &self,
        reference: &str,
        policy: PullPolicy,
    ) -> Result<images::LocalImage, ImageError> {
        let config = insecure(&[self.private.address, self.hostile.address]);
        let other = self.node.other_node("other");
        let request = request(reference, policy);
        let get = async |layers| {
            let recorder = Recorder::default();
            ensure(&self.node.store, layers, &request, &config, &recorder).await
        };
        match get(&self.node.layers).await {
            Ok(image) => Ok(image),
            Err(_) => get(&other).await,
        }
    }

    /// Asserts that pulls of this name fail, also after leftovers of a first attempt.
    async fn assert_no_access(&self, reference: &str) {
        for _ in 0..2 {
            for policy in [PullPolicy::IfNotPresent, PullPolicy::Always] {
                let stolen = self.pull_without_secret(reference, policy).await;
                assert_eq!(stolen.unwrap_err().reason(), "ErrImagePull", "{reference}");
            }
            let stolen = self.pull_without_secret(reference, PullPolicy::Never).await;
            assert_eq!(stolen.unwrap_err().reason(), "ErrImageNeverPull");
        }
    }

    fn hostile_name(&self, version: &str) -> String {
        let mark = if version.contains(':') { '@' } else { ':' };
        format!("{}/app{mark}{version}", self.hostile.address)
    }

    /// Serves the attacker's manifest without its blobs. Returns its digest.
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
async fn knowing_digests_grants_no_access() {
    let tenants = Tenants::new().await;
    let digest = tenants.image.digest();
    tenants.hostile.set(|b| b.claimed_digest = Some(digest));
    tenants
        .assert_no_access(&tenants.hostile_name(&digest.to_string()))
        .await;
    tenants.assert_no_access(&tenants.hostile_name("1")).await;
    // The holder of the secret still needs no request.
    tenants.private.set(|b| b.requests.clear());
    let again = tenants.pull_private(&Recorder::default()).await.unwrap();
    assert!(!again.pulled);
    assert_eq!(tenants.private.requests(""), 0);
}

#[tokio::test]
async fn foreign_manifests_cannot_use_private_blobs() {
    let tenants = Tenants::new().await;
    let image = &tenants.image;
    let layers: Vec<&[u8]> = image.layers.iter().map(|layer| &layer[..]).collect();
    // The private image's own manifest, without blobs.
    let own: serde_json::Value = serde_json::from_slice(&image.manifest).unwrap();
    let own = tenants.serve("same", &own, OCI);
    // Another manifest of the same blobs.
    let mut other = manifest(&image.config, &layers);
    other["annotations"] = serde_json::json!({"a": "b"});
    let other = tenants.serve("other", &other, OCI);
    // The attacker's configuration with private layers.
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
    // The private configuration, which may contain secrets, with the attacker's layers.
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
        tenants.assert_no_access(&tenants.hostile_name(tag)).await;
        let pinned = tenants.hostile_name(&digest.to_string());
        tenants.assert_no_access(&pinned).await;
    }
    // An index of the private manifest, which the attacker's registry lacks.
    let hostile = &tenants.hostile;
    let known = format!("app:{}", image.digest());
    hostile.set(|b| drop(b.manifests.remove(&known)));
    let mut entry = descriptor(&image.manifest, OCI);
    entry["platform"] = serde_json::json!({"os": "linux", "architecture": images::architecture()});
    let index =
        serde_json::json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]});
    let index = tenants.serve("index", &index, OCI_INDEX);
    tenants
        .assert_no_access(&tenants.hostile_name("index"))
        .await;
    let pinned = tenants.hostile_name(&index.to_string());
    tenants.assert_no_access(&pinned).await;
    // A registry that has all blobs may serve them.
    hostile.add("app", "same", image);
    let name = tenants.hostile_name("same");
    let got = tenants
        .pull_without_secret(&name, PullPolicy::IfNotPresent)
        .await;
    assert_eq!(got.unwrap().layers.len(), 3);
    // That grants no access to the private registry's name.
    let private = tenants.private.reference();
    tenants.assert_no_access(&private).await;
}

#[tokio::test]
async fn diff_id_grants_no_access_to_a_layer() {
    let tenants = Tenants::new().await;
    let archive = layer(&[("bin/app", b"one"), ("etc/old", b"x")]);
    assert_eq!(pack(&archive, Packing::Gzip), tenants.image.layers[0]);
    let config = config(&[Digest::of(&archive)], images::architecture());
    let decoy = layer(&[("file", b"decoy")]);
    tenants.serve_blob(&config);
    tenants.serve_blob(&decoy);
    let digest = tenants.serve("1", &manifest(&config, &[&decoy]), OCI);
    tenants.assert_no_access(&tenants.hostile_name("1")).await;
    let pinned = tenants.hostile_name(&digest.to_string());
    tenants.assert_no_access(&pinned).await;
    // The same layer in another compression is accepted.
    let packed = pack(&archive, Packing::Zstd);
    tenants.serve_blob(&packed);
    tenants.serve("1", &manifest(&config, &[&packed]), OCI);
    let name = tenants.hostile_name("1");
    let got = tenants
        .pull_without_secret(&name, PullPolicy::IfNotPresent)
        .await;
    assert_eq!(got.unwrap().layers.len(), 1);
}

#[tokio::test]
async fn downloads_of_other_requesters_are_not_resumed() {
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
    let partial = std::fs::read_dir(tenants.node.store.path().join("partial")).unwrap();
    let length = |entry: std::fs::DirEntry| entry.metadata().unwrap().len();
    let have = partial.flatten().map(length).max().unwrap();
    assert!(have > 0);
    // The attacker has only the rest of the layer.
    let mut rest = image.layers[0].clone();
    rest[..usize::try_from(have).unwrap()].fill(0);
    tenants.hostile.add("app", "1", image);
    let digest = Digest::of(&image.layers[0]).to_string();
    tenants.hostile.set(|b| drop(b.blobs.insert(digest, rest)));
    tenants.assert_no_access(&tenants.hostile_name("1")).await;
    // The original requester resumes.
    private.set(|b| b.slow = false);
    let recorder = Recorder::default();
    tenants.pull_private(&recorder).await.unwrap();
    assert!(recorder.count(|e| matches!(e, PullEvent::Begin { at, .. } if *at > 0)) > 0);
}

#[tokio::test]
async fn public_layers_are_downloaded_once() {
    let base = layer(&[("base", b"x")]);
    let on_base = |name: &str| {
        let own = layer(&[(name, b"y")]);
        TestImage::new(&[(base.clone(), Packing::Gzip), (own, Packing::Gzip)], OCI)
    };
    let fake = FakeRegistry::with_image(&on_base("one")).await;
    fake.add("other", "1", &on_base("two"));
    let (node, recorder) = (TestNode::new(), Recorder::default());
    pull(&node, &fake, &recorder).await.unwrap();
    assert_eq!(downloads(&recorder), 3);
    let other = request(&format!("{}/other:1", fake.address), PullPolicy::Always);
    let config = fake.config();
    ensure(&node.store, &node.layers, &other, &config, &recorder)
        .await
        .unwrap();
    assert_eq!(downloads(&recorder), 5);
}

#[tokio::test]
async fn archives_must_contain_private_blobs() {
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
    let load = || images::archive::load_directory(&tenants.node.store, archive.path(), Some(&name));
    assert!(load().is_err());
    let stolen = tenants
        .pull_without_secret("loaded.example/app:1", PullPolicy::Never)
        .await;
    assert!(stolen.is_err());
    tenants.image.blobs().for_each(|blob| write(blob));
    load().unwrap();
    let loaded = tenants
        .pull_without_secret("loaded.example/app:1", PullPolicy::Never)
        .await;
    assert_eq!(loaded.unwrap().layers.len(), 3);
}
