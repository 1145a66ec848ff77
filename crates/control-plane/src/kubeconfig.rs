//! Kubeconfig files, as a pure function of what they hold.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::pki::Identity;

/// A kubeconfig with one cluster, one user and one context, all called `name`, with everything
/// embedded so that the file is complete in itself.
pub fn kubeconfig(name: &str, server: &str, ca_pem: &str, identity: &Identity) -> String {
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
    fn it_is_complete_in_itself() {
        let identity = Identity {
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
