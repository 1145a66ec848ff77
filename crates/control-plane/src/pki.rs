//! The cluster's certificates: one CA per purpose. They are generated in memory for one cluster, or come from a directory
//! ([`crate::key_dir`]).
//!
//! With separate CAs a certificate works only for its purpose: a kubelet's serving certificate does not authenticate to the
//! API server.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SubjectPublicKeyInfo,
};
use time::OffsetDateTime;
use x509_parser::pem::parse_x509_pem;

/// Certificates are valid from this long before their creation, because the clocks of nodes differ.
pub const CLOCK_TOLERANCE: Duration = Duration::from_secs(3600);

/// The common name of the API server's client certificate for kubelets.
pub const KUBELET_CLIENT: &str = "kube-apiserver-kubelet-client";
/// The common name of the API server's client certificate for aggregated APIs.
pub const FRONT_PROXY_CLIENT: &str = "front-proxy-client";

/// A certificate cannot be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot create the certificate for {subject}")]
pub struct PkiError {
    subject: String,
    source: rcgen::Error,
}

/// A certificate with its private key, both in PEM.
#[derive(Clone)]
pub struct TlsIdentity {
    /// The certificate.
    pub cert_pem: String,
    /// The private key.
    pub key_pem: String,
}

/// The extended key usage of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CertificateUsage {
    /// TLS client authentication.
    Client,
    /// TLS server authentication.
    Server,
}

/// The subject of a certificate.
#[derive(Debug, Clone)]
pub struct CertificateSubject {
    /// The name of the user or server.
    pub common_name: String,
    /// The user's group (organization).
    pub group: Option<String>,
    /// The server's DNS names and addresses.
    pub alt_names: Vec<String>,
}

impl CertificateSubject {
    /// A user, optionally in a group.
    pub fn user(name: impl Into<String>, group: Option<&str>) -> Self {
        Self {
            common_name: name.into(),
            group: group.map(ToOwned::to_owned),
            alt_names: Vec::new(),
        }
    }

    /// A server with DNS names and addresses.
    pub fn server(name: impl Into<String>, alt_names: Vec<String>) -> Self {
        Self {
            common_name: name.into(),
            group: None,
            alt_names,
        }
    }
}

/// A certificate authority.
pub struct CertificateAuthority {
    cert_pem: String,
    issuer: Issuer<'static, KeyPair>,
    /// When the certificates that it signs expire.
    not_after: OffsetDateTime,
}

impl CertificateAuthority {
    /// Generates a CA that is valid for `lifetime` from now.
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

    /// Loads a CA. Certificates that it signs are valid for `lifetime`, and as long as the CA at most.
    pub(crate) fn from_pem(
        cert_pem: &str,
        key_pem: &str,
        lifetime: Duration,
    ) -> Result<Self, String> {
        let key = KeyPair::from_pem(key_pem).map_err(|error| format!("its key: {error}"))?;
        let (_, pem) = parse_x509_pem(cert_pem.as_bytes()).map_err(|error| error.to_string())?;
        let cert = pem.parse_x509().map_err(|error| error.to_string())?;
        if cert.public_key().raw != key.subject_public_key_info() {
            return Err("it is not the certificate of its key".to_owned());
        }
        let now = OffsetDateTime::now_utc();
        let end = OffsetDateTime::from_unix_timestamp(cert.validity().not_after.timestamp());
        let end = end.map_err(|error| error.to_string())?;
        if end <= now {
            return Err(format!("it expired on {}", end.date()));
        }
        let issuer = Issuer::from_ca_cert_pem(cert_pem, key).map_err(|error| error.to_string())?;
        Ok(Self {
            cert_pem: cert_pem.to_owned(),
            issuer,
            not_after: end.min(now + lifetime),
        })
    }

    /// The CA's certificate.
    pub fn cert_pem(&self) -> &str {
        &self.cert_pem
    }

    /// The CA's private key.
    pub(crate) fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Generates a key and signs its certificate.
    pub fn issue(
        &self,
        subject: &CertificateSubject,
        usage: CertificateUsage,
    ) -> Result<TlsIdentity, PkiError> {
        let key = new_key(&subject.common_name)?;
        Ok(TlsIdentity {
            cert_pem: self.certify(subject, usage, &key)?,
            key_pem: key.serialize_pem(),
        })
    }

    /// Signs a certificate for a public key. The private key stays with its owner.
    pub fn sign(
        &self,
        subject: &CertificateSubject,
        usage: CertificateUsage,
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
        subject: &CertificateSubject,
        usage: CertificateUsage,
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
            CertificateUsage::Client => vec![ExtendedKeyUsagePurpose::ClientAuth],
            CertificateUsage::Server => vec![ExtendedKeyUsagePurpose::ServerAuth],
        };
        params.use_authority_key_identifier_extension = true;
        (params.not_before, params.not_after) = (not_before(), self.not_after);
        let cert = params.signed_by(key, &self.issuer).map_err(failed)?;
        Ok(cert.pem())
    }
}

