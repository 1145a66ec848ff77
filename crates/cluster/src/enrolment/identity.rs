//! The identity of an enrolled node, kept for the next agent if this one dies. It lies in a memfd that the guard creates before
//! it starts the first agent, and that every agent inherits: in no file, argument or environment.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::net::IpAddr;
use std::sync::Arc;

use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};

use super::protocol::JoinResponse;

/// Keys, certificates and settings of an enrolled node.
#[derive(Clone, Serialize, Deserialize)]
pub struct NodeIdentity {
    /// The private key of its client certificates.
    pub client_key_pem: String,
    /// The private key of the kubelet's server certificate.
    pub server_key_pem: String,
    /// The leader's response.
    pub response: JoinResponse,
    /// The address of the leader's host.
    pub leader: IpAddr,
}

/// A memfd that outlives the agent and may hold its identity.
#[derive(Clone)]
pub struct SavedIdentity(Arc<File>);

impl SavedIdentity {
    /// Creates an empty memfd.
    pub fn new() -> std::io::Result<Self> {
        let memory = rustix::fs::memfd_create("coracle-node", MemfdFlags::CLOEXEC)?;
        Ok(Self(Arc::new(File::from(memory))))
    }

    /// The identity that a previous agent saved.
    pub fn load(&self) -> Option<NodeIdentity> {
        let mut text = String::new();
        let mut file = &*self.0;
        file.rewind().ok()?;
        file.read_to_string(&mut text).ok()?;
        // Incomplete JSON, if that agent was killed while it wrote, is ignored.
        serde_json::from_str(&text).ok()
    }

    /// Saves the identity for the next agent.
    pub fn save(&self, identity: &NodeIdentity) -> anyhow::Result<()> {
        let text = serde_json::to_string(identity)?;
        let mut file = &*self.0;
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(text.as_bytes())?;
        Ok(())
    }
}
