//! `registries.toml`: mirrors and TLS settings of registries.
//!
//! ```toml
//! # Tried before docker.io itself, in this order. A scheme and a path are optional.
//! [registry."docker.io"]
//! mirrors = ["https://mirror.site.example/hub", "mirror2.site.example:5000"]
//!
//! # Unverified TLS certificates and plain HTTP are allowed, also for passwords.
//! [registry."node1:5000"]
//! insecure = true
//!
//! # CA certificates in addition to the system's.
//! [registry."registry.site.example"]
//! ca = "/etc/site/ca.pem"
//! ```
//!
//! A key is a host with an optional port and an optional path; the longest match wins.
//! Settings of a mirror are under the mirror's own name, those of a token server under its host and port.
//! `localhost` is no exception: every user of a shared node can listen there.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use reqwest::Url;
use serde::Deserialize;

use crate::reference::Reference;

/// Settings of registries, and the location of the user's credentials.
#[derive(Debug, Clone, Default)]
pub struct RegistryConfig {
    rules: BTreeMap<String, RegistryRule>,
    /// The directory of Docker's `config.json`.
    pub(super) docker_config: Option<PathBuf>,
}

/// `registries.toml` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RegistryConfigError {
    /// The file cannot be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The file has invalid content.
    #[error("cannot parse {}", .path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        source: Box<toml::de::Error>,
    },
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    registry: BTreeMap<String, RegistryRule>,
}

/// The settings of one registry.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegistryRule {
    /// Mirrors, tried before the registry itself.
    #[serde(default)]
    pub mirrors: Vec<String>,
    /// Allows unverified certificates and plain HTTP, also for credentials.
    #[serde(default)]
    pub insecure: bool,
    /// A file of additional CA certificates.
    pub ca: Option<PathBuf>,
}

/// The scheme of a registry's URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UrlScheme {
    /// Plain HTTP.
    Http,
    /// HTTP over TLS.
    Https,
}

impl UrlScheme {
    /// The scheme as in a URL.
    pub fn as_str(self) -> &'static str {
        match self {
            UrlScheme::Http => "http",
            UrlScheme::Https => "https",
        }
    }
}

/// A registry or mirror that an image can be pulled from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryEndpoint {
    /// The registry's name in references.
    pub registry: String,
    /// The host to connect to.
    pub host: String,
    /// The path of the repository on this host.
    pub repository: String,
    /// The schemes to try, in this order.
    pub schemes: &'static [UrlScheme],
    /// Verify certificates, and send no credentials over plain HTTP.
    pub verified: bool,
    /// A file of additional CA certificates.
    pub ca: Option<PathBuf>,
}

impl RegistryConfig {
    /// The user's configuration: `$XDG_CONFIG_HOME/coracle/registries.toml` and `$DOCKER_CONFIG`, by default in
    /// `~/.config` and `~/.docker`.
    pub fn from_environment() -> Result<RegistryConfig, RegistryConfigError> {
        let dir = |variable: &str| {
            let value = std::env::var_os(variable).map(PathBuf::from);
            value.filter(|path| path.is_absolute())
        };
        let home = dir("HOME");
        let config =
            dir("XDG_CONFIG_HOME").or_else(|| home.as_ref().map(|home| home.join(".config")));
        let mut registry_config = match config {
            Some(config) => Self::read(&config.join("coracle/registries.toml"))?,
            None => RegistryConfig::default(),
        };
        registry_config.docker_config =
            dir("DOCKER_CONFIG").or_else(|| home.map(|home| home.join(".docker")));
        Ok(registry_config)
    }

