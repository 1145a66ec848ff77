//! A signer for pod certificates: a CA, and its responses to PodCertificateRequests.

use std::error::Error;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair,
    PublicKeyData, SubjectPublicKeyInfo,
};
use serde_json::{Value, json};
use time::format_description::well_known::Rfc3339;
use time::{Duration, OffsetDateTime};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, Pem, X509Certificate, X509CertificationRequest};

/// The annotation by which a pod requests a name in its certificate.
pub const NAME: &str = "coracle.test/name";

/// The key types that a pod may request.
pub const KEY_TYPES: [&str; 6] = [
    "ED25519",
    "ECDSAP256",
    "ECDSAP384",
    "ECDSAP521",
    "RSA3072",
    "RSA4096",
];

/// A CA that signs PodCertificateRequests.
#[derive(Debug)]
pub struct Signer {
    issuer: Issuer<'static, KeyPair>,
    /// The CA's certificate, as PEM.
    pub authority: String,
}

/// A certificate in a pod's volume.
#[derive(Debug, PartialEq, Eq)]
pub struct Held {
    /// The DNS name in its subject alternative names.
    pub name: String,
    /// Its lifetime in seconds.
    pub life: i64,
    /// The length of its chain, including itself.
    pub chain: usize,
}

impl Signer {
    /// Makes a new CA.
    pub fn new(name: &str) -> Result<Self, Box<dyn Error>> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = params.self_signed(&key)?.pem();
        Ok(Self {
            issuer: Issuer::new(params, key),
            authority,
        })
    }

    /// The status of a granted request. The certificate is to be renewed after half of its lifetime.
    pub fn issue(&self, request: &Value) -> Result<Value, Box<dyn Error>> {
        let spec = &request["spec"];
        let proof = STANDARD.decode(spec["stubPKCS10Request"].as_str().unwrap_or_default())?;
        let (_, proof) = X509CertificationRequest::from_der(&proof)?;
        let public =
            SubjectPublicKeyInfo::from_der(proof.certification_request_info.subject_pki.raw)?;
        let name = spec["unverifiedUserAnnotations"][NAME].as_str();
        let mut params = CertificateParams::new(vec![name.unwrap_or("nameless").to_owned()])?;
        params.distinguished_name = DistinguishedName::new();
        let begin = now()?;
        let seconds = spec["maxExpirationSeconds"].as_i64().unwrap_or_default();
        let end = begin + Duration::seconds(seconds);
        (params.not_before, params.not_after) = (begin, end);
        let certificate = params.signed_by(&public, &self.issuer)?.pem();
        Ok(json!({
            "certificateChain": format!("{certificate}not a part of it\n{}", self.authority),
            "notBefore": begin.format(&Rfc3339)?,
            "beginRefreshAt": (begin + Duration::seconds(seconds / 2)).format(&Rfc3339)?,
            "notAfter": end.format(&Rfc3339)?,
            "conditions": [condition("Issued", "Fine", "as you like")?],
        }))
    }
}

impl Held {
    /// Parses a key and its chain, and checks that they match.
    pub fn read(key: &str, chain: &str) -> Result<Self, Box<dyn Error>> {
        let mut certificates = vec![];
        for block in Pem::iter_from_buffer(chain.as_bytes()) {
            let block = block?;
            if block.label == "CERTIFICATE" {
                certificates.push(block.contents);
            }
        }
        let first = certificates.first().ok_or("no certificate")?;
        let (_, first) = X509Certificate::from_der(first)?;
        let key = KeyPair::from_pem(key)?;
        if key.subject_public_key_info() != first.public_key().raw {
            return Err("the certificate is for another key".into());
        }
        let names = first.subject_alternative_name()?.ok_or("no name")?;
        let name = names
            .value
            .general_names
            .iter()
            .find_map(|name| match name {
                GeneralName::DNSName(name) => Some((*name).to_owned()),
                _ => None,
            });
        let validity = first.validity();
        Ok(Self {
            name: name.unwrap_or_default(),
            life: validity.not_after.timestamp() - validity.not_before.timestamp(),
            chain: certificates.len(),
        })
    }
}

/// The status of a request that is `Denied` or `Failed`.
pub fn refusal(kind: &str) -> Result<Value, Box<dyn Error>> {
    Ok(json!({ "conditions": [condition(kind, "Whim", "not today")?] }))
}

fn condition(kind: &str, reason: &str, message: &str) -> Result<Value, Box<dyn Error>> {
    let time = now()?.format(&Rfc3339)?;
    Ok(
        json!({ "type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": time }),
    )
}

/// The current time in whole seconds, the precision of certificates.
fn now() -> Result<OffsetDateTime, Box<dyn Error>> {
    Ok(OffsetDateTime::from_unix_timestamp(
        OffsetDateTime::now_utc().unix_timestamp(),
    )?)
}
