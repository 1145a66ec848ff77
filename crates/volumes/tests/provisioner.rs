//! The provisioner with upstream's API server and controllers.

#![allow(
    clippy::unwrap_used,
    reason = "a failed unwrap fails the test and shows the line"
)]

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{ApiServer, until};
use futures::FutureExt;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use volumes::provisioner::{
    Provisioner, REMOVE_VOLUMES_ANNOTATION, RemoveDir, SCRATCH_ANNOTATION, marked_clusters,
    requested_removals,
};

fn claim(name: &str, class: Option<&str>, size: &str, annotations: Value) -> PersistentVolumeClaim {
    serde_json::from_value(json!({
        "metadata": { "name": name, "annotations": annotations },
        "spec": {
            "accessModes": ["ReadWriteMany"], "storageClassName": class,
            "resources": { "requests": { "storage": size } },
        },
    }))
    .unwrap()
}

struct Cluster {
    claims: Api<PersistentVolumeClaim>,
    volumes: Api<PersistentVolume>,
}

impl Cluster {
    async fn wait_until_bound(&self, name: &str) -> PersistentVolume {
        let bound = async || {
            let claim = self.claims.get(name).await.unwrap();
            let status = claim.status.as_ref()?;
            (status.phase.as_deref() == Some("Bound")).then_some(claim.spec?.volume_name?)
        };
        let volume = until("the claim to be bound", bound).await;
        self.volumes.get(&volume).await.unwrap()
    }

    async fn wait_until_deleted(&self, volume: &PersistentVolume) {
        let name = volume.name_any();
        let deleted = async || {
            self.volumes
                .get_opt(&name)
                .await
                .unwrap()
                .is_none()
                .then_some(())
        };
        until("the volume to be deleted", deleted).await;
    }
}

fn path(volume: &PersistentVolume) -> PathBuf {
    let spec = volume.spec.as_ref().unwrap();
    let shared = spec.host_path.as_ref().map(|source| &source.path);
    let local = spec.local.as_ref().map(|source| &source.path);
    PathBuf::from(shared.or(local).unwrap())
}

#[tokio::test]
async fn volumes_are_provisioned_and_removed_with_claims() {
    let Some(server) = ApiServer::start().await else {
        eprintln!("skipped: no Kubernetes release, `make dist` builds it");
        return;
    };
    let admin = server.admin();
    let home = tempfile::tempdir().unwrap();
    let shared_dir = home.path().join("coracle/volumes");
    let remove: RemoveDir = Arc::new(|path| async move { std::fs::remove_dir_all(path) }.boxed());
    let provisioner = || Provisioner::new(admin.clone(), &shared_dir, Arc::clone(&remove), "test");
    let serving = tokio::spawn(provisioner().run());
    let cluster = Cluster {
        claims: Api::namespaced(admin.clone(), "default"),
        volumes: Api::all(admin.clone()),
    };
    let classes: Api<StorageClass> = Api::all(admin.clone());
    until("the classes", async || {
        classes.get_opt("local").await.unwrap()
    })
    .await;

    shared_volumes(&cluster, &classes, &shared_dir).await;
    local_volumes(&cluster, &Api::all(admin.clone())).await;

    // The cluster ends: reclaim policy Delete removes the directory, Retain keeps it.
    cluster
        .claims
        .create(&Default::default(), &claim("last", None, "1Mi", json!({})))
        .await
        .unwrap();
    let last = cluster.wait_until_bound("last").await;
    serving.abort();
    // Two directories, and the marker of the one to remove.
    assert_eq!(std::fs::read_dir(&shared_dir).unwrap().count(), 3);
    assert!(marked_clusters(&shared_dir).contains("test"));
    provisioner().remove_all().await;
    assert!(!path(&last).exists());
    assert_eq!(std::fs::read_dir(&shared_dir).unwrap().count(), 1);
}

