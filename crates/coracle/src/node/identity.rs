//! Who this node is, kept for an agent that replaces a dead one: in memory that the guard made before
//! it started the first agent, and that every agent inherits. No file, no argument, no environment.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::net::IpAddr;
use std::sync::Arc;

use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};

use crate::handover::Welcome;

/// A node that was admitted to the cluster.
#[derive(Clone, Serialize, Deserialize)]
pub struct NodeIdentity {
    /// The key for logging in.
    pub client_key_pem: String,
    /// The key of the kubelet's server.
    pub server_key_pem: String,
    /// What the leader said.
    pub welcome: Welcome,
    /// The address at which the leader's host answered.
    pub leader: IpAddr,
}

/// Memory that outlives an agent.
#[derive(Clone)]
pub struct Kept(Arc<File>);

impl Kept {
    /// Empty memory.
    pub fn new() -> std::io::Result<Self> {
        let memory = rustix::fs::memfd_create("coracle-node", MemfdFlags::CLOEXEC)?;
        Ok(Self(Arc::new(File::from(memory))))
    }

    /// What an agent before us kept.
    pub fn load(&self) -> Option<NodeIdentity> {
        let mut text = String::new();
        let mut file = &*self.0;
        file.rewind().ok()?;
        file.read_to_string(&mut text).ok()?;
        // Half of it, if that agent was killed while writing, is nothing.
        serde_json::from_str(&text).ok()
    }

    /// Keeps an identity for those after us.
    pub fn save(&self, identity: &NodeIdentity) -> anyhow::Result<()> {
        let text = serde_json::to_string(identity)?;
        let mut file = &*self.0;
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(text.as_bytes())?;
        Ok(())
    }
}
