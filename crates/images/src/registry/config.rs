//! `registries.toml`: mirrors, and registries that need a special treatment.
//!
//! ```toml
//! # Asked before docker.io itself, in this order. A path and a scheme may be given.
//! [registry."docker.io"]
//! mirrors = ["https://mirror.site.example/hub", "mirror2.site.example:5000"]
//!
//! # TLS with a certificate that is not verified, or no TLS at all, also for passwords.
//! [registry."node1:5000"]
//! insecure = true
//!
//! # TLS with the site's own authority, in addition to the system's.
//! [registry."registry.site.example"]
//! ca = "/etc/site/ca.pem"
//! ```
//!
//! A key is a host with an optional port, and perhaps a path; the longest that fits an image counts.
//! Settings of a mirror are looked up under the mirror's own name, those of a token server under its host and port.
//! `localhost` is no exception: every user of a shared node can listen there.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use reqwest::Url;
use serde::Deserialize;

use crate::reference::Reference;

/// How registries are to be treated, and where credentials are.
#[derive(Debug, Clone, Default)]
pub struct RegistryConfig {
    rules: BTreeMap<String, Rule>,
    /// The directory of Docker's `config.json`, if there may be one.
    pub(super) docker_config: Option<PathBuf>,
}

/// The configuration can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It can't be read.
    #[error("can't read {}", .path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It isn't as it should be.
    #[error("{} is not a configuration of registries", .path.display())]
    Parse {
        /// Which file.
        path: PathBuf,
        /// In which way.
        source: Box<toml::de::Error>,
    },
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    registry: BTreeMap<String, Rule>,
}

/// What is configured for one registry.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Asked before the registry itself.
    #[serde(default)]
    pub mirrors: Vec<String>,
    /// Whether TLS may be missing or unverified, and credentials sent all the same.
    #[serde(default)]
    pub insecure: bool,
    /// More authorities.
    pub ca: Option<PathBuf>,
}

/// One place that an image may come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The registry by the name that users know.
    pub registry: String,
    /// Where to connect to.
    pub host: String,
    /// The path of the repository there.
    pub repository: String,
    /// Ways to connect, in the order to try them.
    pub schemes: &'static [&'static str],
    /// Whether certificates are verified, and credentials kept back from plain HTTP.
    pub verified: bool,
    /// More authorities.
    pub ca: Option<PathBuf>,
}

impl RegistryConfig {
    /// The user's own: `$XDG_CONFIG_HOME/coracle/registries.toml` and `$DOCKER_CONFIG`, or
    /// `~/.config` and `~/.docker`.
    pub fn from_environment() -> Result<RegistryConfig, ConfigError> {
        let dir = |variable: &str| {
            let value = std::env::var_os(variable).map(PathBuf::from);
            value.filter(|path| path.is_absolute())
        };
        let home = dir("HOME");
        let config =
            dir("XDG_CONFIG_HOME").or_else(|| home.as_ref().map(|home| home.join(".config")));
        let mut all = match config {
            Some(config) => Self::read(&config.join("coracle/registries.toml"))?,
            None => RegistryConfig::default(),
        };
        all.docker_config = dir("DOCKER_CONFIG").or_else(|| home.map(|home| home.join(".docker")));
        Ok(all)
    }

