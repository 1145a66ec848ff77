//! Tests of trust bundles and pod certificates with a node's permissions, against upstream's API server, its Node authorizer and
//! NodeRestriction.

#[path = "../../../../tests/src/signer.rs"]
#[allow(dead_code, reason = "only the lab's tests use refusals")]
mod signer;

use k8s_openapi::api::certificates::v1::{ClusterTrustBundle, PodCertificateRequest};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use volumes::content::pem;
use volumes::{Payload, VolumeSource};

use self::signer::{Held, KEY_TYPES, NAME, Signer};
use super::live_tests::api_server::ApiServer;
use super::*;

fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).unwrap()
}

async fn create<K>(api: &Api<K>, value: Value) -> K
where
    K: DeserializeOwned + serde::Serialize + Clone + std::fmt::Debug,
{
    api.create(&Default::default(), &object(value))
        .await
        .unwrap()
}

fn pod_with(name: &str, sources: Value) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": {
            "nodeName": "node1",
            "automountServiceAccountToken": false,
            "containers": [{ "name": "main", "image": "none", "volumeMounts": [{ "name": "v", "mountPath": "/v" }] }],
            "volumes": [{ "name": "v", "projected": { "sources": sources } }],
        },
    })
}

/// Waits until the bundle has all volumes.
async fn complete_payload(resolver: &Resolver, pod: &Arc<Pod>) -> Payload {
    let wait = async {
        loop {
            let resolved = resolver.bundle(pod).await;
            if resolved.failed_mounts.is_empty() {
                return resolved;
            }
            eprintln!("{:?}", resolved.failed_mounts);
            resolver.changed(pod).await;
        }
    };
    let resolved = tokio::time::timeout(Duration::from_secs(120), wait).await;
    match object(resolved.unwrap().bundle.volumes["v"].clone()) {
        VolumeSource::Files(payload) => payload,
        other => panic!("{other:?}"),
    }
}

/// Waits until a file contains exactly these authorities, in any order.
async fn until_trusted(resolver: &Resolver, pod: &Arc<Pod>, path: &str, authorities: &[&str]) {
    let sorted = |texts: &[&str]| {
        let mut all = pem::certificates(&texts.concat());
        all.sort();
        all
    };
    let wait = async {
        loop {
            let payload = complete_payload(resolver, pod).await;
            if pem::certificates(&text(&payload, path)) == sorted(authorities) {
                return;
            }
            resolver.changed(pod).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), wait).await;
    assert!(
        waited.is_ok(),
        "timed out waiting for the content of {path}"
    );
}

fn text(payload: &Payload, path: &str) -> String {
    String::from_utf8(payload.files[path].data.clone()).unwrap()
}

