//! Registry credentials, and the registries that they match.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use download::Digest;

/// A secret for matching repositories.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegistryCredential {
    /// A host with an optional port and an optional path prefix; `*` matches within a label of the host name.
    pub pattern: String,
    /// The secret.
    pub secret: RegistrySecret,
}

/// A secret for a registry or its token server. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RegistrySecret {
    /// A user name and a password.
    Password {
        /// The user name.
        username: String,
        /// The password.
        password: String,
    },
    /// A refresh token for the token server.
    IdentityToken(String),
    /// A bearer token for the registry.
    RegistryToken(String),
}

impl RegistrySecret {
    /// A hash by which access records identify holders of the secret without storing it.
    pub fn fingerprint(&self, repository: &str) -> Digest {
        let parts: &[&str] = match self {
            RegistrySecret::Password { username, password } => &["password", username, password],
            RegistrySecret::IdentityToken(token) => &["identity-token", token],
            RegistrySecret::RegistryToken(token) => &["registry-token", token],
        };
        // Names of repositories, users and types contain no NUL byte, so the separator is unambiguous.
        let text = [&[repository], parts].concat().join("\0");
        Digest::of(text.as_bytes())
    }
}

impl fmt::Debug for RegistrySecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Credentials cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    /// The JSON is not in Docker's format.
    #[error("{origin} is not in the format of ~/.docker/config.json")]
    Format {
        /// The file or secret.
        origin: String,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// The file cannot be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// An entry is malformed.
    #[error("the entry for {registry} is malformed: its \"auth\" is not base64 of name:password")]
    Auth {
        /// The registry of the entry.
        registry: String,
    },
    /// A credential helper failed.
    #[error("credential helper {program} failed: {output}")]
    Helper {
        /// The program.
        program: String,
        /// Its output, or the reason why it did not run.
        output: String,
    },
}

/// An entry of `auths`.
#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct Auth {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

impl Auth {
    /// `None` for an empty entry, which Docker writes when a helper has the secret.
    pub fn secret(&self, registry: &str) -> Result<Option<RegistrySecret>, CredentialError> {
        let non_empty = |value: &Option<String>| value.clone().filter(|value| !value.is_empty());
        if let Some(token) = non_empty(&self.registrytoken) {
            return Ok(Some(RegistrySecret::RegistryToken(token)));
        }
        if let Some(token) = non_empty(&self.identitytoken) {
            return Ok(Some(RegistrySecret::IdentityToken(token)));
        }
        if let Some(auth) = non_empty(&self.auth) {
            let malformed = || CredentialError::Auth {
                registry: registry.to_owned(),
            };
            let bytes = STANDARD.decode(auth.trim()).map_err(|_| malformed())?;
            let text = String::from_utf8(bytes).map_err(|_| malformed())?;
            let (username, password) = text.split_once(':').ok_or_else(malformed)?;
            return Ok(Some(RegistrySecret::Password {
                username: username.to_owned(),
                // Old clients appended NUL bytes.
                password: password.trim_end_matches('\0').to_owned(),
            }));
        }
        match (non_empty(&self.username), non_empty(&self.password)) {
            (Some(username), Some(password)) => {
                Ok(Some(RegistrySecret::Password { username, password }))
            }
            _ => Ok(None),
        }
    }
}

/// The credentials in the key `.dockerconfigjson` of a secret of type `kubernetes.io/dockerconfigjson`.
pub fn from_dockerconfigjson(json: &[u8]) -> Result<Vec<RegistryCredential>, CredentialError> {
    #[derive(Deserialize)]
    struct Config {
        #[serde(default)]
        auths: BTreeMap<String, Auth>,
    }
    let config: Config = serde_json::from_slice(json).map_err(not_docker)?;
    credentials(config.auths)
}

/// The credentials in the key `.dockercfg` of a secret of type `kubernetes.io/dockercfg`.
pub fn from_dockercfg(json: &[u8]) -> Result<Vec<RegistryCredential>, CredentialError> {
    credentials(serde_json::from_slice(json).map_err(not_docker)?)
}

fn not_docker(source: serde_json::Error) -> CredentialError {
    CredentialError::Format {
        origin: "the pull secret".to_owned(),
        source,
    }
}

fn credentials(auths: BTreeMap<String, Auth>) -> Result<Vec<RegistryCredential>, CredentialError> {
    let mut all = Vec::new();
    for (pattern, auth) in auths {
        if let Some(secret) = auth.secret(&pattern)? {
            all.push(RegistryCredential { pattern, secret });
        }
    }
    Ok(all)
}

