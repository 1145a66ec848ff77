//! Finding pods and containers by their names.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod};

use crate::pod_source::PodSource;

/// The pod of this name, if the node has it.
pub(crate) fn find_pod(source: &dyn PodSource, namespace: &str, name: &str) -> Option<Arc<Pod>> {
    source.pods().into_iter().find(|pod| {
        pod.metadata.name.as_deref() == Some(name)
            && pod.metadata.namespace.as_deref() == Some(namespace)
    })
}

/// A pod has a container if its spec names one, of whatever kind.
pub(crate) fn has_container(pod: &Pod, name: &str) -> bool {
    let ephemeral = pod.spec.iter().flat_map(|spec| &spec.ephemeral_containers);
    container_of(pod, name).is_some() || ephemeral.flatten().any(|c| c.name == name)
}

/// Whether a container of any kind has a terminal.
pub(crate) fn has_tty(pod: &Pod, name: &str) -> bool {
    let ephemeral = pod.spec.iter().flat_map(|spec| &spec.ephemeral_containers);
    let mut ephemeral = ephemeral.flatten().filter(|c| c.name == name);
    let main = container_of(pod, name);
    main.is_some_and(|container| container.tty == Some(true))
        || ephemeral.any(|container| container.tty == Some(true))
}

fn container_of<'a>(pod: &'a Pod, name: &str) -> Option<&'a Container> {
    let spec = pod.spec.as_ref()?;
    let init = spec.init_containers.iter().flatten();
    let mut all = spec.containers.iter().chain(init);
    all.find(|container| container.name == name)
}

/// What is known of a container of whatever kind.
pub(crate) fn status_of<'a>(pod: &'a Pod, container: &str) -> Option<&'a ContainerStatus> {
    let status = pod.status.as_ref()?;
    let main = status.container_statuses.iter().flatten();
    let init = status.init_container_statuses.iter().flatten();
    let ephemeral = status.ephemeral_container_statuses.iter().flatten();
    main.chain(init)
        .chain(ephemeral)
        .find(|status| status.name == container)
}

/// Whether a container runs now.
pub(crate) fn is_running(pod: &Pod, container: &str) -> bool {
    let state = status_of(pod, container).and_then(|status| status.state.as_ref());
    state.is_some_and(|state| state.running.is_some())
}
