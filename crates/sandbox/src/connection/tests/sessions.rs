//! Sessions, with pods that are simpler than real ones.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::Stream;
use futures::future::join_all;
use tokio::net::TcpListener;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;

use super::*;
use crate::streams::{BLOCK, Ending, Input, Kind, Size, Word, plain};

/// How often the endless command has said something.
static SAID: AtomicUsize = AtomicUsize::new(0);

/// What a command is here.
pub fn run(query: ExecQuery) -> Result<Session, Problem> {
    let word = query.command.first().map(String::as_str);
    let session = |input, frames| Session {
        input,
        frames,
        terminal: None,
        lingers: false,
    };
    match word {
        // Says what it hears, and ends with its input.
        Some("cat") => {
            let (to, from) = pipe::pipe().unwrap();
            let frames = stream::unfold(Some(from), |from| async move {
                let mut from = from?;
                let mut block = vec![0; BLOCK];
                match from.read(&mut block).await.unwrap() {
                    0 => Some((Ending::Code(7).frame(), None)),
                    read => Some((plain(Kind::Output, &block[..read]), Some(from))),
                }
            });
            Ok(session(Some(Input::Own(to)), frames.boxed_local()))
        }
        // Never reads.
        Some("deaf") => {
            let (to, from) = pipe::pipe().unwrap();
            let frames = stream::once(async move {
                let _held = from;
                pending::<Bytes>().await
            });
            Ok(session(Some(Input::Own(to)), frames.boxed_local()))
        }
        Some("endless") => {
            let frames = stream::repeat_with(|| {
                SAID.fetch_add(1, Ordering::Relaxed);
                plain(Kind::Errors, &[b'x'; BLOCK])
            });
            Ok(session(None, frames.boxed_local()))
        }
        // Tells of the end of its client.
        Some("left") => {
            let guard = Guard(query.command[1].clone());
            let frames = stream::once(async move {
                let _guard = guard;
                pending::<Bytes>().await
            });
            let said = stream::iter([plain(Kind::Output, b"here")]);
            Ok(session(None, said.chain(frames).boxed_local()))
        }
        other => Err(Problem {
            reason: "ExecError".to_owned(),
            message: format!("exec: {other:?}: executable file not found in $PATH"),
        }),
    }
}

/// Writes a file when it is dropped.
struct Guard(String);

impl Drop for Guard {
    fn drop(&mut self) {
        std::fs::write(&self.0, "").unwrap();
    }
}

fn query(words: &[&str]) -> ExecQuery {
    ExecQuery {
        command: words.iter().map(|word| (*word).to_owned()).collect(),
        ..ExecQuery::default()
    }
}

fn input(room: usize) -> (mpsc::Sender<Bytes>, impl Stream<Item = Bytes>) {
    let (sender, receiver) = mpsc::channel(room);
    let stream = stream::unfold(receiver, |mut receiver| async move {
        let bytes: Bytes = receiver.recv().await?;
        Some((bytes, receiver))
    });
    (sender, stream)
}

/// What is said on either channel, and the end.
async fn all(mut conversation: Conversation) -> io::Result<(Vec<u8>, Option<Ending>)> {
    let mut output = Vec::new();
    while let Some(word) = conversation.next().await? {
        match word {
            Word::Output(bytes) | Word::Errors(bytes) => output.extend_from_slice(&bytes),
            Word::Ended(ending) => return Ok((output, Some(ending))),
            other => panic!("{other:?}"),
        }
    }
    Ok((output, None))
}

#[tokio::test]
async fn a_command_hears_its_input_and_its_end() {
    local(async {
        let client = connected(&Told::new()).await;
        let (sender, stream) = input(8);
        let conversation = client.exec(&query(&["cat"]), stream).await.unwrap();
        for word in ["one ", "two"] {
            sender
                .send(plain(Kind::Input, word.as_bytes()))
                .await
                .unwrap();
        }
        let size = Size {
            columns: 80,
            rows: 24,
        };
        sender.send(size.frame()).await.unwrap();
        sender.send(plain(Kind::InputEnd, &[])).await.unwrap();
        // The sender is still there: the end of the input is not the end of the client.
        let (output, ending) = all(conversation).await.unwrap();
        assert_eq!(output, b"one two");
        assert_eq!(ending, Some(Ending::Code(7)));
    })
    .await;
}

