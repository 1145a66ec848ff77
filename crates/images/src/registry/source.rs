//! One place that an image may come from: asks for manifests and blobs, and lets itself in.

use std::sync::OnceLock;
use std::time::Duration;

use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RANGE};
use reqwest::{Client, Method, Response, StatusCode, Url};
use tokio::sync::{Mutex, OnceCell};

use super::auth::{self, Challenge, TokenRequest};
use super::client;
use super::config::{Place, RegistryConfig, TokenServer};
use super::credentials::{Credential, Secret, matching};
use super::docker_config;
use super::error::RegistryError;
use crate::digest::Digest;
use crate::error::causes;
use crate::manifest::{
    DOCKER_LIST, DOCKER_MANIFEST, Descriptor, LARGEST_DOCUMENT, OCI_INDEX, OCI_MANIFEST,
};
use crate::store::Grant;

/// How often a small request is tried.
const TRIES: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(300);

/// Where registries tell the digest of what they send.
const CONTENT_DIGEST: &str = "docker-content-digest";

/// The kinds of manifests that we understand.
fn accepted() -> HeaderMap {
    let mut headers = HeaderMap::new();
    for kind in [OCI_INDEX, DOCKER_LIST, OCI_MANIFEST, DOCKER_MANIFEST] {
        headers.append(ACCEPT, HeaderValue::from_static(kind));
    }
    headers
}

/// A registry or a mirror.
#[derive(Debug)]
pub struct Source {
    place: Place,
    /// From the pod's pull secrets, the most specific first.
    secrets: Vec<Secret>,
    config: RegistryConfig,
    client: OnceLock<Client>,
    scheme: OnceCell<&'static str>,
    door: Mutex<Door>,
}

/// How far we got with letting ourselves in.
#[derive(Debug, Default)]
struct Door {
    /// What the registry wants to see.
    challenge: Option<Challenge>,
    /// All ways in, once they were needed; the last is to go without any.
    ways: Option<Vec<Way>>,
    /// Why the user's own is not among them, if it may have been one.
    missing: Option<String>,
    /// Which of them is tried.
    at: usize,
    /// What goes with requests.
    pass: Option<Pass>,
    /// Whether it has opened the door before.
    worked: bool,
}

/// A way in.
#[derive(Debug, Clone)]
struct Way {
    secret: Option<Secret>,
    /// Who has it.
    grant: Grant,
}

/// What lets a request in.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pass {
    header: HeaderValue,
    /// Whom the answer is for.
    grant: Grant,
}

impl Source {
    /// Nothing is asked yet.
    pub fn new(place: Place, config: &RegistryConfig, credentials: &[Credential]) -> Source {
        let secrets = matching(credentials, &place.registry, &place.repository);
        Source {
            secrets: secrets.into_iter().cloned().collect(),
            config: config.clone(),
            client: OnceLock::new(),
            scheme: OnceCell::new(),
            door: Mutex::default(),
            place,
        }
    }

    /// Its name, for messages.
    pub fn host(&self) -> &str {
        &self.place.host
    }

    fn what(&self, version: &str) -> String {
        let mark = if version.contains(':') { '@' } else { ':' };
        format!(
            "{}/{}{mark}{version}",
            self.place.registry, self.place.repository
        )
    }

    /// What a tag stands for now, if the registry tells without sending it. Registries that count
    /// what is pulled don't count this.
    pub async fn digest(&self, version: &str) -> Option<Digest> {
        let path = format!("manifests/{version}");
        let what = self.what(version);
        let asked = self.ask(Method::HEAD, &path, &accepted(), &what).await;
        let (response, _) = asked.ok()?;
        let told = response.headers().get(CONTENT_DIGEST)?.to_str().ok()?;
        told.parse().ok()
    }

