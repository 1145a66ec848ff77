//! Tests of the resolver with a node's permissions, against upstream's API server and its Node authorizer.

#[path = "../../../volumes/tests/common/mod.rs"]
pub(super) mod api_server;

use std::io;
use std::path::PathBuf;
use std::time::Instant;

use api_server::{ApiServer, until};
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use kube::api::{Patch, PatchParams};
use pod_protocol::SandboxId;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use volumes::VolumeSource;

use super::*;
use crate::{LaunchRequest, Launcher, PodRecords, SandboxHandle};

fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).unwrap()
}

fn file(resolved: &ResolvedPod, volume: &str, path: &str) -> Option<String> {
    let source = resolved.bundle.volumes.get(volume)?;
    match object(source.clone()) {
        VolumeSource::Files(payload) => {
            let file = payload.files.get(path)?;
            Some(String::from_utf8(file.data.clone()).unwrap())
        }
        _ => None,
    }
}

async fn pod(pods: &Api<Pod>, name: &str, spec: Value) -> Arc<Pod> {
    let mut whole = json!({
        "nodeName": "node1",
        "containers": [{ "name": "main", "image": "none", "volumeMounts": [{ "name": "v", "mountPath": "/v" }] }],
    });
    for (key, value) in spec.as_object().unwrap() {
        whole[key] = value.clone();
    }
    let pod = json!({ "metadata": { "name": name }, "spec": whole });
    Arc::new(
        pods.create(&Default::default(), &object(pod))
            .await
            .unwrap(),
    )
}

#[tokio::test]
async fn pods_are_resolved_with_node_permissions() {
    let Some(server) = ApiServer::start().await else {
        eprintln!("skipped: no release of Kubernetes, `make dist` builds it");
        return;
    };
    let admin = server.admin();
    let pods: Api<Pod> = Api::namespaced(admin.clone(), "default");
    let config_maps: Api<ConfigMap> = Api::namespaced(admin.clone(), "default");
    let services: Api<Service> = Api::namespaced(admin.clone(), "default");
    // The root CA publisher creates it after a moment.
    until("the root certificate", async || {
        config_maps.get_opt("kube-root-ca.crt").await.unwrap()
    })
    .await;
    let resolver = Resolver::new(server.node(), &crate::node::tests::config());

    let post = kube::api::PostParams::default();

    // The config map is missing, then created, then changed.
    let missing = pod(
        &pods,
        "missing",
        json!({
            "volumes": [{ "name": "v", "configMap": { "name": "late" } }],
        }),
    )
    .await;
    let started = Instant::now();
    let resolved = resolver.bundle(&missing).await;
    eprintln!("first bundle after {:?}", started.elapsed());
    assert_eq!(
        resolved.failed_mounts,
        ["MountVolume.SetUp failed for volume \"v\" : configmap \"late\" not found"]
    );
    // The ServiceAccount admission controller adds this volume to every pod.
    let api = resolved
        .bundle
        .volumes
        .keys()
        .find(|name| name.starts_with("kube-api-access-"))
        .unwrap()
        .clone();
    assert!(
        file(&resolved, &api, "ca.crt")
            .unwrap()
            .contains("BEGIN CERTIFICATE")
    );
    assert_eq!(file(&resolved, &api, "namespace").unwrap(), "default");
    let token = file(&resolved, &api, "token").unwrap();
    assert_eq!(token.split('.').count(), 3);
    let env = &resolved.bundle.containers["main"].env;
    assert!(
        env.iter()
            .any(|variable| variable.name == "KUBERNETES_SERVICE_HOST")
    );

    let late: ConfigMap = object(json!({ "metadata": { "name": "late" }, "data": { "k": "one" } }));
    let (_, created) = tokio::join!(resolver.changed(&missing), config_maps.create(&post, &late),);
    created.unwrap();
    let resolved = resolver.bundle(&missing).await;
    assert_eq!(resolved.failed_mounts, Vec::<String>::new());
    assert_eq!(file(&resolved, "v", "k").as_deref(), Some("one"));
    // The token is cached.
    assert_eq!(file(&resolved, &api, "token").unwrap(), token);

    let started = Instant::now();
    let patch = Patch::Merge(json!({ "data": { "k": "two" } }));
    let parameters = PatchParams::default();
    let (_, patched) = tokio::join!(
        resolver.changed(&missing),
        config_maps.patch("late", &parameters, &patch)
    );
    patched.unwrap();
    let resolved = resolver.bundle(&missing).await;
    eprintln!("a change is known after {:?}", started.elapsed());
    assert_eq!(file(&resolved, "v", "k").as_deref(), Some("two"));

    // Without a change nothing is reported.
    let quiet = tokio::time::timeout(Duration::from_millis(500), resolver.changed(&missing)).await;
    assert!(quiet.is_err());

    // A new service gets variables.
    let shop: Service =
        object(json!({ "metadata": { "name": "shop" }, "spec": { "ports": [{ "port": 80 }] } }));
    let (_, created) = tokio::join!(resolver.changed(&missing), services.create(&post, &shop));
    created.unwrap();
    let resolved = resolver.bundle(&missing).await;
    let env = &resolved.bundle.containers["main"].env;
    assert!(
        env.iter()
            .any(|variable| variable.name == "SHOP_SERVICE_HOST")
    );

    claims_are_resolved(&server, &pods, &resolver).await;
    resolver.forget(missing.metadata.uid.as_deref().unwrap());
}

