//! Enrolment: how the agent of a node becomes a member of the cluster, and the connection that it then keeps to the leader.
//!
//! ```text
//!   leader ──(srun's standard input)──► agent     JoinConfig: the leader's addresses, its CA, a token
//!   leader ◄──(TCP, TLS)─────────────── agent     JoinRequest: the token, the agent's public keys
//!   leader ───────────────────────────► agent     JoinResponse: certificates, the Node's properties
//!   leader ◄──────────────────────────► agent     … the member connection: Registered, End, Left …
//! ```
//!
//! A token admits each node once. An agent that comes back after a crash shows the certificate that it
//! was given. A connection that ends without a last message means that the peer died or the network is cut.

mod client;
mod identity;
mod listener;
mod protocol;

pub use client::{
    Enrolled, EnrolmentRefused, LeaderConnection, NodeTaken, enrol, is_leader_gone, is_retryable,
};
pub use identity::{NodeIdentity, SavedIdentity};
pub use listener::{EnrolmentListener, NodeEvent, SharedNodeConfig};
pub use protocol::{
    AgentMessage, COMPATIBLE_VERSION, HostPathMapping, JoinConfig, JoinRequest, JoinResponse,
    LeaderMessage, clock_problem, unix_time,
};
