//! Clients of the cluster's API server, from credentials in memory.

use std::net::SocketAddr;

use anyhow::Context;
use control_plane::pki::TlsIdentity;
use kube::config::{KubeConfigOptions, Kubeconfig};

/// A client that reaches the API server at `address` as `identity`.
pub async fn connect(
    address: SocketAddr,
    ca_pem: &str,
    identity: &TlsIdentity,
) -> anyhow::Result<kube::Client> {
    let server = format!("https://{address}");
    let text = control_plane::kubeconfig::kubeconfig("coracle", &server, ca_pem, identity);
    from_kubeconfig(Kubeconfig::from_yaml(&text).context("cannot read our own kubeconfig")?).await
}

/// The client that a kubeconfig describes.
pub async fn from_kubeconfig(kubeconfig: Kubeconfig) -> anyhow::Result<kube::Client> {
    let mut config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    // The site's proxies are for the internet, not for hosts of the cluster.
    config.proxy_url = None;
    Ok(kube::Client::try_from(config)?)
}
