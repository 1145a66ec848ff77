//! Clients of the cluster's API server, made from credentials in memory.

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
    of(Kubeconfig::from_yaml(&text).context("cannot read our own kubeconfig")?).await
}

/// The client that a kubeconfig describes.
pub async fn of(kubeconfig: Kubeconfig) -> anyhow::Result<kube::Client> {
    let mut config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    // The proxies of a site are for the world outside, not for the next rack.
    config.proxy_url = None;
    Ok(kube::Client::try_from(config)?)
}