/// Generates a private key (P-256); `subject` is for error messages.
pub fn new_key(subject: &str) -> Result<KeyPair, PkiError> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|source| PkiError {
        subject: subject.to_owned(),
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

/// All CAs of a cluster.
pub struct ClusterPki {
    /// Signs the API server's serving certificate; pods find this CA in `kube-root-ca.crt`.
    pub cluster: CertificateAuthority,
    /// Signs client certificates for the API server.
    pub client: CertificateAuthority,
    /// Signs the kubelets' serving certificates.
    pub kubelet: CertificateAuthority,
    /// Signs the API server's client certificate for kubelets.
    pub kubelet_client: CertificateAuthority,
    /// Signs the API server's client certificate for aggregated APIs.
    pub front_proxy: CertificateAuthority,
    /// Signs both ends of the connection between the cluster's leader and its nodes.
    pub join: CertificateAuthority,
    service_account: KeyPair,
}

impl ClusterPki {
    /// Generates all CAs.
    pub fn new(lifetime: Duration) -> Result<Self, PkiError> {
        let authority =
            |name: &str| CertificateAuthority::new(&format!("coracle-{name}"), lifetime);
        Self::with_authorities(authority, new_key("service accounts")?)
    }

    /// Gets each CA by its name.
    pub(crate) fn with_authorities<E>(
        authority: impl Fn(&str) -> Result<CertificateAuthority, E>,
        service_account: KeyPair,
    ) -> Result<Self, E> {
        Ok(Self {
            cluster: authority("cluster")?,
            client: authority("client")?,
            kubelet: authority("kubelet")?,
            kubelet_client: authority("kubelet-client")?,
            front_proxy: authority("front-proxy")?,
            join: authority("join")?,
            service_account,
        })
    }

    /// All CAs with their names.
    pub(crate) fn authorities(&self) -> [(&'static str, &CertificateAuthority); 6] {
        [
            ("cluster", &self.cluster),
            ("client", &self.client),
            ("kubelet", &self.kubelet),
            ("kubelet-client", &self.kubelet_client),
            ("front-proxy", &self.front_proxy),
            ("join", &self.join),
        ]
    }

    /// The key that signs the tokens of service accounts.
    pub(crate) fn service_account(&self) -> &KeyPair {
        &self.service_account
    }

    /// A client certificate of a cluster administrator.
    pub fn administrator(&self) -> Result<TlsIdentity, PkiError> {
        let subject = CertificateSubject::user("coracle-admin", Some("system:masters"));
        self.client.issue(&subject, CertificateUsage::Client)
    }

    /// The files for the upstream programs, by name. `api_names` are the API server's DNS names and addresses.
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

        let mut add = |name: &str, identity: TlsIdentity| {
            files.insert(format!("{name}.crt"), identity.cert_pem);
            files.insert(format!("{name}.key"), identity.key_pem);
        };
        let server = CertificateSubject::server("kube-apiserver", api_names);
        add(
            "apiserver",
            self.cluster.issue(&server, CertificateUsage::Server)?,
        );
        let kubelet_client = CertificateSubject::user(KUBELET_CLIENT, None);
        add(
            "kubelet-client",
            self.kubelet_client
                .issue(&kubelet_client, CertificateUsage::Client)?,
        );
        let front_proxy = CertificateSubject::user(FRONT_PROXY_CLIENT, None);
        add(
            "front-proxy-client",
            self.front_proxy
                .issue(&front_proxy, CertificateUsage::Client)?,
        );
        // The controller-manager uses one identity for all controllers, and has the key that signs service
        // account tokens, so it is an administrator in any case.
        for (name, group) in [
            ("kube-controller-manager", Some("system:masters")),
            ("kube-scheduler", None),
        ] {
            let subject = CertificateSubject::user(format!("system:{name}"), group);
            add(name, self.client.issue(&subject, CertificateUsage::Client)?);
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
    fn all_files_exist_and_keys_differ() {
        let pki = ClusterPki::new(Duration::from_secs(60)).unwrap();
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
    fn public_key_is_certified() {
        let authority = CertificateAuthority::new("test", Duration::from_secs(60)).unwrap();
        let key = new_key("node1").unwrap();
        let subject = CertificateSubject::user("system:node:node1", Some("system:nodes"));
        let pem = authority
            .sign(&subject, CertificateUsage::Client, &key.public_key_pem())
            .unwrap();
        assert!(pem.starts_with("-----BEGIN CERTIFICATE-----"));
        assert!(
            authority
                .sign(&subject, CertificateUsage::Client, "no key")
                .is_err()
        );
    }
}
