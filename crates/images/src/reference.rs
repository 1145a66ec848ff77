//! Image references: names as users write them, and their full form.
//!
//! The grammar is Docker's, which Kubernetes uses too: `busybox` is `docker.io/library/busybox:latest`.

use std::fmt;
use std::str::FromStr;

use download::Digest;

const DOCKER_HUB: &str = "docker.io";
const MAX_NAME_LEN: usize = 255;

/// The full name of an image.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

/// A name is not a valid reference.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("couldn't parse image name {name:?}: invalid reference format: {reason}")]
pub struct ReferenceError {
    name: String,
    reason: &'static str,
}

impl ReferenceError {
    /// The name as the user wrote it.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Reference {
    /// The registry's host with an optional port; `docker.io` for Docker Hub.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// The path of the repository on the registry.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Registry and repository.
    pub fn name(&self) -> String {
        format!("{}/{}", self.registry, self.repository)
    }

    /// The tag; `None` if the reference has only a digest.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The digest, if the reference has one.
    pub fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// The version to request from a registry: the digest if there is one, else the tag.
    pub fn version(&self) -> String {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.clone(),
            (None, None) => "latest".to_owned(),
        }
    }

    /// The repository with this digest, the form of Kubernetes' `imageID`.
    pub fn pinned(&self, digest: Digest) -> String {
        format!("{}@{digest}", self.name())
    }
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(name: &str) -> Result<Self, ReferenceError> {
        let invalid = |reason| ReferenceError {
            name: name.chars().take(300).collect(),
            reason,
        };
        let (rest, digest) = match name.split_once('@') {
            Some((rest, digest)) => {
                let digest = digest
                    .parse()
                    .map_err(|_| invalid("no SHA-256 digest after @"))?;
                (rest, Some(digest))
            }
            None => (name, None),
        };
        // A colon before the last slash belongs to the registry's port.
        let (rest, tag) = match rest.rsplit_once(':') {
            Some((before, tag)) if !tag.contains('/') => (before, Some(tag)),
            _ => (rest, None),
        };
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(invalid("the tag has invalid characters"));
        }
        let (registry, repository) = match rest.split_once('/') {
            Some((first, path)) if is_host(first) => (first, path),
            _ => (DOCKER_HUB, rest),
        };
        let registry = match registry {
            "index.docker.io" | "registry-1.docker.io" => DOCKER_HUB,
            other => other,
        };
        let repository = match registry == DOCKER_HUB && !repository.contains('/') {
            true => format!("library/{repository}"),
            false => repository.to_owned(),
        };
        if rest.is_empty() || repository == "library/" {
            return Err(invalid("it is empty"));
        }
        if !is_registry(registry) {
            return Err(invalid("the registry is not a host name"));
        }
        if repository.chars().any(|c| c.is_ascii_uppercase()) {
            return Err(invalid("repository name must be lowercase"));
        }
        if !repository.split('/').all(is_component) {
            return Err(invalid("the path has invalid characters"));
        }
        if registry.len() + 1 + repository.len() > MAX_NAME_LEN {
            return Err(invalid("it is longer than 255 characters"));
        }
        let default = || digest.is_none().then(|| "latest".to_owned());
        Ok(Reference {
            registry: registry.to_owned(),
            repository,
            tag: tag.map(str::to_owned).or_else(default),
            digest,
        })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        match &self.digest {
            Some(digest) => write!(f, "@{digest}"),
            None => Ok(()),
        }
    }
}

/// Distinguishes `host/path` from `user/path`, like Docker.
fn is_host(first: &str) -> bool {
    first.contains(['.', ':']) || first == "localhost" || first.chars().any(char::is_uppercase)
}

fn is_registry(registry: &str) -> bool {
    let (host, port) = match registry.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((address, after)) => {
                let good = address.parse::<std::net::Ipv6Addr>().is_ok();
                return good && (after.is_empty() || after.strip_prefix(':').is_some_and(is_port));
            }
            None => return false,
        },
        None => match registry.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (registry, None),
        },
    };
    let label = |label: &str| {
        let edge = |c: char| c.is_ascii_alphanumeric();
        label.starts_with(edge)
            && label.ends_with(edge)
            && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
    };
    host.split('.').all(label) && port.is_none_or(is_port)
}

fn is_port(port: &str) -> bool {
    !port.is_empty() && port.len() < 6 && port.chars().all(|c| c.is_ascii_digit())
}

fn is_tag(tag: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    tag.len() <= 128
        && tag.starts_with(word)
        && tag.chars().all(|c| word(c) || c == '.' || c == '-')
}

/// Letters and digits, separated by `.`, `_`, `__` or any number of `-`.
fn is_component(component: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let separators = component.split(plain).filter(|part| !part.is_empty());
    component.starts_with(plain)
        && component.ends_with(plain)
        && separators
            .into_iter()
            .all(|s| matches!(s, "." | "_" | "__") || s.chars().all(|c| c == '-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_are_completed() {
        let digest = Digest::of(b"");
        for (short, full) in [
            ("busybox", "docker.io/library/busybox:latest"),
            ("busybox:1.36", "docker.io/library/busybox:1.36"),
            ("user/app", "docker.io/user/app:latest"),
            (
                "index.docker.io/busybox",
                "docker.io/library/busybox:latest",
            ),
            ("localhost/app", "localhost/app:latest"),
            ("localhost:5000/app", "localhost:5000/app:latest"),
            ("[::1]:5000/app:x", "[::1]:5000/app:x"),
            ("registry.k8s.io/pause:3.10", "registry.k8s.io/pause:3.10"),
            ("ghcr.io/a/b-c/d__e:V1.0-x", "ghcr.io/a/b-c/d__e:V1.0-x"),
        ] {
            assert_eq!(short.parse::<Reference>().unwrap().to_string(), full);
        }
        let pinned: Reference = format!("busybox@{digest}").parse().unwrap();
        assert_eq!(
            pinned.to_string(),
            format!("docker.io/library/busybox@{digest}")
        );
        let both: Reference = format!("busybox:1@{digest}").parse().unwrap();
        assert_eq!(both.version(), digest.to_string());
        assert_eq!(both.tag(), Some("1"));
    }

    #[test]
    fn malformed_names_are_rejected() {
        for bad in [
            "",
            ":",
            ":tag",
            "@sha256:00",
            "busybox@sha256:00",
            "BusyBox",
            "docker.io/Library/busybox",
            "a//b",
            "a/",
            "/a",
            "-a",
            "a..b/c",
            "a b",
            "busybox:",
            "busybox:-1",
            "busybox:a/b:c:d",
            "https://docker.io/busybox",
            "../../etc/passwd",
            "localhost:port/a",
            "a\n",
            "host.example/a/../b",
        ] {
            assert!(bad.parse::<Reference>().is_err(), "{bad:?}");
        }
        assert!("a".repeat(300).parse::<Reference>().is_err());
    }

    proptest::proptest! {
        #[test]
        fn parsed_names_round_trip(name in "[a-zA-Z0-9./:@_-]{0,60}") {
            if let Ok(reference) = name.parse::<Reference>() {
                let text = reference.to_string();
                proptest::prop_assert_eq!(text.parse::<Reference>().unwrap(), reference);
            }
        }
    }
}
