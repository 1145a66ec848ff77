//! This kubelet's configuration as upstream's `KubeletConfiguration`, for `/configz`. Only fields that apply are set.

use pod_protocol::go_duration;
use serde_json::{Value, json};

use crate::NodeConfig;

pub(super) fn kubelet_configuration(config: &NodeConfig) -> Value {
    let mut configuration = json!({
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "enableServer": true,
        "address": "0.0.0.0",
        "port": config.kubelet_port,
        "readOnlyPort": 0,
        "healthzPort": 0,
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {},
        },
        "authorization": {"mode": "Webhook", "webhook": {}},
        "registerNode": true,
        "clusterDomain": config.cluster_domain,
        "clusterDNS": config.cluster_dns,
        "podCIDR": config.pod_cidrs.join(","),
        "maxPods": config.capacity.pods,
        "nodeStatusUpdateFrequency": "10s",
        "nodeStatusReportFrequency": "5m0s",
        "nodeLeaseDurationSeconds": 40,
        "volumeStatsAggPeriod": "1m0s",
        "resolvConf": "/etc/resolv.conf",
        "cpuManagerPolicy": "none",
        "memoryManagerPolicy": "None",
        "topologyManagerPolicy": "none",
        "failSwapOn": false,
        "serializeImagePulls": false,
        "containerLogMaxSize": "10Mi",
        "containerLogMaxFiles": 5,
        "enableDebuggingHandlers": true,
        "enableControllerAttachDetach": true,
        "enableSystemLogHandler": true,
        "enableSystemLogQuery": true,
        "enableProfilingHandler": false,
        "enableDebugFlagsHandler": false,
        "makeIPTablesUtilChains": false,
        "localStorageCapacityIsolation": true,
        "seccompDefault": false,
        "configMapAndSecretChangeDetectionStrategy": "Watch",
        "containerRuntimeEndpoint": "",
        "logging": {"format": "text"},
        "featureGates": {"NodeLogQuery": true, "ContainerCheckpoint": false},
    });
    // Separate, because of the macro's recursion limit.
    configuration["streamingConnectionIdleTimeout"] =
        go_duration(config.stream_idle_timeout).into();
    configuration
}
