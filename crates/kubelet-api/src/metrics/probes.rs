//! `GET /metrics/probes`: results of container probes, with upstream's names and labels.

use super::exposition::Exposition;
use crate::stats::MeasuredSummary;

pub(super) fn render(measured: &MeasuredSummary) -> String {
    let help = "[BETA] Cumulative number of a liveness, readiness or startup probe for a container by result.";
    let mut metrics = Exposition::default();
    for pod in &measured.summary.pods {
        for probe in &pod.probes {
            let labels = [
                ("container", probe.container.as_str()),
                ("namespace", pod.pod_ref.namespace.as_str()),
                ("pod", pod.pod_ref.name.as_str()),
                ("pod_uid", pod.pod_ref.uid.as_str()),
                ("probe_type", probe.kind.as_str()),
                ("result", probe.result.as_str()),
            ];
            metrics
                .counter("prober_probe_total", help)
                .value(&labels, probe.count as f64);
        }
    }
    metrics.render()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::summary::ProbeStats;
    use crate::stats::tests::example;

    #[test]
    fn names_and_labels_match_upstream() {
        let mut summary = example();
        summary.pods[0].probes = vec![ProbeStats {
            container: "main".to_owned(),
            kind: "Readiness".to_owned(),
            result: "successful".to_owned(),
            count: 12,
        }];
        let measured = MeasuredSummary {
            summary,
            incomplete: false,
        };
        assert_eq!(
            render(&measured),
            "# HELP prober_probe_total [BETA] Cumulative number of a liveness, readiness or startup probe for a container by result.\n\
             # TYPE prober_probe_total counter\n\
             prober_probe_total{container=\"main\",namespace=\"default\",pod=\"web\",pod_uid=\"u1\",\
             probe_type=\"Readiness\",result=\"successful\"} 12\n"
        );
    }
}
