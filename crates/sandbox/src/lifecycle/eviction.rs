//! Local storage eviction: evicts the pod if it exceeds an ephemeral storage limit. Usage is measured periodically, as in upstream's
//! kubelet.
//!
//! Memory-backed volumes are not measured, because the kernel enforces their size.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use linux::walk::allocated_bytes;
use pod_protocol::restart::is_sidecar;
use pod_protocol::{FailureCause, PodFailure};
use quantity::bytes;

use crate::runtime::{PodDirs, effective_amount};

const STORAGE: &str = "ephemeral-storage";
/// The interval of measurements, as upstream.
const MONITORING_INTERVAL: Duration = Duration::from_secs(10);
/// The wait is at least this many times as long as the last measurement, so that a large tree is not walked continuously.
const MIN_IDLE_FACTOR: u32 = 20;

/// Waits until the pod exceeds a limit and returns the failure, with upstream's message. Never returns if it has no limits.
pub async fn wait_until_exceeded(pod: &Pod, pod_dirs: &PodDirs) -> PodFailure {
    let Some(limits) = StorageLimits::of(pod) else {
        return std::future::pending().await;
    };
    let mut wait = MONITORING_INTERVAL;
    loop {
        tokio::time::sleep(wait).await;
        let started = std::time::Instant::now();
        if let Some(message) = check(&limits, pod_dirs).await {
            return PodFailure::new(FailureCause::StorageLimit, message);
        }
        wait = MONITORING_INTERVAL.max(started.elapsed() * MIN_IDLE_FACTOR);
    }
}

/// Measures the usage; returns the reason for eviction, if any.
async fn check(limits: &StorageLimits, pod_dirs: &PodDirs) -> Option<String> {
    let dirs = MeasuredDirs::of(limits, pod_dirs);
    // Walking a tree blocks, and the sandbox has a single thread.
    let usage = tokio::task::spawn_blocking(move || dirs.measure()).await;
    limits.eviction_message(&usage.ok()?)
}

/// The ephemeral storage limits of a pod.
#[derive(Debug, Default, PartialEq, Eq)]
struct StorageLimits {
    /// emptyDirs on disk, with or without a limit.
    volumes: BTreeMap<String, Option<StorageLimit>>,
    /// The pod's containers and sidecars, with or without a limit.
    containers: BTreeMap<String, Option<StorageLimit>>,
    /// The pod's total: the maximum over containers that run at the same time.
    pod: Option<u64>,
}

/// A limit in bytes, and the quantity as written in the spec.
#[derive(Clone, Debug, PartialEq, Eq)]
struct StorageLimit(u64, String);

/// A pod's usage, in bytes.
#[derive(Debug, Default)]
struct StorageUsage {
    volumes: BTreeMap<String, u64>,
    containers: BTreeMap<String, u64>,
    /// Files below /etc that all containers share.
    etc: u64,
}

impl StorageLimits {
    /// `None` if there is no limit at all.
    fn of(pod: &Pod) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let limit = |quantity: &Quantity| {
            let bytes = bytes(quantity).filter(|&bytes| bytes > 0)?;
            Some(StorageLimit(bytes, quantity.0.clone()))
        };
        let volumes = spec.volumes.iter().flatten().filter_map(|volume| {
            let source = volume.empty_dir.as_ref()?;
            (source.medium.as_deref() != Some("Memory")).then(|| {
                (
                    volume.name.clone(),
                    source.size_limit.as_ref().and_then(limit),
                )
            })
        });
        let container_limit = |container: &Container| {
            let limits = container.resources.as_ref()?.limits.as_ref()?;
            limit(limits.get(STORAGE)?)
        };
        let containers = long_running_containers(spec)
            .map(|container| (container.name.clone(), container_limit(container)));
        let limits = Self {
            volumes: volumes.collect(),
            containers: containers.collect(),
            pod: pod_limit(spec, |container| Some(container_limit(container)?.0)),
        };
        let has_limit = limits.pod.is_some() || limits.volumes.values().any(Option::is_some);
        has_limit.then_some(limits)
    }

    /// The reason for eviction, if a limit is exceeded. The messages are upstream's.
    fn eviction_message(&self, usage: &StorageUsage) -> Option<String> {
        let exceeded = |limits: &BTreeMap<String, Option<StorageLimit>>,
                        used: &BTreeMap<String, u64>| {
            limits.iter().find_map(|(name, limit)| {
                let limit = limit.as_ref()?;
                (*used.get(name)? > limit.0).then(|| (name.clone(), limit.1.clone()))
            })
        };
        if let Some((name, limit)) = exceeded(&self.volumes, &usage.volumes) {
            let message =
                format!("Usage of EmptyDir volume {name:?} exceeds the limit {limit:?}. ");
            return Some(message);
        }
        let total: u64 = usage
            .volumes
            .values()
            .chain(usage.containers.values())
            .chain([&usage.etc])
            .sum();
        if let Some(limit) = self.pod.filter(|&limit| total > limit) {
            let limit = quantity::binary(limit).0;
            return Some(format!(
                "Pod ephemeral local storage usage exceeds the total limit of containers {limit}. "
            ));
        }
        exceeded(&self.containers, &usage.containers).map(|(name, limit)| {
            format!("Container {name} exceeded its local ephemeral storage limit {limit:?}. ")
        })
    }
}

