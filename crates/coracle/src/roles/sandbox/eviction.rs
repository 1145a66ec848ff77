//! Eviction of pods that exceed their ephemeral storage limits. Usage is measured periodically, as in upstream's kubelet.
//!
//! Memory-backed volumes are not measured, because the kernel enforces their size.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use pod_protocol::Problem;
use quantity::bytes;
use sandbox::runtime::{PodDirs, effective_amount};

const STORAGE: &str = "ephemeral-storage";
/// The interval of measurements, as upstream.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Measuring takes at most one part in this many of the time, so that a large tree is not walked continuously.
const PART: u32 = 20;

/// Waits until the pod exceeds a limit and returns upstream's message. Never returns if it has no limits.
pub async fn exceeded(pod: &Pod, places: &PodDirs) -> Problem {
    let Some(limits) = Limits::of(pod) else {
        return std::future::pending().await;
    };
    let mut wait = LOOK_EVERY;
    loop {
        tokio::time::sleep(wait).await;
        let started = std::time::Instant::now();
        if let Some(message) = look(&limits, places).await {
            return Problem {
                reason: "Evicted".to_owned(),
                message,
            };
        }
        wait = LOOK_EVERY.max(started.elapsed() * PART);
    }
}

/// Measures the usage; returns the reason for eviction, if any.
async fn look(limits: &Limits, places: &PodDirs) -> Option<String> {
    let dirs = Dirs::of(limits, places);
    // Walking a tree blocks, and the sandbox has a single thread.
    let usage = tokio::task::spawn_blocking(move || dirs.measure()).await;
    limits.judge(&usage.ok()?)
}

/// The ephemeral storage limits of a pod.
#[derive(Debug, Default, PartialEq, Eq)]
struct Limits {
    /// emptyDirs on disk, with or without a limit.
    volumes: BTreeMap<String, Option<Limit>>,
    /// The pod's containers and sidecars, with or without a limit.
    containers: BTreeMap<String, Option<Limit>>,
    /// The pod's total: the maximum over containers that run at the same time.
    pod: Option<u64>,
}

/// Bytes, and the quantity as written in the spec.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Limit(u64, String);

/// A pod's usage, in bytes.
#[derive(Debug, Default)]
struct Usage {
    volumes: BTreeMap<String, u64>,
    containers: BTreeMap<String, u64>,
    /// Files below /etc that all containers share.
    etc: u64,
}

impl Limits {
    /// `None` if there is no limit at all.
    fn of(pod: &Pod) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let limit = |quantity: &Quantity| {
            let bytes = bytes(quantity).filter(|&bytes| bytes > 0)?;
            Some(Limit(bytes, quantity.0.clone()))
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
        let own = |container: &Container| {
            let limits = container.resources.as_ref()?.limits.as_ref()?;
            limit(limits.get(STORAGE)?)
        };
        let containers = staying(spec).map(|container| (container.name.clone(), own(container)));
        let limits = Self {
            volumes: volumes.collect(),
            containers: containers.collect(),
            pod: of_pod(spec, |container| Some(own(container)?.0)),
        };
        let has_any = limits.pod.is_some() || limits.volumes.values().any(Option::is_some);
        has_any.then_some(limits)
    }

    /// The reason for eviction, if a limit is exceeded. The messages are upstream's.
    fn judge(&self, usage: &Usage) -> Option<String> {
        let beyond = |limits: &BTreeMap<String, Option<Limit>>, used: &BTreeMap<String, u64>| {
            limits.iter().find_map(|(name, limit)| {
                let limit = limit.as_ref()?;
                (*used.get(name)? > limit.0).then(|| (name.clone(), limit.1.clone()))
            })
        };
        if let Some((name, limit)) = beyond(&self.volumes, &usage.volumes) {
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
        beyond(&self.containers, &usage.containers).map(|(name, limit)| {
            format!("Container {name} exceeded its local ephemeral storage limit {limit:?}. ")
        })
    }
}

/// The pod's total limit: that of containers that run at the same time, plus overhead. `None` if no container has a limit.
fn of_pod(spec: &PodSpec, own: impl Fn(&Container) -> Option<u64>) -> Option<u64> {
    let init = spec.init_containers.iter().flatten();
    init.chain(&spec.containers).find_map(&own)?;
    let overhead = spec.overhead.as_ref();
    let overhead = overhead.and_then(|overhead| bytes(overhead.get(STORAGE)?));
    Some(effective_amount(spec, own).saturating_add(overhead.unwrap_or(0)))
}

/// The directories to measure.
struct Dirs {
    volumes: Vec<(String, PathBuf)>,
    /// The writable layer and the logs of each container.
    containers: Vec<(String, [PathBuf; 2])>,
    etc: PathBuf,
}

impl Dirs {
    fn of(limits: &Limits, places: &PodDirs) -> Self {
        let volumes = limits.volumes.keys().map(|name| {
            let dir = places.disk.join("volumes").join(name);
            (name.clone(), dir)
        });
        let containers = limits.containers.keys().map(|name| {
            let changes = places.disk.join("containers").join(name);
            (name.clone(), [changes, places.logs.join(name)])
        });
        Self {
            volumes: volumes.collect(),
            containers: containers.collect(),
            etc: places.etc(),
        }
    }

