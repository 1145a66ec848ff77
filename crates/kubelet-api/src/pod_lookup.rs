//! Finds pods and containers by name.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod};

use crate::pod_source::PodSource;

/// The pod of this name on this node.
pub(crate) fn find_pod(source: &dyn PodSource, namespace: &str, name: &str) -> Option<Arc<Pod>> {
    source.pods().into_iter().find(|pod| {
        pod.metadata.name.as_deref() == Some(name)
            && pod.metadata.namespace.as_deref() == Some(namespace)
    })
}

/// Whether the spec has a container of this name, of any kind.
pub(crate) fn has_container(pod: &Pod, name: &str) -> bool {
    let ephemeral = pod.spec.iter().flat_map(|spec| &spec.ephemeral_containers);
    find_container(pod, name).is_some() || ephemeral.flatten().any(|c| c.name == name)
}

/// Whether a container of any kind has a terminal.
pub(crate) fn has_tty(pod: &Pod, name: &str) -> bool {
    let ephemeral = pod.spec.iter().flat_map(|spec| &spec.ephemeral_containers);
    let mut ephemeral = ephemeral.flatten().filter(|c| c.name == name);
    let main = find_container(pod, name);
    main.is_some_and(|container| container.tty == Some(true))
        || ephemeral.any(|container| container.tty == Some(true))
}

fn find_container<'a>(pod: &'a Pod, name: &str) -> Option<&'a Container> {
    let spec = pod.spec.as_ref()?;
    let init = spec.init_containers.iter().flatten();
    let mut all = spec.containers.iter().chain(init);
    all.find(|container| container.name == name)
}

/// The status of a container of any kind.
pub fn container_status<'a>(pod: &'a Pod, container: &str) -> Option<&'a ContainerStatus> {
    let status = pod.status.as_ref()?;
    let main = status.container_statuses.iter().flatten();
    let init = status.init_container_statuses.iter().flatten();
    let ephemeral = status.ephemeral_container_statuses.iter().flatten();
    main.chain(init)
        .chain(ephemeral)
        .find(|status| status.name == container)
}

/// Whether a container of any kind is running.
pub(crate) fn is_running(pod: &Pod, container: &str) -> bool {
    let state = container_status(pod, container).and_then(|status| status.state.as_ref());
    state.is_some_and(|state| state.running.is_some())
}