/// Issues a certificate for every request.
async fn sign_all(admin: Client, signer: &Signer) {
    let all: Api<PodCertificateRequest> = Api::all(admin.clone());
    loop {
        for request in all.list(&Default::default()).await.unwrap() {
            let answered = request.status.iter().any(|status| {
                status
                    .conditions
                    .as_ref()
                    .is_some_and(|all| !all.is_empty())
            });
            if answered {
                continue;
            }
            let status = signer.issue(&json!(request)).unwrap();
            let namespace = request.metadata.namespace.as_deref().unwrap();
            let api: Api<PodCertificateRequest> = Api::namespaced(admin.clone(), namespace);
            let name = request.metadata.name.as_deref().unwrap();
            let patch = Patch::Merge(json!({ "status": status }));
            api.patch_status(name, &PatchParams::default(), &patch)
                .await
                .unwrap();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn node_gets_certificates_and_trust_bundles() {
    let Some(server) = ApiServer::start().await else {
        eprintln!("skipped: no release of Kubernetes, `make dist` builds it");
        return;
    };
    let admin = server.admin();
    let nodes: Api<Node> = Api::all(admin.clone());
    create(&nodes, json!({ "metadata": { "name": "node1" } })).await;
    let pods: Api<Pod> = Api::namespaced(admin.clone(), "default");
    let resolver = Resolver::new(server.node(), &crate::node::tests::config());
    let signer = Signer::new("signer").unwrap();
    let signing = sign_all(admin.clone(), &signer);
    tokio::select! {
        () = signing => {}
        () = certificates_of_every_type(&pods, &resolver) => {}
    }
    trust_bundles_are_updated(admin, &pods, &resolver, &signer).await;
}

async fn certificates_of_every_type(pods: &Api<Pod>, resolver: &Resolver) {
    let source = |key_type: &str| {
        json!({ "podCertificate": {
            "signerName": "coracle.test/signer", "keyType": key_type, "maxExpirationSeconds": 7200,
            "keyPath": format!("{key_type}.key"), "certificateChainPath": format!("{key_type}.crt"),
            "userAnnotations": { NAME: format!("{}.test", key_type.to_lowercase()) },
        }})
    };
    let sources = KEY_TYPES.map(source);
    let pod = Arc::new(create(pods, pod_with("certified", json!(sources))).await);
    let payload = complete_payload(resolver, &pod).await;
    for key_type in KEY_TYPES {
        let key = text(&payload, &format!("{key_type}.key"));
        let chain = text(&payload, &format!("{key_type}.crt"));
        let expected = Held {
            name: format!("{}.test", key_type.to_lowercase()),
            life: 7200,
            chain: 2,
        };
        assert_eq!(Held::read(&key, &chain).unwrap(), expected, "{key_type}");
        assert!(!chain.contains("not a part of it"));
    }
    // The certificates are cached.
    assert_eq!(complete_payload(resolver, &pod).await, payload);
    resolver.forget(pod.metadata.uid.as_deref().unwrap());
}

async fn trust_bundles_are_updated(
    admin: Client,
    pods: &Api<Pod>,
    resolver: &Resolver,
    signer: &Signer,
) {
    let bundles: Api<ClusterTrustBundle> = Api::all(admin);
    let other = Signer::new("other").unwrap();
    let sources = json!([
        { "clusterTrustBundle": { "name": "late", "path": "named.pem" } },
        { "clusterTrustBundle": { "signerName": "coracle.test/signer", "labelSelector": {}, "path": "all.pem", "optional": true } },
        { "clusterTrustBundle": { "name": "absent", "path": "none.pem", "optional": true } },
    ]);
    let pod = Arc::new(create(pods, pod_with("trusting", sources)).await);
    let resolved = resolver.bundle(&pod).await;
    assert_eq!(
        resolved.failed_mounts,
        [
            "MountVolume.SetUp failed for volume \"v\" : clustertrustbundle.certificates.k8s.io \"late\" not found"
        ]
    );
    let late =
        json!({ "metadata": { "name": "late" }, "spec": { "trustBundle": signer.authority } });
    let (_, late) = tokio::join!(resolver.changed(&pod), create(&bundles, late));
    until_trusted(resolver, &pod, "named.pem", &[&signer.authority]).await;
    let payload = complete_payload(resolver, &pod).await;
    assert_eq!(text(&payload, "none.pem"), "");
    assert_eq!(text(&payload, "all.pem"), "");

    // The two bundles of the signer contain three certificates, of which two are different.
    let both = [signer.authority.as_str(), &other.authority];
    for (name, text) in [("a", both[0].to_owned()), ("b", both.concat())] {
        let name = format!("coracle.test:signer:{name}");
        let spec = json!({ "signerName": "coracle.test/signer", "trustBundle": text });
        create(
            &bundles,
            json!({ "metadata": { "name": name }, "spec": spec }),
        )
        .await;
    }
    until_trusted(resolver, &pod, "all.pem", &both).await;

    let patch = Patch::Merge(json!({ "spec": { "trustBundle": other.authority } }));
    let name = late.metadata.name.unwrap();
    bundles
        .patch(&name, &PatchParams::default(), &patch)
        .await
        .unwrap();
    until_trusted(resolver, &pod, "named.pem", &[&other.authority]).await;
}
