//! Services, and their environment variables in containers.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::FIRST_SYNC_TIMEOUT;
use super::watch_events::watch_events;

const MAX_SERVICE_WATCH_RETRY_DELAY: Duration = Duration::from_secs(2);
/// The API server's service, for which every pod gets variables.
const API_SERVER: (&str, &str) = ("default", "kubernetes");

/// All services of the cluster.
pub(super) struct ServiceCache {
    services: Arc<Mutex<ServiceTable>>,
    /// Counts changes; 0 until all services were received.
    changes: watch::Receiver<u64>,
    _watch: AbortOnDropHandle<()>,
}

/// By namespace and name.
type ServiceTable = HashMap<(String, String), ServiceAddress>;

/// The address and ports of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServiceAddress {
    address: String,
    ports: Vec<AddressPort>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct AddressPort {
    name: String,
    protocol: String,
    number: i32,
}

impl ServiceCache {
    /// Watches the services of all namespaces: one watch is cheaper than one per namespace.
    pub(super) fn watch(client: Client) -> Self {
        let services = Arc::new(Mutex::new(HashMap::new()));
        let (count, changes) = watch::channel(0);
        let task = watch_all(client, Arc::clone(&services), count);
        Self {
            services,
            changes,
            _watch: AbortOnDropHandle::new(tokio::spawn(task)),
        }
    }

    /// Waits until services were received, with a time-out. Returns whether they were.
    pub(super) async fn synced(&self) -> bool {
        let mut changes = self.changes.clone();
        let synced =
            tokio::time::timeout(FIRST_SYNC_TIMEOUT, changes.wait_for(|&changes| changes > 0))
                .await;
        matches!(synced, Ok(Ok(_)))
    }

    /// Notifies of changes after this call.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        let mut changes = self.changes.clone();
        changes.mark_unchanged();
        changes
    }

    /// The variables for a pod of `namespace`. With `links` (`enableServiceLinks`) these include all services of the namespace.
    pub(super) fn variables(&self, namespace: &str, links: bool) -> BTreeMap<String, String> {
        let services = self.services.lock().unwrap();
        let visible = services.iter().filter(|((of, name), _)| {
            (of.as_str(), name.as_str()) == API_SERVER || links && of == namespace
        });
        // As in upstream, a service `kubernetes` of the pod's namespace overrides the API server's.
        let mut by_name = BTreeMap::new();
        for ((of, name), address) in visible {
            let own = of == namespace && links;
            if own || !by_name.contains_key(name.as_str()) {
                by_name.insert(name.as_str(), address);
            }
        }
        by_name
            .into_iter()
            .flat_map(|(name, address)| variables(name, address))
            .collect()
    }
}

async fn watch_all(client: Client, services: Arc<Mutex<ServiceTable>>, count: watch::Sender<u64>) {
    let (api, config) = (Api::<Service>::all(client), watcher::Config::default());
    let mut listed = HashMap::new();
    let handle = |event| {
        let changed = match event {
            watcher::Event::Init => {
                listed.clear();
                false
            }
            watcher::Event::InitApply(service) => {
                listed.extend(service_address(&service).map(|address| (key(&service), address)));
                false
            }
            watcher::Event::InitDone => {
                *services.lock().unwrap() = std::mem::take(&mut listed);
                true
            }
            watcher::Event::Apply(service) => {
                let mut services = services.lock().unwrap();
                match service_address(&service) {
                    Some(address) => {
                        services.insert(key(&service), address.clone()) != Some(address)
                    }
                    None => services.remove(&key(&service)).is_some(),
                }
            }
            watcher::Event::Delete(service) => {
                services.lock().unwrap().remove(&key(&service)).is_some()
            }
        };
        if changed {
            count.send_modify(|count| *count += 1);
        }
    };
    watch_events(
        api,
        config,
        MAX_SERVICE_WATCH_RETRY_DELAY,
        "Services",
        handle,
    )
    .await;
}

fn key(service: &Service) -> (String, String) {
    let metadata = &service.metadata;
    (
        metadata.namespace.clone().unwrap_or_default(),
        metadata.name.clone().unwrap_or_default(),
    )
}

