//! Logs of nodes' agents, fetched through the API server.

use console::{Failure, FailureCode, say};
use std::io::Write;
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::ListParams;
use kube::config::Kubeconfig;
use kube::{Api, Client, ResourceExt};

use super::here::Found;

/// Polling interval: the kubelet's log endpoint cannot follow.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// Prints the log of one node's agent, or of all nodes' agents in turn.
pub async fn show(
    cluster: &Found,
    node: Option<&str>,
    tail: Option<usize>,
    follow: bool,
) -> anyhow::Result<()> {
    let client = connect(cluster).await?;
    let nodes = match node {
        Some(node) => vec![node.to_owned()],
        None => {
            let nodes: Api<Node> = Api::all(client.clone());
            let list = nodes.list(&ListParams::default()).await?;
            list.iter().map(ResourceExt::name_any).collect()
        }
    };
    let named = nodes.len() > 1;
    let mut seen: Vec<Seen> = nodes.into_iter().map(Seen::new).collect();
    let mut tail = tail;
    loop {
        for node in &mut seen {
            let text = match node.ask(&client, tail).await {
                // With several nodes, report the error once and go on with the others.
                Err(error) if named => {
                    if !std::mem::replace(&mut node.is_silent, true) {
                        say(format_args!("coracle: {error:#}"));
                    }
                    continue;
                }
                answer => answer?,
            };
            node.is_silent = false;
            let mut out = std::io::stdout().lock();
            for line in text.lines() {
                match named {
                    true => writeln!(out, "{}: {line}", node.name)?,
                    false => writeln!(out, "{line}")?,
                }
            }
            out.flush()?;
        }
        if !follow {
            return Ok(());
        }
        tail = None;
        tokio::time::sleep(ASK_EVERY).await;
    }
}

async fn connect(cluster: &Found) -> anyhow::Result<Client> {
    let path = cluster.kubeconfig();
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let kubeconfig =
        Kubeconfig::from_yaml(&text).context("cannot read the cluster's kubeconfig")?;
    cluster::client::from_kubeconfig(harmless(kubeconfig)).await
}

/// Reduces a kubeconfig to server and keys. Its author is not verified, and kubeconfigs can name programs to execute and files to
/// send.
fn harmless(mut kubeconfig: Kubeconfig) -> Kubeconfig {
    for cluster in kubeconfig
        .clusters
        .iter_mut()
        .flat_map(|named| &mut named.cluster)
    {
        *cluster = kube::config::Cluster {
            server: cluster.server.take(),
            certificate_authority_data: cluster.certificate_authority_data.take(),
            ..Default::default()
        };
    }
    for user in kubeconfig
        .auth_infos
        .iter_mut()
        .flat_map(|named| &mut named.auth_info)
    {
        *user = kube::config::AuthInfo {
            client_certificate_data: user.client_certificate_data.take(),
            client_key_data: user.client_key_data.take(),
            ..Default::default()
        };
    }
    kubeconfig
}

/// The error about an unknown node; lists the existing ones.
async fn unknown(client: &Client, name: &str) -> Failure {
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
    .hint(format!("its nodes are {}", names.join(", ")))
}

/// The state of one node's log.
struct Seen {
    name: String,
    /// The last line that was printed, and the start time of the next request.
    last: String,
    since: Option<Timestamp>,
    /// The last request failed.
    is_silent: bool,
}

impl Seen {
    fn new(name: String) -> Self {
        Self {
            name,
            last: String::new(),
            since: None,
            is_silent: false,
        }
    }

    /// Fetches the lines since the last request.
    async fn ask(&mut self, client: &Client, tail: Option<usize>) -> anyhow::Result<String> {
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
                return Err(unknown(client, &self.name).await.into());
            }
            answer => {
                answer.with_context(|| format!("cannot ask node {} for its log", self.name))?
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
    fn kubeconfig_cannot_name_programs_or_files() {
        let text = r#"{"current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": "https://1.2.3.4", "certificate-authority": "/etc/passwd", "proxy-url": "http://evil"}}],
            "users": [{"name": "u", "user": {"exec": {"apiVersion": "v1", "command": "/bin/evil"}, "tokenFile": "/etc/passwd", "client-key-data": "a2V5"}}]}"#;
        let left = format!("{:?}", harmless(Kubeconfig::from_yaml(text).unwrap()));
        for evil in ["evil", "passwd"] {
            assert!(!left.contains(evil), "{left}");
        }
        assert!(left.contains("https://1.2.3.4"), "{left}");
    }

    #[test]
    fn lines_are_shown_once() {
        let mut seen = Seen::new("node1".to_owned());
        assert_eq!(seen.new_lines("1 a\n2 b\n"), "1 a\n2 b\n");
        assert_eq!(seen.new_lines("2 b\n3 c\n"), "3 c\n");
        assert_eq!(seen.new_lines("3 c\n"), "");
        assert_eq!(seen.new_lines(""), "");
        // With --tail the first response has fewer lines than the next.
        assert_eq!(seen.new_lines("1 a\n2 b\n3 c\n4 d\n"), "4 d\n");
        assert_eq!(seen.new_lines("8 x\n9 y\n"), "8 x\n9 y\n");
    }
}