    /// Reads a file; a missing file is the default configuration.
    pub fn read(path: &Path) -> Result<RegistryConfig, RegistryConfigError> {
        let path_buf = || path.to_path_buf();
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(source) => {
                return Err(RegistryConfigError::Read {
                    path: path_buf(),
                    source,
                });
            }
        };
        let file: File = toml::from_str(&text).map_err(|source| RegistryConfigError::Parse {
            path: path_buf(),
            source: Box::new(source),
        })?;
        Ok(RegistryConfig {
            rules: file.registry,
            docker_config: None,
        })
    }

    /// Sets the directory of Docker's `config.json`.
    pub fn with_docker_config(self, dir: &Path) -> RegistryConfig {
        RegistryConfig {
            docker_config: Some(dir.to_path_buf()),
            ..self
        }
    }

    /// The rule for `host/path` with the longest matching key.
    fn rule(&self, name: &str) -> RegistryRule {
        let matches_name = |key: &&str| {
            let rest = name.strip_prefix(key.trim_end_matches('/'));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let keys = self.rules.keys().map(String::as_str);
        let best = keys.filter(matches_name).max_by_key(|key| key.len());
        best.and_then(|key| self.rules.get(key))
            .cloned()
            .unwrap_or_default()
    }

    /// The endpoints of an image: mirrors first, then the registry.
    pub(super) fn endpoints(&self, reference: &Reference) -> Vec<RegistryEndpoint> {
        let own = self.rule(&reference.name());
        let mirrors = own.mirrors.iter().map(|mirror| {
            let (scheme, rest) = match mirror.split_once("://") {
                Some((scheme, rest)) => (Some(scheme), rest),
                None => (None, mirror.as_str()),
            };
            let rest = rest.trim_end_matches('/');
            let (host, prefix) = rest.split_once('/').unwrap_or((rest, ""));
            let repository = match prefix {
                "" => reference.repository().to_owned(),
                prefix => format!("{prefix}/{}", reference.repository()),
            };
            self.endpoint(host, host, repository, scheme, &self.rule(rest))
        });
        let host = match reference.registry() {
            "docker.io" => "registry-1.docker.io",
            other => other,
        };
        let repository = reference.repository().to_owned();
        let origin = self.endpoint(reference.registry(), host, repository, None, &own);
        mirrors.chain([origin]).collect()
    }

    fn endpoint(
        &self,
        registry: &str,
        host: &str,
        repository: String,
        scheme: Option<&str>,
        rule: &RegistryRule,
    ) -> RegistryEndpoint {
        RegistryEndpoint {
            registry: registry.to_owned(),
            host: host.to_owned(),
            repository,
            schemes: match scheme {
                Some("http") => &[UrlScheme::Http],
                None if rule.insecure => &[UrlScheme::Https, UrlScheme::Http],
                _ => &[UrlScheme::Https],
            },
            verified: !rule.insecure,
            ca: rule.ca.clone(),
        }
    }

    /// The settings for the token server at `realm`, to which `endpoint` refers. It receives credentials, so plain HTTP needs
    /// `insecure = true` for the token server itself; the registry's setting applies only if both are the same server.
    pub(super) fn token_server(&self, realm: &Url, endpoint: &RegistryEndpoint) -> TokenServer {
        let host = realm.host_str().unwrap_or_default();
        let rule = [realm.port(), realm.port_or_known_default()]
            .into_iter()
            .map(|port| match port {
                Some(port) => self.rule(&format!("{host}:{port}")),
                None => self.rule(host),
            })
            .find(|rule| *rule != RegistryRule::default())
            .unwrap_or_default();
        let own = Url::parse(&format!("{}://{}", realm.scheme(), endpoint.host));
        let is_registry = own.is_ok_and(|own| own.origin() == realm.origin());
        let verified = !rule.insecure && (endpoint.verified || !is_registry);
        TokenServer {
            is_allowed: realm.scheme() == "https" || (realm.scheme() == "http" && !verified),
            verified,
            // A site's registry and its token server mostly have the same CA.
            ca: rule.ca.or_else(|| endpoint.ca.clone()),
        }
    }
}

