//! This kubelet's configuration as upstream's `KubeletConfiguration`, for `/configz`. Only fields that apply are set.

use std::time::Duration;

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

/// Formats whole seconds like Go's `time.Duration`.
fn go_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds}s"),
        (0, _) => format!("{minutes}m{seconds}s"),
        _ => format!("{hours}h{minutes}m{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_go_format() {
        let formatted = |seconds| go_duration(Duration::from_secs(seconds));
        assert_eq!(formatted(4 * 3600), "4h0m0s");
        assert_eq!(formatted(90), "1m30s");
        assert_eq!(formatted(5), "5s");
    }
}
