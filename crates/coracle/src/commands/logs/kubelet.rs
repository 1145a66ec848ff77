//! Logs of nodes' agents, fetched through the API server.

use console::{Failure, FailureCode, print_stderr};
use std::io::Write;
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};

use crate::running_clusters::LocalCluster;
use crate::running_clusters::access::ClusterAccess;

/// Polling interval: the kubelet's log endpoint cannot follow.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Prints the log of one node's agent, or of all nodes' agents in turn.
pub async fn show(
    cluster: &LocalCluster,
    node: Option<&str>,
    tail: Option<usize>,
    follow: bool,
) -> anyhow::Result<()> {
    let client = ClusterAccess::of(cluster)?.connect().await?;
    let nodes = match node {
        Some(node) => vec![node.to_owned()],
        None => {
            let nodes: Api<Node> = Api::all(client.clone());
            let list = nodes.list(&ListParams::default()).await?;
            list.iter().map(ResourceExt::name_any).collect()
        }
    };
    let has_several = nodes.len() > 1;
    let mut logs: Vec<NodeLog> = nodes.into_iter().map(NodeLog::new).collect();
    let mut tail = tail;
    loop {
        for log in &mut logs {
            let text = match log.fetch(&client, tail).await {
                // With several nodes, report the error once and go on with the others.
                Err(error) if has_several => {
                    if !std::mem::replace(&mut log.fetch_failed, true) {
                        print_stderr(format_args!("coracle: {error:#}"));
                    }
                    continue;
                }
                result => result?,
            };
            log.fetch_failed = false;
            let mut out = std::io::stdout().lock();
            for line in text.lines() {
                match has_several {
                    true => writeln!(out, "{}: {line}", log.name)?,
                    false => writeln!(out, "{line}")?,
                }
            }
            out.flush()?;
        }
        if !follow {
            return Ok(());
        }
        tail = None;
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// The error about an unknown node; lists the existing ones.
async fn unknown_node(client: &Client, name: &str) -> Failure {
    let nodes: Api<Node> = Api::all(client.clone());
    let list = nodes.list(&ListParams::default()).await;
    let names: Vec<String> = list
        .iter()
        .flat_map(|list| list.iter().map(ResourceExt::name_any))
        .collect();
    Failure::new(
        FailureCode::Usage,
        format!("the cluster has no node {name:?}"),
    )
    .with_hint(format!("its nodes are {}", names.join(", ")))
}

/// The log of one node's agent, as far as it was fetched.
struct NodeLog {
    name: String,
    /// The last line that was printed, and the start time of the next request.
    last: String,
    since: Option<Timestamp>,
    /// The last request failed.
    fetch_failed: bool,
}

impl NodeLog {
    fn new(name: String) -> Self {
        Self {
            name,
            last: String::new(),
            since: None,
            fetch_failed: false,
        }
    }

    /// Fetches the lines since the last request.
    async fn fetch(&mut self, client: &Client, tail: Option<usize>) -> anyhow::Result<String> {
        let mut path = format!("/api/v1/nodes/{}/proxy/logs/?query=kubelet", self.name);
        if let Some(tail) = tail {
            // At least one, to find the lines that follow it later.
            path.push_str(&format!("&tailLines={}", tail.max(1)));
        }
        if let Some(since) = self.since {
            path.push_str(&format!("&sinceTime={since}"));
        }
        // The hosts' clocks may differ, so requests overlap; `new_lines` drops duplicates.
        self.since = Some(Timestamp::now() - SignedDuration::from_secs(10));
        let request = http::Request::get(path).body(Vec::new())?;
        let text = match client.request_text(request).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {
                return Err(unknown_node(client, &self.name).await.into());
            }
            result => {
                result.with_context(|| format!("cannot fetch the log of node {}", self.name))?
            }
        };
        let new = self.new_lines(&text);
        Ok(if tail == Some(0) { "" } else { new }.to_owned())
    }

    /// The lines after the last printed one, or all lines if `text` does not contain it.
    fn new_lines<'a>(&mut self, text: &'a str) -> &'a str {
        let ends = text.rmatch_indices('\n').map(|(at, _)| &text[..=at]);
        let is_last = |head: &&str| head.lines().next_back() == Some(self.last.as_str());
        let shown = ends
            .filter(|_| !self.last.is_empty())
            .find(is_last)
            .map_or(0, str::len);
        let new = &text[shown..];
        if let Some(last) = new.lines().next_back() {
            self.last = last.to_owned();
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_printed_once() {
        let mut log = NodeLog::new("node1".to_owned());
        assert_eq!(log.new_lines("1 a\n2 b\n"), "1 a\n2 b\n");
        assert_eq!(log.new_lines("2 b\n3 c\n"), "3 c\n");
        assert_eq!(log.new_lines("3 c\n"), "");
        assert_eq!(log.new_lines(""), "");
        // With --tail the first response has fewer lines than the next.
        assert_eq!(log.new_lines("1 a\n2 b\n3 c\n4 d\n"), "4 d\n");
        assert_eq!(log.new_lines("8 x\n9 y\n"), "8 x\n9 y\n");
    }
}