/// The settings for a token server.
#[derive(Debug, PartialEq, Eq)]
pub struct TokenServer {
    /// Whether credentials may be sent to the server.
    pub is_allowed: bool,
    /// Whether the server's certificate is verified.
    pub verified: bool,
    /// A file of additional CA certificates.
    pub ca: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> RegistryConfig {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("registries.toml");
        fs::write(&path, text).unwrap();
        RegistryConfig::read(&path).unwrap()
    }

    #[test]
    fn mirrors_come_first_and_longest_key_wins() {
        let config = config(
            r#"
            [registry."docker.io"]
            mirrors = ["https://mirror.example/hub/", "node1:5000"]
            [registry."docker.io/library/secret"]
            [registry."node1:5000"]
            insecure = true
            "#,
        );
        let endpoints = config.endpoints(&"busybox".parse().unwrap());
        let shown: Vec<_> = endpoints
            .iter()
            .map(|p| {
                (
                    p.host.as_str(),
                    p.repository.as_str(),
                    p.schemes,
                    p.verified,
                )
            })
            .collect();
        assert_eq!(
            shown,
            [
                (
                    "mirror.example",
                    "hub/library/busybox",
                    &[UrlScheme::Https][..],
                    true
                ),
                (
                    "node1:5000",
                    "library/busybox",
                    &[UrlScheme::Https, UrlScheme::Http][..],
                    false
                ),
                (
                    "registry-1.docker.io",
                    "library/busybox",
                    &[UrlScheme::Https][..],
                    true
                ),
            ]
        );
        assert_eq!(config.endpoints(&"secret".parse().unwrap()).len(), 1);
        assert_eq!(config.endpoints(&"secretive".parse().unwrap()).len(), 3);
    }

    #[test]
    fn loopback_needs_tls_unless_configured() {
        let config = config("[registry.\"localhost:5001\"]\ninsecure = true\n");
        for (name, insecure) in [
            ("localhost:5000/a", false),
            ("localhost:5001/a", true),
            ("127.0.0.1:5001/a", false),
            ("[::1]:5000/a", false),
            ("10.0.0.1/a", false),
        ] {
            let endpoint = &config.endpoints(&name.parse().unwrap())[0];
            let shown = (
                endpoint.schemes.contains(&UrlScheme::Http),
                endpoint.verified,
            );
            assert_eq!(shown, (insecure, !insecure), "{name}");
        }
    }

    #[test]
    fn insecure_token_servers_need_their_own_rule() {
        let config = config(
            r#"
            [registry."plain:5000"]
            insecure = true
            [registry."tokens:5001"]
            insecure = true
            [registry."plain-port-80"]
            insecure = true
            "#,
        );
        for (registry, realm, is_allowed, verified) in [
            ("a.example", "https://tokens.example/t", true, true),
            ("a.example", "http://tokens.example/t", false, true),
            ("a.example", "http://a.example/t", false, true),
            ("a.example", "http://tokens:5001/t", true, false),
            ("a.example", "ftp://tokens:5001/t", false, false),
            ("plain:5000", "http://plain:5000/t", true, false),
            ("plain:5000", "http://plain:5001/t", false, true),
            ("plain:5000", "http://tokens.example/t", false, true),
            ("plain:5000", "https://tokens.example/t", true, true),
            ("plain-port-80", "http://plain-port-80:80/t", true, false),
        ] {
            let endpoint = &config.endpoints(&format!("{registry}/a").parse().unwrap())[0];
            let server = config.token_server(&Url::parse(realm).unwrap(), endpoint);
            let shown = (server.is_allowed, server.verified);
            assert_eq!(shown, (is_allowed, verified), "{registry} {realm}");
        }
    }

    #[test]
    fn unknown_settings_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("registries.toml");
        assert!(RegistryConfig::read(&path).is_ok());
        fs::write(&path, "[registry.a]\nmirror = 'b'\n").unwrap();
        assert!(RegistryConfig::read(&path).is_err());
    }
}
