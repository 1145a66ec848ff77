//! clusterTrustBundle: CA certificates for a pod.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::certificates::v1::ClusterTrustBundle;
use k8s_openapi::api::core::v1::ClusterTrustBundleProjection;
use kube::core::{Selector, SelectorExt};

use super::{ContentError, pem};

/// All ClusterTrustBundles, by name.
pub type TrustBundles = BTreeMap<String, Arc<ClusterTrustBundle>>;

/// The certificates that a source selects, without duplicates, in PEM.
///
/// They are sorted, so that the file changes only with its certificates. `bundles` is `None` before they are received.
pub fn trust_anchors(
    source: &ClusterTrustBundleProjection,
    bundles: Option<&TrustBundles>,
) -> Result<String, ContentError> {
    let bundles = bundles.ok_or(ContentError::TrustBundlesNotSynced)?;
    let optional = source.optional.unwrap_or(false);
    let selected: Vec<_> = match (&source.name, &source.signer_name) {
        (Some(name), _) => match bundles.get(name) {
            Some(bundle) => vec![bundle],
            None if optional => vec![],
            None => {
                return Err(ContentError::NotFound {
                    kind: "clustertrustbundle.certificates.k8s.io",
                    name: name.clone(),
                });
            }
        },
        (None, Some(signer)) => {
            let selected = by_signer(source, signer, bundles)?;
            if selected.is_empty() && !optional {
                return Err(ContentError::NoTrustBundles {
                    signer: signer.clone(),
                    labels: labels(source),
                });
            }
            selected
        }
        (None, None) => return Err(ContentError::TrustBundleUnspecified),
    };
    let anchors: BTreeSet<_> = selected
        .iter()
        .flat_map(|bundle| pem::certificates(&bundle.spec.trust_bundle))
        .collect();
    let encode = |der: &Vec<u8>| pem::encode(pem::CERTIFICATE, der);
    Ok(anchors.iter().map(encode).collect())
}

/// The selected bundles of a signer. By the API, an unset selector matches nothing, and an empty one everything.
fn by_signer<'a>(
    source: &ClusterTrustBundleProjection,
    signer: &str,
    bundles: &'a TrustBundles,
) -> Result<Vec<&'a Arc<ClusterTrustBundle>>, ContentError> {
    let Some(selector) = &source.label_selector else {
        return Ok(vec![]);
    };
    let selector = Selector::try_from(selector.clone())
        .map_err(|error| ContentError::Selector(error.to_string()))?;
    let unlabelled = BTreeMap::new();
    let selected = bundles.values().filter(|bundle| {
        bundle.spec.signer_name.as_deref() == Some(signer)
            && selector.matches(bundle.metadata.labels.as_ref().unwrap_or(&unlabelled))
    });
    Ok(selected.collect())
}

/// A source's selector, for an error message.
fn labels(source: &ClusterTrustBundleProjection) -> String {
    match source.label_selector.clone().map(Selector::try_from) {
        None => "that is not set, and so matches nothing".to_owned(),
        Some(Ok(selector)) => format!("{:?}", selector.to_string()),
        Some(Err(error)) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn bundle(name: &str, signer: Option<&str>, alive: &str, anchors: &[u8]) -> ClusterTrustBundle {
        let blocks = anchors
            .iter()
            .map(|&byte| pem::encode("CERTIFICATE", &[byte]));
        let text = blocks.collect::<Vec<_>>().join("a comment\n");
        let object = json!({
            "metadata": { "name": name, "labels": { "alive": alive } },
            "spec": { "signerName": signer, "trustBundle": text },
        });
        serde_json::from_value(object).unwrap()
    }

    fn bundles() -> TrustBundles {
        let all = [
            bundle("one", None, "yes", &[9, 1]),
            bundle("s:a", Some("s/s"), "yes", &[5, 4, 3]),
            bundle("s:b", Some("s/s"), "no", &[4, 2]),
            bundle("other", Some("o/o"), "yes", &[7]),
        ];
        let by_name =
            |bundle: ClusterTrustBundle| (bundle.metadata.name.clone().unwrap(), Arc::new(bundle));
        all.map(by_name).into_iter().collect()
    }

    fn anchors(source: Value) -> Result<Vec<u8>, String> {
        let mut source = source;
        source["path"] = json!("p");
        let source = serde_json::from_value(source).unwrap();
        let text = trust_anchors(&source, Some(&bundles())).map_err(|error| error.to_string())?;
        Ok(pem::certificates(&text).concat())
    }

    #[test]
    fn selected_bundles_are_merged_and_sorted() {
        let by_labels =
            |selector: Value| anchors(json!({ "signerName": "s/s", "labelSelector": selector }));
        assert_eq!(anchors(json!({ "name": "one" })).unwrap(), [1, 9]);
        assert_eq!(by_labels(json!({})).unwrap(), [2, 3, 4, 5]);
        let alive = json!({ "matchLabels": { "alive": "yes" } });
        assert_eq!(by_labels(alive).unwrap(), [3, 4, 5]);
        let not_alive = json!({ "matchExpressions": [{ "key": "alive", "operator": "NotIn", "values": ["yes"] }] });
        assert_eq!(by_labels(not_alive).unwrap(), [2, 4]);
    }

    #[test]
    fn missing_bundles_are_errors_unless_optional() {
        let nothing = json!({ "matchLabels": { "alive": "unknown" } });
        let missing = [
            json!({ "name": "none" }),
            json!({ "signerName": "s/s", "labelSelector": nothing }),
            json!({ "signerName": "s/s" }),
            json!({ "signerName": "nobody/s", "labelSelector": {} }),
        ];
        let messages = missing.clone().map(|source| anchors(source).unwrap_err());
        insta::assert_debug_snapshot!(messages);
        for mut source in missing {
            source["optional"] = json!(true);
            assert_eq!(anchors(source).unwrap(), Vec::<u8>::new());
        }
    }

    #[test]
    fn invalid_sources_are_errors_even_if_optional() {
        let odd = json!({ "matchExpressions": [{ "key": "k", "operator": "Like" }] });
        let source = ClusterTrustBundleProjection {
            optional: Some(true),
            ..Default::default()
        };
        insta::assert_debug_snapshot!([
            anchors(json!({})).unwrap_err(),
            anchors(json!({ "signerName": "s/s", "labelSelector": odd })).unwrap_err(),
            trust_anchors(&source, None).unwrap_err().to_string(),
        ]);
    }
}
