//! The launcher `Fork`: a pod's sandbox as a process on this node.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;

use anyhow::Context;
use futures::FutureExt;
use futures::future::BoxFuture;
use kubelet::{Handle, Launch, LaunchError, Launcher};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};

use super::hub::NodeHub;
use super::place::{self, NodePlace};
use crate::sandbox_role;

/// Starts sandboxes on this node.
pub struct Fork {
    /// The node's directory.
    pub place: NodePlace,
    /// Its hub, whose user namespace sandboxes join.
    pub hub: Arc<NodeHub>,
    /// Where images are.
    pub store: PathBuf,
    /// For the environment of sandboxes.
    pub mark: (String, String),
}

impl Launcher for Fork {
    fn launch(&self, launch: Launch) -> BoxFuture<'_, Result<Box<dyn Handle>, LaunchError>> {
        async move {
            self.start(launch)
                .await
                .map(|child| Box::new(Forked(child)) as Box<dyn Handle>)
                .map_err(|error| LaunchError(error.into()))
        }
        .boxed()
    }

    fn remove(&self, dir: PathBuf) -> BoxFuture<'_, std::io::Result<()>> {
        place::remove_elsewhere(dir).boxed()
    }
}

impl Fork {
    async fn start(&self, launch: Launch) -> anyhow::Result<Child> {
        self.hub.ready().await?;
        let start = sandbox_role::Start {
            uid: launch.uid,
            token: launch.token,
            host_pid: launch.host_pid,
            node_dir: self.place.dir.clone(),
            store: self.store.clone(),
        };
        let (name, value) = &self.mark;
        let mut child = Command::new("/proc/self/exe")
            .args(["internal", "sandbox"])
            .env(name, value)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .context("cannot start a process")?;
        let mut line = serde_json::to_string(&start)?;
        line.push('\n');
        let mut input = child
            .stdin
            .take()
            .context("the sandbox has no standard input")?;
        input.write_all(line.as_bytes()).await?;
        Ok(child)
    }
}

/// A sandbox that is a child of ours.
struct Forked(Child);

impl Handle for Forked {
    fn exited(&mut self) -> BoxFuture<'_, String> {
        async {
            match self.0.wait().await {
                Ok(status) => status.to_string(),
                Err(error) => error.to_string(),
            }
        }
        .boxed()
    }

    fn kill(&mut self) {
        let _ = self.0.start_kill();
    }
}
