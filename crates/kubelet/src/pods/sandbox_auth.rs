//! The credentials of sandboxes: a launch token for the first connection, then a key of the sandbox's own.
//!
//! Both are derived from the node's key, so that the next kubelet accepts the sandboxes of this one without a file:
//!
//! ```text
//!   launch token   NONCE.HMAC(node key, "token" UID NONCE)     valid once
//!   key            NONCE.HMAC(node key, "key" UID NONCE)       sent in response to the token
//! ```
//!
//! A kubelet refuses the token of every sandbox that it has seen. A new kubelet has seen none; it refuses the token of a sandbox from
//! the moment when that connects with its key, which takes a second at most.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;

use aws_lc_rs::hmac;
use pod_protocol::{SandboxCredential, SandboxHello, SandboxWelcome};

/// The key from which a node derives the credentials of its sandboxes. It outlives the agent.
#[derive(Clone)]
pub struct NodeKey(pub [u8; 32]);

impl std::fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NodeKey")
    }
}

/// The purpose of a credential.
#[derive(Clone, Copy)]
enum Purpose {
    Token,
    Key,
}

/// Issues and checks the credentials of this node's sandboxes.
#[derive(Debug)]
pub(super) struct SandboxAuthenticator {
    key: hmac::Key,
    /// By uid: the nonces of sandboxes whose token is used up.
    used: Mutex<HashMap<String, HashSet<String>>>,
}

impl SandboxAuthenticator {
    pub(super) fn new(key: &NodeKey) -> Self {
        Self {
            key: hmac::Key::new(hmac::HMAC_SHA256, &key.0),
            used: Mutex::default(),
        }
    }

    /// A token for a new sandbox of a pod.
    pub(super) fn issue_token(&self, uid: &str) -> String {
        let mut nonce = [0; 16];
        // The system's source of randomness does not fail on Linux.
        aws_lc_rs::rand::fill(&mut nonce).expect("random bytes");
        self.derive(Purpose::Token, uid, &hex(&nonce))
    }

    /// The response to a hello with a valid credential.
    pub(super) fn authenticate(&self, hello: &SandboxHello) -> Option<SandboxWelcome> {
        let (purpose, credential) = match &hello.credential {
            SandboxCredential::LaunchToken(token) => (Purpose::Token, token),
            SandboxCredential::Key(key) => (Purpose::Key, key),
        };
        let (nonce, tag) = credential.split_once('.')?;
        let tag = from_hex(tag)?;
        hmac::verify(&self.key, &message(purpose, &hello.uid, nonce), &tag).ok()?;
        let mut used = self.used.lock().unwrap();
        let is_first = used
            .entry(hello.uid.clone())
            .or_default()
            .insert(nonce.to_owned());
        match purpose {
            Purpose::Token => is_first.then(|| SandboxWelcome {
                key: Some(self.derive(Purpose::Key, &hello.uid, nonce)),
            }),
            Purpose::Key => Some(SandboxWelcome::default()),
        }
    }

    /// Forgets a pod that is gone: no new sandbox of it will be launched.
    pub(super) fn forget(&self, uid: &str) {
        self.used.lock().unwrap().remove(uid);
    }

    fn derive(&self, purpose: Purpose, uid: &str, nonce: &str) -> String {
        let tag = hmac::sign(&self.key, &message(purpose, uid, nonce));
        format!("{nonce}.{}", hex(tag.as_ref()))
    }
}

fn message(purpose: Purpose, uid: &str, nonce: &str) -> Vec<u8> {
    let purpose = match purpose {
        Purpose::Token => "token",
        Purpose::Key => "key",
    };
    format!("{purpose}\0{uid}\0{nonce}").into_bytes()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u32>> = text.chars().map(|c| c.to_digit(16)).collect();
    let pairs = digits?;
    let bytes = pairs.chunks(2).map(|pair| match pair {
        [high, low] => u8::try_from(high << 4 | low).ok(),
        _ => None,
    });
    bytes.collect()
}

#[cfg(test)]
mod tests {
    use pod_protocol::{SandboxId, VERSION};

    use super::*;

    fn hello(uid: &str, credential: SandboxCredential) -> SandboxHello {
        SandboxHello {
            version: VERSION,
            uid: uid.to_owned(),
            id: SandboxId::new("1"),
            credential,
        }
    }

    #[test]
    fn token_is_valid_once_and_key_always() {
        let node = SandboxAuthenticator::new(&NodeKey([7; 32]));
        let token = SandboxCredential::LaunchToken(node.issue_token("a"));
        let welcome = node.authenticate(&hello("a", token.clone())).unwrap();
        assert!(node.authenticate(&hello("a", token.clone())).is_none());
        let key = SandboxCredential::Key(welcome.key.unwrap());
        for _ in 0..2 {
            let welcome = node.authenticate(&hello("a", key.clone())).unwrap();
            assert!(welcome.key.is_none());
        }

        // The next kubelet of the node.
        let next = SandboxAuthenticator::new(&NodeKey([7; 32]));
        assert!(next.authenticate(&hello("a", key)).is_some());
        assert!(next.authenticate(&hello("a", token)).is_none());
    }

    #[test]
    fn credential_is_bound_to_pod_node_and_purpose() {
        let node = SandboxAuthenticator::new(&NodeKey([7; 32]));
        let token = node.issue_token("a");
        let as_token = |token: &str| SandboxCredential::LaunchToken(token.to_owned());
        let rejected = |uid: &str, credential| node.authenticate(&hello(uid, credential)).is_none();
        assert!(rejected("b", as_token(&token)));
        assert!(rejected("a", SandboxCredential::Key(token.clone())));
        assert!(rejected("a", as_token(&token[1..])));
        assert!(rejected("a", as_token(&token[..token.len() - 1])));
        assert!(rejected("a", as_token(&format!("{token}é"))));
        assert!(rejected("a", as_token("")));
        let other = SandboxAuthenticator::new(&NodeKey([8; 32]));
        assert!(other.authenticate(&hello("a", as_token(&token))).is_none());
        // A rejected credential does not use up the token.
        assert!(!rejected("a", as_token(&token)));
    }

    #[test]
    fn secrets_are_not_printed() {
        assert_eq!(format!("{:?}", NodeKey([7; 32])), "NodeKey");
        let token = SandboxCredential::LaunchToken("secret".to_owned());
        assert!(!format!("{token:?}").contains("secret"));
    }
}
