//! The Node object that this kubelet registers.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    DaemonEndpoint, Node, NodeAddress, NodeDaemonEndpoints, NodeFeatures, NodeRuntimeHandler,
    NodeRuntimeHandlerFeatures, NodeSpec, NodeStatus, NodeSystemInfo,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;

use volumes::provisioner::{REMOVE_VOLUMES_ANNOTATION, SCRATCH_ANNOTATION};

use super::conditions::{Readiness, conditions, keep_transition_times, with_foreign};
use super::{Pressures, SystemInfo};
use crate::pods::RUNTIME_HANDLER;
use crate::{NodeCapacity, NodeConfig};

/// `status.nodeInfo.containerRuntimeVersion`: the container runtime is this program.
const RUNTIME_VERSION: &str = concat!("coracle://", env!("CARGO_PKG_VERSION"));

/// Only Coracle writes labels, annotations and resources with this prefix, so stale ones are removed.
const OWN_PREFIX: &str = "coracle.dev/";
/// Resources without that prefix that only Coracle writes.
const GPU_RESOURCES: [&str; 2] = ["nvidia.com/gpu", "amd.com/gpu"];

/// `status.declaredFeatures`: optional features that this kubelet supports.
///
/// - `ExtendWebSocketsToKubelet`: the API server proxies WebSockets of exec, attach and port-forward to the kubelet.
/// - `RestartAllContainersOnContainerExits`: the scheduler sends pods with such a rule only to nodes that declare it.
///
/// Upstream's registry (component-helpers/nodedeclaredfeatures) has more names in 1.37, which this kubelet does not support yet:
/// - `UserNamespacesHostNetworkSupport`, `VolumeBindMountOptions`: the scheduler sends pods that use these only to nodes
///   that declare them.
/// - `InPlacePodLevelResourcesVerticalScaling`, `InPlacePodVerticalScalingInitContainers`,
///   `InPlacePodVerticalScalingMemoryBackedVolumes`: the API server rejects such resizes unless the node declares them.
/// - `DRANodeAllocatableResources`, `DRAOptionalNodeOperations`: dynamic resource allocation.
///
/// Must be sorted: the API server rejects the Node otherwise.
const DECLARED_FEATURES: &[&str] = &[
    "ExtendWebSocketsToKubelet",
    "RestartAllContainersOnContainerExits",
];

/// The Node to create. It has a complete status, so that it is Ready at once.
pub fn node_object(
    config: &NodeConfig,
    system: &SystemInfo,
    pressures: Pressures,
    now: Timestamp,
) -> Node {
    let mut labels = BTreeMap::from([
        ("kubernetes.io/arch".to_owned(), system.architecture.clone()),
        ("kubernetes.io/hostname".to_owned(), config.hostname.clone()),
        ("kubernetes.io/os".to_owned(), "linux".to_owned()),
    ]);
    // As with upstream's --node-labels, configured labels override detected ones.
    labels.extend(config.labels.clone());
    let mut annotations: BTreeMap<_, _> = (config.host_dirs.iter())
        .map(|dirs| {
            let volumes = dirs.local_volumes.display().to_string();
            (SCRATCH_ANNOTATION.to_owned(), volumes)
        })
        .collect();
    annotations.extend(config.annotations.clone());

    Node {
        metadata: ObjectMeta {
            name: Some(config.name.clone()),
            labels: Some(labels),
            annotations: Some(annotations),
            ..Default::default()
        },
        // The configuration contains the ranges, so no controller has to assign them.
        spec: config.pod_cidrs.first().map(|first| NodeSpec {
            pod_cidr: Some(first.clone()),
            pod_cidrs: Some(config.pod_cidrs.clone()),
            ..Default::default()
        }),
        status: Some(NodeStatus {
            addresses: Some(addresses(config)),
            capacity: Some(resources(&config.capacity)),
            // No reservation for the system: Slurm has already kept that out of the allocation.
            allocatable: Some(resources(&config.capacity)),
            conditions: Some(conditions(pressures, Readiness::Ready, &[], now)),
            daemon_endpoints: Some(NodeDaemonEndpoints {
                kubelet_endpoint: Some(DaemonEndpoint {
                    port: config.kubelet_port.into(),
                }),
            }),
            declared_features: (!DECLARED_FEATURES.is_empty()).then(|| {
                DECLARED_FEATURES
                    .iter()
                    .map(|&name| name.to_owned())
                    .collect()
            }),
            features: Some(NodeFeatures {
                supplemental_groups_policy: Some(true),
            }),
            // The empty name is for pods without a RuntimeClass.
            runtime_handlers: Some(["", RUNTIME_HANDLER].map(runtime_handler).into()),
            node_info: Some(NodeSystemInfo {
                architecture: system.architecture.clone(),
                boot_id: system.boot_id.clone(),
                container_runtime_version: RUNTIME_VERSION.to_owned(),
                kernel_version: system.kernel_version.clone(),
                // Deprecated, and empty in upstream too.
                kube_proxy_version: String::new(),
                kubelet_version: config.kubelet_version.clone(),
                machine_id: system.machine_id.clone(),
                operating_system: "linux".to_owned(),
                os_image: system.os_image.clone(),
                running_in_user_namespace: None,
                swap: None,
                system_uuid: system.system_uuid.clone(),
            }),
            ..Default::default()
        }),
    }
}

