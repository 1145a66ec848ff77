//! Private keys of pod certificates, and the proof of possession that a request contains.

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::Ed25519KeyPair;
use rcgen::{
    CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384,
    PKCS_ECDSA_P521_SHA512, PKCS_RSA_SHA256, RsaKeySize,
};
use volumes::content::pem;

/// A new private key.
pub(super) struct PrivateKey {
    /// PKCS#8 in PEM.
    pub pem: String,
    /// A certificate signing request (PKCS#10, DER) with an empty subject: the signer only uses its key and signature.
    pub proof: Vec<u8>,
}

/// Why no key was generated.
#[derive(Debug, thiserror::Error)]
pub(super) enum PrivateKeyError {
    /// The API server should have rejected this type.
    #[error("unknown key type {0:?}")]
    UnknownType(String),
    /// The cryptographic library has failed.
    #[error("while generating a key of type {key_type}: {source}")]
    Failed {
        key_type: String,
        source: rcgen::Error,
    },
}

/// Generates a key of one of the API's types. RSA keys take up to a second of CPU time.
pub(super) fn generate(key_type: &str) -> Result<PrivateKey, PrivateKeyError> {
    let failed = |source| PrivateKeyError::Failed {
        key_type: key_type.to_owned(),
        source,
    };
    let key = match key_type {
        "ED25519" => ed25519(),
        "ECDSAP256" => KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256),
        "ECDSAP384" => KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384),
        "ECDSAP521" => KeyPair::generate_for(&PKCS_ECDSA_P521_SHA512),
        "RSA3072" => KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_3072),
        "RSA4096" => KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_4096),
        other => return Err(PrivateKeyError::UnknownType(other.to_owned())),
    }
    .map_err(failed)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    let request = params.serialize_request(&key).map_err(failed)?;
    Ok(PrivateKey {
        pem: pem::encode("PRIVATE KEY", key.serialized_der()),
        proof: request.der().to_vec(),
    })
}

/// In version 1 of PKCS#8: many programs cannot read version 2, which includes the public key.
fn ed25519() -> Result<KeyPair, rcgen::Error> {
    let document = Ed25519KeyPair::generate_pkcs8v1(&SystemRandom::new())
        .map_err(|_| rcgen::Error::KeyGenerationUnavailable)?;
    KeyPair::try_from(document.as_ref())
}

#[cfg(test)]
mod tests {
    use rcgen::CertificateSigningRequestParams;
    use x509_parser::prelude::{FromDer, X509CertificationRequest};

    use super::*;

    #[test]
    fn keys_of_all_types_are_generated() {
        let types = [
            ("ED25519", "1.3.101.112"),
            ("ECDSAP256", "1.2.840.10045.2.1"),
            ("ECDSAP384", "1.2.840.10045.2.1"),
            ("ECDSAP521", "1.2.840.10045.2.1"),
            ("RSA3072", "1.2.840.113549.1.1.1"),
            ("RSA4096", "1.2.840.113549.1.1.1"),
        ];
        for (key_type, algorithm) in types {
            let key = generate(key_type).unwrap();
            let (rest, request) = X509CertificationRequest::from_der(&key.proof).unwrap();
            assert!(rest.is_empty());
            let info = &request.certification_request_info;
            assert_eq!(info.subject.iter().count(), 0, "{key_type}");
            assert_eq!(info.attributes().len(), 0, "{key_type}");
            let public = &info.subject_pki;
            assert_eq!(public.algorithm.algorithm.to_id_string(), algorithm);
            // The request contains the public key of the private key.
            let private = KeyPair::from_pem(&key.pem).unwrap();
            assert_eq!(
                private.public_key_raw(),
                &*public.subject_public_key.data,
                "{key_type}"
            );
            assert!(key.pem.starts_with("-----BEGIN PRIVATE KEY-----\n"));
        }
        let key = generate("ECDSAP256").unwrap();
        // This verifies the signature too.
        CertificateSigningRequestParams::from_der(&key.proof.into()).unwrap();
    }

    #[test]
    fn keys_differ_and_unknown_type_is_an_error() {
        let two = [(); 2].map(|()| generate("ECDSAP256").unwrap().pem);
        assert_ne!(two[0], two[1]);
        let error = generate("DSA").err().unwrap();
        assert_eq!(error.to_string(), "unknown key type \"DSA\"");
    }
}
