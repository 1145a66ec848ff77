//! The downwardAPI volume.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{DownwardAPIVolumeFile, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{ContentError, FileContent, Payload, clean, field, mode, resource};

/// The files of a downwardAPI volume, or of a downwardAPI source in a projected volume.
pub fn downward_api(
    items: &[DownwardAPIVolumeFile],
    default_mode: Option<i32>,
    pod: &Pod,
    allocatable: &BTreeMap<String, Quantity>,
) -> Result<Payload, ContentError> {
    let mut payload = Payload::default();
    let mut errors = Vec::new();
    for item in items {
        let text = if let Some(selector) = &item.field_ref {
            field(pod, &selector.field_path)
        } else if let Some(selector) = &item.resource_field_ref {
            resource(pod, "", selector, allocatable)
        } else {
            Ok(String::new())
        };
        match text {
            Ok(text) => {
                let file = FileContent {
                    data: text.into_bytes(),
                    mode: mode(item.mode, default_mode),
                    user: None,
                };
                // Clean only valid paths: cleaning must not make an invalid path valid.
                let path = match super::check_path(&item.path) {
                    Ok(()) => clean(&item.path),
                    Err(_) => item.path.clone(),
                };
                payload.files.insert(path, file);
            }
            Err(error) => errors.push(error),
        }
    }
    ContentError::combine(errors)?;
    Ok(payload)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ObjectFieldSelector, ResourceFieldSelector};

    use super::*;

    #[test]
    fn fields_become_files_and_errors_are_combined() {
        let by_field = |path: &str, field_path: &str| DownwardAPIVolumeFile {
            path: path.to_owned(),
            field_ref: Some(ObjectFieldSelector {
                field_path: field_path.to_owned(),
                api_version: None,
            }),
            mode: Some(0o400),
            ..Default::default()
        };
        let mut pod = Pod::default();
        pod.metadata.name = Some("web".to_owned());
        let payload = downward_api(
            &[by_field("./name", "metadata.name")],
            None,
            &pod,
            &BTreeMap::new(),
        );
        insta::assert_json_snapshot!(payload.unwrap());

        let invalid = [
            by_field("a", "spec.nodeName"),
            DownwardAPIVolumeFile {
                path: "b".to_owned(),
                resource_field_ref: Some(ResourceFieldSelector {
                    container_name: Some("c".to_owned()),
                    resource: "limits.cpu".to_owned(),
                    divisor: None,
                }),
                ..Default::default()
            },
        ];
        let error = downward_api(&invalid, None, &pod, &BTreeMap::new()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "[unsupported fieldPath: spec.nodeName, container c not found]"
        );
    }
}
