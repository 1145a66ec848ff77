//! Logs of nodes' agents, by the API server's way to them.

use std::io::Write;
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, ResourceExt};

use super::here::Found;

/// A node's log can't be followed by one request, so it is asked again.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// Shows the log of the agent of one node, or of all one after the other.
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
            let text = node.ask(&client, tail).await?;
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
    let mut config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    config.proxy_url = None;
    Ok(Client::try_from(config)?)
}

/// How much of a node's log was shown.
struct Seen {
    name: String,
    /// The last lines that were shown, and since when to ask.
    last: Vec<String>,
    since: Option<Timestamp>,
}

impl Seen {
    fn new(name: String) -> Self {
        Self {
            name,
            last: Vec::new(),
            since: None,
        }
    }

    /// What is new.
    async fn ask(&mut self, client: &Client, tail: Option<usize>) -> anyhow::Result<String> {
        let mut path = format!("/api/v1/nodes/{}/proxy/logs/?query=kubelet", self.name);
        if let Some(tail) = tail {
            path.push_str(&format!("&tailLines={tail}"));
        }
        if let Some(since) = self.since {
            path.push_str(&format!("&sinceTime={since}"));
        }
        // The clocks of hosts differ a little: what is told twice is shown once.
        self.since = Some(Timestamp::now() - SignedDuration::from_secs(10));
        let request = http::Request::get(path).body(Vec::new())?;
        let text = client
            .request_text(request)
            .await
            .with_context(|| format!("cannot ask node {} for its log", self.name))?;
        Ok(self.new_lines(&text))
    }

    fn new_lines(&mut self, text: &str) -> String {
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let new: Vec<&String> = lines
            .iter()
            .filter(|line| !self.last.contains(line))
            .collect();
        let shown: String = new.iter().map(|line| format!("{line}\n")).collect();
        self.last = lines;
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_twice_is_shown_once() {
        let mut seen = Seen::new("node1".to_owned());
        assert_eq!(seen.new_lines("1 a\n2 b\n"), "1 a\n2 b\n");
        assert_eq!(seen.new_lines("2 b\n3 c\n"), "3 c\n");
        assert_eq!(seen.new_lines("3 c\n"), "");
    }
}
