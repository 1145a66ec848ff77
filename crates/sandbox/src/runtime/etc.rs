//! The files in /etc that a pod's containers share: hosts, hostname, resolv.conf. Pure.

use k8s_openapi::api::core::v1::{Pod, PodSpec};

use pod_protocol::NodeFacts;

/// Upstream's limit of search domains.
const MAX_SEARCHES: usize = 32;
/// Resolvers ignore further name servers.
const MAX_NAMESERVERS: usize = 3;

/// The pod's host name.
pub fn hostname(pod: &Pod, cluster_domain: &str) -> String {
    let spec = pod.spec.clone().unwrap_or_default();
    let short = short_name(pod, &spec);
    match (
        spec.set_hostname_as_fqdn,
        domain(pod, &spec, cluster_domain),
    ) {
        (Some(true), Some(domain)) => format!("{short}.{domain}"),
        _ => short,
    }
}

fn short_name(pod: &Pod, spec: &PodSpec) -> String {
    if let Some(name) = hostname_override(spec) {
        return name.to_owned();
    }
    let name = pod.metadata.name.clone().unwrap_or_default();
    let mut name = spec
        .hostname
        .clone()
        .filter(|name| !name.is_empty())
        .unwrap_or(name);
    name.truncate(63);
    name.trim_end_matches(['-', '.']).to_owned()
}

/// A name outside of the cluster's domain.
fn hostname_override(spec: &PodSpec) -> Option<&str> {
    spec.hostname_override
        .as_deref()
        .filter(|name| !name.is_empty())
}

fn domain(pod: &Pod, spec: &PodSpec, cluster_domain: &str) -> Option<String> {
    if hostname_override(spec).is_some() {
        return None;
    }
    let subdomain = spec.subdomain.as_ref().filter(|name| !name.is_empty())?;
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    Some(format!("{subdomain}.{namespace}.svc.{cluster_domain}"))
}

/// `/etc/hosts`. With `hostNetwork` it starts with the host's file.
pub fn hosts(pod: &Pod, node: &NodeFacts, pod_ips: &[String], host_file: &str) -> String {
    let spec = pod.spec.clone().unwrap_or_default();
    let mut text = String::new();
    if spec.host_network == Some(true) {
        text.push_str("# Kubernetes-managed hosts file (host network).\n");
        text.push_str(host_file);
        if !text.ends_with('\n') {
            text.push('\n');
        }
    } else {
        text.push_str(
            "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n\
             fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n",
        );
        let short = short_name(pod, &spec);
        let full =
            domain(pod, &spec, &node.cluster_domain).map(|domain| format!("{short}.{domain}\t"));
        for ip in pod_ips {
            text.push_str(&format!(
                "{ip}\t{}{short}\n",
                full.as_deref().unwrap_or_default()
            ));
        }
    }
    let aliases = spec.host_aliases.unwrap_or_default();
    if !aliases.is_empty() {
        text.push_str("\n# Entries added by HostAliases.\n");
    }
    for alias in aliases {
        text.push_str(&format!(
            "{}\t{}\n",
            alias.ip,
            alias.hostnames.unwrap_or_default().join("\t")
        ));
    }
    text
}

/// `/etc/resolv.conf`, from `dnsPolicy`, `dnsConfig` and the host's file.
pub fn resolv_conf(pod: &Pod, node: &NodeFacts, host_file: &str) -> String {
    let spec = pod.spec.clone().unwrap_or_default();
    let host_network = spec.host_network == Some(true);
    let mut conf = match spec.dns_policy.as_deref() {
        Some("None") => ResolvConf::default(),
        Some("ClusterFirst") if !host_network && !node.cluster_dns.is_empty() => {
            ResolvConf::cluster(pod, node, ResolvConf::parse(host_file))
        }
        Some("ClusterFirstWithHostNet") if !node.cluster_dns.is_empty() => {
            ResolvConf::cluster(pod, node, ResolvConf::parse(host_file))
        }
        _ => ResolvConf::parse(host_file),
    };
    if let Some(wanted) = spec.dns_config {
        conf.servers.extend(wanted.nameservers.unwrap_or_default());
        conf.searches.extend(wanted.searches.unwrap_or_default());
        for option in wanted.options.unwrap_or_default() {
            let Some(name) = option.name else { continue };
            conf.options
                .retain(|old| old != &name && !old.starts_with(&format!("{name}:")));
            conf.options.push(
                option
                    .value
                    .map_or(name.clone(), |value| format!("{name}:{value}")),
            );
        }
    }
    conf.text()
}

#[derive(Default)]
struct ResolvConf {
    servers: Vec<String>,
    searches: Vec<String>,
    options: Vec<String>,
}

