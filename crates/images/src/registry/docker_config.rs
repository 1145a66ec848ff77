//! Docker's `config.json`, and its credential helpers.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use super::credentials::{Auth, CredentialError, RegistrySecret, normalized};

/// Timeout for a credential helper, which may ask a server.
const HELPER_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Deserialize, Default)]
#[serde(default)]
struct DockerConfig {
    auths: BTreeMap<String, Auth>,
    #[serde(rename = "credHelpers")]
    cred_helpers: BTreeMap<String, String>,
    #[serde(rename = "credsStore")]
    creds_store: Option<String>,
}

/// The secret for `registry/repository`, if the configuration has one.
pub async fn secret(
    dir: &Path,
    registry: &str,
    repository: &str,
) -> Result<Option<RegistrySecret>, CredentialError> {
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
            origin: path.display().to_string(),
            source,
        })?;
    let is_registry = |key: &&String| normalized(key) == registry;
    if let Some(key) = config.cred_helpers.keys().find(is_registry) {
        return run_helper(&config.cred_helpers[key], &server_url(registry)).await;
    }
    if let Some(store) = config
        .creds_store
        .as_deref()
        .filter(|name| !name.is_empty())
        && let Some(secret) = run_helper(store, &server_url(registry)).await?
    {
        return Ok(Some(secret));
    }
    // Keys that podman writes may contain a repository path; the longest match wins.
    let name = format!("{registry}/{repository}");
    let matches_name = |key: &&String| {
        let rest = name.strip_prefix(normalized(key).as_str());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let best = config
        .auths
        .keys()
        .filter(matches_name)
        .max_by_key(|key| normalized(key).len());
    match best {
        Some(key) => config.auths[key].secret(key),
        None => Ok(None),
    }
}

/// The server URL under which helpers store a registry's credentials.
fn server_url(registry: &str) -> String {
    match registry {
        "docker.io" => "https://index.docker.io/v1/".to_owned(),
        other => other.to_owned(),
    }
}

/// Runs `docker-credential-NAME get`.
async fn run_helper(
    name: &str,
    server_url: &str,
) -> Result<Option<RegistrySecret>, CredentialError> {
    let program = format!("docker-credential-{name}");
    let failed = |output: String| CredentialError::Helper {
        program: program.clone(),
        output,
    };
    if name.contains('/') {
        return Err(failed("the name is a path".to_owned()));
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
        // A helper that does not read its input may still respond.
        let _ = stdin.write_all(server_url.as_bytes()).await;
    }
    let output = tokio::time::timeout(HELPER_TIMEOUT, child.wait_with_output())
        .await
        .map_err(|_| failed("no response within 30 s".to_owned()))?
        .map_err(|error| failed(error.to_string()))?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        // Helpers print this to stdout.
        if stdout.contains("credentials not found") {
            return Ok(None);
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        let message = format!("{} {} {}", stdout.trim(), stderr.trim(), output.status);
        return Err(failed(message.trim().chars().take(500).collect()));
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct HelperResponse {
        username: String,
        secret: String,
    }
    // The output may contain the secret, so it is not in the error.
    let response: HelperResponse = serde_json::from_str(&stdout)
        .map_err(|_| failed("the output is not in the format of credential helpers".to_owned()))?;
    Ok(Some(match response.username.as_str() {
        "<token>" => RegistrySecret::IdentityToken(response.secret),
        _ => RegistrySecret::Password {
            username: response.username,
            password: response.secret,
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn longest_matching_entry_wins() {
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
        let token = |token: &str| Some(RegistrySecret::RegistryToken(token.into()));
        assert_eq!(find("docker.io", "library/a").await, token("hub"));
        assert_eq!(find("r.example", "a").await, token("host"));
        assert_eq!(find("r.example", "team/a").await, token("team"));
        assert_eq!(find("other.example", "a").await, None);
    }
}
