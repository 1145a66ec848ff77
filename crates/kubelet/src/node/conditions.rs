//! The Node's conditions, with upstream's reasons and messages.

use k8s_openapi::api::core::v1::NodeCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::Pressures;

/// The status of the condition Ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    ShuttingDown,
}

/// The four conditions of a node, Ready last as in upstream.
///
/// `previous` are the API server's: a condition whose status does not change keeps its transition time.
pub(super) fn conditions(
    pressures: Pressures,
    readiness: Readiness,
    previous: &[NodeCondition],
    now: Timestamp,
) -> Vec<NodeCondition> {
    let condition = |type_: &str, (status, reason, message): (&str, &str, &str)| NodeCondition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        last_heartbeat_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    };
    let mut wanted = vec![
        condition(
            "MemoryPressure",
            if pressures.memory {
                (
                    "True",
                    "KubeletHasInsufficientMemory",
                    "kubelet has insufficient memory available",
                )
            } else {
                (
                    "False",
                    "KubeletHasSufficientMemory",
                    "kubelet has sufficient memory available",
                )
            },
        ),
        condition(
            "DiskPressure",
            if pressures.disk {
                (
                    "True",
                    "KubeletHasDiskPressure",
                    "kubelet has disk pressure",
                )
            } else {
                (
                    "False",
                    "KubeletHasNoDiskPressure",
                    "kubelet has no disk pressure",
                )
            },
        ),
        condition(
            "PIDPressure",
            if pressures.pid {
                (
                    "True",
                    "KubeletHasInsufficientPID",
                    "kubelet has insufficient PID available",
                )
            } else {
                (
                    "False",
                    "KubeletHasSufficientPID",
                    "kubelet has sufficient PID available",
                )
            },
        ),
        condition(
            "Ready",
            match readiness {
                Readiness::Ready => ("True", "KubeletReady", "kubelet is posting ready status"),
                Readiness::ShuttingDown => ("False", "KubeletNotReady", "node is shutting down"),
            },
        ),
    ];
    keep_transition_times(&mut wanted, previous);
    wanted
}

/// Copies the transition time of each condition whose status does not change.
pub(super) fn keep_transition_times(wanted: &mut [NodeCondition], previous: &[NodeCondition]) {
    for want in wanted {
        let same = previous
            .iter()
            .find(|have| have.type_ == want.type_ && have.status == want.status);
        if let Some(time) = same.and_then(|same| same.last_transition_time.clone()) {
            want.last_transition_time = Some(time);
        }
    }
}

/// Whether the API server has all of `wanted`, apart from heartbeat and transition times.
pub(super) fn are_reported(server: &[NodeCondition], wanted: &[NodeCondition]) -> bool {
    wanted.iter().all(|want| {
        server.iter().any(|have| {
            (&have.type_, &have.status, &have.reason, &have.message)
                == (&want.type_, &want.status, &want.reason, &want.message)
        })
    })
}

/// `wanted`, followed by the API server's conditions of other types: other components set those.
pub(super) fn with_foreign(
    wanted: Vec<NodeCondition>,
    server: &[NodeCondition],
) -> Vec<NodeCondition> {
    let foreign: Vec<_> = server
        .iter()
        .filter(|have| wanted.iter().all(|want| want.type_ != have.type_))
        .cloned()
        .collect();
    wanted.into_iter().chain(foreign).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPOCH: Timestamp = Timestamp::UNIX_EPOCH;

    fn healthy(previous: &[NodeCondition], now: Timestamp) -> Vec<NodeCondition> {
        conditions(Pressures::default(), Readiness::Ready, previous, now)
    }

    #[test]
    fn pressures_have_upstream_reasons_and_messages() {
        let all = Pressures {
            memory: true,
            disk: true,
            pid: true,
        };
        let printed: Vec<_> = conditions(all, Readiness::ShuttingDown, &[], EPOCH)
            .into_iter()
            .map(|c| {
                format!(
                    "{} {} {}: {}",
                    c.type_,
                    c.status,
                    c.reason.unwrap(),
                    c.message.unwrap()
                )
            })
            .collect();
        insta::assert_snapshot!(printed.join("\n"), @r"
        MemoryPressure True KubeletHasInsufficientMemory: kubelet has insufficient memory available
        DiskPressure True KubeletHasDiskPressure: kubelet has disk pressure
        PIDPressure True KubeletHasInsufficientPID: kubelet has insufficient PID available
        Ready False KubeletNotReady: node is shutting down
        ");
    }

    #[test]
    fn transition_time_changes_only_with_status() {
        let now = Timestamp::from_second(60).unwrap();
        let mut before = healthy(&[], EPOCH);
        before[3].status = "Unknown".to_owned();
        let after = healthy(&before, now);
        assert_eq!(after[0].last_transition_time, Some(Time(EPOCH)));
        assert_eq!(after[0].last_heartbeat_time, Some(Time(now)));
        assert_eq!(after[3].last_transition_time, Some(Time(now)));
    }

    #[test]
    fn unknown_status_of_controller_manager_is_a_difference() {
        let wanted = healthy(&[], EPOCH);
        let mut server = healthy(&[], Timestamp::from_second(9).unwrap());
        assert!(are_reported(&server, &wanted));
        server[3].status = "Unknown".to_owned();
        assert!(!are_reported(&server, &wanted));
        assert!(!are_reported(&[], &wanted));
    }

    #[test]
    fn foreign_conditions_are_kept() {
        let other = NodeCondition {
            type_: "NetworkUnavailable".to_owned(),
            ..Default::default()
        };
        let merged = with_foreign(healthy(&[], EPOCH), &[other, healthy(&[], EPOCH).remove(3)]);
        let types: Vec<_> = merged
            .iter()
            .map(|condition| condition.type_.as_str())
            .collect();
        assert_eq!(
            types,
            [
                "MemoryPressure",
                "DiskPressure",
                "PIDPressure",
                "Ready",
                "NetworkUnavailable"
            ]
        );
    }
}
