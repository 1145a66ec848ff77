//! The environment variables of a container.
//!
//! The sandbox expands `$(NAME)` references, because they may refer to the pod's address, which only the sandbox knows. In values
//! that must not be expanded (from config maps, secrets and fields) every `$` is doubled, which the expansion reverses.

use k8s_openapi::api::core::v1::{EnvVar, EnvVarSource};
use volumes::content::{ContentError, field, resource};

use super::ResolveInputs;
use super::references::AnyContainer;

/// Fields that only the sandbox knows.
const SANDBOX_FIELDS: [&str; 4] = [
    "status.podIP",
    "status.podIPs",
    "status.hostIP",
    "status.hostIPs",
];

/// The variables of a container in order: services, envFrom, env. A later variable overrides an earlier one of the same name.
pub(super) fn variables(
    container: &AnyContainer<'_>,
    inputs: &ResolveInputs,
) -> Result<Vec<EnvVar>, String> {
    let services = inputs
        .services
        .as_ref()
        .ok_or("services have not yet been read at least once, cannot construct envvars")?;
    let mut all: Vec<_> = services
        .iter()
        .map(|(name, value)| literal(name, value))
        .collect();
    for from in container.env_from {
        let prefix = from.prefix.as_deref().unwrap_or_default();
        if let Some(source) = &from.config_map_ref {
            let object = config_map(inputs, &source.name, source.optional)?;
            for (key, value) in object
                .iter()
                .flat_map(|object| object.data.iter().flatten())
            {
                all.push(checked_literal(&format!("{prefix}{key}"), value)?);
            }
        } else if let Some(source) = &from.secret_ref {
            let object = secret(inputs, &source.name, source.optional)?;
            for (key, value) in object
                .iter()
                .flat_map(|object| object.data.iter().flatten())
            {
                let value = String::from_utf8_lossy(&value.0);
                all.push(checked_literal(&format!("{prefix}{key}"), &value)?);
            }
        }
    }
    for variable in container.env {
        let value = variable.value.clone().unwrap_or_default();
        match &variable.value_from {
            Some(from) if value.is_empty() => {
                all.extend(from_source(&variable.name, from, container, inputs)?);
            }
            _ => all.push(EnvVar {
                name: variable.name.clone(),
                value: Some(value),
                value_from: None,
            }),
        }
    }
    Ok(all)
}

/// `None` if an optional source is missing: the variable is not set.
fn from_source(
    name: &str,
    from: &EnvVarSource,
    container: &AnyContainer<'_>,
    inputs: &ResolveInputs,
) -> Result<Option<EnvVar>, String> {
    let pod = &inputs.volumes.pod;
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    if let Some(selector) = &from.field_ref {
        let spec = pod.spec.as_ref();
        let value = match selector.field_path.as_str() {
            path if SANDBOX_FIELDS.contains(&path) => {
                return Ok(Some(EnvVar {
                    name: name.to_owned(),
                    value: None,
                    value_from: Some(from.clone()),
                }));
            }
            "spec.nodeName" | "spec.host" => spec.and_then(|spec| spec.node_name.clone()),
            "spec.serviceAccountName" => spec.and_then(|spec| spec.service_account_name.clone()),
            path => Some(field(pod, path).map_err(|error| error.to_string())?),
        };
        return checked_literal(name, &value.unwrap_or_default()).map(Some);
    }
    if let Some(selector) = &from.resource_field_ref {
        let value = resource(pod, container.name, selector, &inputs.volumes.allocatable);
        return checked_literal(name, &value.map_err(|error| error.to_string())?).map(Some);
    }
    if let Some(key) = &from.config_map_key_ref {
        let object = config_map(inputs, &key.name, key.optional)?;
        let value = object.and_then(|object| object.data.as_ref()?.get(&key.key));
        return match value {
            Some(value) => checked_literal(name, value).map(Some),
            None if key.optional == Some(true) => Ok(None),
            None => Err(format!(
                "couldn't find key {} in ConfigMap {namespace}/{}",
                key.key, key.name
            )),
        };
    }
    if let Some(key) = &from.secret_key_ref {
        let object = secret(inputs, &key.name, key.optional)?;
        let value = object.and_then(|object| object.data.as_ref()?.get(&key.key));
        return match value {
            Some(value) => checked_literal(name, &String::from_utf8_lossy(&value.0)).map(Some),
            None if key.optional == Some(true) => Ok(None),
            None => Err(format!(
                "couldn't find key {} in Secret {namespace}/{}",
                key.key, key.name
            )),
        };
    }
    if from.file_key_ref.is_some() {
        return Ok(Some(EnvVar {
            name: name.to_owned(),
            value: None,
            value_from: Some(from.clone()),
        }));
    }
    Ok(Some(literal(name, "")))
}

/// `None` if it is missing and optional.
fn config_map<'a>(
    inputs: &'a ResolveInputs,
    name: &str,
    optional: Option<bool>,
) -> Result<Option<&'a k8s_openapi::api::core::v1::ConfigMap>, String> {
    if let Some(why) = inputs.unknown_config_maps.get(name) {
        return Err(why.clone());
    }
    let object = inputs.volumes.config_maps.get(name).map(AsRef::as_ref);
    check_found(object, "configmap", name, optional)
}

/// `None` if it is missing and optional.
fn secret<'a>(
    inputs: &'a ResolveInputs,
    name: &str,
    optional: Option<bool>,
) -> Result<Option<&'a k8s_openapi::api::core::v1::Secret>, String> {
    if let Some(why) = inputs.unknown_secrets.get(name) {
        return Err(why.clone());
    }
    let object = inputs.volumes.secrets.get(name).map(AsRef::as_ref);
    check_found(object, "secret", name, optional)
}

fn check_found<'a, K>(
    object: Option<&'a K>,
    kind: &'static str,
    name: &str,
    optional: Option<bool>,
) -> Result<Option<&'a K>, String> {
    if object.is_none() && optional != Some(true) {
        let name = name.to_owned();
        return Err(ContentError::NotFound { kind, name }.to_string());
    }
    Ok(object)
}

/// Checks that name and value are valid in an environment: config maps and secrets may contain NUL bytes.
fn checked_literal(name: &str, value: &str) -> Result<EnvVar, String> {
    if name.contains(['=', '\0']) || value.contains('\0') {
        return Err(format!(
            "invalid environment variable {name:?}: it contains a NUL byte, or '=' in its name"
        ));
    }
    Ok(literal(name, value))
}

/// A variable whose value is not expanded.
fn literal(name: &str, value: &str) -> EnvVar {
    EnvVar {
        name: name.to_owned(),
        value: Some(value.replace('$', "$$")),
        value_from: None,
    }
}
