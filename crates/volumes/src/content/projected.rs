//! The projected volume: several sources in one directory; a later one wins over an earlier one of the same path.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Pod, ProjectedVolumeSource, Secret, VolumeProjection};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{
    ContentError, FileContent, Payload, Selection, TrustBundles, config_map, downward_api, mode,
    secret, trust_anchors,
};

/// All that a pod's volumes are made of.
#[derive(Clone, Debug, Default)]
pub struct Inputs {
    /// The pod.
    pub pod: Arc<Pod>,
    /// What its node can give, for limits that aren't set.
    pub allocatable: BTreeMap<String, Quantity>,
    /// The config maps of its namespace that it names, if they exist.
    pub config_maps: BTreeMap<String, Arc<ConfigMap>>,
    /// The same for secrets.
    pub secrets: BTreeMap<String, Arc<Secret>>,
    /// By volume name and index of the source in a projected volume: a token, or why there is none.
    pub tokens: BTreeMap<(String, usize), Result<String, String>>,
    /// All trust bundles of the cluster, if the pod asks for any and they are known.
    pub trust_bundles: Option<Arc<TrustBundles>>,
    /// By volume name and index of the source: a certificate, or why there is none.
    pub certificates: BTreeMap<(String, usize), Result<Credentials, String>>,
}

/// A pod's own certificate, with its key.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// PKCS#8, as PEM.
    pub key: String,
    /// The certificate, then those of the authorities between it and the root, as PEM.
    pub chain: String,
}

/// The key stays out of logs.
impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials")
            .field("chain", &self.chain)
            .finish_non_exhaustive()
    }
}

/// The files of a projected volume.
pub fn projected(
    volume: &str,
    source: &ProjectedVolumeSource,
    inputs: &Inputs,
) -> Result<Payload, ContentError> {
    let mut payload = Payload::default();
    let mut errors = Vec::new();
    for (index, part) in source.sources.iter().flatten().enumerate() {
        match projection(volume, index, part, source.default_mode, inputs) {
            Ok(part) => payload.files.extend(part.files),
            Err(error) => errors.push(error),
        }
    }
    ContentError::together(errors)?;
    Ok(payload)
}

fn projection(
    volume: &str,
    index: usize,
    part: &VolumeProjection,
    default_mode: Option<i32>,
    inputs: &Inputs,
) -> Result<Payload, ContentError> {
    if let Some(part) = &part.secret {
        let selection = Selection {
            name: &part.name,
            items: part.items.as_deref(),
            default_mode,
            optional: part.optional.unwrap_or(false),
        };
        secret(selection, inputs.secrets.get(&part.name).map(Arc::as_ref))
    } else if let Some(part) = &part.config_map {
        let selection = Selection {
            name: &part.name,
            items: part.items.as_deref(),
            default_mode,
            optional: part.optional.unwrap_or(false),
        };
        config_map(
            selection,
            inputs.config_maps.get(&part.name).map(Arc::as_ref),
        )
    } else if let Some(part) = &part.downward_api {
        let items = part.items.as_deref().unwrap_or_default();
        downward_api(items, default_mode, &inputs.pod, &inputs.allocatable)
    } else if let Some(part) = &part.service_account_token {
        let token = match inputs.tokens.get(&(volume.to_owned(), index)) {
            Some(Ok(token)) => token.clone().into_bytes(),
            Some(Err(why)) => return Err(ContentError::NoToken(why.clone())),
            None => return Err(ContentError::NoToken("nobody asked for it".to_owned())),
        };
        Ok(private([(&part.path, token)], default_mode, inputs))
    } else if let Some(part) = &part.cluster_trust_bundle {
        let anchors = trust_anchors(part, inputs.trust_bundles.as_deref())?;
        let file = (&part.path, anchors.into_bytes());
        Ok(private([file], default_mode, inputs))
    } else if let Some(part) = &part.pod_certificate {
        let Credentials { key, chain } = match inputs.certificates.get(&(volume.to_owned(), index))
        {
            Some(Ok(credentials)) => credentials,
            Some(Err(why)) => return Err(ContentError::NoCertificate(why.clone())),
            None => {
                let why = "nobody asked for a certificate".to_owned();
                return Err(ContentError::NoCertificate(why));
            }
        };
        let files = [
            (&part.credential_bundle_path, format!("{key}{chain}")),
            (&part.key_path, key.clone()),
            (&part.certificate_chain_path, chain.clone()),
        ];
        let wanted = files.into_iter().filter_map(|(path, text)| {
            let path = path.as_ref().filter(|path| !path.is_empty())?;
            Some((path, text.into_bytes()))
        });
        Ok(private(wanted, default_mode, inputs))
    } else {
        Ok(Payload::default())
    }
}

