//! RuntimeClasses. The only runtime handler is Coracle itself.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::{Api, Client};

use crate::api_call::{ApiCallError, call};

/// The value of a RuntimeClass's `handler` for this runtime.
pub(crate) const RUNTIME_HANDLER: &str = "coracle";

/// Why this node cannot run a pod with its RuntimeClass. The messages are upstream's and containerd's.
#[derive(Debug, thiserror::Error)]
pub(super) enum RuntimeClassError {
    #[error("runtimeclass.node.k8s.io {0:?} not found")]
    NotFound(String),
    #[error("failed to lookup RuntimeClass {name}")]
    Lookup { name: String, source: ApiCallError },
    #[error("failed to get sandbox runtime: no runtime for {0:?} is configured")]
    UnknownHandler(String),
}

/// Checks that this node has the runtime of the pod's RuntimeClass. Called before each launch, because classes may change.
pub(super) async fn check(client: &Client, pod: &Pod) -> Result<(), RuntimeClassError> {
    let spec = pod.spec.as_ref();
    let Some(name) = spec
        .and_then(|spec| spec.runtime_class_name.as_deref())
        .filter(|name| !name.is_empty())
    else {
        return Ok(());
    };
    let classes: Api<RuntimeClass> = Api::all(client.clone());
    match call(classes.get(name)).await {
        Ok(class) if is_supported(&class.handler) => Ok(()),
        Ok(class) => Err(RuntimeClassError::UnknownHandler(class.handler)),
        Err(error) if error.code() == Some(404) => {
            Err(RuntimeClassError::NotFound(name.to_owned()))
        }
        Err(source) => Err(RuntimeClassError::Lookup {
            name: name.to_owned(),
            source,
        }),
    }
}

fn is_supported(handler: &str) -> bool {
    handler.is_empty() || handler == RUNTIME_HANDLER
}