#[tokio::test]
async fn large_streams_go_both_ways_at_once() {
    local(async {
        let client = connected(&Told::new()).await;
        let blocks: Vec<Bytes> = (0..512_u32)
            .map(|serial| {
                let bytes: Vec<u8> = (0..BLOCK as u32)
                    .map(|at| (at.wrapping_mul(2_654_435_761).wrapping_add(serial) >> 13) as u8)
                    .collect();
                bytes.into()
            })
            .collect();
        let frames: Vec<Bytes> = blocks
            .iter()
            .map(|block| plain(Kind::Input, block))
            .collect();
        // Its end is the end of the body.
        let conversation = client.exec(&query(&["cat"]), stream::iter(frames)).await;
        let (output, ending) = all(conversation.unwrap()).await.unwrap();
        assert!(
            output == blocks.concat(),
            "{} bytes came back",
            output.len()
        );
        assert_eq!(ending, Some(Ending::Code(7)));
    })
    .await;
}

#[tokio::test]
async fn who_does_not_read_holds_up_only_what_he_asked() {
    local(async {
        let pod = Told::new();
        let client = connected(&pod).await;
        let held = client
            .exec(&query(&["endless"]), stream::empty())
            .await
            .unwrap();
        let mut deaf = Vec::new();
        for _ in 0..20 {
            let frame = plain(Kind::Input, &[0; BLOCK]);
            let frames = stream::repeat(frame);
            deaf.push(client.exec(&query(&["deaf"]), frames).await.unwrap());
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        let said = SAID.load(Ordering::Relaxed);
        assert!(said * BLOCK < 1 << 20, "{said} blocks wait");
        client.put_bundle(&bundle()).await.unwrap();
        let (output, _) = {
            let conversation = client.exec(&query(&["cat"]), stream::empty()).await;
            all(conversation.unwrap()).await.unwrap()
        };
        assert_eq!(output, b"");
        drop((held, deaf));
    })
    .await;
}

#[tokio::test]
async fn a_client_that_is_gone_is_noticed() {
    local(async {
        let client = connected(&Told::new()).await;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("left");
        let words = ["left", file.to_str().unwrap()];
        let (sender, stream) = input(1);
        let mut conversation = client.exec(&query(&words), stream).await.unwrap();
        assert!(matches!(
            conversation.next().await.unwrap(),
            Some(Word::Output(_))
        ));
        assert!(!file.exists());
        drop((conversation, sender));
        let noticed = async {
            while !file.exists() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), noticed)
            .await
            .unwrap();
    })
    .await;
}

#[tokio::test]
async fn refusals_have_their_words() {
    local(async {
        let client = connected(&Told::new()).await;
        let refused = client
            .exec(&query(&["nope"]), stream::empty())
            .await
            .unwrap_err();
        assert!(
            refused.to_string().contains("executable file not found"),
            "{refused}"
        );
        let refused = client
            .attach(&AttachQuery::default(), stream::empty())
            .await
            .unwrap_err();
        assert_eq!(refused.to_string(), "nothing to attach to");
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let refused = client
            .port_forward(port, stream::empty())
            .await
            .unwrap_err();
        assert!(refused.to_string().contains("refused"), "{refused}");
    })
    .await;
}

#[tokio::test]
async fn a_port_has_two_ways_with_an_end_each() {
    local(async {
        let client = connected(&Told::new()).await;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let served = tokio::spawn(async move {
            let (mut connection, _) = listener.accept().await.unwrap();
            let mut all = Vec::new();
            connection.read_to_end(&mut all).await.unwrap();
            // After the client's end.
            connection
                .write_all(format!("{} bytes", all.len()).as_bytes())
                .await
                .unwrap();
        });
        let blocks = stream::iter(vec![Bytes::from(vec![1; 1 << 20]); 16]);
        let mut forwarded = client.port_forward(port, blocks).await.unwrap();
        let mut answer = String::new();
        forwarded.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "16777216 bytes");
        served.await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn hundreds_of_commands_at_once() {
    local(async {
        let client = connected(&Told::new()).await;
        let words = query(&["cat"]);
        let one = async |serial: usize| {
            let (sender, stream) = input(1);
            let conversation = client.exec(&words, stream).await.unwrap();
            // All are open at once.
            tokio::time::sleep(Duration::from_millis(100)).await;
            let text = serial.to_string();
            sender
                .send(plain(Kind::Input, text.as_bytes()))
                .await
                .unwrap();
            drop(sender);
            let (output, _) = all(conversation).await.unwrap();
            assert_eq!(output, text.as_bytes());
        };
        join_all((0..300).map(one)).await;
    })
    .await;
}