/// The API server grants tokens for at least ten minutes, so the test advances the clock.
#[tokio::test]
async fn token_is_renewed_before_it_expires() {
    let Some(server) = ApiServer::start().await else {
        eprintln!("skipped: no release of Kubernetes, `make dist` builds it");
        return;
    };
    let pods: Api<Pod> = Api::namespaced(server.admin(), "default");
    let resolver = Resolver::new(server.node(), &crate::node::tests::config());
    let token = json!({ "path": "token", "audience": "mine", "expirationSeconds": 600 });
    let bearer = pod(&pods, "bearer", json!({
        "automountServiceAccountToken": false,
        "volumes": [{ "name": "v", "projected": { "sources": [{ "serviceAccountToken": token }] } }],
    }))
    .await;
    let now = async || file(&resolver.bundle(&bearer).await, "v", "token").unwrap();
    let first = now().await;
    let advance = async |seconds| {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(seconds)).await;
        tokio::time::resume();
    };
    // Renewed after four fifths of its lifetime, or up to ten seconds earlier.
    advance(460).await;
    assert_eq!(now().await, first);
    advance(25).await;
    let due = tokio::time::timeout(Duration::from_secs(20), resolver.changed(&bearer)).await;
    assert!(due.is_ok(), "the token was not renewed");
    let second = now().await;
    assert_ne!(second, first);
    assert_eq!(now().await, second);
}

async fn claims_are_resolved(server: &ApiServer, pods: &Api<Pod>, resolver: &Resolver) {
    use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};

    let claims: Api<PersistentVolumeClaim> = Api::namespaced(server.admin(), "default");
    let volumes: Api<PersistentVolume> = Api::all(server.admin());
    let claimer = pod(pods, "claimer", json!({
        "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": "data", "readOnly": true } }],
    }))
    .await;
    let resolved = resolver.bundle(&claimer).await;
    insta::assert_debug_snapshot!(resolved.failed_mounts);

    let size = json!({ "storage": "1Mi" });
    let volume = json!({
        "metadata": { "name": "pv1" },
        "spec": {
            "accessModes": ["ReadWriteMany"], "capacity": size, "storageClassName": "none",
            "hostPath": { "path": "/data", "type": "Directory" },
        },
    });
    let claim = json!({
        "metadata": { "name": "data" },
        "spec": { "accessModes": ["ReadWriteMany"], "resources": { "requests": size }, "storageClassName": "none" },
    });
    volumes
        .create(&Default::default(), &object(volume))
        .await
        .unwrap();
    claims
        .create(&Default::default(), &object(claim))
        .await
        .unwrap();
    let resolved = loop {
        resolver.changed(&claimer).await;
        let resolved = resolver.bundle(&claimer).await;
        if resolved.failed_mounts.is_empty() {
            break resolved;
        }
    };
    let expected =
        json!({ "hostPath": { "kind": "Directory", "path": "/data", "readOnly": true } });
    assert_eq!(resolved.bundle.volumes["v"], expected);
}

/// A launcher that only removes local volumes, in this directory.
struct RemoveOnlyLauncher(PathBuf);

impl Launcher for RemoveOnlyLauncher {
    fn launch(&self, _: LaunchRequest) -> SandboxHandle {
        unimplemented!("the test launches nothing")
    }

    fn find(&self, _: &str) -> BoxFuture<'_, io::Result<Option<SandboxHandle>>> {
        Box::pin(async { Ok(None) })
    }

    fn adopt(&self, _: &SandboxId) -> BoxFuture<'_, io::Result<Option<SandboxHandle>>> {
        Box::pin(async { Ok(None) })
    }

    fn records(&self) -> Arc<dyn PodRecords> {
        unimplemented!("the test has no pods")
    }

    fn remove_local_volume(&self, name: &str) -> BoxFuture<'_, io::Result<()>> {
        let dir = self.0.join(name);
        Box::pin(async move {
            match dir.exists() {
                true => tokio::fs::remove_dir_all(dir).await,
                false => Ok(()),
            }
        })
    }
}

#[tokio::test]
async fn local_volumes_in_node_annotation_are_removed() {
    use k8s_openapi::api::core::v1::Node;
    use volumes::provisioner::requested_removals;

    let Some(server) = ApiServer::start().await else {
        eprintln!("skipped: no release of Kubernetes, `make dist` builds it");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let local = dir.path();
    let names = ["a".repeat(32), "b".repeat(32), "c".repeat(32)];
    for name in &names[..2] {
        std::fs::create_dir_all(local.join(name).join("deep")).unwrap();
    }
    let nodes: Api<Node> = Api::all(server.admin());
    let listed = format!("{},{}", names[0], names[2]);
    let node = json!({ "metadata": { "name": "node1", "annotations": { "coracle.dev/remove-volumes": listed } } });
    let node = nodes
        .create(&Default::default(), &object(node))
        .await
        .unwrap();
    let (_sender, node_receiver) = watch::channel(Some(Arc::new(node)));
    let launcher = Arc::new(RemoveOnlyLauncher(local.to_owned()));
    let removing = crate::local_volumes::remove_listed(server.node(), node_receiver, launcher);
    let done = until("the list to be empty", async || {
        requested_removals(&nodes.get("node1").await.unwrap())
            .is_empty()
            .then_some(())
    });
    tokio::select! {
        () = removing => {}
        () = done => {}
    }
    assert!(!local.join(&names[0]).exists());
    assert!(local.join(&names[1]).exists());
}
