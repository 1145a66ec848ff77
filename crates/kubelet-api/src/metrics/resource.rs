//! `GET /metrics/resource`: CPU and memory usage for autoscalers, with upstream's names and labels.

use super::exposition::{Exposition, seconds, unix_seconds};
use crate::stats::MeasuredSummary;
use crate::stats::summary::{CpuStats, MemoryStats};

pub(super) fn render(measured: &MeasuredSummary) -> String {
    let mut metrics = Exposition::default();
    let node = &measured.summary.node;
    if let Some(cpu) = &node.usage.cpu {
        let help = "[STABLE] Cumulative cpu time consumed by the node in core-seconds";
        add_cpu_time(&mut metrics, "node_cpu_usage_seconds_total", help, &[], cpu);
    }
    if let Some(memory) = &node.usage.memory {
        let help = "[STABLE] Current working set of the node in bytes";
        add_working_set(
            &mut metrics,
            "node_memory_working_set_bytes",
            help,
            &[],
            memory,
        );
    }
    for pod in &measured.summary.pods {
        let (name, namespace) = (pod.pod_ref.name.as_str(), pod.pod_ref.namespace.as_str());
        for container in &pod.containers {
            let labels = [
                ("container", container.name.as_str()),
                ("namespace", namespace),
                ("pod", name),
            ];
            let help = "[STABLE] Start time of the container since unix epoch in seconds";
            metrics
                .gauge("container_start_time_seconds", help)
                .value(&labels, unix_seconds(container.usage.start_time));
            if let Some(cpu) = &container.usage.cpu {
                let help = "[STABLE] Cumulative cpu time consumed by the container in core-seconds";
                let name = "container_cpu_usage_seconds_total";
                add_cpu_time(&mut metrics, name, help, &labels, cpu);
            }
            if let Some(memory) = &container.usage.memory {
                let help = "[STABLE] Current working set of the container in bytes";
                let name = "container_memory_working_set_bytes";
                add_working_set(&mut metrics, name, help, &labels, memory);
            }
        }
        let labels = [("namespace", namespace), ("pod", name)];
        if let Some(cpu) = &pod.usage.cpu {
            let help = "[STABLE] Cumulative cpu time consumed by the pod in core-seconds";
            add_cpu_time(
                &mut metrics,
                "pod_cpu_usage_seconds_total",
                help,
                &labels,
                cpu,
            );
        }
        if let Some(memory) = &pod.usage.memory {
            let help = "[STABLE] Current working set of the pod in bytes";
            let name = "pod_memory_working_set_bytes";
            add_working_set(&mut metrics, name, help, &labels, memory);
        }
    }
    let help = "[STABLE] 1 if there was an error while getting container metrics, 0 otherwise";
    let error = f64::from(u8::from(measured.incomplete));
    metrics
        .gauge("resource_scrape_error", help)
        .value(&[], error);
    let help = "[ALPHA] (Deprecated since 1.29.0) 1 if there was an error while getting container metrics, 0 otherwise";
    metrics.gauge("scrape_error", help).value(&[], error);
    metrics.render()
}

fn add_cpu_time(
    metrics: &mut Exposition,
    name: &'static str,
    help: &'static str,
    labels: &[(&str, &str)],
    cpu: &CpuStats,
) {
    let value = seconds(cpu.usage_core_nano_seconds);
    metrics
        .counter(name, help)
        .value_at(labels, value, cpu.time);
}

fn add_working_set(
    metrics: &mut Exposition,
    name: &'static str,
    help: &'static str,
    labels: &[(&str, &str)],
    memory: &MemoryStats,
) {
    let value = memory.working_set_bytes as f64;
    metrics
        .gauge(name, help)
        .value_at(labels, value, memory.time);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::tests::example;

    #[test]
    fn names_and_labels_match_upstream() {
        let measured = MeasuredSummary {
            summary: example(),
            incomplete: false,
        };
        insta::assert_snapshot!(render(&measured));
    }
}
