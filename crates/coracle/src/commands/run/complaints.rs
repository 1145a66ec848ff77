//! What the cluster complains about while manifests are waited for: Warning events, each told once, so that nobody waits for a
//! pod that can't run without knowing.

use console::say;
use std::collections::{BTreeSet, HashSet};
use std::convert::Infallible;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Event;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};

/// So much of an event's text is shown.
const LONGEST: usize = 400;
/// So many different ones are told; a workload that has more is not helped by another.
const MOST: usize = 200;

/// Tells them, in these namespaces, for as long as it is polled.
pub async fn tell(client: Client, namespaces: BTreeSet<String>) -> Infallible {
    let warnings = watcher::Config::default().fields("type=Warning");
    let events = watcher(Api::<Event>::all(client), warnings).default_backoff();
    let mut events = std::pin::pin!(events.applied_objects());
    let mut told = HashSet::new();
    while let Some(event) = events.next().await {
        let Ok(event) = event else { continue };
        if namespaces.contains(
            event
                .involved_object
                .namespace
                .as_deref()
                .unwrap_or_default(),
        ) && told.len() < MOST
            && told.insert(line(&event))
        {
            say(format_args!("coracle: {}", line(&event)));
        }
    }
    // A watch that ends is no end of the workload.
    std::future::pending().await
}

/// An event in one line.
fn line(event: &Event) -> String {
    let about = &event.involved_object;
    let words = |text: &Option<String>| text.clone().unwrap_or_default();
    let line = format!(
        "{}/{}: {}: {}",
        words(&about.kind).to_lowercase(),
        words(&about.name),
        words(&event.reason),
        words(&event.message)
    );
    let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line() {
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
        assert!(line(&event(&"é".repeat(1000))).chars().count() <= LONGEST + 1);
    }
}
