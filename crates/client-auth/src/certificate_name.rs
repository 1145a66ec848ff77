//! The common name of a client certificate.

use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The common name of a certificate that TLS has already verified; Kubernetes uses it as the user name.
///
/// `None` unless there is exactly one: with two common names, each reader could pick a different one.
pub fn certificate_common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let mut names = parsed.subject().iter_common_name();
    let common_name = names.next()?.as_str().ok()?.to_owned();
    (names.next().is_none() && !common_name.is_empty()).then_some(common_name)
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
    fn returns_the_common_name() {
        let name = certificate_common_name(&certificate(&["kube-apiserver-kubelet-client"]));
        assert_eq!(name.as_deref(), Some("kube-apiserver-kubelet-client"));
    }

    #[test]
    fn certificate_without_common_name_is_rejected() {
        assert_eq!(certificate_common_name(&certificate(&[])), None);
        let garbage = CertificateDer::from(b"garbage".as_slice());
        assert_eq!(certificate_common_name(&garbage), None);
    }
}
