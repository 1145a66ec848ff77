//! The pod before its first container: namespaces, control group, network, volumes, files below `/etc`.
//!
//! Each step is done once, however often it is asked for: after a failure all are asked for again.

use k8s_openapi::api::core::v1::PodSpec;

use super::{Addresses, HostPorts, LinuxRuntime, etc, groups, host_ports};
use crate::inner::message::{NetworkSetUp, PodSetUp, Request};
use crate::seams::{Attachment, PodNetwork, World};
use pod_protocol::{Bundle, Problem};

impl<W: World> LinuxRuntime<W> {
    pub(super) async fn set_up(&self) -> Result<PodNetwork, Problem> {
        let bundle = self.bundle.borrow().clone();
        let spec = self.spec();
        self.make_namespaces(&bundle, &spec).await?;
        self.make_group(&bundle, &spec)
            .map_err(|error| sandbox_problem(format!("the pod's control group: {error}")))?;
        self.join_network(&bundle, &spec).await?;
        self.publish_ports(&spec).await?;
        self.make_volumes(&bundle, &spec).await?;
        self.write_etc(&bundle)
            .map_err(|error| sandbox_problem(format!("the pod's files below /etc: {error}")))?;
        let ips = self.addresses.get().map(|addresses| &addresses.pod_ips[..]);
        let parse = |ip: &String| ip.parse().ok();
        Ok(PodNetwork {
            ips: ips.unwrap_or_default().iter().filter_map(parse).collect(),
            closed_ports: host_ports::closed(&spec),
        })
    }

    async fn make_namespaces(&self, bundle: &Bundle, spec: &PodSpec) -> Result<(), Problem> {
        if self.network.get().is_some() {
            return Ok(());
        }
        let host_network = spec.host_network == Some(true);
        let hostname = etc::hostname(&bundle.pod, &bundle.node.cluster_domain);
        let sysctls = spec
            .security_context
            .as_ref()
            .and_then(|context| context.sysctls.clone());
        let plan = PodSetUp {
            network: !host_network,
            ipc: spec.host_ipc != Some(true),
            hostname: (!host_network).then_some(hostname),
            sysctls: sysctls
                .unwrap_or_default()
                .into_iter()
                .map(|sysctl| (sysctl.name, sysctl.value))
                .collect(),
        };
        let made = self.inside.ask(Request::SetUp(plan)).await;
        let network = made
            .map_err(|refusal| sandbox_problem(refusal.message))?
            .pop()
            .ok_or_else(no_network)?;
        let _ = self.network.set(network);
        Ok(())
    }

    /// Makes the pod's control group.
    fn make_group(&self, bundle: &Bundle, spec: &PodSpec) -> std::io::Result<()> {
        let (Some(pods), None) = (&self.places.groups, self.group.get()) else {
            return Ok(());
        };
        let uid = bundle.pod.metadata.uid.as_deref().unwrap_or_default();
        let group = groups::place(pods, uid);
        groups::make_pod(&group, spec)?;
        let _ = self.group.set(group);
        Ok(())
    }

    async fn join_network(&self, bundle: &Bundle, spec: &PodSpec) -> Result<(), Problem> {
        if self.addresses.get().is_some() {
            return Ok(());
        }
        let host_ips = bundle.node.host_ips.clone();
        let pod_ips = if spec.host_network == Some(true) {
            host_ips.iter().take(1).cloned().collect()
        } else {
            let place = self.attach().await?;
            self.set_up_interface(place).await?;
            vec![place.address.to_string()]
        };
        let _ = self.addresses.set(Addresses { pod_ips, host_ips });
        Ok(())
    }

    async fn set_up_interface(&self, place: &Attachment) -> Result<(), Problem> {
        let plan = NetworkSetUp {
            interface: place.interface.clone(),
            address: place.address,
            prefix: place.prefix,
            gateway: place.gateway,
        };
        let done = self.inside.ask(Request::Network(plan)).await;
        done.map_err(|refusal| sandbox_problem(refusal.message))?;
        Ok(())
    }