    /// The configuration in this file; it is no error if there is none.
    pub fn read(path: &Path) -> Result<RegistryConfig, ConfigError> {
        let path_buf = || path.to_path_buf();
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(source) => {
                return Err(ConfigError::Read {
                    path: path_buf(),
                    source,
                });
            }
        };
        let file: File = toml::from_str(&text).map_err(|source| ConfigError::Parse {
            path: path_buf(),
            source: Box::new(source),
        })?;
        Ok(RegistryConfig {
            rules: file.registry,
            docker_config: None,
        })
    }

    /// Credentials are looked for in the `config.json` of this directory.
    pub fn with_docker_config(self, dir: &Path) -> RegistryConfig {
        RegistryConfig {
            docker_config: Some(dir.to_path_buf()),
            ..self
        }
    }

    /// The rule for `host/path`: of all that fit, the longest.
    fn rule(&self, name: &str) -> Rule {
        let fits = |key: &&str| {
            let rest = name.strip_prefix(key.trim_end_matches('/'));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let keys = self.rules.keys().map(String::as_str);
        let best = keys.filter(fits).max_by_key(|key| key.len());
        best.and_then(|key| self.rules.get(key))
            .cloned()
            .unwrap_or_default()
    }

    /// Where an image may come from: mirrors first.
    pub(super) fn places(&self, reference: &Reference) -> Vec<Place> {
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
            self.place(host, host, repository, scheme, &self.rule(rest))
        });
        let host = match reference.registry() {
            "docker.io" => "registry-1.docker.io",
            other => other,
        };
        let repository = reference.repository().to_owned();
        let origin = self.place(reference.registry(), host, repository, None, &own);
        mirrors.chain([origin]).collect()
    }

    fn place(
        &self,
        registry: &str,
        host: &str,
        repository: String,
        scheme: Option<&str>,
        rule: &Rule,
    ) -> Place {
        Place {
            registry: registry.to_owned(),
            host: host.to_owned(),
            repository,
            schemes: match scheme {
                Some("http") => &["http"],
                None if rule.insecure => &["https", "http"],
                _ => &["https"],
            },
            verified: !rule.insecure,
            ca: rule.ca.clone(),
        }
    }

    /// How to connect to the token server at `realm`, which `place` has named. Credentials go there, so plain HTTP needs the
    /// user's consent for that very server: what the registry is allowed counts only if both are one server.
    pub(super) fn token_server(&self, realm: &Url, place: &Place) -> TokenServer {
        let host = realm.host_str().unwrap_or_default();
        let rule = [realm.port(), realm.port_or_known_default()]
            .into_iter()
            .map(|port| match port {
                Some(port) => self.rule(&format!("{host}:{port}")),
                None => self.rule(host),
            })
            .find(|rule| *rule != Rule::default())
            .unwrap_or_default();
        let own = Url::parse(&format!("{}://{}", realm.scheme(), place.host));
        let is_registry = own.is_ok_and(|own| own.origin() == realm.origin());
        let verified = !rule.insecure && (place.verified || !is_registry);
        TokenServer {
            is_allowed: realm.scheme() == "https" || (realm.scheme() == "http" && !verified),
            verified,
            // A site's registry and its token server mostly have certificates of one authority.
            ca: rule.ca.or_else(|| place.ca.clone()),
        }
    }
}

/// How to connect to a token server.
#[derive(Debug, PartialEq, Eq)]
pub struct TokenServer {
    /// Whether credentials may be sent to it.
    pub is_allowed: bool,
    /// Whether its certificate is verified.
    pub verified: bool,
    /// More authorities.
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
    fn mirrors_come_first_and_the_longest_key_counts() {
        let config = config(
            r#"
            [registry."docker.io"]
            mirrors = ["https://mirror.example/hub/", "node1:5000"]
            [registry."docker.io/library/secret"]
            [registry."node1:5000"]
            insecure = true
            "#,
        );
        let places = config.places(&"busybox".parse().unwrap());
        let shown: Vec<_> = places
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
                    &["https"][..],
                    true
                ),
                (
                    "node1:5000",
                    "library/busybox",
                    &["https", "http"][..],
                    false
                ),
                (
                    "registry-1.docker.io",
                    "library/busybox",
                    &["https"][..],
                    true
                ),
            ]
        );
        assert_eq!(config.places(&"secret".parse().unwrap()).len(), 1);
        assert_eq!(config.places(&"secretive".parse().unwrap()).len(), 3);
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
            let place = &config.places(&name.parse().unwrap())[0];
            let shown = (place.schemes.contains(&"http"), place.verified);
            assert_eq!(shown, (insecure, !insecure), "{name}");
        }
    }

    #[test]
    fn plain_token_servers_need_consent_of_their_own() {
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
            let place = &config.places(&format!("{registry}/a").parse().unwrap())[0];
            let server = config.token_server(&Url::parse(realm).unwrap(), place);
            let shown = (server.is_allowed, server.verified);
            assert_eq!(shown, (is_allowed, verified), "{registry} {realm}");
        }
    }

    #[test]
    fn mistakes_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("registries.toml");
        assert!(RegistryConfig::read(&path).is_ok());
        fs::write(&path, "[registry.a]\nmirror = 'b'\n").unwrap();
        assert!(RegistryConfig::read(&path).is_err());
    }
}
