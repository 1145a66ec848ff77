//! For tests: a runtime with fake node services. The test acts as its inner process.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use linux::packet;
use pod_protocol::{Bundle, NodeFacts, Problem};

use super::inner::message::{InnerEvent, InnerRequest};
use super::logs::LogDir;
use super::{LinuxRuntime, PodDirs, Snapshotter, volume_spec};
use crate::container_runtime::{ImageProblem, ImageRequest, PodImage};
use crate::node_services::{NetworkAttachment, NodeServices, ReadyVolume};

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Node services that record calls.
#[derive(Clone, Default)]
pub struct RecordingServices {
    /// Number of calls of `attach_network`.
    pub attachments: Rc<Cell<u32>>,
    /// The requested images.
    pub images: Rc<RefCell<Vec<ImageRequest>>>,
    /// Names of the volumes, in the order of calls.
    pub volumes: Rc<RefCell<Vec<String>>>,
    /// Volumes for which calls fail.
    pub broken: Rc<RefCell<BTreeSet<String>>>,
}

impl NodeServices for RecordingServices {
    fn host_ips(&self) -> Vec<std::net::IpAddr> {
        vec![[10, 0, 0, 1].into()]
    }

    async fn ensure_image(
        &self,
        request: &ImageRequest,
        _: &[serde_json::Value],
    ) -> Result<PodImage, ImageProblem> {
        self.images.borrow_mut().push(request.clone());
        Ok(PodImage::default())
    }

    async fn set_up_volume(
        &self,
        name: &str,
        _: &serde_json::Value,
        _: Option<i64>,
    ) -> Result<ReadyVolume, Problem> {
        self.volumes.borrow_mut().push(name.to_owned());
        if self.broken.borrow().contains(name) {
            let error = io::Error::other("broken");
            return Err(volume_spec::mount_problem(name, &error));
        }
        Ok(ReadyVolume::Layers(Vec::new()))
    }

    async fn attach_network(&self, _: OwnedFd) -> io::Result<NetworkAttachment> {
        self.attachments.set(self.attachments.get() + 1);
        Ok(NetworkAttachment {
            interface: "eth0".to_owned(),
            address: [10, 0, 0, 2].into(),
            gateway: [10, 0, 0, 1].into(),
        })
    }

    async fn release(&self) {}
}

/// A bundle of a pod with this spec.
pub fn bundle(spec: serde_json::Value) -> Bundle {
    Bundle {
        pod: Pod {
            spec: Some(serde_json::from_value(spec).unwrap()),
            ..Pod::default()
        },
        containers: Default::default(),
        volumes: Default::default(),
        pull_credentials: Vec::new(),
        node: NodeFacts::default(),
        previous_statuses: Vec::new(),
    }
}

/// A runtime, and the inner process's end of its socket.
pub fn runtime(
    services: RecordingServices,
    bundle: Bundle,
) -> (LinuxRuntime<RecordingServices>, OwnedFd) {
    let (ours, theirs) = packet::pair().unwrap();
    let nowhere = std::path::PathBuf::from("/nowhere");
    let dirs = PodDirs {
        disk: nowhere.clone(),
        memory: nowhere.clone(),
        logs: nowhere.clone(),
        cgroup: None,
    };
    let runtime = LinuxRuntime::new(
        services,
        dirs,
        LogDir::new(nowhere),
        rustix::process::getpid(),
        ours,
        bundle,
        Snapshotter::default(),
    );
    (runtime.unwrap(), theirs)
}

/// Waits for the next request to the inner process.
pub async fn next_request(inner: &OwnedFd) -> (u64, InnerRequest) {
    rustix::io::ioctl_fionbio(inner, true).unwrap();
    let message = loop {
        match packet::receive(inner) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            message => break message.unwrap().unwrap(),
        }
    };
    let request = serde_json::from_slice(&message.text).unwrap();
    (message.number, request)
}

/// Sends an event of the inner process.
pub fn send_event(
    inner: &OwnedFd,
    serial: u64,
    event: &InnerEvent,
    descriptors: &[BorrowedFd<'_>],
) {
    let text = serde_json::to_vec(event).unwrap();
    packet::send(inner, serial, &text, descriptors).unwrap();
}

/// Runs a test that spawns local tasks, with a timeout.
pub async fn run_local(test: impl Future<Output = ()>) {
    let local = tokio::task::LocalSet::new();
    let test = tokio::time::timeout(TEST_TIMEOUT, local.run_until(test));
    test.await.unwrap();
}
