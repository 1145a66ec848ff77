//! Logs of nodes' agents, by the API server's way to them.

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
            let text = match node.ask(&client, tail).await {
                // The others may answer.
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

/// Who wrote it isn't known for sure, so nothing is left of it but the server and keys: kubeconfigs can name programs to run and
/// files to send.
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

/// That there is no such node, and which there are.
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

/// How much of a node's log was shown.
struct Seen {
    name: String,
    /// The last line that was shown, and since when to ask.
    last: String,
    since: Option<Timestamp>,
    /// It didn't answer the last time.
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

    /// What is new.
    async fn ask(&mut self, client: &Client, tail: Option<usize>) -> anyhow::Result<String> {
        let mut path = format!("/api/v1/nodes/{}/proxy/logs/?query=kubelet", self.name);
        if let Some(tail) = tail {
            // One at least, to know later what comes after it.
            path.push_str(&format!("&tailLines={}", tail.max(1)));
        }
        if let Some(since) = self.since {
            path.push_str(&format!("&sinceTime={since}"));
        }
        // The clocks of hosts differ a little: what is told twice is shown once.
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

    /// What follows on the last line that was shown; all of it, if that line isn't there any more.
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
    fn a_kubeconfig_can_not_name_programs_and_files() {
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
    fn what_is_told_twice_is_shown_once() {
        let mut seen = Seen::new("node1".to_owned());
        assert_eq!(seen.new_lines("1 a\n2 b\n"), "1 a\n2 b\n");
        assert_eq!(seen.new_lines("2 b\n3 c\n"), "3 c\n");
        assert_eq!(seen.new_lines("3 c\n"), "");
        assert_eq!(seen.new_lines(""), "");
        // With --tail less was shown at first than is told later.
        assert_eq!(seen.new_lines("1 a\n2 b\n3 c\n4 d\n"), "4 d\n");
        assert_eq!(seen.new_lines("8 x\n9 y\n"), "8 x\n9 y\n");
    }
}
