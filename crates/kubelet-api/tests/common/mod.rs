//! A server with generated certificates, and connections to it.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use kubelet_api::{AccessPolicy, ApiError, PodSource, STREAM_IDLE_TIMEOUT, ServerIdentity, serve};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::crypto::aws_lc_rs;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

/// The common name of the API server's client certificate.
pub const API_SERVER_CLIENT: &str = "kube-apiserver-kubelet-client";

/// A server on the loopback address, and the CA of its clients.
pub struct Server {
    pub address: SocketAddr,
    pub ca: Ca,
    pub shutdown: CancellationToken,
    pub task: JoinHandle<Result<(), ApiError>>,
}

impl Server {
    pub async fn start(pods: impl PodSource + 'static, access: AccessPolicy) -> Self {
        let ca = Ca::new("test CA");
        let (cert_chain_pem, key_pem) =
            ca.sign("system:node:node1", ExtendedKeyUsagePurpose::ServerAuth);
        let identity = ServerIdentity {
            cert_chain_pem,
            key_pem,
            client_ca_pem: ca.pem.clone(),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(serve(
            listener,
            identity,
            access,
            Arc::new(pods),
            STREAM_IDLE_TIMEOUT,
            shutdown.clone(),
        ));
        Self {
            address,
            ca,
            shutdown,
            task,
        }
    }

    /// Opens a TLS connection, with this client certificate and key or without any.
    pub async fn connect(
        &self,
        client: Option<(String, String)>,
    ) -> io::Result<TlsStream<TcpStream>> {
        self.ca.connect(self.address, client).await
    }
}

/// A CA that signs certificates.
pub struct Ca {
    pub pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Ca {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    pub fn sign(&self, common_name: &str, usage: ExtendedKeyUsagePurpose) -> (String, String) {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::CommonName, common_name);
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        (
            params.signed_by(&key, &self.issuer).unwrap().pem(),
            key.serialize_pem(),
        )
    }

    pub fn client(&self, common_name: &str) -> (String, String) {
        self.sign(common_name, ExtendedKeyUsagePurpose::ClientAuth)
    }

    /// Opens a TLS connection, with this client certificate and key or without any.
    pub async fn connect(
        &self,
        address: SocketAddr,
        client: Option<(String, String)>,
    ) -> io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(self.pem.as_bytes()).unwrap())
            .unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match client {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => builder
                .with_client_auth_cert(
                    vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()],
                    PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
                )
                .unwrap(),
        };
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::try_from("127.0.0.1").unwrap();
        TlsConnector::from(Arc::new(config))
            .connect(name, stream)
            .await
    }
}