    /// Returns when the pod has lost its network for good. An interface that was made anew gets the address that the pod has.
    pub async fn network_lost(&self) {
        loop {
            let Some(place) = self.world.reattached().await else {
                return;
            };
            let before = self.attachment.get();
            if before.is_some_and(|before| *before != place) {
                tracing::warn!(address = %place.address, "the pod's address was given to another");
                return;
            }
            if let Err(problem) = self.set_up_interface(&place).await {
                tracing::warn!(
                    problem = problem.message,
                    "cannot set up the pod's interface"
                );
                return;
            }
        }
    }

    /// Asks for a place in the network.
    async fn attach(&self) -> Result<&Attachment, Problem> {
        if let Some(place) = self.attachment.get() {
            return Ok(place);
        }
        let network = self.network.get().ok_or_else(no_network)?;
        let network = network
            .try_clone()
            .map_err(|error| sandbox_problem(format!("the pod's network: {error}")))?;
        let place = self.world.attach(network).await?;
        Ok(self.attachment.get_or_init(|| place))
    }

    /// Listens at the ports of the machine that the pod asks for.
    async fn publish_ports(&self, spec: &PodSpec) -> Result<(), Problem> {
        let addresses = self.addresses.get();
        let pod = addresses.and_then(|addresses| addresses.pod_ips.first()?.parse().ok());
        let are_open = self.host_ports.borrow().is_some();
        if let Some(pod) = pod.filter(|_| !are_open) {
            let opened = HostPorts::open(spec, pod, &self.inside).await;
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
        let etc = self.places.etc();
        std::fs::create_dir_all(&etc)?;
        let host = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let (pod, node) = (&bundle.pod, &bundle.node);
        let hosts = etc::hosts(pod, node, &pod_ips, &host("/etc/hosts"));
        std::fs::write(etc.join("hosts"), hosts)?;
        let resolv = etc::resolv_conf(pod, node, &host("/etc/resolv.conf"));
        std::fs::write(etc.join("resolv.conf"), resolv)?;
        let name = etc::hostname(pod, &node.cluster_domain);
        std::fs::write(etc.join("hostname"), format!("{name}\n"))?;
        let shm = self.places.memory.join("shm");
        if !shm.is_dir() {
            std::fs::create_dir_all(&shm)?;
            linux::mount::shared_memory(&shm)?;
        }
        Ok(())
    }
}

fn no_network() -> Problem {
    sandbox_problem("the inner process told of no network".to_owned())
}

fn sandbox_problem(message: String) -> Problem {
    Problem {
        reason: "FailedCreatePodSandBox".to_owned(),
        message,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{Asked, asked, bundle, runtime, say, within_patience};
    use super::*;
    use crate::inner::message::News;

    #[tokio::test]
    async fn a_place_in_the_network_is_asked_for_once() {
        within_patience(async {
            let world = Asked::default();
            let given = bundle(json!({"containers": []}));
            let (runtime, inner) = runtime(world.clone(), given.clone());
            let spec = runtime.spec();
            let network = linux::namespace::own_network().unwrap();
            runtime.network.set(network).unwrap();
            let failed = News::Failed {
                message: "not yet".to_owned(),
                program: false,
            };
            for (answer, works) in [(failed, false), (News::Done, true)] {
                let answer = async {
                    let (serial, request) = asked(&inner).await;
                    assert!(matches!(request, Request::Network(_)), "{request:?}");
                    say(&inner, serial, &answer, &[]);
                };
                let (joined, ()) = tokio::join!(runtime.join_network(&given, &spec), answer);
                assert_eq!(joined.is_ok(), works, "{joined:?}");
            }
            assert_eq!(world.places.get(), 1);
        })
        .await;
    }
}