/// `None` for a service without a cluster IP.
fn service_address(service: &Service) -> Option<ServiceAddress> {
    let spec = service.spec.as_ref()?;
    let address = spec
        .cluster_ip
        .clone()
        .filter(|ip| !ip.is_empty() && ip != "None")?;
    let port = |port: &k8s_openapi::api::core::v1::ServicePort| AddressPort {
        name: port.name.clone().unwrap_or_default(),
        protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
        number: port.port,
    };
    let ports = spec.ports.iter().flatten().map(port).collect();
    Some(ServiceAddress { address, ports })
}

/// The variables of one service: those of Kubernetes, and those of Docker links.
fn variables(name: &str, service: &ServiceAddress) -> Vec<(String, String)> {
    let prefix = variable_name(name);
    let mut all = vec![(format!("{prefix}_SERVICE_HOST"), service.address.clone())];
    let host = match service.address.contains(':') {
        true => format!("[{}]", service.address),
        false => service.address.clone(),
    };
    for (index, port) in service.ports.iter().enumerate() {
        let number = port.number.to_string();
        let protocol = port.protocol.to_lowercase();
        let url = format!("{protocol}://{host}:{number}");
        if index == 0 {
            all.push((format!("{prefix}_SERVICE_PORT"), number.clone()));
            all.push((format!("{prefix}_PORT"), url.clone()));
        }
        if !port.name.is_empty() {
            let name = variable_name(&port.name);
            all.push((format!("{prefix}_SERVICE_PORT_{name}"), number.clone()));
        }
        let link = format!("{prefix}_PORT_{number}_{}", port.protocol.to_uppercase());
        all.extend([
            (format!("{link}_PROTO"), protocol),
            (format!("{link}_PORT"), number),
            (format!("{link}_ADDR"), service.address.clone()),
            (link, url),
        ]);
    }
    all
}

fn variable_name(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ServicePort, ServiceSpec};

    use super::*;

    fn service(address: &str) -> Service {
        let port = |name: &str, number, protocol: &str| ServicePort {
            name: Some(name.to_owned()).filter(|name| !name.is_empty()),
            port: number,
            protocol: Some(protocol.to_owned()),
            ..Default::default()
        };
        Service {
            spec: Some(ServiceSpec {
                cluster_ip: Some(address.to_owned()),
                ports: Some(vec![port("web-ui", 80, "TCP"), port("dns", 53, "UDP")]),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    #[test]
    fn variables_of_a_service() {
        let address = service_address(&service("100.96.0.7")).unwrap();
        let mut lines: Vec<_> = variables("my-shop", &address)
            .into_iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        lines.sort();
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn ipv6_addresses_have_brackets_in_urls() {
        let address = service_address(&service("fd00::7")).unwrap();
        let all: BTreeMap<_, _> = variables("a", &address).into_iter().collect();
        assert_eq!(all["A_SERVICE_HOST"], "fd00::7");
        assert_eq!(all["A_PORT"], "tcp://[fd00::7]:80");
    }

    #[test]
    fn services_without_cluster_ip_are_ignored() {
        assert_eq!(service_address(&service("None")), None);
        assert_eq!(service_address(&service("")), None);
        assert_eq!(service_address(&Service::default()), None);
    }

    #[tokio::test]
    async fn variables_cover_own_namespace_and_api_server() {
        let some = |number| ServiceAddress {
            address: format!("100.96.0.{number}"),
            ports: vec![],
        };
        let key = |namespace: &str, name: &str| (namespace.to_owned(), name.to_owned());
        let services = ServiceCache {
            services: Arc::new(Mutex::new(HashMap::from([
                (key("default", "kubernetes"), some(1)),
                (key("default", "other"), some(2)),
                (key("shop", "web"), some(3)),
                (key("odd", "kubernetes"), some(4)),
            ]))),
            changes: watch::channel(1).1,
            _watch: AbortOnDropHandle::new(tokio::spawn(async {})),
        };
        let hosts = |namespace, links| {
            let all = services.variables(namespace, links);
            all.into_iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            hosts("shop", true),
            "KUBERNETES_SERVICE_HOST=100.96.0.1 WEB_SERVICE_HOST=100.96.0.3"
        );
        assert_eq!(hosts("shop", false), "KUBERNETES_SERVICE_HOST=100.96.0.1");
        assert_eq!(hosts("odd", true), "KUBERNETES_SERVICE_HOST=100.96.0.4");
        assert_eq!(
            hosts("default", true),
            "KUBERNETES_SERVICE_HOST=100.96.0.1 OTHER_SERVICE_HOST=100.96.0.2"
        );
    }
}
