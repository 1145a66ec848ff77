//! The way into registries, from the secrets that a pod names in `imagePullSecrets`.
//!
//! What comes out is JSON in the form of `images::Credential`; the kubelet itself knows no images.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::Secret;
use serde::Deserialize;
use serde_json::{Value, json};
use volumes::content::Inputs;

/// An entry of `~/.docker/config.json`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

/// The credentials of a pod, and warnings about secrets that are of no use: a pull may work without them.
pub(super) fn credentials(inputs: &Inputs) -> (Vec<Value>, Vec<(&'static str, String)>) {
    let (mut all, mut useless) = (Vec::new(), Vec::new());
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
            .and_then(|secret| of_secret(secret));
        match read {
            Some(credentials) => all.extend(credentials),
            None => useless.push(name),
        }
    }
    let warning = format!(
        "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
        useless.join(", ")
    );
    let warnings = match useless.is_empty() {
        true => Vec::new(),
        false => vec![("FailedToRetrieveImagePullSecret", warning)],
    };
    (all, warnings)
}

/// `None` if it isn't in the format that its type promises.
fn of_secret(secret: &Secret) -> Option<Vec<Value>> {
    let data = secret.data.as_ref()?;
    let auths = if let Some(json) = data.get(".dockerconfigjson") {
        serde_json::from_slice::<Config>(&json.0).ok()?.auths
    } else {
        serde_json::from_slice(&data.get(".dockercfg")?.0).ok()?
    };
    let mut all = Vec::new();
    for (pattern, entry) in auths {
        if let Some(secret) = way_in(entry)? {
            all.push(json!({ "pattern": pattern, "secret": secret }));
        }
    }
    Some(all)
}

/// The inner `None` is an entry that only says that a credential helper knows more.
fn way_in(entry: Entry) -> Option<Option<Value>> {
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    if let Some(token) = given(entry.registrytoken) {
        return Some(Some(json!({ "registry_token": token })));
    }
    if let Some(token) = given(entry.identitytoken) {
        return Some(Some(json!({ "identity_token": token })));
    }
    let (username, password) = match given(entry.auth) {
        Some(auth) => {
            let text = String::from_utf8(STANDARD.decode(auth.trim()).ok()?).ok()?;
            let (username, password) = text.split_once(':')?;
            // Old clients wrote a zero byte at the end.
            (
                username.to_owned(),
                password.trim_end_matches('\0').to_owned(),
            )
        }
        None => match (given(entry.username), given(entry.password)) {
            (Some(username), Some(password)) => (username, password),
            _ => return Some(None),
        },
    };
    let password = json!({ "username": username, "password": password });
    Some(Some(json!({ "password": password })))
}
