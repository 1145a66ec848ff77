//! The client for one registry or mirror: requests manifests and blobs, and authenticates.

use std::sync::OnceLock;
use std::time::Duration;

use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Client, Method, Response, StatusCode, Url};
use tokio::sync::{Mutex, OnceCell};

use super::auth::{self, Challenge, TokenRequest};
use super::client;
use super::config::{RegistryConfig, RegistryEndpoint, TokenServer, UrlScheme};
use super::credentials::{RegistryCredential, RegistrySecret, matching};
use super::docker_config;
use super::error::RegistryError;
use crate::manifest::{
    DOCKER_LIST, DOCKER_MANIFEST, Descriptor, MAX_DOCUMENT_SIZE, OCI_INDEX, OCI_MANIFEST,
};
use crate::store::Grant;
use download::Digest;
use download::error_chain;

/// Attempts for a small request.
const MAX_ATTEMPTS: u32 = 3;
const REGISTRY_INITIAL_BACKOFF: Duration = Duration::from_millis(300);

/// The header with the digest of the content.
const CONTENT_DIGEST: &str = "docker-content-digest";

/// The `Accept` headers for the supported manifests.
fn manifest_accept_headers() -> HeaderMap {
    let mut headers = HeaderMap::new();
    for kind in [OCI_INDEX, DOCKER_LIST, OCI_MANIFEST, DOCKER_MANIFEST] {
        headers.append(ACCEPT, HeaderValue::from_static(kind));
    }
    headers
}

/// The client for one registry or mirror.
#[derive(Debug)]
pub struct PullSource {
    endpoint: RegistryEndpoint,
    /// From the pod's pull secrets, most specific first.
    secrets: Vec<RegistrySecret>,
    config: RegistryConfig,
    client: OnceLock<Client>,
    scheme: OnceCell<UrlScheme>,
    auth: Mutex<RegistryAuth>,
}

/// The state of authentication.
#[derive(Debug, Default)]
struct RegistryAuth {
    /// The registry's latest challenge.
    challenge: Option<Challenge>,
    /// The identities to try, collected at the first challenge. The last one is anonymous.
    identities: Option<Vec<AuthIdentity>>,
    /// Why the user's own credentials are not among them.
    missing: Option<String>,
    /// The index of the current identity.
    current: usize,
    /// Sent with requests.
    authorization: Option<RequestAuthorization>,
    /// Whether a request with it has succeeded.
    has_succeeded: bool,
}

/// An identity to authenticate with.
#[derive(Debug, Clone)]
struct AuthIdentity {
    secret: Option<RegistrySecret>,
    /// The grant for content that the registry sends to this identity.
    grant: Grant,
}

/// The authorization of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RequestAuthorization {
    header: HeaderValue,
    /// The grant for the content of the response.
    grant: Grant,
}

impl PullSource {
    /// A client for `endpoint` that has sent no request yet.
    pub fn new(
        endpoint: RegistryEndpoint,
        config: &RegistryConfig,
        credentials: &[RegistryCredential],
    ) -> PullSource {
        let secrets = matching(credentials, &endpoint.registry, &endpoint.repository);
        PullSource {
            secrets: secrets.into_iter().cloned().collect(),
            config: config.clone(),
            client: OnceLock::new(),
            scheme: OnceCell::new(),
            auth: Mutex::default(),
            endpoint,
        }
    }

    /// The host, for messages.
    pub fn host(&self) -> &str {
        &self.endpoint.host
    }

    fn subject_of(&self, version: &str) -> String {
        let separator = if version.contains(':') { '@' } else { ':' };
        format!(
            "{}/{}{separator}{version}",
            self.endpoint.registry, self.endpoint.repository
        )
    }

