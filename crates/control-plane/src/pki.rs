//! The cluster's certificates: one authority per purpose, made in memory for one cluster and valid
//! about as long as it lives.
//!
//! Separate authorities mean that a certificate can be used for what it was made for and nothing
//! else: a kubelet's serving certificate logs nobody in to the API server.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SubjectPublicKeyInfo,
};
use time::OffsetDateTime;

/// Clocks of nodes differ; certificates are valid from this long before they were made.
pub const CLOCK_TOLERANCE: Duration = Duration::from_secs(3600);

/// The common name that the API server shows to kubelets.
pub const KUBELET_CLIENT: &str = "kube-apiserver-kubelet-client";
/// The common name that the API server shows to aggregated APIs.
pub const FRONT_PROXY_CLIENT: &str = "front-proxy-client";

/// A certificate could not be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot make the certificate for {subject}")]
pub struct PkiError {
    subject: String,
    source: rcgen::Error,
}

/// A certificate with its private key, both PEM.
#[derive(Clone)]
pub struct Identity {
    /// The certificate.
    pub cert_pem: String,
    /// Its private key.
    pub key_pem: String,
}

/// What a certificate is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    /// Logging in.
    Client,
    /// Being found behind an address.
    Server,
}

/// Whom a certificate names.
#[derive(Debug, Clone)]
pub struct Subject {
    /// The user's or server's name.
    pub common_name: String,
    /// The group it belongs to.
    pub group: Option<String>,
    /// The names and addresses that it may be found under.
    pub alt_names: Vec<String>,
}

impl Subject {
    /// A user, perhaps in a group.
    pub fn user(name: impl Into<String>, group: Option<&str>) -> Self {
        Self {
            common_name: name.into(),
            group: group.map(ToOwned::to_owned),
            alt_names: Vec::new(),
        }
    }

    /// A server under some names and addresses.
    pub fn server(name: impl Into<String>, alt_names: Vec<String>) -> Self {
        Self {
            common_name: name.into(),
            group: None,
            alt_names,
        }
    }
}

/// A certificate authority.
pub struct Authority {
    cert_pem: String,
    issuer: Issuer<'static, KeyPair>,
    not_after: OffsetDateTime,
}

impl Authority {
    /// Makes a new one, valid for `lifetime` from now.
    pub fn new(name: &str, lifetime: Duration) -> Result<Self, PkiError> {
        let failed = |source| PkiError {
            subject: name.to_owned(),
            source,
        };
        let not_after = OffsetDateTime::now_utc() + lifetime;
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::CrlSign,
        ];
        (params.not_before, params.not_after) = (not_before(), not_after);
        let cert_pem = params.self_signed(&key).map_err(failed)?.pem();
        let issuer = Issuer::new(params, key);
        Ok(Self {
            cert_pem,
            issuer,
            not_after,
        })
    }

    /// Its own certificate.
    pub fn cert_pem(&self) -> &str {
        &self.cert_pem
    }

    /// Its private key.
    fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Makes a key and signs its certificate.
    pub fn issue(&self, subject: &Subject, usage: Usage) -> Result<Identity, PkiError> {
        let key = new_key(&subject.common_name)?;
        Ok(Identity {
            cert_pem: self.certify(subject, usage, &key)?,
            key_pem: key.serialize_pem(),
        })
    }

    /// Signs a certificate for a key that stays with its owner.
    pub fn sign(
        &self,
        subject: &Subject,
        usage: Usage,
        public_key_pem: &str,
    ) -> Result<String, PkiError> {
        let key = SubjectPublicKeyInfo::from_pem(public_key_pem).map_err(|source| PkiError {
            subject: subject.common_name.clone(),
            source,
        })?;
        self.certify(subject, usage, &key)
    }

    fn certify(
        &self,
        subject: &Subject,
        usage: Usage,
        key: &impl PublicKeyData,
    ) -> Result<String, PkiError> {
        let failed = |source| PkiError {
            subject: subject.common_name.clone(),
            source,
        };
        let mut params = CertificateParams::default();
        let name = &mut params.distinguished_name;
        name.push(DnType::CommonName, subject.common_name.as_str());
        if let Some(group) = &subject.group {
            name.push(DnType::OrganizationName, group.as_str());
        }
        params.subject_alt_names = subject
            .alt_names
            .iter()
            .map(|name| alt_name(name))
            .collect::<Result<_, _>>()
            .map_err(failed)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = match usage {
            Usage::Client => vec![ExtendedKeyUsagePurpose::ClientAuth],
            Usage::Server => vec![ExtendedKeyUsagePurpose::ServerAuth],
        };
        params.use_authority_key_identifier_extension = true;
        (params.not_before, params.not_after) = (not_before(), self.not_after);
        let cert = params.signed_by(key, &self.issuer).map_err(failed)?;
        Ok(cert.pem())
    }
}

/// A new private key, on the curve that all of ours are on.
pub fn new_key(for_whom: &str) -> Result<KeyPair, PkiError> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|source| PkiError {
        subject: for_whom.to_owned(),
        source,
    })
}

