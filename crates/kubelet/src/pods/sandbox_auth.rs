//! The credentials of sandboxes: a launch token for the first connection, then a key of the sandbox's own.
//!
//! Both are derived from the node's key, so that the next kubelet accepts the sandboxes of this one without a file:
//!
//! ```text
//!   launch token   NONCE.HMAC(node key, "token" UID NONCE)     valid once
//!   key            NONCE.HMAC(node key, "key" UID NONCE)       sent in response to the token
//! ```
//!
//! A token is valid only while this kubelet awaits it: after a launch of its own, or while it looks for the sandbox of an earlier kubelet.
//! The first connection with a token uses it up, unless that connection fails before the sandbox can have received its key.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

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

/// The launch token that the kubelet awaits from the sandbox of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
enum AwaitedToken {
    /// Issued by this kubelet, with this nonce.
    Issued(String),
    /// Issued by an earlier kubelet.
    OfEarlierKubelet,
}

type AwaitedTokens = Arc<Mutex<HashMap<String, AwaitedToken>>>;

/// Issues and checks the credentials of this node's sandboxes.
#[derive(Debug)]
pub(super) struct SandboxAuthenticator {
    key: hmac::Key,
    /// By uid.
    awaited: AwaitedTokens,
}

/// An authenticated sandbox. If it is dropped before the sandbox has responded, the sandbox's token is valid again.
#[derive(Debug, Default)]
pub(super) struct Authenticated {
    used: Option<(String, AwaitedToken)>,
    awaited: AwaitedTokens,
}

impl Authenticated {
    /// The sandbox has responded to a request, so it has received its key.
    pub(super) fn confirm(mut self) {
        self.used = None;
    }
}

impl Drop for Authenticated {
    fn drop(&mut self) {
        if let Some((uid, token)) = self.used.take() {
            self.awaited.lock().unwrap().entry(uid).or_insert(token);
        }
    }
}

impl SandboxAuthenticator {
    pub(super) fn new(key: &NodeKey) -> Self {
        Self {
            key: hmac::Key::new(hmac::HMAC_SHA256, &key.0),
            awaited: AwaitedTokens::default(),
        }
    }

    /// A token for a new sandbox of a pod. Earlier tokens of the pod become invalid.
    pub(super) fn issue_token(&self, uid: &str) -> String {
        let mut nonce = [0; 16];
        // The system's source of randomness does not fail on Linux.
        aws_lc_rs::rand::fill(&mut nonce).expect("random bytes");
        let nonce = hex(&nonce);
        let token = self.derive(Purpose::Token, uid, &nonce);
        self.set_awaited(uid, AwaitedToken::Issued(nonce));
        token
    }

    /// Accepts a token of an earlier kubelet from a pod's sandbox, which may not have connected to that kubelet.
    pub(super) fn await_adoption(&self, uid: &str) {
        self.set_awaited(uid, AwaitedToken::OfEarlierKubelet);
    }

    /// The response to a hello with a valid credential.
    pub(super) fn authenticate(
        &self,
        hello: &SandboxHello,
    ) -> Option<(SandboxWelcome, Authenticated)> {
        let (purpose, credential) = match &hello.credential {
            SandboxCredential::LaunchToken(token) => (Purpose::Token, token),
            SandboxCredential::Key(key) => (Purpose::Key, key),
        };
        let (nonce, tag) = credential.split_once('.')?;
        let tag = from_hex(tag)?;
        hmac::verify(&self.key, &message(purpose, &hello.uid, nonce), &tag).ok()?;
        let mut awaited = self.awaited.lock().unwrap();
        let is_awaited = match awaited.get(&hello.uid) {
            Some(AwaitedToken::Issued(issued)) => issued == nonce,
            Some(AwaitedToken::OfEarlierKubelet) => true,
            None => false,
        };
        let used = match is_awaited {
            true => awaited.remove(&hello.uid),
            false => None,
        };
        let (welcome, used) = match purpose {
            Purpose::Token => {
                let key = self.derive(Purpose::Key, &hello.uid, nonce);
                (SandboxWelcome { key: Some(key) }, Some(used?))
            }
            Purpose::Key => (SandboxWelcome::default(), None),
        };
        let authenticated = Authenticated {
            used: used.map(|token| (hello.uid.clone(), token)),
            awaited: Arc::clone(&self.awaited),
        };
        Some((welcome, authenticated))
    }

    /// Forgets a pod that is gone: no new sandbox of it will be launched.
    pub(super) fn forget(&self, uid: &str) {
        self.awaited.lock().unwrap().remove(uid);
    }

    fn set_awaited(&self, uid: &str, token: AwaitedToken) {
        self.awaited.lock().unwrap().insert(uid.to_owned(), token);
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
    use pod_protocol::{PROTOCOL_VERSION, SandboxId};

    use super::*;

    fn hello(uid: &str, credential: SandboxCredential) -> SandboxHello {
        SandboxHello {
            version: PROTOCOL_VERSION,
            uid: uid.to_owned(),
            id: SandboxId::new("1"),
            credential,
        }
    }

    #[test]
    fn token_is_valid_once_and_key_always() {
        let node = SandboxAuthenticator::new(&NodeKey([7; 32]));
        let token = SandboxCredential::LaunchToken(node.issue_token("a"));
        let (welcome, connected) = node.authenticate(&hello("a", token.clone())).unwrap();
        assert!(node.authenticate(&hello("a", token.clone())).is_none());
        connected.confirm();
        assert!(node.authenticate(&hello("a", token.clone())).is_none());
        let key = SandboxCredential::Key(welcome.key.unwrap());
        for _ in 0..2 {
            let (welcome, _) = node.authenticate(&hello("a", key.clone())).unwrap();
            assert!(welcome.key.is_none());
        }
        assert!(node.authenticate(&hello("a", token.clone())).is_none());

        // The next kubelet of the node.
        let next = SandboxAuthenticator::new(&NodeKey([7; 32]));
        assert!(next.authenticate(&hello("a", token.clone())).is_none());
        next.await_adoption("a");
        assert!(next.authenticate(&hello("a", key)).is_some());
        assert!(next.authenticate(&hello("a", token)).is_none());
    }

    #[test]
    fn token_of_a_failed_connection_stays_valid() {
        let node = SandboxAuthenticator::new(&NodeKey([7; 32]));
        let token = SandboxCredential::LaunchToken(node.issue_token("a"));
        drop(node.authenticate(&hello("a", token.clone())).unwrap());
        let (_, connected) = node.authenticate(&hello("a", token.clone())).unwrap();
        // The pod was launched again while the old connection failed.
        let new = SandboxCredential::LaunchToken(node.issue_token("a"));
        drop(connected);
        assert!(node.authenticate(&hello("a", token)).is_none());
        assert!(node.authenticate(&hello("a", new)).is_some());
    }

    #[test]
    fn adopted_sandbox_may_show_its_token() {
        let first = SandboxAuthenticator::new(&NodeKey([7; 32]));
        let token = SandboxCredential::LaunchToken(first.issue_token("a"));
        let next = SandboxAuthenticator::new(&NodeKey([7; 32]));
        assert!(next.authenticate(&hello("a", token.clone())).is_none());
        next.await_adoption("a");
        let (_, connected) = next.authenticate(&hello("a", token.clone())).unwrap();
        connected.confirm();
        assert!(next.authenticate(&hello("a", token.clone())).is_none());
        next.await_adoption("a");
        next.forget("a");
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