    fn measure(self) -> Usage {
        let volumes = self.volumes.into_iter();
        let containers = self.containers.into_iter();
        Usage {
            volumes: volumes.map(|(name, dir)| (name, taken(&dir))).collect(),
            containers: containers
                .map(|(name, dirs)| {
                    let all: u64 = dirs.iter().map(|dir| taken(dir)).sum();
                    (name, all.saturating_sub(copied(&dirs[0])))
                })
                .collect(),
            etc: taken(&self.etc),
        }
    }
}

/// Disk usage of a directory.
fn taken(dir: &Path) -> u64 {
    volumes::dirs::disk_usage(dir)
}

/// The size of image copies in a container's directory, which do not count as the container's usage. Each run of the container that
/// copied its image recorded the size in a file.
fn copied(container: &Path) -> u64 {
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
fn staying(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|c| c.restart_policy.as_deref() == Some("Always"));
    sidecars.chain(&spec.containers)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn limits(spec: Value) -> Option<Limits> {
        let pod: Pod = serde_json::from_value(json!({ "metadata": {}, "spec": spec })).unwrap();
        Limits::of(&pod)
    }

    fn usage(volumes: &[(&str, u64)], containers: &[(&str, u64)]) -> Usage {
        let map = |pairs: &[(&str, u64)]| pairs.iter().map(|&(n, b)| (n.to_owned(), b)).collect();
        Usage {
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
    fn eviction_messages_are_upstreams() {
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
        let judge = |volumes: &[_], containers: &[_]| limits.judge(&usage(volumes, containers));
        const MI: u64 = 1 << 20;
        assert_eq!(judge(&[("v", 2 * MI)], &[("a", 2 * MI)]), None);
        assert_eq!(
            judge(&[("v", 2 * MI + 1)], &[]).unwrap(),
            "Usage of EmptyDir volume \"v\" exceeds the limit \"2Mi\". "
        );
        assert_eq!(
            judge(&[("w", 3 * MI)], &[("b", MI + 1)]).unwrap(),
            "Pod ephemeral local storage usage exceeds the total limit of containers 4Mi. "
        );
        assert_eq!(
            judge(&[], &[("s", MI + 1)]).unwrap(),
            "Container s exceeded its local ephemeral storage limit \"1Mi\". "
        );
    }

    #[test]
    fn pod_limit_sums_containers_that_run_at_once() {
        let of = |init: Value, main: Value| {
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
        assert_eq!(of(json!("9Ki"), json!("3Ki")), Some((10 << 10) + 1));
        assert_eq!(of(json!("3Ki"), json!("3Ki")), Some((5 << 10) + 1));
        assert_eq!(of(json!("3Ki"), Value::Null), Some((4 << 10) + 1));
        let only = json!({
            "initContainers": [{ "name": "i", "resources": { "limits": { "ephemeral-storage": "1Ki" } } }],
            "containers": [{ "name": "a" }],
        });
        assert_eq!(limits(only).unwrap().pod, Some(1 << 10));
    }

    #[tokio::test]
    async fn exceeded_volume_limit_is_found() {
        let home = tempfile::tempdir().unwrap();
        let places = PodDirs {
            disk: home.path().to_owned(),
            memory: home.path().join("memory"),
            cgroup: None,
            logs: home.path().join("logs"),
        };
        let volume = home.path().join("volumes/v");
        std::fs::create_dir_all(&volume).unwrap();
        let limits = limits(json!({
            "containers": [{ "name": "a" }],
            "volumes": [{ "name": "v", "emptyDir": { "sizeLimit": "100Ki" } }],
        }))
        .unwrap();
        assert_eq!(look(&limits, &places).await, None);
        std::fs::write(volume.join("file"), vec![1; 200 << 10]).unwrap();
        assert!(look(&limits, &places).await.is_some());
    }

    /// As upstream, which adds /etc/hosts to the pod's total usage.
    #[tokio::test]
    async fn files_below_etc_count_for_the_pod() {
        let home = tempfile::tempdir().unwrap();
        let places = PodDirs {
            disk: home.path().to_owned(),
            memory: home.path().join("memory"),
            cgroup: None,
            logs: home.path().join("logs"),
        };
        let limits = limits(json!({ "containers": [
            { "name": "a", "resources": { "limits": { "ephemeral-storage": "100Ki" } } },
        ] }))
        .unwrap();
        std::fs::create_dir(places.etc()).unwrap();
        std::fs::write(places.etc().join("hosts"), "127.0.0.1 localhost").unwrap();
        assert_eq!(look(&limits, &places).await, None);
        std::fs::write(places.etc().join("hosts"), vec![1; 200 << 10]).unwrap();
        let message = look(&limits, &places).await.unwrap();
        assert!(
            message.contains("total limit of containers 100Ki"),
            "{message}"
        );
    }
}
