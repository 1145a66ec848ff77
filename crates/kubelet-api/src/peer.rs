//! Who is calling: the subject of the certificate that the peer proved to own.

use std::fmt;

use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

/// A caller, as its verified certificate names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The certificate's common name, which Kubernetes takes for the user name.
    pub common_name: String,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.common_name)
    }
}

/// Names the owner of a certificate that TLS has already verified; `None` if it carries no single common name.
///
/// Two common names are as bad as none: which of them counts would be up to the reader.
pub fn peer_of(certificate: &CertificateDer<'_>) -> Option<Peer> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let mut names = parsed.subject().iter_common_name();
    let common_name = names.next()?.as_str().ok()?.to_owned();
    (names.next().is_none() && !common_name.is_empty()).then_some(Peer { common_name })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(common_names: &[&str]) -> CertificateDer<'static> {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for name in common_names {
            params
                .distinguished_name
                .push(rcgen::DnType::CommonName, *name);
        }
        let key = rcgen::KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().clone()
    }

    #[test]
    fn names_the_common_name() {
        let peer = peer_of(&certificate(&["kube-apiserver-kubelet-client"])).unwrap();
        assert_eq!(peer.common_name, "kube-apiserver-kubelet-client");
    }

    #[test]
    fn no_name_is_no_peer() {
        assert_eq!(peer_of(&certificate(&[])), None);
        assert_eq!(peer_of(&CertificateDer::from(b"garbage".as_slice())), None);
    }
}