/// The secrets for `registry/repository`, most specific first.
pub(super) fn matching<'a>(
    credentials: &'a [RegistryCredential],
    registry: &str,
    repository: &str,
) -> Vec<&'a RegistrySecret> {
    let mut all: Vec<_> = credentials
        .iter()
        .filter(|credential| matches_pattern(&credential.pattern, registry, repository))
        .collect();
    all.sort_by_key(|credential| std::cmp::Reverse(normalized(&credential.pattern).len()));
    all.into_iter()
        .map(|credential| &credential.secret)
        .collect()
}

/// Strips the scheme, and the API version that old clients appended to a registry's address.
pub(super) fn normalized(pattern: &str) -> String {
    let rest = pattern.split_once("://").map_or(pattern, |(_, rest)| rest);
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let path = path.trim_end_matches('/');
    let version = |v: &'static str| move |rest: &str| rest.is_empty() || rest.starts_with(v);
    let path = ["v1", "v2"]
        .into_iter()
        .find_map(|v| path.strip_prefix(v).filter(|rest| version("/")(rest)))
        .unwrap_or(path)
        .trim_start_matches('/');
    let host = match host {
        "index.docker.io" | "registry-1.docker.io" => "docker.io",
        host => host,
    };
    match path {
        "" => host.to_owned(),
        path => format!("{host}/{path}"),
    }
}

fn matches_pattern(pattern: &str, registry: &str, repository: &str) -> bool {
    let pattern = normalized(pattern);
    let (host, path) = pattern.split_once('/').unwrap_or((&pattern, ""));
    let split = |host: &str| -> (Vec<String>, Option<String>) {
        let (name, port) = match host.rsplit_once(':') {
            Some((name, port)) if !port.contains(']') => (name, Some(port.to_owned())),
            _ => (host, None),
        };
        (name.split('.').map(str::to_owned).collect(), port)
    };
    let ((globs, glob_port), (labels, port)) = (split(host), split(registry));
    // Like upstream's kubelet: the path is a string prefix, not a directory prefix.
    glob_port == port
        && globs.len() == labels.len()
        && globs
            .iter()
            .zip(&labels)
            .all(|(glob, label)| matches_glob(glob, label))
        && repository.starts_with(path)
}

/// `*` matches any number of characters.
fn matches_glob(glob: &str, text: &str) -> bool {
    match glob.split_once('*') {
        None => glob == text,
        Some((before, after)) => text.strip_prefix(before).is_some_and(|rest| {
            let ends = rest.char_indices().map(|(at, _)| at).chain([rest.len()]);
            ends.into_iter().any(|at| matches_glob(after, &rest[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_like_the_kubelets() {
        for (pattern, registry, repository, expected) in [
            (
                "https://index.docker.io/v1/",
                "docker.io",
                "library/a",
                true,
            ),
            ("docker.io", "docker.io", "library/a", true),
            ("registry.example", "registry.example", "a", true),
            ("registry.example/v2/", "registry.example", "a", true),
            ("registry.example/team", "registry.example", "team/a", true),
            (
                "registry.example/team",
                "registry.example",
                "other/a",
                false,
            ),
            ("registry.example:5000", "registry.example", "a", false),
            ("registry.example", "registry.example:5000", "a", false),
            ("*.example", "registry.example", "a", true),
            ("*.example", "a.b.example", "a", false),
            ("r*y.*", "registry.example", "a", true),
            ("https://registry.example", "registry.example", "a", true),
            ("evil.example", "registry.example", "a", false),
        ] {
            assert_eq!(
                matches_pattern(pattern, registry, repository),
                expected,
                "{pattern}"
            );
        }
    }

    #[test]
    fn secrets_are_parsed_and_not_printed() {
        let json = br#"{"auths":{
            "a.example":{"auth":"dXNlcjpwYTpzcw=="},
            "b.example":{"username":"u","password":"p"},
            "c.example":{"identitytoken":"t"},
            "d.example":{}}}"#;
        let all = from_dockerconfigjson(json).unwrap();
        assert_eq!(all.len(), 3);
        assert_eq!(
            all[0].secret,
            RegistrySecret::Password {
                username: "user".into(),
                password: "pa:ss".into()
            }
        );
        assert!(!format!("{all:?}").contains("pa:ss"));
        assert_eq!(
            from_dockercfg(br#"{"a.example":{"auth":"dTpw"}}"#)
                .unwrap()
                .len(),
            1
        );
        assert!(from_dockerconfigjson(b"no").is_err());
        assert!(from_dockerconfigjson(br#"{"auths":{"a":{"auth":"???"}}}"#).is_err());
    }

    #[test]
    fn most_specific_credential_comes_first() {
        let one = |pattern: &str, token: &str| RegistryCredential {
            pattern: pattern.into(),
            secret: RegistrySecret::RegistryToken(token.into()),
        };
        let all = [one("r.example", "host"), one("r.example/team", "team")];
        let found = matching(&all, "r.example", "team/app");
        assert_eq!(*found[0], all[1].secret);
        assert_eq!(found.len(), 2);
    }
}
