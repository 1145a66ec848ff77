//! Credentials, and which registry each is for.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// A way into some repositories.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credential {
    /// A host, with an optional port and the beginning of a path; `*` stands for a part of a host's name.
    pub pattern: String,
    /// The way in.
    pub secret: Secret,
}

/// What a registry or its token server wants to see. Never shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Secret {
    /// A name and a password.
    Password {
        /// The name.
        username: String,
        /// The password.
        password: String,
    },
    /// A token that the token server exchanges for another.
    IdentityToken(String),
    /// A token for the registry itself.
    RegistryToken(String),
}

impl Secret {
    /// By this the store knows again who was let into a repository, without knowing the secret.
    pub fn mark(&self, repository: &str) -> Digest {
        let words: &[&str] = match self {
            Secret::Password { username, password } => &["password", username, password],
            Secret::IdentityToken(token) => &["identity-token", token],
            Secret::RegistryToken(token) => &["registry-token", token],
        };
        // No name of a repository, of a user or of a kind holds a zero byte.
        let text = [&[repository], words].concat().join("\0");
        Digest::of(text.as_bytes())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Credentials can't be read.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    /// The JSON isn't Docker's.
    #[error("{what} is not in the format of ~/.docker/config.json")]
    Format {
        /// Whose.
        what: String,
        /// In which way.
        source: serde_json::Error,
    },
    /// The file can't be read.
    #[error("can't read {}", .path.display())]
    Read {
        /// Which one.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// An entry makes no sense.
    #[error("the entry for {registry} is malformed: its \"auth\" is not base64 of name:password")]
    Auth {
        /// Whose.
        registry: String,
    },
    /// A helper failed.
    #[error("the credential helper {program} failed: {said}")]
    Helper {
        /// Which program.
        program: String,
        /// Its words, or why it didn't run.
        said: String,
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
    /// `None`: the entry only says that a helper knows more.
    pub fn secret(&self, registry: &str) -> Result<Option<Secret>, CredentialError> {
        let given = |value: &Option<String>| value.clone().filter(|value| !value.is_empty());
        if let Some(token) = given(&self.registrytoken) {
            return Ok(Some(Secret::RegistryToken(token)));
        }
        if let Some(token) = given(&self.identitytoken) {
            return Ok(Some(Secret::IdentityToken(token)));
        }
        if let Some(auth) = given(&self.auth) {
            let wrong = || CredentialError::Auth {
                registry: registry.to_owned(),
            };
            let bytes = STANDARD.decode(auth.trim()).map_err(|_| wrong())?;
            let text = String::from_utf8(bytes).map_err(|_| wrong())?;
            let (username, password) = text.split_once(':').ok_or_else(wrong)?;
            return Ok(Some(Secret::Password {
                username: username.to_owned(),
                // Old clients wrote a zero byte at the end.
                password: password.trim_end_matches('\0').to_owned(),
            }));
        }
        match (given(&self.username), given(&self.password)) {
            (Some(username), Some(password)) => Ok(Some(Secret::Password { username, password })),
            _ => Ok(None),
        }
    }
}

/// The credentials in a secret of type `kubernetes.io/dockerconfigjson`: the key `.dockerconfigjson`.
pub fn from_dockerconfigjson(json: &[u8]) -> Result<Vec<Credential>, CredentialError> {
    #[derive(Deserialize)]
    struct Config {
        #[serde(default)]
        auths: BTreeMap<String, Auth>,
    }
    let config: Config = serde_json::from_slice(json).map_err(not_docker)?;
    credentials(config.auths)
}

/// The credentials in a secret of type `kubernetes.io/dockercfg`: the key `.dockercfg`.
pub fn from_dockercfg(json: &[u8]) -> Result<Vec<Credential>, CredentialError> {
    credentials(serde_json::from_slice(json).map_err(not_docker)?)
}

fn not_docker(source: serde_json::Error) -> CredentialError {
    CredentialError::Format {
        what: "the pull secret".to_owned(),
        source,
    }
}

fn credentials(auths: BTreeMap<String, Auth>) -> Result<Vec<Credential>, CredentialError> {
    let mut all = Vec::new();
    for (pattern, auth) in auths {
        if let Some(secret) = auth.secret(&pattern)? {
            all.push(Credential { pattern, secret });
        }
    }
    Ok(all)
}

/// Those of `credentials` that fit `registry/repository`, the most specific first.
pub(super) fn matching<'a>(
    credentials: &'a [Credential],
    registry: &str,
    repository: &str,
) -> Vec<&'a Secret> {
    let mut all: Vec<_> = credentials
        .iter()
        .filter(|credential| fits(&credential.pattern, registry, repository))
        .collect();
    all.sort_by_key(|credential| std::cmp::Reverse(normal(&credential.pattern).len()));
    all.into_iter()
        .map(|credential| &credential.secret)
        .collect()
}

/// Without scheme and the version that old clients added to a registry's address.
pub(super) fn normal(pattern: &str) -> String {
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

fn fits(pattern: &str, registry: &str, repository: &str) -> bool {
    let pattern = normal(pattern);
    let (host, path) = pattern.split_once('/').unwrap_or((&pattern, ""));
    let split = |host: &str| -> (Vec<String>, Option<String>) {
        let (name, port) = match host.rsplit_once(':') {
            Some((name, port)) if !port.contains(']') => (name, Some(port.to_owned())),
            _ => (host, None),
        };
        (name.split('.').map(str::to_owned).collect(), port)
    };
    let ((wanted, wanted_port), (parts, port)) = (split(host), split(registry));
    // As upstream's kubelet has it: the path is the beginning of a string, not of a folder.
    wanted_port == port
        && wanted.len() == parts.len()
        && wanted
            .iter()
            .zip(&parts)
            .all(|(glob, part)| glob_fits(glob, part))
        && repository.starts_with(path)
}

/// `*` stands for any number of letters.
fn glob_fits(glob: &str, text: &str) -> bool {
    match glob.split_once('*') {
        None => glob == text,
        Some((before, after)) => text.strip_prefix(before).is_some_and(|rest| {
            let ends = rest.char_indices().map(|(at, _)| at).chain([rest.len()]);
            ends.into_iter().any(|at| glob_fits(after, &rest[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_as_kubernetes_has_them() {
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
            assert_eq!(fits(pattern, registry, repository), expected, "{pattern}");
        }
    }

    #[test]
    fn secrets_are_read_and_not_shown() {
        let json = br#"{"auths":{
            "a.example":{"auth":"dXNlcjpwYTpzcw=="},
            "b.example":{"username":"u","password":"p"},
            "c.example":{"identitytoken":"t"},
            "d.example":{}}}"#;
        let all = from_dockerconfigjson(json).unwrap();
        assert_eq!(all.len(), 3);
        assert_eq!(
            all[0].secret,
            Secret::Password {
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
    fn the_most_specific_comes_first() {
        let one = |pattern: &str, token: &str| Credential {
            pattern: pattern.into(),
            secret: Secret::RegistryToken(token.into()),
        };
        let all = [one("r.example", "host"), one("r.example/team", "team")];
        let found = matching(&all, "r.example", "team/app");
        assert_eq!(*found[0], all[1].secret);
        assert_eq!(found.len(), 2);
    }
}
