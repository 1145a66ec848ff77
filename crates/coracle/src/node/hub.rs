//! The agent's side of the node's hub: it starts it, finds that of an agent before it, and starts it again.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

use crate::handover::POD_MARK;
use crate::hub_role::Start;

/// What it may take to be ready. It waits for programs of the host (`newuidmap`), and these perhaps for a server that knows the
/// site's users; every pod of the node waits for it.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// What it may take to be gone.
const LAST_BREATH: Duration = Duration::from_secs(2);

/// How often it is looked whether a hub's process has taken over from its guard, and how long between.
const TAKE_OVER_LOOKS: u32 = 20;
const TAKE_OVER_PAUSE: Duration = Duration::from_millis(25);

/// The node's hub, which there is as soon as somebody needs it.
pub struct NodeHub {
    start: Start,
    running: Mutex<Option<Child>>,
}

impl NodeHub {
    /// A hub for pods with addresses of `range`; `mark` is for its environment.
    pub fn new(dir: &Path, socket: PathBuf, range: &str, mark: &str) -> Self {
        Self {
            start: Start {
                dir: dir.to_owned(),
                socket,
                range: range.to_owned(),
                mark: mark.to_owned(),
            },
            running: Mutex::new(None),
        }
    }

    /// Makes sure that it is there.
    pub async fn ready(&self) -> anyhow::Result<()> {
        let mut running = self.running.lock().await;
        let lives = match running.as_mut().map(Child::try_wait).transpose()? {
            Some(None) => true,
            // Its other process takes over.
            Some(Some(_)) => self.is_there_soon().await,
            // Perhaps one of an agent before us.
            None => network::hub::is_there(&self.start.socket),
        };
        if !lives {
            *running = Some(self.spawn().await?);
        }
        Ok(())
    }

    async fn is_there_soon(&self) -> bool {
        for _ in 0..TAKE_OVER_LOOKS {
            if network::hub::is_there(&self.start.socket) {
                return true;
            }
            tokio::time::sleep(TAKE_OVER_PAUSE).await;
        }
        false
    }

    async fn spawn(&self) -> anyhow::Result<Child> {
        let mut child = Command::new("/proc/self/exe")
            .args(["internal", "hub"])
            .env(POD_MARK, &self.start.mark)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("cannot start the node's hub")?;
        let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("the node's hub has no pipes");
        };
        let mut line = serde_json::to_string(&self.start)?;
        line.push('\n');
        input.write_all(line.as_bytes()).await?;
        let ready = until_ready(output, START_PATIENCE).await;
        if ready.is_err() {
            let _ = child.start_kill();
        }
        ready.map(|()| child)
    }

    /// Ends it, and with it the pods' network. It may be that of an agent before us.
    pub async fn end(&self) {
        let socket = &self.start.socket;
        let gone = async {
            while network::hub::end(socket).is_ok() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(LAST_BREATH, gone).await.is_err() {
            tracing::warn!("the node's hub does not end");
        }
        if let Some(mut child) = self.running.lock().await.take() {
            let _ = tokio::time::timeout(LAST_BREATH, child.wait()).await;
        }
    }
}

/// Waits for the hub's word that it is ready, or why not.
async fn until_ready(output: impl AsyncRead + Unpin, patience: Duration) -> anyhow::Result<()> {
    let mut answer = String::new();
    let mut output = BufReader::new(output);
    tokio::time::timeout(patience, output.read_line(&mut answer))
        .await
        .with_context(|| {
            let seconds = patience.as_secs();
            format!("the node's hub was not ready within {seconds} s")
        })??;
    match answer.trim() {
        "ready" => Ok(()),
        "" => bail!("the node's hub ended before it was ready"),
        problem => bail!("{problem}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_hub_says_that_it_is_ready_or_why_not_or_is_given_up() {
        let patience = Duration::from_millis(20);
        let said = |words: &'static str| until_ready(words.as_bytes(), patience);
        said("ready\n").await.unwrap();
        let problem = |ready: anyhow::Result<()>| ready.unwrap_err().to_string();
        assert_eq!(problem(said("no namespaces\n").await), "no namespaces");
        assert!(problem(said("").await).contains("ended before"));
        let (silent, _held) = tokio::io::duplex(16);
        assert!(problem(until_ready(silent, patience).await).contains("not ready"));
    }
}
