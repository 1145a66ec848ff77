//! Projected volumes: several sources in one directory. A later source overrides an earlier one at the same path.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Pod, ProjectedVolumeSource, Secret, VolumeProjection};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{
    ContentError, FileContent, KeySelection, Payload, TrustBundles, config_map, downward_api, mode,
    secret, trust_anchors,
};

/// The API objects and credentials for a pod's volumes.
#[derive(Clone, Debug, Default)]
pub struct VolumeInputs {
    /// The pod.
    pub pod: Arc<Pod>,
    /// The node's allocatable resources, the default for unset limits.
    pub allocatable: BTreeMap<String, Quantity>,
    /// The existing config maps that the pod refers to.
    pub config_maps: BTreeMap<String, Arc<ConfigMap>>,
    /// The existing secrets that the pod refers to.
    pub secrets: BTreeMap<String, Arc<Secret>>,
    /// By volume name and index of the source in a projected volume: a token, or the reason why it is missing.
    pub tokens: BTreeMap<(String, usize), Result<String, String>>,
    /// All trust bundles of the cluster, if the pod needs any and the kubelet has received them.
    pub trust_bundles: Option<Arc<TrustBundles>>,
    /// By volume name and index of the source: a certificate, or the reason why it is missing.
    pub certificates: BTreeMap<(String, usize), Result<CredentialBundle, String>>,
}

/// A pod certificate with its key.
#[derive(Clone, PartialEq, Eq)]
pub struct CredentialBundle {
    /// The private key: PKCS#8 in PEM.
    pub key: String,
    /// The certificate and the intermediate certificates, in PEM.
    pub chain: String,
}

/// Omits the key.
impl std::fmt::Debug for CredentialBundle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CredentialBundle")
            .field("chain", &self.chain)
            .finish_non_exhaustive()
    }
}

/// The files of a projected volume.
pub fn projected(
    volume: &str,
    source: &ProjectedVolumeSource,
    inputs: &VolumeInputs,
) -> Result<Payload, ContentError> {
    let mut payload = Payload::default();
    let mut errors = Vec::new();
    for (index, projection) in source.sources.iter().flatten().enumerate() {
        match projected_source(volume, index, projection, source.default_mode, inputs) {
            Ok(projected) => payload.files.extend(projected.files),
            Err(error) => errors.push(error),
        }
    }
    ContentError::combine(errors)?;
    Ok(payload)
}

fn projected_source(
    volume: &str,
    index: usize,
    projection: &VolumeProjection,
    default_mode: Option<i32>,
    inputs: &VolumeInputs,
) -> Result<Payload, ContentError> {
    if let Some(source) = &projection.secret {
        let selection = KeySelection {
            name: &source.name,
            items: source.items.as_deref(),
            default_mode,
            optional: source.optional.unwrap_or(false),
        };
        secret(selection, inputs.secrets.get(&source.name).map(Arc::as_ref))
    } else if let Some(source) = &projection.config_map {
        let selection = KeySelection {
            name: &source.name,
            items: source.items.as_deref(),
            default_mode,
            optional: source.optional.unwrap_or(false),
        };
        config_map(
            selection,
            inputs.config_maps.get(&source.name).map(Arc::as_ref),
        )
    } else if let Some(source) = &projection.downward_api {
        let items = source.items.as_deref().unwrap_or_default();
        downward_api(items, default_mode, &inputs.pod, &inputs.allocatable)
    } else if let Some(source) = &projection.service_account_token {
        let token = match inputs.tokens.get(&(volume.to_owned(), index)) {
            Some(Ok(token)) => token.clone().into_bytes(),
            Some(Err(reason)) => return Err(ContentError::NoToken(reason.clone())),
            None => return Err(ContentError::NoToken("not requested".to_owned())),
        };
        Ok(private_files([(&source.path, token)], default_mode, inputs))
    } else if let Some(source) = &projection.cluster_trust_bundle {
        let anchors = trust_anchors(source, inputs.trust_bundles.as_deref())?;
        let file = (&source.path, anchors.into_bytes());
        Ok(private_files([file], default_mode, inputs))
    } else if let Some(source) = &projection.pod_certificate {
        let CredentialBundle { key, chain } =
            match inputs.certificates.get(&(volume.to_owned(), index)) {
                Some(Ok(credentials)) => credentials,
                Some(Err(reason)) => return Err(ContentError::NoCertificate(reason.clone())),
                None => {
                    let reason = "the certificate was not requested".to_owned();
                    return Err(ContentError::NoCertificate(reason));
                }
            };
        let files = [
            (&source.credential_bundle_path, format!("{key}{chain}")),
            (&source.key_path, key.clone()),
            (&source.certificate_chain_path, chain.clone()),
        ];
        let requested = files.into_iter().filter_map(|(path, text)| {
            let path = path.as_ref().filter(|path| !path.is_empty())?;
            Some((path, text.into_bytes()))
        });
        Ok(private_files(requested, default_mode, inputs))
    } else {
        Ok(Payload::default())
    }
}

