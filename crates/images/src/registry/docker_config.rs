//! Docker's own `config.json`, and the helpers that it names.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use super::credentials::{Auth, CredentialError, Secret, normal};

/// A helper may ask a server somewhere, but nobody waits for ever.
const HELPER_PATIENCE: Duration = Duration::from_secs(30);

#[derive(Deserialize, Default)]
#[serde(default)]
struct DockerConfig {
    auths: BTreeMap<String, Auth>,
    #[serde(rename = "credHelpers")]
    cred_helpers: BTreeMap<String, String>,
    #[serde(rename = "credsStore")]
    creds_store: Option<String>,
}

/// The secret for `registry/repository`, if there is one.
pub async fn secret(
    dir: &Path,
    registry: &str,
    repository: &str,
) -> Result<Option<Secret>, CredentialError> {
    let path = dir.join("config.json");
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            return Ok(None);
        }
        Err(source) => return Err(CredentialError::Read { path, source }),
    };
    let config: DockerConfig =
        serde_json::from_slice(&text).map_err(|source| CredentialError::Format {
            what: path.display().to_string(),
            source,
        })?;
    let wanted = |key: &&String| normal(key) == registry;
    if let Some(key) = config.cred_helpers.keys().find(wanted) {
        return ask(&config.cred_helpers[key], &server(registry)).await;
    }
    if let Some(store) = config
        .creds_store
        .as_deref()
        .filter(|name| !name.is_empty())
        && let Some(secret) = ask(store, &server(registry)).await?
    {
        return Ok(Some(secret));
    }
    // podman writes paths of repositories too; the longest that fits counts.
    let name = format!("{registry}/{repository}");
    let fits = |key: &&String| {
        let rest = name.strip_prefix(normal(key).as_str());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let best = config
        .auths
        .keys()
        .filter(fits)
        .max_by_key(|key| normal(key).len());
    match best {
        Some(key) => config.auths[key].secret(key),
        None => Ok(None),
    }
}

/// What helpers know a registry by.
fn server(registry: &str) -> String {
    match registry {
        "docker.io" => "https://index.docker.io/v1/".to_owned(),
        other => other.to_owned(),
    }
}

/// Runs `docker-credential-NAME get`.
async fn ask(name: &str, server: &str) -> Result<Option<Secret>, CredentialError> {
    let program = format!("docker-credential-{name}");
    let failed = |said: String| CredentialError::Helper {
        program: program.clone(),
        said,
    };
    if name.contains('/') {
        return Err(failed("its name is a path".to_owned()));
    }
    let mut child = Command::new(&program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| failed(error.to_string()))?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that doesn't read its input may still answer.
        let _ = stdin.write_all(server.as_bytes()).await;
    }
    let output = tokio::time::timeout(HELPER_PATIENCE, child.wait_with_output())
        .await
        .map_err(|_| failed("it didn't answer within 30 s".to_owned()))?
        .map_err(|error| failed(error.to_string()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        // Helpers say so on their output.
        if said.contains("credentials not found") {
            return Ok(None);
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        let words = format!("{} {} {}", said.trim(), errors.trim(), output.status);
        return Err(failed(words.trim().chars().take(500).collect()));
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Answer {
        username: String,
        secret: String,
    }
    // What it said may hold the secret: it isn't shown.
    let answer: Answer = serde_json::from_str(&said)
        .map_err(|_| failed("it answered something else than credentials".to_owned()))?;
    Ok(Some(match answer.username.as_str() {
        "<token>" => Secret::IdentityToken(answer.secret),
        _ => Secret::Password {
            username: answer.username,
            password: answer.secret,
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_longest_entry_counts() {
        let dir = tempfile::tempdir().unwrap();
        let find = |registry: &'static str, repository: &'static str| {
            let dir = dir.path().to_path_buf();
            async move { secret(&dir, registry, repository).await.unwrap() }
        };
        assert_eq!(find("r.example", "a").await, None);
        fs::write(
            dir.path().join("config.json"),
            r#"{"auths":{"https://index.docker.io/v1/":{"registrytoken":"hub"},
                "r.example":{"registrytoken":"host"},"r.example/team":{"registrytoken":"team"}}}"#,
        )
        .unwrap();
        let token = |token: &str| Some(Secret::RegistryToken(token.into()));
        assert_eq!(find("docker.io", "library/a").await, token("hub"));
        assert_eq!(find("r.example", "a").await, token("host"));
        assert_eq!(find("r.example", "team/a").await, token("team"));
        assert_eq!(find("other.example", "a").await, None);
    }
}
