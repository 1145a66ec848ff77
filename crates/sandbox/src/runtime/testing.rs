//! For tests: a runtime whose inner process and world are the test itself.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use linux::packet;

use super::{LinuxRuntime, Places, Stacking};
use crate::inner::message::{News, Request};
use crate::logs::LogDir;
use crate::seams::{Attachment, ImageRequest, PodImage, Volume, World};
use pod_protocol::{Bundle, NodeFacts, Problem};

/// A world that notes what it is asked for.
#[derive(Clone, Default)]
pub struct Asked {
    /// How often for a place in the network.
    pub places: Rc<Cell<u32>>,
    /// For which volumes, one after the other.
    pub volumes: Rc<RefCell<Vec<String>>>,
    /// Volumes that can't be had.
    pub broken: Rc<RefCell<BTreeSet<String>>>,
}

impl World for Asked {
    async fn image(&self, _: &ImageRequest, _: &[serde_json::Value]) -> Result<PodImage, Problem> {
        Ok(PodImage::default())
    }

    async fn volume(
        &self,
        name: &str,
        _: &serde_json::Value,
        _: Option<i64>,
        _: &[serde_json::Value],
    ) -> Result<Volume, Problem> {
        self.volumes.borrow_mut().push(name.to_owned());
        if self.broken.borrow().contains(name) {
            return Err(super::volumes::failed(name, &io::Error::other("broken")));
        }
        Ok(Volume::Layers(Vec::new()))
    }

    async fn attach(&self, _: OwnedFd) -> Result<Attachment, Problem> {
        self.places.set(self.places.get() + 1);
        Ok(Attachment {
            interface: "eth0".to_owned(),
            address: [10, 0, 0, 2].into(),
            prefix: 24,
            gateway: [10, 0, 0, 1].into(),
        })
    }

    async fn leave(&self) {}
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
        before: Vec::new(),
    }
}

/// A runtime, and the inner process's end of its line.
pub fn runtime(world: Asked, bundle: Bundle) -> (LinuxRuntime<Asked>, OwnedFd) {
    let (ours, theirs) = packet::pair().unwrap();
    let nowhere = std::path::PathBuf::from("/nowhere");
    let places = Places {
        disk: nowhere.clone(),
        memory: nowhere.clone(),
        logs: nowhere.clone(),
        groups: None,
    };
    let runtime = LinuxRuntime::new(
        world,
        places,
        LogDir::new(nowhere),
        rustix::process::getpid(),
        ours,
        bundle,
        Stacking::default(),
    );
    (runtime.unwrap(), theirs)
}

/// The next thing that the inner process is asked for.
pub async fn asked(inner: &OwnedFd) -> (u64, Request) {
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

/// The inner process's answer.
pub fn say(inner: &OwnedFd, serial: u64, news: &News, beside: &[BorrowedFd<'_>]) {
    let text = serde_json::to_vec(news).unwrap();
    packet::send(inner, serial, &text, beside).unwrap();
}

/// Runs a test that has tasks of its own, and not for ever.
pub async fn within_patience(test: impl Future<Output = ()>) {
    let local = tokio::task::LocalSet::new();
    let test = tokio::time::timeout(Duration::from_secs(5), local.run_until(test));
    test.await.unwrap();
}