impl ResolvConf {
    fn parse(file: &str) -> Self {
        let mut conf = Self::default();
        for line in file.lines() {
            let mut fields = line.split_whitespace();
            match fields.next() {
                Some("nameserver") => conf.servers.extend(fields.next().map(str::to_owned)),
                // The last one wins.
                Some("search" | "domain") => conf.searches = fields.map(str::to_owned).collect(),
                Some("options") => conf.options.extend(fields.map(str::to_owned)),
                _ => {}
            }
        }
        conf
    }

    fn cluster(pod: &Pod, node: &NodeFacts, host: Self) -> Self {
        let domain = &node.cluster_domain;
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let mut searches = vec![
            format!("{namespace}.svc.{domain}"),
            format!("svc.{domain}"),
            domain.clone(),
        ];
        searches.extend(host.searches);
        Self {
            servers: node.cluster_dns.clone(),
            searches,
            options: vec!["ndots:5".to_owned()],
        }
    }

    fn text(mut self) -> String {
        let mut seen = std::collections::HashSet::new();
        self.searches.retain(|name| seen.insert(name.clone()));
        self.searches.truncate(MAX_SEARCHES);
        let mut seen = std::collections::HashSet::new();
        self.servers.retain(|server| seen.insert(server.clone()));
        self.servers.truncate(MAX_NAMESERVERS);
        let mut text = String::new();
        if !self.searches.is_empty() {
            text.push_str(&format!("search {}\n", self.searches.join(" ")));
        }
        for server in &self.servers {
            text.push_str(&format!("nameserver {server}\n"));
        }
        if !self.options.is_empty() {
            text.push_str(&format!("options {}\n", self.options.join(" ")));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(spec: serde_json::Value) -> Pod {
        let mut spec = spec;
        spec["containers"] = json!([]);
        serde_json::from_value(
            json!({"metadata": {"name": "web-0", "namespace": "ns"}, "spec": spec}),
        )
        .unwrap()
    }

    fn node() -> NodeFacts {
        NodeFacts {
            cluster_dns: vec!["100.96.0.10".into()],
            cluster_domain: "cluster.local".into(),
            ..Default::default()
        }
    }

    const HOST: &str = "search site.org\nnameserver 10.0.0.1\noptions timeout:1\n";

    #[test]
    fn hostname_follows_spec() {
        assert_eq!(hostname(&pod(json!({})), "cluster.local"), "web-0");
        let fqdn = json!({"hostname": "a", "subdomain": "b", "setHostnameAsFQDN": true});
        assert_eq!(
            hostname(&pod(fqdn), "cluster.local"),
            "a.b.ns.svc.cluster.local"
        );
    }

    #[test]
    fn hosts_files() {
        let aliases = json!([{"ip": "1.2.3.4", "hostnames": ["x", "y"]}]);
        let own = pod(json!({"hostname": "a", "subdomain": "b", "hostAliases": aliases}));
        insta::assert_snapshot!(hosts(
            &own,
            &node(),
            &["100.64.0.5".into()],
            "10.1.1.1 host\n"
        ));
        let host = pod(json!({"hostNetwork": true, "hostAliases": aliases}));
        insta::assert_snapshot!(hosts(&host, &node(), &["10.1.1.1".into()], "10.1.1.1 host"));
    }

    #[test]
    fn hostname_override_has_no_domain() {
        let own = pod(json!({"hostname": "a", "subdomain": "b", "hostnameOverride": "db.example"}));
        assert_eq!(hostname(&own, "cluster.local"), "db.example");
        let text = hosts(&own, &node(), &["100.64.0.5".into()], "");
        assert_eq!(text.lines().last(), Some("100.64.0.5\tdb.example"));
    }

    #[test]
    fn resolv_conf_follows_dns_policy() {
        let with = |policy: &str| {
            pod(json!({"dnsPolicy": policy, "dnsConfig": {
            "nameservers": ["9.9.9.9"], "searches": ["more.org"], "options": [{"name": "ndots", "value": "2"}, {"name": "rotate"}]}}))
        };
        let cluster = resolv_conf(&with("ClusterFirst"), &node(), HOST);
        assert_eq!(
            cluster,
            "search ns.svc.cluster.local svc.cluster.local cluster.local site.org more.org\nnameserver 100.96.0.10\nnameserver 9.9.9.9\noptions ndots:2 rotate\n"
        );
        assert_eq!(
            resolv_conf(&with("None"), &node(), HOST),
            "search more.org\nnameserver 9.9.9.9\noptions ndots:2 rotate\n"
        );
        assert_eq!(
            resolv_conf(&pod(json!({"dnsPolicy": "Default"})), &node(), HOST),
            "search site.org\nnameserver 10.0.0.1\noptions timeout:1\n"
        );
        let without = NodeFacts::default();
        assert_eq!(
            resolv_conf(&pod(json!({"dnsPolicy": "ClusterFirst"})), &without, HOST),
            "search site.org\nnameserver 10.0.0.1\noptions timeout:1\n"
        );
    }
}
