//! Sessions and logs over a real connection, with a fake pod.

use std::future::pending;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use futures::{Stream, StreamExt, TryStreamExt, stream};
use linux::async_fd::{InputWriter, OutputReader};
use pod_protocol::connection::{
    LogByteStream, SandboxClient, SandboxService, SandboxSession, ServeEnd, accept, serve,
};
use pod_protocol::streams::{
    FrameKind, FrameReader, FrameStream, STREAM_BLOCK_SIZE, SessionEnd, StreamFrame, TtySize,
    encode_frame,
};
use pod_protocol::{
    AttachQuery, Bundle, ExecQuery, LogQuery, PROTOCOL_VERSION, PodState, RequestError,
    SandboxCredential, SandboxHello, SandboxId, SandboxWelcome, Stop,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::LocalSet;

use super::{ClientSession, SessionInput};
use crate::runtime::logs::LogDir;

/// A pod that runs the commands of [`start_command`].
struct FakePod {
    state: watch::Sender<PodState>,
    logs: Option<LogDir>,
}

impl FakePod {
    fn new(logs: Option<LogDir>) -> Rc<Self> {
        Rc::new(Self {
            state: watch::Sender::default(),
            logs,
        })
    }
}

impl SandboxService for FakePod {
    fn put_bundle(&self, _: Bundle) {}

    fn stop(&self, _: Stop) {}

    fn dismiss(&self) {}

    fn retire(&self) {}

    fn state(&self) -> watch::Receiver<PodState> {
        self.state.subscribe()
    }

    async fn logs(&self, query: LogQuery) -> Result<LogByteStream, RequestError> {
        let logs = self.logs.as_ref().ok_or_else(not_found)?;
        logs.read(&query).await
    }

    async fn exec(
        &self,
        query: ExecQuery,
        client: FrameReader,
    ) -> Result<FrameStream, RequestError> {
        Ok(start_command(query)?.run(client))
    }

    async fn attach(&self, _: AttachQuery, _: FrameReader) -> Result<FrameStream, RequestError> {
        Err(not_found())
    }

    async fn port_forward(&self, _: u16) -> Result<TcpStream, RequestError> {
        Err(not_found())
    }
}

fn not_found() -> RequestError {
    RequestError::not_found("not found")
}

fn hello() -> SandboxHello {
    SandboxHello {
        version: PROTOCOL_VERSION,
        uid: "1234".to_owned(),
        id: SandboxId::new("1234/1"),
        credential: SandboxCredential::LaunchToken(String::new()),
    }
}

fn accept_any(_: &SandboxHello) -> Option<SandboxWelcome> {
    Some(SandboxWelcome::default())
}

/// A client of a pod that is served until the test ends.
async fn connect() -> SandboxClient {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let pod = FakePod::new(None);
    tokio::task::spawn_local(async move { serve(theirs, &mut hello(), pod, pending()).await });
    accept(ours, accept_any).await.unwrap().1
}

async fn run_local<T>(test: impl Future<Output = T>) -> T {
    LocalSet::new().run_until(test).await
}

/// Number of frames from the `endless` command.
static FRAMES_SENT: AtomicUsize = AtomicUsize::new(0);

fn pipe() -> (InputWriter, OutputReader) {
    let (read, write) = rustix::pipe::pipe().unwrap();
    (
        InputWriter::new(write).unwrap(),
        OutputReader::new(read).unwrap(),
    )
}

/// Starts a command of the fake pod.
fn start_command(query: ExecQuery) -> Result<ClientSession, RequestError> {
    let program = query.command.first().map(String::as_str);
    let session = |input, frames| ClientSession {
        input,
        frames,
        terminal: None,
        survives_disconnect: false,
    };
    match program {
        // Echoes its input, and exits at end-of-file.
        Some("cat") => {
            let (to, from) = pipe();
            let frames = stream::unfold(Some(from), |from| async move {
                let mut from = from?;
                let mut block = vec![0; STREAM_BLOCK_SIZE];
                match from.read(&mut block).await.unwrap() {
                    0 => Some((SessionEnd::Code(7).to_frame(), None)),
                    read => Some((encode_frame(FrameKind::Stdout, &block[..read]), Some(from))),
                }
            });
            Ok(session(
                Some(SessionInput::Process(to)),
                frames.boxed_local(),
            ))
        }
        // Never reads its input.
        Some("ignore-stdin") => {
            let (to, from) = pipe();
            let frames = stream::once(async move {
                let _open = from;
                pending::<Bytes>().await
            });
            Ok(session(
                Some(SessionInput::Process(to)),
                frames.boxed_local(),
            ))
        }
        Some("endless") => {
            let frames = stream::repeat_with(|| {
                FRAMES_SENT.fetch_add(1, Ordering::Relaxed);
                encode_frame(FrameKind::Stderr, &[b'x'; STREAM_BLOCK_SIZE])
            });
            Ok(session(None, frames.boxed_local()))
        }
        // Writes a file when the client disconnects.
        Some("write-on-disconnect") => {
            let guard = WriteOnDrop(query.command[1].clone());
            let frames = stream::once(async move {
                let _guard = guard;
                pending::<Bytes>().await
            });
            let first = stream::iter([encode_frame(FrameKind::Stdout, b"started")]);
            Ok(session(None, first.chain(frames).boxed_local()))
        }
        _ => Err(not_found()),
    }
}

/// Writes a file when it is dropped.
struct WriteOnDrop(String);

impl Drop for WriteOnDrop {
    fn drop(&mut self) {
        std::fs::write(&self.0, "").unwrap();
    }
}

fn query(command: &[&str]) -> ExecQuery {
    ExecQuery {
        command: command.iter().map(|arg| (*arg).to_owned()).collect(),
        ..ExecQuery::default()
    }
}

/// The client's frames: those that are sent to the sender.
fn client_frames(capacity: usize) -> (mpsc::Sender<Bytes>, impl Stream<Item = Bytes>) {
    let (sender, receiver) = mpsc::channel(capacity);
    let stream = stream::unfold(receiver, |mut receiver| async move {
        let bytes: Bytes = receiver.recv().await?;
        Some((bytes, receiver))
    });
    (sender, stream)
}

/// Collects stdout and stderr until the session ends.
async fn read_to_end(mut session: SandboxSession) -> io::Result<(Vec<u8>, Option<SessionEnd>)> {
    let mut output = Vec::new();
    while let Some(frame) = session.next().await? {
        match frame {
            StreamFrame::Stdout(bytes) | StreamFrame::Stderr(bytes) => {
                output.extend_from_slice(&bytes)
            }
            StreamFrame::Exit(end) => return Ok((output, Some(end))),
            other => panic!("{other:?}"),
        }
    }
    Ok((output, None))
}

#[tokio::test]
async fn command_reads_its_input_until_end_of_file() {
    run_local(async {
        let client = connect().await;
        let (sender, stream) = client_frames(8);
        let session = client.exec(&query(&["cat"]), stream).await.unwrap();
        for text in ["one ", "two"] {
            sender
                .send(encode_frame(FrameKind::Stdin, text.as_bytes()))
                .await
                .unwrap();
        }
        let size = TtySize {
            columns: 80,
            rows: 24,
        };
        sender.send(size.to_frame()).await.unwrap();
        sender
            .send(encode_frame(FrameKind::StdinEnd, &[]))
            .await
            .unwrap();
        // The sender still exists: the end of the input does not disconnect the client.
        let (output, end) = read_to_end(session).await.unwrap();
        assert_eq!(output, b"one two");
        assert_eq!(end, Some(SessionEnd::Code(7)));
    })
    .await;
}

#[tokio::test]
async fn large_streams_go_both_ways_at_once() {
    run_local(async {
        let client = connect().await;
        let blocks: Vec<Bytes> = (0..512_u32)
            .map(|serial| {
                let bytes: Vec<u8> = (0..STREAM_BLOCK_SIZE as u32)
                    .map(|at| (at.wrapping_mul(2_654_435_761).wrapping_add(serial) >> 13) as u8)
                    .collect();
                bytes.into()
            })
            .collect();
        let frames: Vec<Bytes> = blocks
            .iter()
            .map(|block| encode_frame(FrameKind::Stdin, block))
            .collect();
        // Without a `StdinEnd` frame, the input ends with the request body.
        let session = client.exec(&query(&["cat"]), stream::iter(frames)).await;
        let (output, end) = read_to_end(session.unwrap()).await.unwrap();
        assert!(
            output == blocks.concat(),
            "{} bytes came back",
            output.len()
        );
        assert_eq!(end, Some(SessionEnd::Code(7)));
    })
    .await;
}

#[tokio::test]
async fn slow_reader_blocks_only_its_own_session() {
    run_local(async {
        let client = connect().await;
        let unread = client
            .exec(&query(&["endless"]), stream::empty())
            .await
            .unwrap();
        let mut blocked = Vec::new();
        for _ in 0..20 {
            let frame = encode_frame(FrameKind::Stdin, &[0; STREAM_BLOCK_SIZE]);
            let frames = stream::repeat(frame);
            blocked.push(
                client
                    .exec(&query(&["ignore-stdin"]), frames)
                    .await
                    .unwrap(),
            );
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        let sent = FRAMES_SENT.load(Ordering::Relaxed);
        assert!(sent * STREAM_BLOCK_SIZE < 1 << 20, "{sent} frames sent");
        client.dismiss().await.unwrap();
        let (output, _) = {
            let session = client.exec(&query(&["cat"]), stream::empty()).await;
            read_to_end(session.unwrap()).await.unwrap()
        };
        assert_eq!(output, b"");
        drop((unread, blocked));
    })
    .await;
}

#[tokio::test]
async fn client_disconnect_ends_the_session() {
    run_local(async {
        let client = connect().await;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disconnected");
        let command = ["write-on-disconnect", file.to_str().unwrap()];
        let (sender, stream) = client_frames(1);
        let mut session = client.exec(&query(&command), stream).await.unwrap();
        assert!(matches!(
            session.next().await.unwrap(),
            Some(StreamFrame::Stdout(_))
        ));
        assert!(!file.exists());
        drop((session, sender));
        let written = async {
            while !file.exists() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), written)
            .await
            .unwrap();
    })
    .await;
}

#[tokio::test]
async fn hundreds_of_commands_run_at_once() {
    run_local(async {
        let client = connect().await;
        let query = query(&["cat"]);
        let run_one = async |serial: usize| {
            let (sender, stream) = client_frames(1);
            let session = client.exec(&query, stream).await.unwrap();
            // Keep all sessions open at once.
            tokio::time::sleep(Duration::from_millis(100)).await;
            let text = serial.to_string();
            sender
                .send(encode_frame(FrameKind::Stdin, text.as_bytes()))
                .await
                .unwrap();
            drop(sender);
            let (output, _) = read_to_end(session).await.unwrap();
            assert_eq!(output, text.as_bytes());
        };
        join_all((0..300).map(run_one)).await;
    })
    .await;
}

#[tokio::test]
async fn followed_log_is_complete_when_the_sandbox_exits() {
    run_local(async {
        let dir = tempfile::tempdir().unwrap();
        let logs = LogDir::new(dir.path());
        let writer = logs.writer("c", 0).unwrap();
        let (mut output, input) = tokio::net::unix::pipe::pipe().unwrap();
        tokio::task::spawn_local(writer.copy(input, None::<tokio::io::Empty>));

        let (ours, theirs) = UnixStream::pair().unwrap();
        let (done, end) = oneshot::channel::<()>();
        let serving = tokio::task::spawn_local(async move {
            let end = async {
                let _ = end.await;
            };
            serve(theirs, &mut hello(), FakePod::new(Some(logs)), end).await
        });
        let (_, client) = accept(ours, accept_any).await.unwrap();
        let query = LogQuery {
            container: "c".to_owned(),
            follow: true,
            ..LogQuery::default()
        };
        let mut log = pin!(client.logs(&query).await.unwrap());
        output.write_all(b"first\n").await.unwrap();
        assert_eq!(log.next().await.unwrap().unwrap(), "first\n");

        // The container writes a lot and exits, its files are removed, and its sandbox exits.
        let written = vec![b'x'; 3_000_000];
        output.write_all(&written).await.unwrap();
        drop(output);
        done.send(()).unwrap();
        drop(dir);
        let rest: Vec<Bytes> = log.try_collect().await.unwrap();
        assert!(rest.concat() == written);
        assert_eq!(serving.await.unwrap(), ServeEnd::Done);
    })
    .await;
}