/// The pod's total limit: that of containers that run at the same time, plus overhead. `None` if no container has a limit.
fn pod_limit(spec: &PodSpec, limit_of: impl Fn(&Container) -> Option<u64>) -> Option<u64> {
    let init = spec.init_containers.iter().flatten();
    init.chain(&spec.containers).find_map(&limit_of)?;
    let overhead = spec.overhead.as_ref();
    let overhead = overhead.and_then(|overhead| bytes(overhead.get(STORAGE)?));
    Some(effective_amount(spec, limit_of).saturating_add(overhead.unwrap_or(0)))
}

/// The directories to measure.
struct MeasuredDirs {
    volumes: Vec<(String, PathBuf)>,
    /// The writable layer and the logs of each container.
    containers: Vec<(String, [PathBuf; 2])>,
    etc: PathBuf,
}

impl MeasuredDirs {
    fn of(limits: &StorageLimits, pod_dirs: &PodDirs) -> Self {
        let volumes = limits.volumes.keys().map(|name| {
            let dir = pod_dirs.disk.join("volumes").join(name);
            (name.clone(), dir)
        });
        let containers = limits.containers.keys().map(|name| {
            let writable_layer = pod_dirs.disk.join("containers").join(name);
            (name.clone(), [writable_layer, pod_dirs.logs.join(name)])
        });
        Self {
            volumes: volumes.collect(),
            containers: containers.collect(),
            etc: pod_dirs.etc(),
        }
    }

    fn measure(self) -> StorageUsage {
        let volumes = self.volumes.into_iter();
        let containers = self.containers.into_iter();
        StorageUsage {
            volumes: volumes
                .map(|(name, dir)| (name, allocated_bytes(&dir)))
                .collect(),
            containers: containers
                .map(|(name, dirs)| {
                    let total: u64 = dirs.iter().map(|dir| allocated_bytes(dir)).sum();
                    (name, total.saturating_sub(image_copies_size(&dirs[0])))
                })
                .collect(),
            etc: allocated_bytes(&self.etc),
        }
    }
}

/// The size of image copies in a container's directory, which do not count as the container's usage. Each run of the container that
/// copied its image recorded the size in a file.
fn image_copies_size(container: &Path) -> u64 {
    let runs = std::fs::read_dir(container).into_iter().flatten().flatten();
    runs.filter_map(|run| {
        std::fs::read_to_string(run.path().join("copied"))
            .ok()?
            .parse()
            .ok()
    })
    .map(|bytes: u64| bytes)
    .sum()
}