/// Files with mode 0600 if the pod has a common user or an fsGroup, else with the default mode.
fn private_files<'a>(
    files: impl IntoIterator<Item = (&'a String, Vec<u8>)>,
    default_mode: Option<i32>,
    inputs: &VolumeInputs,
) -> Payload {
    let user = common_user(&inputs.pod);
    let fs_group = inputs
        .pod
        .spec
        .as_ref()
        .and_then(|spec| spec.security_context.as_ref()?.fs_group);
    let mode = match (user, fs_group) {
        (None, None) => mode(None, default_mode),
        _ => 0o600,
    };
    let file = |(path, data): (&String, Vec<u8>)| (path.clone(), FileContent { data, mode, user });
    Payload {
        files: files.into_iter().map(file).collect(),
        ..Default::default()
    }
}

/// The user of all containers, if the spec sets the same `runAsUser` for each of them.
pub fn common_user(pod: &Pod) -> Option<i64> {
    let spec = pod.spec.as_ref()?;
    let pod_user = spec
        .security_context
        .as_ref()
        .and_then(|context| context.run_as_user);
    let regular = spec
        .init_containers
        .iter()
        .flatten()
        .chain(&spec.containers)
        .map(|container| &container.security_context);
    let ephemeral = spec
        .ephemeral_containers
        .iter()
        .flatten()
        .map(|container| &container.security_context);
    let mut users = regular.chain(ephemeral).map(|context| {
        context
            .as_ref()
            .and_then(|context| context.run_as_user)
            .or(pod_user)
    });
    let first = users.next()??;
    users.all(|user| user == Some(first)).then_some(first)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{
        ClusterTrustBundleProjection, ConfigMapProjection, Container, PodCertificateProjection,
        PodSecurityContext, PodSpec, SecretProjection, SecurityContext,
        ServiceAccountTokenProjection,
    };

    use super::*;

    fn inputs(context: PodSecurityContext, users: &[Option<i64>]) -> VolumeInputs {
        let container = |user: &Option<i64>| Container {
            name: "c".to_owned(),
            security_context: user.map(|user| SecurityContext {
                run_as_user: Some(user),
                ..Default::default()
            }),
            ..Default::default()
        };
        VolumeInputs {
            pod: Arc::new(Pod {
                spec: Some(PodSpec {
                    security_context: Some(context),
                    containers: users.iter().map(container).collect(),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            tokens: BTreeMap::from([(("v".to_owned(), 0), Ok("ey".to_owned()))]),
            ..Default::default()
        }
    }

    fn token_source() -> ProjectedVolumeSource {
        ProjectedVolumeSource {
            default_mode: Some(0o644),
            sources: Some(vec![VolumeProjection {
                service_account_token: Some(ServiceAccountTokenProjection {
                    path: "token".to_owned(),
                    ..Default::default()
                }),
                ..Default::default()
            }]),
            ..Default::default()
        }
    }

    fn token(context: PodSecurityContext, users: &[Option<i64>]) -> FileContent {
        let payload = projected("v", &token_source(), &inputs(context, users)).unwrap();
        payload.files["token"].clone()
    }

    #[test]
    fn token_mode_depends_on_user_and_group() {
        let unset = PodSecurityContext::default;
        let as_user = |user| PodSecurityContext {
            run_as_user: Some(user),
            ..Default::default()
        };
        let group = PodSecurityContext {
            fs_group: Some(5),
            ..Default::default()
        };
        let tokens = [
            token(unset(), &[None]),
            token(unset(), &[Some(7), Some(7)]),
            token(unset(), &[Some(7), Some(8)]),
            token(unset(), &[Some(7), None]),
            token(as_user(3), &[None, Some(3)]),
            token(group, &[None]),
        ];
        insta::assert_debug_snapshot!(tokens);
    }

    #[test]
    fn errors_of_all_sources_are_combined() {
        let source = ProjectedVolumeSource {
            sources: Some(vec![
                VolumeProjection {
                    secret: Some(SecretProjection {
                        name: "s".to_owned(),
                        ..Default::default()
                    }),
                    ..Default::default()
                },
                VolumeProjection {
                    config_map: Some(ConfigMapProjection {
                        name: "c".to_owned(),
                        ..Default::default()
                    }),
                    ..Default::default()
                },
                VolumeProjection {
                    cluster_trust_bundle: Some(ClusterTrustBundleProjection {
                        name: Some("t".to_owned()),
                        ..Default::default()
                    }),
                    ..Default::default()
                },
                VolumeProjection {
                    pod_certificate: Some(PodCertificateProjection::default()),
                    ..Default::default()
                },
            ]),
            ..Default::default()
        };
        let reason = "credential bundle is not issued yet".to_owned();
        let inputs = VolumeInputs {
            trust_bundles: Some(Arc::default()),
            certificates: BTreeMap::from([(("v".to_owned(), 3), Err(reason))]),
            ..Default::default()
        };
        let error = projected("v", &source, &inputs).unwrap_err();
        insta::assert_snapshot!(error.to_string());
    }

    #[test]
    fn pod_certificate_is_written_to_requested_paths() {
        let source = |paths: [Option<&str>; 3]| {
            let [bundle, key, chain] = paths.map(|path| path.map(str::to_owned));
            ProjectedVolumeSource {
                default_mode: Some(0o644),
                sources: Some(vec![VolumeProjection {
                    pod_certificate: Some(PodCertificateProjection {
                        credential_bundle_path: bundle,
                        key_path: key,
                        certificate_chain_path: chain,
                        ..Default::default()
                    }),
                    ..Default::default()
                }]),
                ..Default::default()
            }
        };
        let credentials = CredentialBundle {
            key: "key\n".to_owned(),
            chain: "chain\n".to_owned(),
        };
        assert!(!format!("{credentials:?}").contains("key\\n"));
        let with = |context| VolumeInputs {
            certificates: BTreeMap::from([(("v".to_owned(), 0), Ok(credentials.clone()))]),
            ..inputs(context, &[None])
        };
        let files = |paths, inputs: &VolumeInputs| {
            let payload = projected("v", &source(paths), inputs).unwrap();
            let text = |file: &FileContent| String::from_utf8(file.data.clone()).unwrap();
            let describe = |(path, file): (&String, &FileContent)| {
                format!("{path} {:o} {:?} {:?}", file.mode, file.user, text(file))
            };
            payload.files.iter().map(describe).collect::<Vec<_>>()
        };
        let private = PodSecurityContext {
            run_as_user: Some(7),
            ..Default::default()
        };
        let all = [Some("all.pem"), Some("key.pem"), Some("chain.pem")];
        insta::assert_debug_snapshot!([
            files([Some("all.pem"), None, None], &with(Default::default())),
            files([None, Some("key.pem"), Some("")], &with(Default::default())),
            files(all, &with(private)),
        ]);
    }
}
