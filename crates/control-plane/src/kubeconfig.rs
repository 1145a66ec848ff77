//! Kubeconfig files, by a pure function.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::pki::TlsIdentity;

/// A kubeconfig with one cluster, one user and one context, all called `name`. Certificates and key are
/// embedded, so that it refers to no other file.
pub fn kubeconfig(name: &str, server: &str, ca_pem: &str, identity: &TlsIdentity) -> String {
    let (ca, cert, key) = (
        STANDARD.encode(ca_pem),
        STANDARD.encode(&identity.cert_pem),
        STANDARD.encode(&identity.key_pem),
    );
    format!(
        "apiVersion: v1
kind: Config
current-context: {name}
clusters:
- name: {name}
  cluster:
    server: {server}
    certificate-authority-data: {ca}
contexts:
- name: {name}
  context:
    cluster: {name}
    user: {name}
users:
- name: {name}
  user:
    client-certificate-data: {cert}
    client-key-data: {key}
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubeconfig_embeds_certificates() {
        let identity = TlsIdentity {
            cert_pem: "CERT".into(),
            key_pem: "KEY".into(),
        };
        insta::assert_snapshot!(kubeconfig(
            "coracle-7",
            "https://10.0.0.1:6443",
            "CA",
            &identity
        ));
    }
}