/// The pod's containers and its native sidecars: all except for init containers that run to completion.
fn long_running_containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|container| is_sidecar(container));
    sidecars.chain(&spec.containers)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn limits(spec: Value) -> Option<StorageLimits> {
        let pod: Pod = serde_json::from_value(json!({ "metadata": {}, "spec": spec })).unwrap();
        StorageLimits::of(&pod)
    }

    fn usage(volumes: &[(&str, u64)], containers: &[(&str, u64)]) -> StorageUsage {
        let map = |pairs: &[(&str, u64)]| pairs.iter().map(|&(n, b)| (n.to_owned(), b)).collect();
        StorageUsage {
            volumes: map(volumes),
            containers: map(containers),
            etc: 0,
        }
    }

    #[test]
    fn pod_without_limits_is_not_measured() {
        assert_eq!(
            limits(json!({ "containers": [{ "name": "a" }], "volumes": [
            { "name": "v", "emptyDir": {} },
            { "name": "m", "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } },
        ] })),
            None
        );
    }

    #[test]
    fn eviction_messages_match_upstream() {
        let limits = limits(json!({
            "initContainers": [
                { "name": "i", "resources": { "limits": { "ephemeral-storage": "1Ki" } } },
                { "name": "s", "restartPolicy": "Always", "resources": { "limits": { "ephemeral-storage": "1Mi" } } },
            ],
            "containers": [
                { "name": "a", "resources": { "limits": { "ephemeral-storage": "3Mi" } } },
                { "name": "b" },
            ],
            "volumes": [{ "name": "v", "emptyDir": { "sizeLimit": "2Mi" } }, { "name": "w", "emptyDir": {} }],
        }))
        .unwrap();
        let eviction_message =
            |volumes: &[_], containers: &[_]| limits.eviction_message(&usage(volumes, containers));
        const MI: u64 = 1 << 20;
        assert_eq!(eviction_message(&[("v", 2 * MI)], &[("a", 2 * MI)]), None);
        assert_eq!(
            eviction_message(&[("v", 2 * MI + 1)], &[]).unwrap(),
            "Usage of EmptyDir volume \"v\" exceeds the limit \"2Mi\". "
        );
        assert_eq!(
            eviction_message(&[("w", 3 * MI)], &[("b", MI + 1)]).unwrap(),
            "Pod ephemeral local storage usage exceeds the total limit of containers 4Mi. "
        );
        assert_eq!(
            eviction_message(&[], &[("s", MI + 1)]).unwrap(),
            "Container s exceeded its local ephemeral storage limit \"1Mi\". "
        );
    }

    #[test]
    fn pod_limit_sums_containers_that_run_at_once() {
        let pod_limit = |init: Value, main: Value| {
            let container = |name: &str, always: bool, limit: &Value| {
                let limits = match limit {
                    Value::Null => json!({}),
                    limit => json!({ "limits": { "ephemeral-storage": limit } }),
                };
                let policy = always.then_some("Always");
                json!({ "name": name, "restartPolicy": policy, "resources": limits })
            };
            let spec = json!({
                "initContainers": [
                    container("s", true, &json!("1Ki")),
                    container("i", false, &init),
                    container("t", true, &json!("1Ki")),
                ],
                "containers": [container("a", false, &main), container("b", false, &Value::Null)],
                "overhead": { "ephemeral-storage": "1" },
            });
            limits(spec).unwrap().pod
        };
        assert_eq!(pod_limit(json!("9Ki"), json!("3Ki")), Some((10 << 10) + 1));
        assert_eq!(pod_limit(json!("3Ki"), json!("3Ki")), Some((5 << 10) + 1));
        assert_eq!(pod_limit(json!("3Ki"), Value::Null), Some((4 << 10) + 1));
        let init_only = json!({
            "initContainers": [{ "name": "i", "resources": { "limits": { "ephemeral-storage": "1Ki" } } }],
            "containers": [{ "name": "a" }],
        });
        assert_eq!(limits(init_only).unwrap().pod, Some(1 << 10));
    }

    fn pod_dirs(home: &Path) -> PodDirs {
        PodDirs {
            disk: home.to_owned(),
            memory: home.join("memory"),
            cgroup: None,
            logs: home.join("logs"),
        }
    }

    #[tokio::test]
    async fn exceeded_volume_limit_is_found() {
        let home = tempfile::tempdir().unwrap();
        let pod_dirs = pod_dirs(home.path());
        let volume = home.path().join("volumes/v");
        std::fs::create_dir_all(&volume).unwrap();
        let limits = limits(json!({
            "containers": [{ "name": "a" }],
            "volumes": [{ "name": "v", "emptyDir": { "sizeLimit": "100Ki" } }],
        }))
        .unwrap();
        assert_eq!(check(&limits, &pod_dirs).await, None);
        std::fs::write(volume.join("file"), vec![1; 200 << 10]).unwrap();
        assert!(check(&limits, &pod_dirs).await.is_some());
    }

    /// As upstream, which adds /etc/hosts to the pod's total usage.
    #[tokio::test]
    async fn files_below_etc_count_for_the_pod() {
        let home = tempfile::tempdir().unwrap();
        let pod_dirs = pod_dirs(home.path());
        let limits = limits(json!({ "containers": [
            { "name": "a", "resources": { "limits": { "ephemeral-storage": "100Ki" } } },
        ] }))
        .unwrap();
        std::fs::create_dir(pod_dirs.etc()).unwrap();
        std::fs::write(pod_dirs.etc().join("hosts"), "127.0.0.1 localhost").unwrap();
        assert_eq!(check(&limits, &pod_dirs).await, None);
        std::fs::write(pod_dirs.etc().join("hosts"), vec![1; 200 << 10]).unwrap();
        let message = check(&limits, &pod_dirs).await.unwrap();
        assert!(
            message.contains("total limit of containers 100Ki"),
            "{message}"
        );
    }
}
