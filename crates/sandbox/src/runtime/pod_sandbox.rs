//! Starts and stops the pod sandbox: namespaces, cgroup, network, volumes and the files in `/etc`.
//!
//! Each step of the start is idempotent: after a failure all of them run again.

use std::path::PathBuf;

use k8s_openapi::api::core::v1::PodSpec;
use pod_protocol::{Bundle, Problem};
use rustix::process::Signal;

use super::inner::message::{InnerError, InnerRequest, InterfaceConfig, NamespacePlan};
use super::rootfs::unmount_fuse;
use super::{HostPorts, LinuxRuntime, PodAddresses, cgroups, cleanup, etc, host_ports};
use crate::container_runtime::PodNetwork;
use crate::node_services::{NetworkAttachment, NodeServices};

impl<S: NodeServices> LinuxRuntime<S> {
    pub(super) async fn run_pod_sandbox(&self) -> Result<PodNetwork, Problem> {
        let bundle = self.bundle.borrow().clone();
        let spec = self.spec();
        self.create_namespaces(&bundle, &spec).await?;
        self.create_cgroup(&bundle, &spec)
            .map_err(|error| sandbox_problem(format!("cannot create the pod's cgroup: {error}")))?;
        self.join_network(&spec).await?;
        self.open_host_ports(&spec).await?;
        self.create_volumes(&bundle, &spec).await?;
        self.write_etc(&bundle).map_err(|error| {
            sandbox_problem(format!("cannot write the pod's files in /etc: {error}"))
        })?;
        let ips = self.addresses.get().map(|addresses| &addresses.pod_ips[..]);
        let parse = |ip: &String| ip.parse().ok();
        Ok(PodNetwork {
            ips: ips.unwrap_or_default().iter().filter_map(parse).collect(),
            unsupported_host_ports: host_ports::unsupported(&spec),
        })
    }

    /// Kills all processes of the pod and removes its mounts, network and files. Errors are logged.
    pub(super) async fn stop_pod_sandbox(&self) {
        self.is_stopping.set(true);
        self.host_ports.take();
        if self.spec().host_pid == Some(true) {
            // In the host's pid namespace, killing the inner process would leave its descendants: it kills them itself.
            self.inner.disconnect();
        } else {
            // The kernel kills all processes of a pid namespace with its first.
            let _ = rustix::process::kill_process(self.inner_pid, Signal::KILL);
        }
        self.inner.closed().await;
        if let Some(cgroup) = self.cgroup.get() {
            cgroups::remove_cgroup(cgroup).await;
        }
        let mount_points: Vec<PathBuf> = self.fuse_mounts.borrow().keys().cloned().collect();
        for mount_point in mount_points {
            unmount_fuse(&self.fuse_mounts, &mount_point).await;
        }
        for path in self.shared_volumes.take().iter().rev() {
            if let Err(error) = linux::mount::detach(path) {
                tracing::warn!(path = %path.display(), %error, "cannot unmount a volume");
            }
        }
        self.services.release().await;
        for dir in ["containers", "images"] {
            cleanup::remove_dir(self.dirs.disk.join(dir)).await;
        }
    }

    async fn create_namespaces(&self, bundle: &Bundle, spec: &PodSpec) -> Result<(), Problem> {
        if self.network_namespace.get().is_some() {
            return Ok(());
        }
        let host_network = spec.host_network == Some(true);
        let hostname = etc::hostname(&bundle.pod, &bundle.node.cluster_domain);
        let sysctls = spec
            .security_context
            .as_ref()
            .and_then(|context| context.sysctls.clone());
        let plan = NamespacePlan {
            network: !host_network,
            ipc: spec.host_ipc != Some(true),
            hostname: (!host_network).then_some(hostname),
            sysctls: sysctls
                .unwrap_or_default()
                .into_iter()
                .map(|sysctl| (sysctl.name, sysctl.value))
                .collect(),
        };
        let request = InnerRequest::CreateNamespaces(plan);
        let created = self.inner.request(request).await;
        let network = created
            .map_err(|error| sandbox_problem(error.message))?
            .pop()
            .ok_or_else(no_network_namespace)?;
        let _ = self.network_namespace.set(network);
        Ok(())
    }

    fn create_cgroup(&self, bundle: &Bundle, spec: &PodSpec) -> std::io::Result<()> {
        let (Some(pods), None) = (&self.dirs.cgroup, self.cgroup.get()) else {
            return Ok(());
        };
        let uid = bundle.pod.metadata.uid.as_deref().unwrap_or_default();
        let cgroup = cgroups::pod_cgroup(pods, uid);
        cgroups::create_pod_cgroup(&cgroup, spec)?;
        let _ = self.cgroup.set(cgroup);
        Ok(())
    }

    async fn join_network(&self, spec: &PodSpec) -> Result<(), Problem> {
        if self.addresses.get().is_some() {
            return Ok(());
        }
        let host_ips = self.services.host_ips();
        let host_ips: Vec<_> = host_ips.iter().map(ToString::to_string).collect();
        let pod_ips = if spec.host_network == Some(true) {
            host_ips.iter().take(1).cloned().collect()
        } else {
            let attachment = self.attach().await?;
            let configured = self.configure_interface(attachment).await;
            configured.map_err(|error| sandbox_problem(error.message))?;
            vec![attachment.address.to_string()]
        };
        let _ = self.addresses.set(PodAddresses { pod_ips, host_ips });
        Ok(())
    }