    /// The current digest of a tag, by a HEAD request, which does not count against pull rate limits.
    pub async fn digest(&self, version: &str) -> Option<Digest> {
        let path = format!("manifests/{version}");
        let subject = self.subject_of(version);
        let response = self
            .request(Method::HEAD, &path, &manifest_accept_headers(), &subject)
            .await;
        let (response, _) = response.ok()?;
        let digest = response.headers().get(CONTENT_DIGEST)?.to_str().ok()?;
        digest.parse().ok()
    }

    /// Fetches a manifest or an index by tag or digest, and checks it against `expected`.
    pub async fn manifest(
        &self,
        version: &str,
        expected: Option<Digest>,
    ) -> Result<(Descriptor, Vec<u8>, Grant), RegistryError> {
        let subject = self.subject_of(version);
        let invalid = |detail: &str| RegistryError::InvalidResponse {
            subject: subject.clone(),
            host: self.endpoint.host.clone(),
            detail: detail.to_owned(),
        };
        let headers = manifest_accept_headers();
        let mut tries = 0;
        loop {
            tries += 1;
            let (response, grant) = self
                .get(&format!("manifests/{version}"), &headers, &subject)
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
            let announced = header(CONTENT_DIGEST).and_then(|text| text.parse().ok());
            let limit = usize::try_from(MAX_DOCUMENT_SIZE).unwrap_or(usize::MAX);
            let bytes = match download::body(response, limit).await {
                Ok(Some(bytes)) => bytes,
                Ok(None) => return Err(invalid("sent a manifest that is too large")),
                Err(_) if tries < MAX_ATTEMPTS => continue,
                Err(error) => return Err(self.connection_error(tries, error)),
            };
            let digest = Digest::of(&bytes);
            match expected.or(announced) {
                Some(expected) if expected != digest => {
                    return Err(RegistryError::DigestMismatch {
                        host: self.endpoint.host.clone(),
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

    /// Requests a blob with these headers.
    pub async fn blob(
        &self,
        digest: Digest,
        headers: &HeaderMap,
    ) -> Result<(Response, Grant), RegistryError> {
        let subject = self.subject_of(&digest.to_string());
        self.get(&format!("blobs/{digest}"), headers, &subject)
            .await
    }

    async fn get(
        &self,
        path: &str,
        headers: &HeaderMap,
        subject: &str,
    ) -> Result<(Response, Grant), RegistryError> {
        self.request(Method::GET, path, headers, subject).await
    }

    /// Sends a request for a path in the repository, authenticates if needed, and classifies the response. Returns also
    /// the grant for its content.
    async fn request(
        &self,
        method: Method,
        path: &str,
        headers: &HeaderMap,
        subject: &str,
    ) -> Result<(Response, Grant), RegistryError> {
        let url = self
            .url(&format!("/v2/{}/{path}", self.endpoint.repository))
            .await?;
        let mut tries = 0;
        loop {
            let authorization = self.auth.lock().await.authorization.clone();
            let mut request = self
                .client()?
                .request(method.clone(), url.clone())
                .headers(headers.clone());
            if let Some(authorization) = &authorization {
                request = request.header(AUTHORIZATION, authorization.header.clone());
            }
            let response = match request.send().await {
                Ok(response) => response,
                Err(error) => {
                    tries += 1;
                    if tries >= MAX_ATTEMPTS {
                        return Err(self.connection_error(tries, error));
                    }
                    tokio::time::sleep(REGISTRY_INITIAL_BACKOFF * (1 << tries)).await;
                    continue;
                }
            };
            let status = response.status();
            match status {
                StatusCode::OK
                | StatusCode::PARTIAL_CONTENT
                | StatusCode::RANGE_NOT_SATISFIABLE => {
                    self.auth.lock().await.has_succeeded = true;
                    let grant =
                        authorization.map_or(Grant::Public, |authorization| authorization.grant);
                    return Ok((response, grant));
                }
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    self.authenticate(response, authorization, subject).await?;
                }
                StatusCode::NOT_FOUND | StatusCode::GONE => {
                    return Err(RegistryError::NotFound {
                        subject: subject.to_owned(),
                    });
                }
                // Possibly transient.
                _ if tries + 1 < MAX_ATTEMPTS
                    && (status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS) =>
                {
                    tries += 1;
                    tokio::time::sleep(REGISTRY_INITIAL_BACKOFF * (1 << tries)).await;
                }
                _ => {
                    return Err(RegistryError::Status {
                        subject: subject.to_owned(),
                        host: self.endpoint.host.clone(),
                        status,
                        message: client::error_message(response).await,
                    });
                }
            }
        }
    }

    /// Moves to the next identity after the registry answered `rejection` to a request with `authorization`.
    async fn authenticate(
        &self,
        rejection: Response,
        authorization: Option<RequestAuthorization>,
        subject: &str,
    ) -> Result<(), RegistryError> {
        let mut auth = self.auth.lock().await;
        // A concurrent request has authenticated meanwhile.
        if auth.authorization != authorization {
            return Ok(());
        }
        let forbidden = rejection.status() == StatusCode::FORBIDDEN;
        let challenge = match forbidden {
            // The identity is known but lacks permission; another one may have it.
            true => auth.challenge.clone(),
            false => Challenge::of(rejection.headers()),
        };
        auth.challenge = challenge.clone();
        let message = client::error_message(rejection).await;
        if auth.identities.is_none() {
            let (identities, missing) = self.identities().await;
            (auth.identities, auth.missing) = (Some(identities), missing);
        }
        let missing = auth.missing.clone();
        let denied = || RegistryError::Denied {
            subject: subject.to_owned(),
            message,
            missing,
        };
        let Some(challenge) = challenge else {
            return Err(denied());
        };
        // A token that worked has expired and is renewed; one that never worked is wrong.
        if authorization.is_some() && (forbidden || !auth.has_succeeded) {
            auth.current += 1;
        }
        auth.has_succeeded = false;
        loop {
            let identity = auth
                .identities
                .as_ref()
                .and_then(|identities| identities.get(auth.current));
            let Some(identity) = identity.cloned() else {
                return Err(denied());
            };
            let header = self
                .answer_challenge(&challenge, identity.secret.as_ref(), subject)
                .await?;
            if let Some(header) = header {
                let grant = identity.grant;
                auth.authorization = Some(RequestAuthorization { header, grant });
                return Ok(());
            }
            auth.current += 1;
        }
    }

    /// Whether the connection is encrypted, or the user allows credentials over plain HTTP.
    fn may_send_credentials(&self) -> bool {
        self.scheme.get() == Some(&UrlScheme::Https) || !self.endpoint.verified
    }

    /// The identities to try: the pod's secrets, the user's credentials, anonymous. The second value is the reason why the
    /// user's credentials are missing; the other identities may still suffice.
    async fn identities(&self) -> (Vec<AuthIdentity>, Option<String>) {
        // The user's own credentials are for all of the user's pods.
        let public = |secret| AuthIdentity {
            secret,
            grant: Grant::Public,
        };
        let pod_secrets = self.secrets.iter().map(|secret| AuthIdentity {
            secret: Some(secret.clone()),
            grant: Grant::Holder(secret.clone()),
        });
        let mut identities: Vec<_> = pod_secrets.collect();
        let mut missing = None;
        if !self.may_send_credentials() {
            let reason = "the connection is plain HTTP, which needs `insecure = true`";
            return (vec![public(None)], Some(reason.to_owned()));
        }
        if let Some(dir) = &self.config.docker_config {
            let found =
                docker_config::secret(dir, &self.endpoint.registry, &self.endpoint.repository);
            match found.await {
                Ok(found) => identities.extend(found.map(|secret| public(Some(secret)))),
                Err(error) => missing = Some(error_chain(&error)),
            }
        }
        identities.push(public(None));
        (identities, missing)
    }

    /// The header that answers a challenge, if the secret fits.
    async fn answer_challenge(
        &self,
        challenge: &Challenge,
        secret: Option<&RegistrySecret>,
        subject: &str,
    ) -> Result<Option<HeaderValue>, RegistryError> {
        if let Some(RegistrySecret::RegistryToken(token)) = secret {
            return Ok(auth::bearer(token));
        }
        match (challenge, secret) {
            (Challenge::Basic, Some(RegistrySecret::Password { username, password })) => {
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
                let (realm, server) = self.token_server(realm, subject)?;
                let default_scope = format!("repository:{}:pull", self.endpoint.repository);
                let scope = scope.as_deref().unwrap_or(&default_scope);
                let request = TokenRequest::new(&realm, service.as_deref(), scope, secret);
                self.request_token(request, &server, subject).await
            }
        }
    }

    /// The token server's URL and settings.
    fn token_server(
        &self,
        realm: &str,
        subject: &str,
    ) -> Result<(Url, TokenServer), RegistryError> {
        let invalid = |detail: String| RegistryError::InvalidResponse {
            subject: subject.to_owned(),
            host: self.endpoint.host.clone(),
            detail,
        };
        let url = Url::parse(realm)
            .map_err(|_| invalid(format!("names an invalid URL of a token server: {realm:?}")))?;
        let server = self.config.token_server(&url, &self.endpoint);
        match server.is_allowed {
            true => Ok((url, server)),
            false => Err(invalid(format!(
                "names an insecure token server: {realm:?}; plain HTTP needs `insecure = true` for that server"
            ))),
        }
    }

    async fn request_token(
        &self,
        request: TokenRequest,
        server: &TokenServer,
        subject: &str,
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
                Ok(_) | Err(_) if tries < MAX_ATTEMPTS => {
                    tokio::time::sleep(REGISTRY_INITIAL_BACKOFF * (1 << tries)).await;
                }
                Ok(response) => break response,
                Err(error) => return Err(self.connection_error(tries, error)),
            }
        };
        let status = response.status();
        if status.is_client_error() {
            return Ok(None);
        }
        if !status.is_success() {
            return Err(RegistryError::Status {
                subject: subject.to_owned(),
                host: request.url.host_str().unwrap_or_default().to_owned(),
                status,
                message: client::error_message(response).await,
            });
        }
        let body = client::small_body(response).await;
        Ok(auth::token_of(&body).as_deref().and_then(auth::bearer))
    }

    fn client(&self) -> Result<&Client, RegistryError> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let new = client::client(&self.endpoint)?;
        Ok(self.client.get_or_init(|| new))
    }

    /// The URL of `path`. Probes the schemes once: https first, then http if it is allowed.
    async fn url(&self, path: &str) -> Result<Url, RegistryError> {
        let parse = |scheme: UrlScheme, path: &str| {
            let text = format!("{}://{}{path}", scheme.as_str(), self.endpoint.host);
            Url::parse(&text).map_err(|error| RegistryError::Unreachable {
                host: self.endpoint.host.clone(),
                source: error.into(),
            })
        };
        let choose = || async {
            for &scheme in self.endpoint.schemes {
                if Some(&scheme) == self.endpoint.schemes.last() {
                    return Ok::<UrlScheme, RegistryError>(scheme);
                }
                let ping = self.client()?.get(parse(scheme, "/v2/")?).send().await;
                if !ping.is_err_and(|error| error.is_connect()) {
                    return Ok(scheme);
                }
            }
            Ok(UrlScheme::Https)
        };
        let scheme = self.scheme.get_or_try_init(choose).await?;
        parse(*scheme, path)
    }

    /// Classifies a connection error, without its URL, which may contain a password.
    pub fn connection_error(&self, tries: u32, error: reqwest::Error) -> RegistryError {
        let host = self.endpoint.host.clone();
        match error.is_connect() {
            true => RegistryError::Unreachable {
                host,
                source: error.without_url().into(),
            },
            false => RegistryError::ConnectionLost {
                host,
                tries,
                source: error.without_url().into(),
            },
        }
    }
}
