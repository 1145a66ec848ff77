//! A fake [`PodSource`] whose processes are tasks, for tests of the stream protocols.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt;
use futures::future::{BoxFuture, pending};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::sync::mpsc;

use crate::pod_source::{
    AttachOptions, ContainerLogStream, ContainerSession, ExecOptions, LogError, LogOptions,
    PodSource, PortConnection, SessionError, SessionExit,
};

/// Buffer size of the processes' pipes.
const PIPE: usize = 4096;

/// One pod, `default/p`, with the running containers `c` and `terminal` and the terminated container `ended`.
#[derive(Default)]
pub(crate) struct TestPods {
    /// The number of open sessions and connections.
    pub(crate) alive: Arc<AtomicUsize>,
}

/// Increments a counter while it exists.
struct Alive(Arc<AtomicUsize>);

impl Alive {
    fn new(alive: &Arc<AtomicUsize>) -> Self {
        alive.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(alive))
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The streams of a process, from its side.
struct Process {
    stdin: DuplexStream,
    stdout: DuplexStream,
    stderr: DuplexStream,
    sizes: mpsc::Receiver<crate::pod_source::TerminalSize>,
}

impl Process {
    async fn run(mut self, command: Vec<String>) -> SessionExit {
        let args: Vec<_> = command.iter().map(String::as_str).collect();
        match args[..] {
            ["cat"] => {
                let _ = tokio::io::copy(&mut self.stdin, &mut self.stdout).await;
            }
            ["exit", code] => return SessionExit::Code(code.parse().unwrap()),
            ["both"] => {
                self.stdout.write_all(b"out").await.unwrap();
                self.stderr.write_all(b"err").await.unwrap();
                return SessionExit::Code(3);
            }
            ["zeros", count] => {
                let zeros = vec![0; count.parse().unwrap()];
                let _ = self.stdout.write_all(&zeros).await;
            }
            ["size"] => {
                let size = self.sizes.recv().await.unwrap();
                let text = format!("{}x{}", size.columns, size.rows);
                self.stdout.write_all(text.as_bytes()).await.unwrap();
            }
            ["first-byte"] => {
                let byte = self.stdin.read_u8().await.unwrap();
                self.stdout.write_u8(byte).await.unwrap();
            }
            ["broken"] => return SessionExit::Failed("the sandbox has exited".to_owned()),
            _ => pending().await,
        }
        SessionExit::Code(0)
    }
}

fn session(command: Vec<String>, tty: bool, alive: Alive) -> ContainerSession {
    let (stdin, process_stdin) = duplex(PIPE);
    let (stdout, process_stdout) = duplex(PIPE);
    let (stderr, process_stderr) = duplex(PIPE);
    let (resize, sizes) = mpsc::channel(1);
    let process = Process {
        stdin: process_stdin,
        stdout: process_stdout,
        stderr: process_stderr,
        sizes,
    };
    let running = tokio::spawn(process.run(command));
    let exit = async move {
        let _alive = alive;
        running.await.unwrap()
    };
    ContainerSession {
        stdin: Some(Box::pin(stdin)),
        stdout: Some(Box::pin(stdout)),
        stderr: (!tty).then(|| Box::pin(stderr) as _),
        resize: tty.then_some(resize),
        exit: exit.boxed(),
    }
}

impl PodSource for TestPods {
    fn pods(&self) -> Vec<Arc<Pod>> {
        let pod = json!({
            "metadata": { "name": "p", "namespace": "default", "uid": "1234" },
            "spec": { "containers": [{ "name": "c" }, { "name": "ended" }, { "name": "terminal", "tty": true }] },
            "status": { "phase": "Running", "containerStatuses": [
                { "name": "c", "ready": true, "restartCount": 0, "image": "i", "imageID": "", "state": { "running": {} } },
                { "name": "terminal", "ready": true, "restartCount": 0, "image": "i", "imageID": "",
                  "state": { "running": {} } },
                { "name": "ended", "ready": false, "restartCount": 0, "image": "i", "imageID": "",
                  "state": { "terminated": { "exitCode": 0 } } },
            ] }
        });
        vec![Arc::new(serde_json::from_value(pod).unwrap())]
    }

    fn logs(
        &self,
        _: &str,
        _: LogOptions,
    ) -> BoxFuture<'static, Result<ContainerLogStream, LogError>> {
        async { Err("this pod writes no logs".into()) }.boxed()
    }

    fn exec(
        &self,
        uid: &str,
        options: ExecOptions,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>> {
        assert_eq!(uid, "1234");
        if options.command == ["nonsense"] {
            return async { Err(SessionError::internal("nonsense: not found")) }.boxed();
        }
        let alive = Alive::new(&self.alive);
        async move { Ok(session(options.command, options.streams.tty, alive)) }.boxed()
    }

    fn attach(
        &self,
        uid: &str,
        options: AttachOptions,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>> {
        assert_eq!(uid, "1234");
        let alive = Alive::new(&self.alive);
        let command = vec!["cat".to_owned()];
        async move { Ok(session(command, options.streams.tty, alive)) }.boxed()
    }

    fn port_forward(
        &self,
        uid: &str,
        port: u16,
    ) -> BoxFuture<'static, Result<PortConnection, SessionError>> {
        assert_eq!(uid, "1234");
        let alive = Alive::new(&self.alive);
        async move {
            if port == 9 {
                return Err(SessionError::internal("connection refused"));
            }
            let (ours, mut theirs) = duplex(PIPE);
            tokio::spawn(async move {
                let _alive = alive;
                match port {
                    7 => {
                        let (mut read, mut write) = tokio::io::split(theirs);
                        let _ = tokio::io::copy(&mut read, &mut write).await;
                    }
                    80 => theirs.write_all(b"hello").await.unwrap(),
                    _ => {
                        let _ = theirs.read_to_end(&mut Vec::new()).await;
                    }
                }
            });
            Ok(Box::pin(ours) as PortConnection)
        }
        .boxed()
    }
}