    async fn configure_interface(&self, attachment: &NetworkAttachment) -> Result<(), InnerError> {
        let config = InterfaceConfig {
            interface: attachment.interface.clone(),
            address: attachment.address,
            gateway: attachment.gateway,
        };
        let request = InnerRequest::ConfigureInterface(config);
        self.inner.request(request).await.map(drop)
    }

    /// Returns when the pod has lost its network for good. Until then, configures each new interface with the pod's address.
    pub async fn network_lost(&self) {
        loop {
            let Some(attachment) = self.services.network_reattached().await else {
                return;
            };
            let before = self.attachment.get();
            if before.is_some_and(|before| *before != attachment) {
                tracing::warn!(new_address = %attachment.address, "the pod's address has changed");
                return;
            }
            if let Err(error) = self.configure_interface(&attachment).await {
                tracing::warn!(error.message, "cannot configure the pod's interface");
                return;
            }
        }
    }

    /// Attaches the pod to the network, once.
    async fn attach(&self) -> Result<&NetworkAttachment, Problem> {
        if let Some(attachment) = self.attachment.get() {
            return Ok(attachment);
        }
        let network = self
            .network_namespace
            .get()
            .ok_or_else(no_network_namespace)?;
        let network = network.try_clone().map_err(|error| {
            sandbox_problem(format!(
                "cannot duplicate the network namespace's descriptor: {error}"
            ))
        })?;
        let attached = self.services.attach_network(network).await;
        let attachment = attached.map_err(|error| {
            sandbox_problem(format!("failed to setup network for sandbox: {error}"))
        })?;
        Ok(self.attachment.get_or_init(|| attachment))
    }

    async fn open_host_ports(&self, spec: &PodSpec) -> Result<(), Problem> {
        let addresses = self.addresses.get();
        let pod = addresses.and_then(|addresses| addresses.pod_ips.first()?.parse().ok());
        let are_open = self.host_ports.borrow().is_some();
        if let Some(pod) = pod.filter(|_| !are_open) {
            let opened = HostPorts::open(spec, pod, &self.inner).await;
            let opened = opened.map_err(sandbox_problem)?;
            self.host_ports.replace(Some(opened));
        }
        Ok(())
    }

    fn write_etc(&self, bundle: &Bundle) -> std::io::Result<()> {
        let pod_ips = self
            .addresses
            .get()
            .map(|addresses| addresses.pod_ips.clone())
            .unwrap_or_default();
        let etc = self.dirs.etc();
        std::fs::create_dir_all(&etc)?;
        let host = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let (pod, node) = (&bundle.pod, &bundle.node);
        let hosts = etc::hosts(pod, node, &pod_ips, &host("/etc/hosts"));
        std::fs::write(etc.join("hosts"), hosts)?;
        let resolv = etc::resolv_conf(pod, node, &host("/etc/resolv.conf"));
        std::fs::write(etc.join("resolv.conf"), resolv)?;
        let name = etc::hostname(pod, &node.cluster_domain);
        std::fs::write(etc.join("hostname"), format!("{name}\n"))?;
        let shm = self.dirs.memory.join("shm");
        if !shm.is_dir() {
            std::fs::create_dir_all(&shm)?;
            linux::mount::shm(&shm)?;
        }
        Ok(())
    }
}

fn no_network_namespace() -> Problem {
    sandbox_problem("the inner process sent no network namespace".to_owned())
}

fn sandbox_problem(message: String) -> Problem {
    let message = format!("Failed to create pod sandbox: {message}");
    Problem::new("FailedCreatePodSandBox", message)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{
        RecordingServices, bundle, next_request, run_local, runtime, send_event,
    };
    use super::*;
    use crate::runtime::inner::message::InnerEvent;

    #[tokio::test]
    async fn retry_does_not_attach_to_network_again() {
        run_local(async {
            let services = RecordingServices::default();
            let bundle = bundle(json!({"containers": []}));
            let (runtime, inner) = runtime(services.clone(), bundle.clone());
            let spec = runtime.spec();
            let network = linux::namespace::own_network_namespace().unwrap();
            runtime.network_namespace.set(network).unwrap();
            let failed = InnerEvent::Failed(InnerError::runtime("not yet"));
            for (reply, works) in [(failed, false), (InnerEvent::Done, true)] {
                let reply = async {
                    let (serial, request) = next_request(&inner).await;
                    assert!(
                        matches!(request, InnerRequest::ConfigureInterface(_)),
                        "{request:?}"
                    );
                    send_event(&inner, serial, &reply, &[]);
                };
                let (joined, ()) = tokio::join!(runtime.join_network(&spec), reply);
                assert_eq!(joined.is_ok(), works, "{joined:?}");
            }
            assert_eq!(services.attachments.get(), 1);
        })
        .await;
    }
}