    /// A manifest or an index, by tag or digest; `expected` is checked.
    pub async fn manifest(
        &self,
        version: &str,
        expected: Option<Digest>,
    ) -> Result<(Descriptor, Vec<u8>, Grant), RegistryError> {
        let what = self.what(version);
        let nonsense = |said: &str| RegistryError::Nonsense {
            what: what.clone(),
            host: self.place.host.clone(),
            said: said.to_owned(),
        };
        let headers = accepted();
        let mut tries = 0;
        loop {
            tries += 1;
            let (response, grant) = self
                .get(&format!("manifests/{version}"), &headers, &what)
                .await?;
            let header = |name: &str| {
                let value = response.headers().get(name)?;
                value.to_str().ok().map(str::to_owned)
            };
            let media_type = header(CONTENT_TYPE.as_str()).unwrap_or_default();
            let media_type = media_type
                .split(';')
                .next()
                .unwrap_or_default()
                .trim()
                .to_owned();
            let told = header(CONTENT_DIGEST).and_then(|text| text.parse().ok());
            let most = usize::try_from(LARGEST_DOCUMENT).unwrap_or(usize::MAX);
            let bytes = match client::body(response, most).await {
                Ok(Some(bytes)) => bytes,
                Ok(None) => return Err(nonsense("sent a manifest that is too large")),
                Err(_) if tries < TRIES => continue,
                Err(error) => return Err(self.broken(tries, error)),
            };
            let digest = Digest::of(&bytes);
            match expected.or(told) {
                Some(expected) if expected != digest => {
                    return Err(RegistryError::Digest {
                        host: self.place.host.clone(),
                        expected,
                        got: digest,
                    });
                }
                _ => {}
            }
            let descriptor = Descriptor {
                media_type,
                digest,
                size: bytes.len() as u64,
                platform: None,
                annotations: Default::default(),
            };
            return Ok((descriptor, bytes, grant));
        }
    }

    /// Begins to download a blob, at `from`.
    pub async fn blob(
        &self,
        digest: Digest,
        from: u64,
    ) -> Result<(Response, Grant), RegistryError> {
        let mut headers = HeaderMap::new();
        if from > 0
            && let Ok(range) = HeaderValue::from_str(&format!("bytes={from}-"))
        {
            headers.insert(RANGE, range);
        }
        let version = digest.to_string();
        self.get(&format!("blobs/{digest}"), &headers, &self.what(&version))
            .await
    }

    async fn get(
        &self,
        path: &str,
        headers: &HeaderMap,
        what: &str,
    ) -> Result<(Response, Grant), RegistryError> {
        self.ask(Method::GET, path, headers, what).await
    }

