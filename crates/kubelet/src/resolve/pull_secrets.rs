//! Credentials for image registries, from `imagePullSecrets`.
//!
//! The result is JSON in the form of `images::RegistryCredential`: this crate does not depend on `images`.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::Secret;
use serde::Deserialize;
use serde_json::{Value, json};
use volumes::content::VolumeInputs;

/// An entry of `~/.docker/config.json`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct DockerAuth {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, DockerAuth>,
}

/// The credentials of a pod, and warnings about secrets that cannot be read. The pull may succeed without them.
pub(super) fn credentials(inputs: &VolumeInputs) -> (Vec<Value>, Vec<(&'static str, String)>) {
    let (mut all, mut unreadable) = (Vec::new(), Vec::new());
    let spec = inputs.pod.spec.as_ref();
    let names = spec.and_then(|spec| spec.image_pull_secrets.as_deref());
    for name in names
        .unwrap_or_default()
        .iter()
        .map(|reference| reference.name.as_str())
    {
        let read = inputs
            .secrets
            .get(name)
            .and_then(|secret| secret_credentials(secret));
        match read {
            Some(credentials) => all.extend(credentials),
            None => unreadable.push(name),
        }
    }
    let warning = format!(
        "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
        unreadable.join(", ")
    );
    let warnings = match unreadable.is_empty() {
        true => Vec::new(),
        false => vec![("FailedToRetrieveImagePullSecret", warning)],
    };
    (all, warnings)
}

/// `None` if the secret does not have the format of its type.
fn secret_credentials(secret: &Secret) -> Option<Vec<Value>> {
    let data = secret.data.as_ref()?;
    let auths = if let Some(json) = data.get(".dockerconfigjson") {
        serde_json::from_slice::<DockerConfig>(&json.0).ok()?.auths
    } else {
        serde_json::from_slice(&data.get(".dockercfg")?.0).ok()?
    };
    let mut all = Vec::new();
    for (pattern, entry) in auths {
        if let Some(secret) = registry_secret(entry)? {
            all.push(json!({ "pattern": pattern, "secret": secret }));
        }
    }
    Some(all)
}

/// The outer `None` means an invalid entry, the inner one an entry without credentials: those are in a credential helper.
fn registry_secret(entry: DockerAuth) -> Option<Option<Value>> {
    let non_empty = |text: Option<String>| text.filter(|text| !text.is_empty());
    if let Some(token) = non_empty(entry.registrytoken) {
        return Some(Some(json!({ "registry_token": token })));
    }
    if let Some(token) = non_empty(entry.identitytoken) {
        return Some(Some(json!({ "identity_token": token })));
    }
    let (username, password) = match non_empty(entry.auth) {
        Some(auth) => {
            let text = String::from_utf8(STANDARD.decode(auth.trim()).ok()?).ok()?;
            let (username, password) = text.split_once(':')?;
            // Old clients wrote a NUL byte at the end.
            (
                username.to_owned(),
                password.trim_end_matches('\0').to_owned(),
            )
        }
        None => match (non_empty(entry.username), non_empty(entry.password)) {
            (Some(username), Some(password)) => (username, password),
            _ => return Some(None),
        },
    };
    let password = json!({ "username": username, "password": password });
    Some(Some(json!({ "password": password })))
}
