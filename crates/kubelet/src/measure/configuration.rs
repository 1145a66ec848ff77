//! This kubelet's configuration as upstream's `KubeletConfiguration`: only what is true here.

use std::time::Duration;

use serde_json::{Value, json};

use crate::NodeConfig;

pub(super) fn of(config: &NodeConfig) -> Value {
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
    // One more than the macro can take.
    configuration["streamingConnectionIdleTimeout"] =
        go_duration(config.stream_idle_timeout).into();
    configuration
}

/// As Go writes a duration, in whole seconds.
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
    fn durations_are_written_as_go_writes_them() {
        let written = |seconds| go_duration(Duration::from_secs(seconds));
        assert_eq!(written(4 * 3600), "4h0m0s");
        assert_eq!(written(90), "1m30s");
        assert_eq!(written(5), "5s");
    }
}
