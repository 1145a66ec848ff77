//! Services, and the variables that tell containers of them.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Service;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::PATIENCE;
use crate::backoff::Doubling;

/// How long to wait at most between attempts to watch.
const RETRY_AT_MOST: Duration = Duration::from_secs(2);
/// The API server's own service, which every pod hears of.
const API_SERVER: (&str, &str) = ("default", "kubernetes");

/// All services of the cluster, as far as variables tell of them.
pub(super) struct Services {
    known: Arc<Mutex<Table>>,
    /// Counts changes; 0 until all services are known.
    changes: watch::Receiver<u64>,
    _watch: AbortOnDropHandle<()>,
}

/// By namespace and name.
type Table = HashMap<(String, String), Told>;

/// What variables tell of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    address: String,
    ports: Vec<Port>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Port {
    name: String,
    protocol: String,
    number: i32,
}

impl Services {
    /// Watches all services: a node may, and one watch is less than one per namespace.
    pub(super) fn follow(client: Client) -> Self {
        let known = Arc::new(Mutex::new(HashMap::new()));
        let (count, changes) = watch::channel(0);
        let task = watch_all(client, Arc::clone(&known), count);
        Self {
            known,
            changes,
            _watch: AbortOnDropHandle::new(tokio::spawn(task)),
        }
    }

    /// Waits until services are known, but not for ever; whether they are.
    pub(super) async fn synced(&self) -> bool {
        let mut changes = self.changes.clone();
        let synced = tokio::time::timeout(PATIENCE, changes.wait_for(|&changes| changes > 0)).await;
        matches!(synced, Ok(Ok(_)))
    }

    /// Signals the changes after this call.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        let mut changes = self.changes.clone();
        changes.mark_unchanged();
        changes
    }

    /// The variables for a pod of `namespace`; with `links`, of all services there.
    pub(super) fn variables(&self, namespace: &str, links: bool) -> BTreeMap<String, String> {
        let known = lock(&self.known);
        let visible = known.iter().filter(|((of, name), _)| {
            (of.as_str(), name.as_str()) == API_SERVER || links && of == namespace
        });
        // The pod's own service of that name wins over the API server's, as upstream.
        let mut by_name = BTreeMap::new();
        for ((of, name), told) in visible {
            let own = of == namespace && links;
            if own || !by_name.contains_key(name.as_str()) {
                by_name.insert(name.as_str(), told);
            }
        }
        by_name
            .into_iter()
            .flat_map(|(name, told)| variables(name, told))
            .collect()
    }
}

async fn watch_all(client: Client, known: Arc<Mutex<Table>>, count: watch::Sender<u64>) {
    let events = watcher(Api::<Service>::all(client), watcher::Config::default())
        .backoff(Doubling::up_to(RETRY_AT_MOST));
    tokio::pin!(events);
    let mut listed = HashMap::new();
    loop {
        let changed = match events.try_next().await {
            Ok(Some(watcher::Event::Init)) => {
                listed.clear();
                false
            }
            Ok(Some(watcher::Event::InitApply(service))) => {
                listed.extend(told(&service).map(|told| (key(&service), told)));
                false
            }
            Ok(Some(watcher::Event::InitDone)) => {
                *lock(&known) = std::mem::take(&mut listed);
                true
            }
            Ok(Some(watcher::Event::Apply(service))) => {
                let mut known = lock(&known);
                match told(&service) {
                    Some(told) => known.insert(key(&service), told.clone()) != Some(told),
                    None => known.remove(&key(&service)).is_some(),
                }
            }
            Ok(Some(watcher::Event::Delete(service))) => {
                lock(&known).remove(&key(&service)).is_some()
            }
            Ok(None) => return,
            Err(error) => {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "watching services"
                );
                false
            }
        };
        if changed {
            count.send_modify(|count| *count += 1);
        }
    }
}

fn key(service: &Service) -> (String, String) {
    let metadata = &service.metadata;
    (
        metadata.namespace.clone().unwrap_or_default(),
        metadata.name.clone().unwrap_or_default(),
    )
}

/// `None` for a service without an address of its own.
fn told(service: &Service) -> Option<Told> {
    let spec = service.spec.as_ref()?;
    let address = spec
        .cluster_ip
        .clone()
        .filter(|ip| !ip.is_empty() && ip != "None")?;
    let port = |port: &k8s_openapi::api::core::v1::ServicePort| Port {
        name: port.name.clone().unwrap_or_default(),
        protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
        number: port.port,
    };
    let ports = spec.ports.iter().flatten().map(port).collect();
    Some(Told { address, ports })
}

/// The variables of one service: Kubernetes' own, and those of Docker's links.
fn variables(name: &str, told: &Told) -> Vec<(String, String)> {
    let prefix = variable_name(name);
    let mut all = vec![(format!("{prefix}_SERVICE_HOST"), told.address.clone())];
    let host = match told.address.contains(':') {
        true => format!("[{}]", told.address),
        false => told.address.clone(),
    };
    for (index, port) in told.ports.iter().enumerate() {
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
            (format!("{link}_ADDR"), told.address.clone()),
            (link, url),
        ]);
    }
    all
}

fn variable_name(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}

fn lock(mutex: &Mutex<Table>) -> MutexGuard<'_, Table> {
    // The map is whole after every statement, so a panic elsewhere can't have left it half-written.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn a_service_as_variables() {
        let told = told(&service("100.96.0.7")).unwrap();
        let mut lines: Vec<_> = variables("my-shop", &told)
            .into_iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        lines.sort();
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn addresses_of_the_sixth_version_get_brackets_in_urls() {
        let told = told(&service("fd00::7")).unwrap();
        let all: BTreeMap<_, _> = variables("a", &told).into_iter().collect();
        assert_eq!(all["A_SERVICE_HOST"], "fd00::7");
        assert_eq!(all["A_PORT"], "tcp://[fd00::7]:80");
    }

    #[test]
    fn services_without_an_address_are_not_told() {
        assert_eq!(told(&service("None")), None);
        assert_eq!(told(&service("")), None);
        assert_eq!(told(&Service::default()), None);
    }

    #[tokio::test]
    async fn pods_hear_of_their_namespace_and_of_the_api_server() {
        let some = |number| Told {
            address: format!("100.96.0.{number}"),
            ports: vec![],
        };
        let key = |namespace: &str, name: &str| (namespace.to_owned(), name.to_owned());
        let services = Services {
            known: Arc::new(Mutex::new(HashMap::from([
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