/// Features of the runtime. All containers run in a user namespace, even if the pod does not request one.
fn runtime_handler(name: &str) -> NodeRuntimeHandler {
    NodeRuntimeHandler {
        name: Some(name.to_owned()),
        features: Some(NodeRuntimeHandlerFeatures {
            recursive_read_only_mounts: Some(true),
            user_namespaces: Some(true),
        }),
    }
}

/// Merges `desired` into an existing Node of the same name. Labels, annotations, conditions and resources of others stay.
///
/// Stale ones of Coracle (the job id of an earlier run) are removed. The result is for the status subresource, which
/// also updates labels and annotations and does not change the spec, with its taints and cordons.
pub(super) fn adopt(existing: Node, desired: Node) -> Node {
    let mut adopted = existing;
    adopted.metadata.labels = merged(adopted.metadata.labels.take(), desired.metadata.labels);
    adopted.metadata.annotations = merged(
        adopted.metadata.annotations.take(),
        desired.metadata.annotations,
    );
    // The API server sets these; sending them back only costs bytes.
    adopted.metadata.managed_fields = None;

    let before = adopted.status.take().unwrap_or_default();
    let server = before.conditions.unwrap_or_default();
    let mut status = desired.status.unwrap_or_default();
    let mut ours = status.conditions.take().unwrap_or_default();
    keep_transition_times(&mut ours, &server);
    status.conditions = Some(with_foreign(ours, &server));
    // Written by the attach/detach controller.
    status.volumes_attached = before.volumes_attached;
    status.capacity = with_foreign_resources(status.capacity, before.capacity);
    status.allocatable = with_foreign_resources(status.allocatable, before.allocatable);
    adopted.status = Some(status);
    adopted
}

/// Adds the extended resources in `before` that another program has written. Stale ones of Coracle are dropped.
fn with_foreign_resources(
    ours: Option<BTreeMap<String, Quantity>>,
    before: Option<BTreeMap<String, Quantity>>,
) -> Option<BTreeMap<String, Quantity>> {
    let is_foreign = |name: &str| {
        name.contains('/') && !name.starts_with(OWN_PREFIX) && !GPU_RESOURCES.contains(&name)
    };
    let mut all = before.unwrap_or_default();
    all.retain(|name, _| is_foreign(name));
    all.extend(ours.unwrap_or_default());
    Some(all)
}

fn merged(
    existing: Option<BTreeMap<String, String>>,
    desired: Option<BTreeMap<String, String>>,
) -> Option<BTreeMap<String, String>> {
    let mut all = existing.unwrap_or_default();
    // The provisioner's list of volumes to remove stays valid for the next agent.
    all.retain(|key, _| !key.starts_with(OWN_PREFIX) || key == REMOVE_VOLUMES_ANNOTATION);
    all.extend(desired.unwrap_or_default());
    Some(all)
}

fn addresses(config: &NodeConfig) -> Vec<NodeAddress> {
    let address = |type_: &str, address: String| NodeAddress {
        type_: type_.to_owned(),
        address,
    };
    let internal = config
        .internal_ips
        .iter()
        .map(|ip| address("InternalIP", ip.to_string()));
    internal
        .chain([address("Hostname", config.hostname.clone())])
        .collect()
}