async fn shared_volumes(cluster: &Cluster, classes: &Api<StorageClass>, shared_dir: &Path) {
    // Upstream's admission sets the default class.
    let data = claim("data", None, "1Mi", json!({}));
    cluster
        .claims
        .create(&Default::default(), &data)
        .await
        .unwrap();
    let volume = cluster.wait_until_bound("data").await;
    let dir = path(&volume);
    let more = json!({ "spec": { "resources": { "requests": { "storage": "2Mi" } } } });
    let merge = PatchParams::default();
    cluster
        .claims
        .patch("data", &merge, &Patch::Merge(more))
        .await
        .unwrap();
    let expanded = async || {
        let status = cluster.claims.get("data").await.unwrap().status?;
        (status.capacity?.get("storage")?.0 == "2Mi").then_some(())
    };
    until("the expansion of the volume", expanded).await;
    assert_eq!(dir.parent(), Some(shared_dir));
    assert_eq!(std::fs::metadata(&dir).unwrap().mode() & 0o7777, 0o777);
    std::fs::create_dir_all(dir.join("a/b")).unwrap();
    cluster
        .claims
        .delete("data", &Default::default())
        .await
        .unwrap();
    cluster.wait_until_deleted(&volume).await;
    assert!(!dir.exists());

    let mut keep = volumes::provisioner::storage_classes()[0].clone();
    keep.metadata.name = Some("keep".to_owned());
    keep.metadata.annotations = None;
    keep.reclaim_policy = Some("Retain".to_owned());
    classes.create(&Default::default(), &keep).await.unwrap();
    let kept = claim("kept", Some("keep"), "1Mi", json!({}));
    cluster
        .claims
        .create(&Default::default(), &kept)
        .await
        .unwrap();
    let volume = cluster.wait_until_bound("kept").await;
    cluster
        .claims
        .delete("kept", &Default::default())
        .await
        .unwrap();
    let name = volume.name_any();
    let released = async || {
        let volume = cluster.volumes.get(&name).await.unwrap();
        (volume.status?.phase? == "Released").then_some(())
    };
    until("the release", released).await;
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    assert!(path(&volume).exists());

    let greedy = claim("greedy", None, "1000Pi", json!({}));
    cluster
        .claims
        .create(&Default::default(), &greedy)
        .await
        .unwrap();
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    let greedy = cluster.claims.get("greedy").await.unwrap();
    assert_eq!(greedy.status.unwrap().phase.as_deref(), Some("Pending"));
    cluster
        .claims
        .delete("greedy", &Default::default())
        .await
        .unwrap();
}

async fn local_volumes(cluster: &Cluster, nodes: &Api<Node>) {
    let node: Node = serde_json::from_value(json!({
        "metadata": { "name": "node1", "annotations": { SCRATCH_ANNOTATION: "/tmp/coracle-x/local" } },
    }))
    .unwrap();
    nodes.create(&Default::default(), &node).await.unwrap();
    cluster
        .claims
        .create(
            &Default::default(),
            &claim("fast", Some("local"), "1Mi", json!({})),
        )
        .await
        .unwrap();
    // The scheduler's annotation for the node of the first pod.
    let selected =
        json!({ "metadata": { "annotations": { "volume.kubernetes.io/selected-node": "node1" } } });
    let merge = PatchParams::default();
    cluster
        .claims
        .patch("fast", &merge, &Patch::Merge(selected))
        .await
        .unwrap();
    let volume = cluster.wait_until_bound("fast").await;
    assert_eq!(
        path(&volume).parent(),
        Some(Path::new("/tmp/coracle-x/local"))
    );

    cluster
        .claims
        .delete("fast", &Default::default())
        .await
        .unwrap();
    let requested = async || {
        Some(requested_removals(&nodes.get("node1").await.unwrap()))
            .filter(|names| !names.is_empty())
    };
    let names = until("the removal request to the node", requested).await;
    assert_eq!(
        path(&volume).file_name().unwrap().to_str(),
        Some(names[0].as_str())
    );
    let done = json!({ "metadata": { "annotations": { REMOVE_VOLUMES_ANNOTATION: null } } });
    nodes
        .patch("node1", &merge, &Patch::Merge(done))
        .await
        .unwrap();
    cluster.wait_until_deleted(&volume).await;
}
