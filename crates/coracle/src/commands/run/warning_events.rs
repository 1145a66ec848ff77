//! Prints Warning events of the cluster, each once, while manifests run: the user sees why a pod cannot start.

use console::print_stderr;
use std::collections::{BTreeSet, HashSet};
use std::convert::Infallible;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Event;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};

/// Limit on the length of a printed event.
const MAX_LINE_CHARS: usize = 400;
/// Limit on the number of printed events; more would not help the user.
const MAX_EVENTS: usize = 200;

/// Prints the events of these namespaces. Never returns.
pub async fn print_warnings(client: Client, namespaces: BTreeSet<String>) -> Infallible {
    let warnings = watcher::Config::default().fields("type=Warning");
    let events = watcher(Api::<Event>::all(client), warnings).default_backoff();
    let mut events = std::pin::pin!(events.applied_objects());
    let mut printed = HashSet::new();
    while let Some(event) = events.next().await {
        let Ok(event) = event else { continue };
        if namespaces.contains(
            event
                .involved_object
                .namespace
                .as_deref()
                .unwrap_or_default(),
        ) && printed.len() < MAX_EVENTS
            && printed.insert(line(&event))
        {
            print_stderr(format_args!("coracle: {}", line(&event)));
        }
    }
    // The watch ended; the workload goes on without it.
    std::future::pending().await
}

/// Formats an event as one line.
fn line(event: &Event) -> String {
    let object = &event.involved_object;
    let text_of = |text: &Option<String>| text.clone().unwrap_or_default();
    let line = format!(
        "{}/{}: {}: {}",
        text_of(&object.kind).to_lowercase(),
        text_of(&object.name),
        text_of(&event.reason),
        text_of(&event.message)
    );
    let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MAX_LINE_CHARS) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_is_formatted_as_one_line() {
        let event = |message: &str| -> Event {
            serde_json::from_value(serde_json::json!({
                "metadata": {}, "reason": "Failed", "message": message,
                "involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"}}))
            .unwrap()
        };
        assert_eq!(
            line(&event("first\n  second")),
            "pod/p: Failed: first second"
        );
        assert!(line(&event(&"é".repeat(1000))).chars().count() <= MAX_LINE_CHARS + 1);
    }
}