/// Files that are their user's alone where that user is known, or the group's that the pod asks for.
fn private<'a>(
    files: impl IntoIterator<Item = (&'a String, Vec<u8>)>,
    default_mode: Option<i32>,
    inputs: &Inputs,
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

/// The user that all containers of the pod run as, if the spec names one and the same for all of them.
pub fn common_user(pod: &Pod) -> Option<i64> {
    let spec = pod.spec.as_ref()?;
    let of_pod = spec
        .security_context
        .as_ref()
        .and_then(|context| context.run_as_user);
    let usual = spec
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
    let mut users = usual.chain(ephemeral).map(|context| {
        context
            .as_ref()
            .and_then(|context| context.run_as_user)
            .or(of_pod)
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

    fn inputs(context: PodSecurityContext, users: &[Option<i64>]) -> Inputs {
        let container = |user: &Option<i64>| Container {
            name: "c".to_owned(),
            security_context: user.map(|user| SecurityContext {
                run_as_user: Some(user),
                ..Default::default()
            }),
            ..Default::default()
        };
        Inputs {
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
    fn a_token_is_as_private_as_the_pod_allows() {
        let nobody = PodSecurityContext::default;
        let as_user = |user| PodSecurityContext {
            run_as_user: Some(user),
            ..Default::default()
        };
        let group = PodSecurityContext {
            fs_group: Some(5),
            ..Default::default()
        };
        let told = [
            token(nobody(), &[None]),
            token(nobody(), &[Some(7), Some(7)]),
            token(nobody(), &[Some(7), Some(8)]),
            token(nobody(), &[Some(7), None]),
            token(as_user(3), &[None, Some(3)]),
            token(group, &[None]),
        ];
        insta::assert_debug_snapshot!(told);
    }

    #[test]
    fn every_source_that_fails_is_told() {
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
        let why = "credential bundle is not issued yet".to_owned();
        let inputs = Inputs {
            trust_bundles: Some(Arc::default()),
            certificates: BTreeMap::from([(("v".to_owned(), 3), Err(why))]),
            ..Default::default()
        };
        let error = projected("v", &source, &inputs).unwrap_err();
        insta::assert_snapshot!(error.to_string());
    }

    #[test]
    fn a_certificate_is_in_the_files_that_are_asked_for() {
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
        let credentials = Credentials {
            key: "key\n".to_owned(),
            chain: "chain\n".to_owned(),
        };
        assert!(!format!("{credentials:?}").contains("key\\n"));
        let with = |context| Inputs {
            certificates: BTreeMap::from([(("v".to_owned(), 0), Ok(credentials.clone()))]),
            ..inputs(context, &[None])
        };
        let files = |paths, inputs: &Inputs| {
            let payload = projected("v", &source(paths), inputs).unwrap();
            let text = |file: &FileContent| String::from_utf8(file.data.clone()).unwrap();
            let told = |(path, file): (&String, &FileContent)| {
                format!("{path} {:o} {:?} {:?}", file.mode, file.user, text(file))
            };
            payload.files.iter().map(told).collect::<Vec<_>>()
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