pub(crate) fn resources(capacity: &NodeCapacity) -> BTreeMap<String, Quantity> {
    let basic = [
        ("cpu", quantity::decimal(capacity.cpus.into())),
        (
            "ephemeral-storage",
            quantity::binary(capacity.ephemeral_storage_bytes),
        ),
        ("memory", quantity::binary(capacity.memory_bytes)),
        ("pods", quantity::decimal(capacity.pods.into())),
    ];
    let extended = capacity
        .extended
        .iter()
        .map(|(name, &number)| (name.clone(), quantity::decimal(number)));
    basic
        .map(|(name, quantity)| (name.to_owned(), quantity))
        .into_iter()
        .chain(extended)
        .collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use k8s_openapi::api::core::v1::NodeCondition;

    use super::*;
    use crate::HostDirs;

    pub(crate) fn config() -> NodeConfig {
        NodeConfig {
            name: "node1".to_owned(),
            internal_ips: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            hostname: "node1.cluster".to_owned(),
            kubelet_port: 34567,
            capacity: NodeCapacity {
                cpus: 8,
                memory_bytes: 16_303_428 << 10,
                ephemeral_storage_bytes: 100 << 30,
                pods: 110,
                extended: BTreeMap::from([("nvidia.com/gpu".to_owned(), 2)]),
            },
            labels: BTreeMap::from([("coracle.dev/partition".to_owned(), "main".to_owned())]),
            annotations: BTreeMap::from([(
                "coracle.dev/hub".to_owned(),
                "10.0.0.1:4789".to_owned(),
            )]),
            kubelet_version: "v1.37.1+coracle-0.1.0".to_owned(),
            host_dirs: Some(HostDirs {
                scratch: "/tmp".into(),
                local_volumes: "/tmp/node/local".into(),
            }),
            node_key: crate::NodeKey([0; 32]),
            launcher: Default::default(),
            pod_cidrs: vec!["100.64.3.0/24".to_owned()],
            cluster_dns: vec![],
            cluster_domain: "cluster.local".to_owned(),
            stream_idle_timeout: std::time::Duration::from_secs(4 * 60 * 60),
            processes: None,
            node_paths: vec![],
        }
    }

    fn system() -> SystemInfo {
        SystemInfo {
            architecture: "amd64".to_owned(),
            boot_id: "5a1cf5b2-8f7e-4c5e-9a71-5e4a3b7f0a11".to_owned(),
            kernel_version: "5.14.0-427.el9.x86_64".to_owned(),
            machine_id: "0123456789abcdef0123456789abcdef".to_owned(),
            os_image: "Rocky Linux 9.4 (Blue Onyx)".to_owned(),
            system_uuid: "0123456789abcdef0123456789abcdef".to_owned(),
        }
    }

    fn node() -> Node {
        node_object(
            &config(),
            &system(),
            Pressures::default(),
            Timestamp::UNIX_EPOCH,
        )
    }

    #[test]
    fn created_node() {
        insta::assert_json_snapshot!(node());
    }

    #[test]
    fn declared_features_are_sorted() {
        assert!(DECLARED_FEATURES.is_sorted());
    }

    #[test]
    fn adopting_keeps_foreign_fields_and_drops_stale_ones() {
        let mut existing = node();
        existing.spec = Some(NodeSpec {
            unschedulable: Some(true),
            ..Default::default()
        });
        let labels = existing.metadata.labels.as_mut().unwrap();
        labels.insert("team".to_owned(), "physics".to_owned());
        labels.insert("coracle.dev/job-id".to_owned(), "41".to_owned());
        let status = existing.status.as_mut().unwrap();
        let conditions = status.conditions.as_mut().unwrap();
        conditions[3].status = "Unknown".to_owned();
        conditions.push(NodeCondition {
            type_: "NetworkUnavailable".to_owned(),
            ..Default::default()
        });
        for resources in [&mut status.capacity, &mut status.allocatable] {
            let resources = resources.as_mut().unwrap();
            for name in [
                "amd.com/gpu",
                "coracle.dev/shard",
                "example.com/dongle",
                "cpu",
            ] {
                resources.insert(name.to_owned(), quantity::decimal(4));
            }
        }

        let now = Timestamp::from_second(100).unwrap();
        let desired = node_object(&config(), &system(), Pressures::default(), now);
        let adopted = adopt(existing, desired);

        let labels = adopted.metadata.labels.unwrap();
        assert_eq!(labels["team"], "physics");
        assert_eq!(labels["coracle.dev/partition"], "main");
        assert!(!labels.contains_key("coracle.dev/job-id"));
        assert_eq!(adopted.spec.unwrap().unschedulable, Some(true));
        let status = adopted.status.unwrap();
        for resources in [status.capacity.unwrap(), status.allocatable.unwrap()] {
            assert!(!resources.contains_key("amd.com/gpu"));
            assert!(!resources.contains_key("coracle.dev/shard"));
            assert_eq!(resources["example.com/dongle"], quantity::decimal(4));
            assert_eq!(resources["cpu"], quantity::decimal(8));
        }
        let times: Vec<_> = status
            .conditions
            .unwrap()
            .into_iter()
            .map(|c| {
                (
                    c.type_,
                    c.status,
                    c.last_transition_time.map(|time| time.0.as_second()),
                )
            })
            .collect();
        insta::assert_debug_snapshot!(times);
    }
}
