//! A fake [`PodSource`] whose processes are tasks, for tests of the stream protocols.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures::future::{BoxFuture, pending};
use futures::{FutureExt, Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tokio::sync::mpsc;

use crate::pod_source::{
    AttachOptions, ContainerLogStream, ContainerSession, ExecOptions, LogError, LogOptions,
    PodSource, PortConnection, SessionError, SessionExit, SessionOutput, TerminalSize,
};

/// Bytes per item of long output.
const CHUNK: usize = 4096;

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
    stdin: mpsc::Receiver<Bytes>,
    sizes: mpsc::Receiver<TerminalSize>,
    output: mpsc::Sender<SessionOutput>,
}

impl Process {
    async fn run(mut self, command: Vec<String>) -> SessionExit {
        let args: Vec<_> = command.iter().map(String::as_str).collect();
        match args[..] {
            ["cat"] => {
                while let Some(bytes) = self.stdin.recv().await {
                    self.write(bytes).await;
                }
            }
            ["exit", code] => return SessionExit::Code(code.parse().unwrap()),
            ["both"] => {
                self.write("out").await;
                let errors = SessionOutput::Stderr(Bytes::from_static(b"err"));
                let _ = self.output.send(errors).await;
                return SessionExit::Code(3);
            }
            ["zeros", count] => {
                let zeros: Vec<u8> = vec![0; count.parse().unwrap()];
                for chunk in zeros.chunks(CHUNK) {
                    self.write(chunk.to_vec()).await;
                }
            }
            ["size"] => {
                let size = self.sizes.recv().await.unwrap();
                let text = format!("{}x{}", size.columns, size.rows);
                self.write(text).await;
            }
            ["first-byte"] => {
                let bytes = self.stdin.recv().await.unwrap();
                self.write(bytes.slice(..1)).await;
            }
            ["broken"] => return SessionExit::Failed("the sandbox has exited".to_owned()),
            _ => pending().await,
        }
        SessionExit::Code(0)
    }

    /// Writes to the standard output.
    async fn write(&self, bytes: impl Into<Bytes>) {
        let _ = self.output.send(SessionOutput::Stdout(bytes.into())).await;
    }
}

fn session(command: Vec<String>, tty: bool, alive: Alive) -> ContainerSession {
    let (stdin, process_stdin) = mpsc::channel(1);
    let (resize, sizes) = mpsc::channel(1);
    let (output, received) = mpsc::channel(1);
    let process = Process {
        stdin: process_stdin,
        sizes,
        output: output.clone(),
    };
    tokio::spawn(async move {
        let exit = tokio::select! {
            exit = process.run(command) => exit,
            () = output.closed() => return,
        };
        let _ = output.send(SessionOutput::Exit(exit)).await;
    });
    ContainerSession {
        stdin: Some(stdin),
        resize: tty.then_some(resize),
        output: into_stream(received, alive).boxed(),
    }
}

/// Holds `alive` until it is dropped.
fn into_stream<T>(received: mpsc::Receiver<T>, alive: Alive) -> impl Stream<Item = T> {
    stream::unfold((received, alive), |(mut received, alive)| async move {
        let item = received.recv().await?;
        Some((item, (received, alive)))
    })
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
            let (to_pod, mut received) = mpsc::channel(1);
            let (sender, from_pod) = mpsc::channel(1);
            tokio::spawn(async move {
                match port {
                    7 => {
                        while let Some(bytes) = received.recv().await {
                            let _ = sender.send(Ok(bytes)).await;
                        }
                    }
                    80 => sender.send(Ok(Bytes::from_static(b"hello"))).await.unwrap(),
                    _ => while received.recv().await.is_some() {},
                }
            });
            let from_pod = into_stream(from_pod, alive).boxed();
            Ok(PortConnection { to_pod, from_pod })
        }
        .boxed()
    }
}
