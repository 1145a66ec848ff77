//! The runtime that a pod asks for by the name of a RuntimeClass: there is one, and this program is it.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::{Api, Client};

use crate::api::{CallError, call};

/// The name of our runtime, for a RuntimeClass's `handler`.
pub(crate) const HANDLER: &str = "coracle";

/// Why a pod's sandbox can't be made by this node, in upstream's and containerd's words.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    /// There is no such class.
    #[error("runtimeclass.node.k8s.io {0:?} not found")]
    Missing(String),
    /// It can't be looked up.
    #[error("failed to lookup RuntimeClass {name}")]
    Unknown {
        /// Its name.
        name: String,
        /// Why not.
        source: CallError,
    },
    /// It names a runtime that isn't here.
    #[error("failed to get sandbox runtime: no runtime for {0:?} is configured")]
    NoRuntime(String),
}

/// Whether the runtime that a pod asks for is ours. Asked before each start of a sandbox: classes are made and removed.
pub(super) async fn check(client: &Client, pod: &Pod) -> Result<(), Refusal> {
    let spec = pod.spec.as_ref();
    let Some(name) = spec
        .and_then(|spec| spec.runtime_class_name.as_deref())
        .filter(|name| !name.is_empty())
    else {
        return Ok(());
    };
    let classes: Api<RuntimeClass> = Api::all(client.clone());
    match call(classes.get(name)).await {
        Ok(class) if is_ours(&class.handler) => Ok(()),
        Ok(class) => Err(Refusal::NoRuntime(class.handler)),
        Err(error) if error.code() == Some(404) => Err(Refusal::Missing(name.to_owned())),
        Err(source) => Err(Refusal::Unknown {
            name: name.to_owned(),
            source,
        }),
    }
}

fn is_ours(handler: &str) -> bool {
    handler.is_empty() || handler == HANDLER
}
