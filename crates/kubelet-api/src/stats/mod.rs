//! `GET /stats/summary`, and the interface that provides the stats of a node.

pub mod summary;

use std::sync::Arc;

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures::future::BoxFuture;
use jiff::Timestamp;

use self::summary::StatsSummary;
use crate::pod_source::PodSource;

/// Stats of the node and its pods, and facts about the kubelet. The kubelet implements this.
pub trait NodeSource: Send + Sync {
    /// Collects the stats of the node and its pods.
    fn measure(&self) -> BoxFuture<'static, MeasuredSummary>;

    /// The capacity and the identity of the node.
    fn machine(&self) -> MachineInfo;

    /// The kubelet's configuration, as upstream's `KubeletConfiguration`.
    fn configuration(&self) -> serde_json::Value;

    /// Whether the kubelet's watch of its pods works.
    fn is_in_sync(&self) -> bool;

    /// The recent log of the kubelet, oldest line first.
    fn log(&self) -> Vec<LogLine>;
}

/// A summary, and whether it is complete.
#[derive(Clone, Debug)]
pub struct MeasuredSummary {
    /// The stats.
    pub summary: StatsSummary,
    /// The sandbox of a running pod did not answer.
    pub incomplete: bool,
}

/// A node: the job's share of the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineInfo {
    /// The name of the Node object.
    pub node: String,
    /// Allocated CPUs.
    pub cpus: u32,
    /// Allocated memory.
    pub memory_bytes: u64,
    /// `/etc/machine-id`.
    pub machine_id: String,
    /// The UUID of the hardware (DMI).
    pub system_uuid: String,
    /// The kernel's id of the current boot.
    pub boot_id: String,
    /// The kubelet version in the Node's status.
    pub kubelet_version: String,
    /// The kernel release.
    pub kernel_version: String,
    /// The name of the distribution.
    pub os_version: String,
}

/// A line of the kubelet's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    /// When it was written.
    pub at: Timestamp,
    /// The line without its newline.
    pub text: String,
}

/// The [`NodeSource`], or a 503 response if there is none.
pub(crate) fn node_or_unavailable(
    source: &dyn PodSource,
) -> Result<Arc<dyn NodeSource>, Box<Response>> {
    source.node().ok_or_else(|| {
        let message = "no stats are collected on this node\n";
        Box::new((StatusCode::SERVICE_UNAVAILABLE, message).into_response())
    })
}

/// `GET /stats/summary[?only_cpu_and_memory=true]`
pub(crate) async fn summary(
    State(source): State<Arc<dyn PodSource>>,
    RawQuery(query): RawQuery,
) -> Response {
    let node = match node_or_unavailable(&*source) {
        Ok(node) => node,
        Err(response) => return *response,
    };
    let summary = node.measure().await.summary;
    let query = query.unwrap_or_default();
    let only = form_urlencoded::parse(query.as_bytes())
        .any(|(name, value)| name == "only_cpu_and_memory" && is_true(&value));
    Json(if only {
        summary.only_cpu_and_memory()
    } else {
        summary
    })
    .into_response()
}

/// Like Go's `strconv.ParseBool`.
fn is_true(value: &str) -> bool {
    matches!(value, "1" | "t" | "T" | "true" | "TRUE" | "True")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::summary::*;
    use super::*;

    pub(crate) fn at() -> Timestamp {
        "2026-11-15T10:00:00.5Z".parse().unwrap()
    }

    fn usage(cpu_ns: u64, bytes: u64) -> UsageStats {
        UsageStats {
            start_time: at(),
            cpu: Some(CpuStats {
                time: at(),
                usage_nano_cores: Some(250_000_000),
                usage_core_nano_seconds: cpu_ns,
            }),
            memory: Some(MemoryStats {
                time: at(),
                available_bytes: None,
                usage_bytes: bytes,
                working_set_bytes: bytes,
                rss_bytes: bytes / 2,
                page_faults: 10,
                major_page_faults: 1,
                swap_bytes: None,
            }),
        }
    }

    fn fs(used: u64) -> FsStats {
        FsStats {
            time: at(),
            available_bytes: 500,
            capacity_bytes: 1000,
            used_bytes: used,
            inodes_free: 5,
            inodes: 10,
            inodes_used: 2,
        }
    }

    pub(crate) fn example() -> StatsSummary {
        let container = ContainerStats {
            name: "main".to_owned(),
            usage: usage(1_500_000_000, 4096),
            rootfs: Some(fs(100)),
            logs: Some(fs(10)),
            processes: 3,
            throttling: None,
            io: IoStats::default(),
        };
        let interface = InterfaceStats {
            name: "eth0".to_owned(),
            rx_bytes: 1,
            rx_errors: 2,
            tx_bytes: 3,
            tx_errors: 4,
            rx_packets: (5, 6),
            tx_packets: (7, 8),
        };
        StatsSummary {
            node: NodeStats {
                node_name: "node1".to_owned(),
                system_containers: Vec::new(),
                usage: usage(9_000_000_000, 1 << 20),
                network: None,
                fs: Some(fs(500)),
                runtime: None,
                rlimit: None,
            },
            pods: vec![PodStats {
                pod_ref: PodReference {
                    name: "web".to_owned(),
                    namespace: "default".to_owned(),
                    uid: "u1".to_owned(),
                },
                usage: usage(2_000_000_000, 8192),
                containers: vec![container],
                network: Some(NetworkStats {
                    time: at(),
                    default: interface.clone(),
                    interfaces: vec![interface],
                }),
                volume_stats: vec![VolumeStats {
                    fs: fs(7),
                    name: "data".to_owned(),
                    pvc_ref: Some(PvcReference {
                        name: "claim".to_owned(),
                        namespace: "default".to_owned(),
                    }),
                }],
                ephemeral_storage: Some(fs(110)),
                process_stats: Some(ProcessStats { process_count: 3 }),
                probes: Vec::new(),
            }],
        }
    }

    #[test]
    fn summary_matches_upstream_json() {
        insta::assert_json_snapshot!(example());
    }

    #[test]
    fn summary_is_parsed_back_and_reduced() {
        let text = serde_json::to_string(&example()).unwrap();
        let mut read: StatsSummary = serde_json::from_str(&text).unwrap();
        assert_eq!(read.pods[0].containers[0].processes, 0);
        read = read.only_cpu_and_memory();
        assert!(read.pods[0].network.is_none() && read.pods[0].containers[0].rootfs.is_none());
        assert_eq!(read.pods[0].usage, example().pods[0].usage);
        assert!(is_true("true") && is_true("1") && !is_true("no"));
    }
}