    /// Sends a request for something in the repository, lets itself in if need be, and sorts the answer. Says whom else the
    /// registry would have sent it to.
    async fn ask(
        &self,
        method: Method,
        path: &str,
        headers: &HeaderMap,
        what: &str,
    ) -> Result<(Response, Grant), RegistryError> {
        let url = self
            .url(&format!("/v2/{}/{path}", self.place.repository))
            .await?;
        let mut tries = 0;
        loop {
            let pass = self.door.lock().await.pass.clone();
            let mut request = self
                .client()?
                .request(method.clone(), url.clone())
                .headers(headers.clone());
            if let Some(pass) = &pass {
                request = request.header(AUTHORIZATION, pass.header.clone());
            }
            let response = match request.send().await {
                Ok(response) => response,
                Err(error) => {
                    tries += 1;
                    if tries >= TRIES {
                        return Err(self.broken(tries, error));
                    }
                    tokio::time::sleep(FIRST_PAUSE * (1 << tries)).await;
                    continue;
                }
            };
            let status = response.status();
            match status {
                StatusCode::OK
                | StatusCode::PARTIAL_CONTENT
                | StatusCode::RANGE_NOT_SATISFIABLE => {
                    self.door.lock().await.worked = true;
                    let grant = pass.map_or(Grant::Everybody, |pass| pass.grant);
                    return Ok((response, grant));
                }
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    self.knock(response, pass, what).await?;
                }
                StatusCode::NOT_FOUND | StatusCode::GONE => {
                    return Err(RegistryError::NotFound {
                        what: what.to_owned(),
                    });
                }
                // In trouble, perhaps for a moment.
                _ if tries + 1 < TRIES
                    && (status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS) =>
                {
                    tries += 1;
                    tokio::time::sleep(FIRST_PAUSE * (1 << tries)).await;
                }
                _ => {
                    return Err(RegistryError::Status {
                        what: what.to_owned(),
                        host: self.place.host.clone(),
                        status,
                        said: client::words(response).await,
                    });
                }
            }
        }
    }

    /// Finds the next way in, after `refused` was answered to a request with `pass`.
    async fn knock(
        &self,
        refused: Response,
        pass: Option<Pass>,
        what: &str,
    ) -> Result<(), RegistryError> {
        let mut door = self.door.lock().await;
        // Another request has found one meanwhile.
        if door.pass != pass {
            return Ok(());
        }
        let forbidden = refused.status() == StatusCode::FORBIDDEN;
        let challenge = match forbidden {
            // It knows who we are, and that isn't enough; another may be let in.
            true => door.challenge.clone(),
            false => Challenge::of(refused.headers()),
        };
        door.challenge = challenge.clone();
        let said = client::words(refused).await;
        if door.ways.is_none() {
            let (ways, missing) = self.ways().await;
            (door.ways, door.missing) = (Some(ways), missing);
        }
        let missing = door.missing.clone();
        let denied = || RegistryError::Denied {
            what: what.to_owned(),
            said,
            missing,
        };
        let Some(challenge) = challenge else {
            return Err(denied());
        };
        // A token that worked has run out; one that never did is the wrong one.
        if pass.is_some() && (forbidden || !door.worked) {
            door.at += 1;
        }
        door.worked = false;
        loop {
            let way = door.ways.as_ref().and_then(|ways| ways.get(door.at));
            let Some(way) = way.cloned() else {
                return Err(denied());
            };
            let answer = self.answer(&challenge, way.secret.as_ref(), what).await?;
            if let Some(header) = answer {
                let grant = way.grant;
                door.pass = Some(Pass { header, grant });
                return Ok(());
            }
            door.at += 1;
        }
    }

    /// Whether everybody on the way may not read what we send, or the user has accepted that.
    fn may_send_credentials(&self) -> bool {
        self.scheme.get() == Some(&"https") || !self.place.verified
    }

    /// The pod's own secrets, then the user's, then none at all. If the user's can't be had, the others may do: why is told
    /// beside them.
    async fn ways(&self) -> (Vec<Way>, Option<String>) {
        // The user's own are for all of the user's pods.
        let open = |secret| Way {
            secret,
            grant: Grant::Everybody,
        };
        let own = self.secrets.iter().map(|secret| Way {
            secret: Some(secret.clone()),
            grant: Grant::Holder(secret.clone()),
        });
        let mut ways: Vec<_> = own.collect();
        let mut missing = None;
        if !self.may_send_credentials() {
            let why = "the connection is plain HTTP, which needs `insecure = true`";
            return (vec![open(None)], Some(why.to_owned()));
        }
        if let Some(dir) = &self.config.docker_config {
            let found = docker_config::secret(dir, &self.place.registry, &self.place.repository);
            match found.await {
                Ok(found) => ways.extend(found.map(|secret| open(Some(secret)))),
                Err(error) => missing = Some(causes(&error)),
            }
        }
        ways.push(open(None));
        (ways, missing)
    }

    /// The header that answers a challenge, if this secret can.
    async fn answer(
        &self,
        challenge: &Challenge,
        secret: Option<&Secret>,
        what: &str,
    ) -> Result<Option<HeaderValue>, RegistryError> {
        if let Some(Secret::RegistryToken(token)) = secret {
            return Ok(auth::bearer(token));
        }
        match (challenge, secret) {
            (Challenge::Basic, Some(Secret::Password { username, password })) => {
                Ok(auth::basic(username, password))
            }
            (Challenge::Basic, _) => Ok(None),
            (
                Challenge::Bearer {
                    realm,
                    service,
                    scope,
                },
                secret,
            ) => {
                let (realm, server) = self.token_server(realm, what)?;
                let own = format!("repository:{}:pull", self.place.repository);
                let scope = scope.as_deref().unwrap_or(&own);
                let request = TokenRequest::new(&realm, service.as_deref(), scope, secret);
                self.token(request, &server, what).await
            }
        }
    }

    /// The token server's address, and how to connect to it.
    fn token_server(&self, realm: &str, what: &str) -> Result<(Url, TokenServer), RegistryError> {
        let nonsense = |said: String| RegistryError::Nonsense {
            what: what.to_owned(),
            host: self.place.host.clone(),
            said,
        };
        let url = Url::parse(realm)
            .map_err(|_| nonsense(format!("names a token server that is no URL: {realm:?}")))?;
        let server = self.config.token_server(&url, &self.place);
        match server.is_allowed {
            true => Ok((url, server)),
            false => Err(nonsense(format!(
                "names a token server that is not secure: {realm:?}; plain HTTP needs `insecure = true` for that server"
            ))),
        }
    }

    async fn token(
        &self,
        request: TokenRequest,
        server: &TokenServer,
        what: &str,
    ) -> Result<Option<HeaderValue>, RegistryError> {
        let client = client::token_client(server)?;
        let mut tries = 0;
        let response = loop {
            let mut attempt = match &request.form {
                Some(form) => client
                    .post(request.url.clone())
                    .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
                    .body(form.clone()),
                None => client.get(request.url.clone()),
            };
            if let Some(header) = &request.header {
                attempt = attempt.header(AUTHORIZATION, header.clone());
            }
            tries += 1;
            match attempt.send().await {
                Ok(response) if !response.status().is_server_error() => break response,
                Ok(_) | Err(_) if tries < TRIES => {
                    tokio::time::sleep(FIRST_PAUSE * (1 << tries)).await;
                }
                Ok(response) => break response,
                Err(error) => return Err(self.broken(tries, error)),
            }
        };
        let status = response.status();
        if status.is_client_error() {
            return Ok(None);
        }
        if !status.is_success() {
            return Err(RegistryError::Status {
                what: what.to_owned(),
                host: request.url.host_str().unwrap_or_default().to_owned(),
                status,
                said: client::words(response).await,
            });
        }
        let body = client::small_body(response).await;
        Ok(auth::token_of(&body).as_deref().and_then(auth::bearer))
    }

    fn client(&self) -> Result<&Client, RegistryError> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let made = client::client(&self.place)?;
        Ok(self.client.get_or_init(|| made))
    }

    /// Chooses how to connect: where TLS may be missing, it is tried first.
    async fn url(&self, path: &str) -> Result<Url, RegistryError> {
        let parse = |scheme: &str, path: &str| {
            let text = format!("{scheme}://{}{path}", self.place.host);
            Url::parse(&text).map_err(|error| RegistryError::Unreachable {
                host: self.place.host.clone(),
                source: error.into(),
            })
        };
        let choose = || async {
            for scheme in self.place.schemes {
                if Some(scheme) == self.place.schemes.last() {
                    return Ok::<&'static str, RegistryError>(scheme);
                }
                let ping = self.client()?.get(parse(scheme, "/v2/")?).send().await;
                if !ping.is_err_and(|error| error.is_connect()) {
                    return Ok(scheme);
                }
            }
            Ok("https")
        };
        let scheme = self.scheme.get_or_try_init(choose).await?;
        parse(scheme, path)
    }

    /// Sorts a failure of the connection. Its URL may hold a name and a password, and is not shown.
    pub fn broken(&self, tries: u32, error: reqwest::Error) -> RegistryError {
        let host = self.place.host.clone();
        match error.is_connect() {
            true => RegistryError::Unreachable {
                host,
                source: error.without_url().into(),
            },
            false => RegistryError::Broken {
                host,
                tries,
                source: error.without_url().into(),
            },
        }
    }
}
