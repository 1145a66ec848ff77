//! The files of config maps and secrets: one per key.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, KeyToPath, Secret};

use super::{ContentError, FileContent, Payload, mode};

/// The keys of a config map or secret to use as files, in a volume of its own or in a projected volume.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeySelection<'a> {
    /// The object's name.
    pub name: &'a str,
    /// The keys and their paths; all keys if empty.
    pub items: Option<&'a [KeyToPath]>,
    /// The volume's default mode.
    pub default_mode: Option<i32>,
    /// Missing objects and keys are not errors.
    pub optional: bool,
}

/// The files of a config map; `object` is `None` if it does not exist.
pub fn config_map(
    selection: KeySelection<'_>,
    object: Option<&ConfigMap>,
) -> Result<Payload, ContentError> {
    let mut data = BTreeMap::new();
    if let Some(object) = check_found(&selection, "configmap", object)? {
        let binary = object.binary_data.iter().flatten();
        data.extend(binary.map(|(key, value)| (key.as_str(), value.0.as_slice())));
        let text = object.data.iter().flatten();
        data.extend(text.map(|(key, value)| (key.as_str(), value.as_bytes())));
    }
    select(selection, &data, ContentError::NoConfigKey)
}

/// The files of a secret; `object` is `None` if it does not exist.
pub fn secret(
    selection: KeySelection<'_>,
    object: Option<&Secret>,
) -> Result<Payload, ContentError> {
    let mut data = BTreeMap::new();
    if let Some(object) = check_found(&selection, "secret", object)? {
        let binary = object.data.iter().flatten();
        data.extend(binary.map(|(key, value)| (key.as_str(), value.0.as_slice())));
    }
    select(selection, &data, ContentError::NoSecretKey)
}

/// Fails if the object is missing and not optional.
fn check_found<'a, K>(
    selection: &KeySelection<'_>,
    kind: &'static str,
    object: Option<&'a K>,
) -> Result<Option<&'a K>, ContentError> {
    if object.is_none() && !selection.optional {
        let name = selection.name.to_owned();
        return Err(ContentError::NotFound { kind, name });
    }
    Ok(object)
}

fn select(
    selection: KeySelection<'_>,
    data: &BTreeMap<&str, &[u8]>,
    missing: fn(String) -> ContentError,
) -> Result<Payload, ContentError> {
    let file = |data: &[u8], item: Option<i32>| FileContent {
        data: data.to_vec(),
        mode: mode(item, selection.default_mode),
        user: None,
    };
    let mut payload = Payload::default();
    let items = selection.items.unwrap_or_default();
    if items.is_empty() {
        for (key, value) in data {
            payload.files.insert((*key).to_owned(), file(value, None));
        }
    }
    for item in items {
        match data.get(item.key.as_str()) {
            Some(value) => {
                payload
                    .files
                    .insert(item.path.clone(), file(value, item.mode));
            }
            None if selection.optional => {}
            None => return Err(missing(item.key.clone())),
        }
    }
    Ok(payload)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;

    use super::*;

    fn object() -> ConfigMap {
        ConfigMap {
            data: Some(BTreeMap::from([("text".to_owned(), "hello".to_owned())])),
            binary_data: Some(BTreeMap::from([("raw".to_owned(), ByteString(vec![0, 1]))])),
            ..Default::default()
        }
    }

    fn item(key: &str, path: &str, mode: Option<i32>) -> KeyToPath {
        KeyToPath {
            key: key.to_owned(),
            path: path.to_owned(),
            mode,
            user: None,
        }
    }

    #[test]
    fn items_select_keys() {
        let all = KeySelection {
            name: "c",
            default_mode: Some(0o400),
            ..Default::default()
        };
        let items = [item("text", "a/b", Some(0o444)), item("raw", "r", None)];
        let some = KeySelection {
            items: Some(&items),
            ..all
        };
        insta::assert_json_snapshot!([
            config_map(all, Some(&object())).unwrap(),
            config_map(some, Some(&object())).unwrap(),
        ]);
    }

    #[test]
    fn missing_objects_and_keys_are_errors_unless_optional() {
        let items = [item("nope", "x", None)];
        let whole = KeySelection {
            name: "c",
            ..Default::default()
        };
        let part = KeySelection {
            items: Some(&items),
            ..whole
        };
        let message = |result: Result<Payload, ContentError>| result.unwrap_err().to_string();
        assert_eq!(
            message(config_map(whole, None)),
            "configmap \"c\" not found"
        );
        assert_eq!(message(secret(whole, None)), "secret \"c\" not found");
        assert_eq!(
            message(config_map(part, Some(&object()))),
            "configmap references non-existent config key: nope"
        );
        assert_eq!(
            message(secret(part, Some(&Secret::default()))),
            "references non-existent secret key: nope"
        );
        for selection in [whole, part] {
            let optional = KeySelection {
                optional: true,
                ..selection
            };
            assert_eq!(config_map(optional, None), Ok(Payload::default()));
            assert_eq!(secret(optional, None), Ok(Payload::default()));
        }
    }
}