fn alt_name(name: &str) -> Result<SanType, rcgen::Error> {
    Ok(match name.parse::<IpAddr>() {
        Ok(address) => SanType::IpAddress(address),
        Err(_) => SanType::DnsName(name.try_into()?),
    })
}

fn not_before() -> OffsetDateTime {
    OffsetDateTime::now_utc() - CLOCK_TOLERANCE
}

/// All authorities of a cluster.
pub struct Pki {
    /// Signs the API server's own certificate; what pods find as `kube-root-ca.crt`.
    pub cluster: Authority,
    /// Signs those who log in to the API server.
    pub client: Authority,
    /// Signs the kubelets' serving certificates.
    pub kubelet: Authority,
    /// Signs the certificate that the API server shows to kubelets.
    pub kubelet_client: Authority,
    /// Signs the certificate that the API server shows to aggregated APIs.
    pub front_proxy: Authority,
    /// Signs both ends of the connection between the cluster's leader and its nodes.
    pub join: Authority,
    service_account: KeyPair,
}

impl Pki {
    /// Makes all authorities anew.
    pub fn new(lifetime: Duration) -> Result<Self, PkiError> {
        let authority = |name: &str| Authority::new(name, lifetime);
        Ok(Self {
            cluster: authority("coracle-cluster")?,
            client: authority("coracle-client")?,
            kubelet: authority("coracle-kubelet")?,
            kubelet_client: authority("coracle-kubelet-client")?,
            front_proxy: authority("coracle-front-proxy")?,
            join: authority("coracle-join")?,
            service_account: new_key("service accounts")?,
        })
    }

    /// An administrator of the whole cluster.
    pub fn administrator(&self) -> Result<Identity, PkiError> {
        let subject = Subject::user("coracle-admin", Some("system:masters"));
        self.client.issue(&subject, Usage::Client)
    }

    /// The files that the upstream programs read, by name. `api_names` are the names and addresses
    /// under which the API server is reached.
    pub fn files(&self, api_names: Vec<String>) -> Result<BTreeMap<String, String>, PkiError> {
        let mut files = BTreeMap::new();
        for (name, authority) in [
            ("cluster-ca", &self.cluster),
            ("client-ca", &self.client),
            ("kubelet-ca", &self.kubelet),
            ("front-proxy-ca", &self.front_proxy),
        ] {
            files.insert(format!("{name}.crt"), authority.cert_pem.clone());
        }
        // The controller-manager signs CertificateSigningRequests with these two.
        files.insert("client-ca.key".into(), self.client.key_pem());
        files.insert("kubelet-ca.key".into(), self.kubelet.key_pem());

        let mut add = |name: &str, identity: Identity| {
            files.insert(format!("{name}.crt"), identity.cert_pem);
            files.insert(format!("{name}.key"), identity.key_pem);
        };
        let server = Subject::server("kube-apiserver", api_names);
        add("apiserver", self.cluster.issue(&server, Usage::Server)?);
        let kubelet_client = Subject::user(KUBELET_CLIENT, None);
        add(
            "kubelet-client",
            self.kubelet_client.issue(&kubelet_client, Usage::Client)?,
        );
        let front_proxy = Subject::user(FRONT_PROXY_CLIENT, None);
        add(
            "front-proxy-client",
            self.front_proxy.issue(&front_proxy, Usage::Client)?,
        );
        // The controller-manager acts for all of its controllers at once, and holds the key that signs
        // service accounts' tokens: it is an administrator in any case.
        for (name, group) in [
            ("kube-controller-manager", Some("system:masters")),
            ("kube-scheduler", None),
        ] {
            let subject = Subject::user(format!("system:{name}"), group);
            add(name, self.client.issue(&subject, Usage::Client)?);
        }
        files.insert(
            "service-account.key".into(),
            self.service_account.serialize_pem(),
        );
        files.insert(
            "service-account.pub".into(),
            self.service_account.public_key_pem(),
        );
        Ok(files)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_made_and_no_two_keys_are_alike() {
        let pki = Pki::new(Duration::from_secs(60)).unwrap();
        let files = pki.files(vec!["node1".into(), "10.0.0.1".into()]).unwrap();
        insta::assert_debug_snapshot!(files.keys().collect::<Vec<_>>());
        let keys: std::collections::BTreeSet<_> = files
            .iter()
            .filter(|(n, _)| n.ends_with(".key"))
            .map(|(_, v)| v)
            .collect();
        assert_eq!(
            keys.len(),
            files.keys().filter(|n| n.ends_with(".key")).count()
        );
    }

    #[test]
    fn a_key_that_stays_with_its_owner_is_certified() {
        let authority = Authority::new("test", Duration::from_secs(60)).unwrap();
        let key = new_key("node1").unwrap();
        let subject = Subject::user("system:node:node1", Some("system:nodes"));
        let pem = authority
            .sign(&subject, Usage::Client, &key.public_key_pem())
            .unwrap();
        assert!(pem.starts_with("-----BEGIN CERTIFICATE-----"));
        assert!(authority.sign(&subject, Usage::Client, "no key").is_err());
    }
}
