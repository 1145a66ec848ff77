//! A new key, and the proof that whoever asks for a certificate has it.

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::Ed25519KeyPair;
use rcgen::{
    CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384,
    PKCS_ECDSA_P521_SHA512, PKCS_RSA_SHA256, RsaKeySize,
};
use volumes::content::pem;

/// A key that nobody else has.
pub(super) struct Key {
    /// PKCS#8, as PEM.
    pub pem: String,
    /// A signing request (PKCS#10, DER) that says nothing but whose it is: all else the API server knows better.
    pub proof: Vec<u8>,
}

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeyError {
    /// A type that the API server should not have let pass.
    #[error("unknown key type {0:?}")]
    Unknown(String),
    /// The machine has no randomness, or the like.
    #[error("while generating a key of type {key_type}: {source}")]
    Failed {
        key_type: String,
        source: rcgen::Error,
    },
}

/// Makes a key of one of the API's types. Long ones of type RSA take a processor for a second.
pub(super) fn generate(key_type: &str) -> Result<Key, KeyError> {
    let failed = |source| KeyError::Failed {
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
        other => return Err(KeyError::Unknown(other.to_owned())),
    }
    .map_err(failed)?;
    let mut nobody = CertificateParams::default();
    nobody.distinguished_name = DistinguishedName::new();
    let request = nobody.serialize_request(&key).map_err(failed)?;
    Ok(Key {
        pem: pem::encode("PRIVATE KEY", key.serialized_der()),
        proof: request.der().to_vec(),
    })
}

/// In version 1 of PKCS#8: the newer one, which has the public key in it, is no key to many programs.
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
    fn every_type_of_the_api_has_its_key() {
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
            // The key that is kept is the one that the request is about.
            let kept = KeyPair::from_pem(&key.pem).unwrap();
            assert_eq!(
                kept.public_key_raw(),
                &*public.subject_public_key.data,
                "{key_type}"
            );
            assert!(key.pem.starts_with("-----BEGIN PRIVATE KEY-----\n"));
        }
        let key = generate("ECDSAP256").unwrap();
        // This reads the signature too.
        CertificateSigningRequestParams::from_der(&key.proof.into()).unwrap();
    }

    #[test]
    fn keys_differ_and_unknown_types_have_none() {
        let two = [(); 2].map(|()| generate("ECDSAP256").unwrap().pem);
        assert_ne!(two[0], two[1]);
        let error = generate("DSA").err().unwrap();
        assert_eq!(error.to_string(), "unknown key type \"DSA\"");
    }
}
