//! A container's variables.
//!
//! Values are sent with `$(NAME)` references, for only the sandbox knows the pod's address, to which a reference may lead.
//! What must not be expanded (values from config maps, secrets and fields) has its `$` doubled, which expansion undoes.

use k8s_openapi::api::core::v1::{EnvVar, EnvVarSource};
use volumes::content::{ContentError, field, resource};

use super::Facts;
use super::references::AnyContainer;

/// What only the sandbox knows.
const SANDBOX_FIELDS: [&str; 4] = [
    "status.podIP",
    "status.podIPs",
    "status.hostIP",
    "status.hostIPs",
];

/// The variables of a container in order: services, envFrom, env. A later one of the same name wins.
pub(super) fn variables(
    container: &AnyContainer<'_>,
    facts: &Facts,
) -> Result<Vec<EnvVar>, String> {
    let services = facts
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
            let object = config_map(facts, &source.name, source.optional)?;
            for (key, value) in object
                .iter()
                .flat_map(|object| object.data.iter().flatten())
            {
                all.push(checked(&format!("{prefix}{key}"), value)?);
            }
        } else if let Some(source) = &from.secret_ref {
            let object = secret(facts, &source.name, source.optional)?;
            for (key, value) in object
                .iter()
                .flat_map(|object| object.data.iter().flatten())
            {
                let value = String::from_utf8_lossy(&value.0);
                all.push(checked(&format!("{prefix}{key}"), &value)?);
            }
        }
    }
    for variable in container.env {
        let value = variable.value.clone().unwrap_or_default();
        match &variable.value_from {
            Some(from) if value.is_empty() => {
                all.extend(from_source(&variable.name, from, container, facts)?);
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

/// `None` for an optional source that isn't there: the variable is left out.
fn from_source(
    name: &str,
    from: &EnvVarSource,
    container: &AnyContainer<'_>,
    facts: &Facts,
) -> Result<Option<EnvVar>, String> {
    let pod = &facts.inputs.pod;
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
        return checked(name, &value.unwrap_or_default()).map(Some);
    }
    if let Some(selector) = &from.resource_field_ref {
        let value = resource(pod, &container.name, selector, &facts.inputs.allocatable);
        return checked(name, &value.map_err(|error| error.to_string())?).map(Some);
    }
    if let Some(key) = &from.config_map_key_ref {
        let object = config_map(facts, &key.name, key.optional)?;
        let value = object.and_then(|object| object.data.as_ref()?.get(&key.key));
        return match value {
            Some(value) => checked(name, value).map(Some),
            None if key.optional == Some(true) => Ok(None),
            None => Err(format!(
                "couldn't find key {} in ConfigMap {namespace}/{}",
                key.key, key.name
            )),
        };
    }
    if let Some(key) = &from.secret_key_ref {
        let object = secret(facts, &key.name, key.optional)?;
        let value = object.and_then(|object| object.data.as_ref()?.get(&key.key));
        return match value {
            Some(value) => checked(name, &String::from_utf8_lossy(&value.0)).map(Some),
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

/// `None` if it is missing and may be.
fn config_map<'a>(
    facts: &'a Facts,
    name: &str,
    optional: Option<bool>,
) -> Result<Option<&'a k8s_openapi::api::core::v1::ConfigMap>, String> {
    if let Some(why) = facts.unknown_config_maps.get(name) {
        return Err(why.clone());
    }
    let object = facts.inputs.config_maps.get(name).map(AsRef::as_ref);
    found(object, "configmap", name, optional)
}

/// `None` if it is missing and may be.
fn secret<'a>(
    facts: &'a Facts,
    name: &str,
    optional: Option<bool>,
) -> Result<Option<&'a k8s_openapi::api::core::v1::Secret>, String> {
    if let Some(why) = facts.unknown_secrets.get(name) {
        return Err(why.clone());
    }
    let object = facts.inputs.secrets.get(name).map(AsRef::as_ref);
    found(object, "secret", name, optional)
}

fn found<'a, K>(
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

/// A value that the kernel can hand over; secrets and config maps may hold others.
fn checked(name: &str, value: &str) -> Result<EnvVar, String> {
    if name.contains(['=', '\0']) || value.contains('\0') {
        return Err(format!(
            "variable {name:?} can't be in an environment: it contains a NUL byte or '=' in its name"
        ));
    }
    Ok(literal(name, value))
}

/// A value that stays as it is.
fn literal(name: &str, value: &str) -> EnvVar {
    EnvVar {
        name: name.to_owned(),
        value: Some(value.replace('$', "$$")),
        value_from: None,
    }
}
