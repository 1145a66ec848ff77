//! Writer and reader together, over real pipes and files.

use std::time::Duration;

use futures::{FutureExt, StreamExt, TryStreamExt};
use proptest::prelude::*;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe::{self, Receiver, Sender};

use super::*;

const SMALL: Limits = Limits {
    segment_bytes: 50_000,
    segments: 1000,
};

fn logs(limits: Limits) -> (tempfile::TempDir, LogDir) {
    let dir = tempfile::tempdir().unwrap();
    let logs = LogDir::with_limits(dir.path().join("logs"), limits);
    (dir, logs)
}

fn query() -> LogQuery {
    LogQuery {
        container: "c".to_owned(),
        ..LogQuery::default()
    }
}

async fn read(logs: &LogDir, query: LogQuery) -> Vec<u8> {
    let log = logs.read(&query).await.unwrap();
    let pieces: Vec<_> = log.try_collect().await.unwrap();
    pieces.concat()
}

/// Writes a whole log from standard output alone.
async fn write(logs: &LogDir, attempt: u32, chunks: &[Vec<u8>]) {
    let (mut output, input) = pipe::pipe().unwrap();
    let writer = logs.writer("c", attempt).unwrap();
    let speak = async {
        for chunk in chunks {
            output.write_all(chunk).await.unwrap();
        }
        drop(output);
    };
    tokio::join!(speak, writer.copy(input, None::<Receiver>));
}

/// A log that a test writes to by and by.
fn begin(logs: &LogDir, attempt: u32) -> (Sender, Sender, tokio::task::JoinHandle<()>) {
    let (stdout, stdout_end) = pipe::pipe().unwrap();
    let (stderr, stderr_end) = pipe::pipe().unwrap();
    let writer = logs.writer("c", attempt).unwrap();
    let task = tokio::spawn(writer.copy(stdout_end, Some(stderr_end)));
    (stdout, stderr, task)
}

fn on_a_runtime<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(test)
}

/// What `tail -n` makes of it.
fn last_lines(bytes: &[u8], lines: usize) -> &[u8] {
    let ends: Vec<usize> = bytes
        .split_inclusive(|byte| *byte == b'\n')
        .scan(0, |end, line| {
            *end += line.len();
            Some(*end)
        })
        .collect();
    match ends.len().checked_sub(lines + 1) {
        Some(before) => &bytes[ends[before]..],
        None => bytes,
    }
}

fn output() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let chunk = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'x')], 0..2000),
        (0..70_000_usize).prop_map(|length| vec![b'l'; length]),
    ];
    prop::collection::vec(chunk, 0..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn what_is_written_is_read(chunks in output(), lines in 0..30_usize) {
        on_a_runtime(async {
            let (_dir, logs) = logs(SMALL);
            write(&logs, 0, &chunks).await;
            let said = chunks.concat();
            assert!(read(&logs, query()).await == said);

            let tail_lines = Some(lines as u64);
            let tail = read(&logs, LogQuery { tail_lines, ..query() }).await;
            assert!(tail == last_lines(&said, lines));
            let limit_bytes = Some(1000);
            let head = read(&logs, LogQuery { limit_bytes, ..query() }).await;
            assert!(head == said[..said.len().min(1000)]);
        });
    }

    #[test]
    fn any_files_can_be_read(files in prop::collection::vec((0..9_u32, prop::collection::vec(any::<u8>(), 0..300)), 0..6), lines in 0..5_u64) {
        on_a_runtime(async {
            let (dir, logs) = logs(SMALL);
            let place = dir.path().join("logs/c");
            std::fs::create_dir_all(&place).unwrap();
            std::fs::write(place.join("3.log"), b"no record\n").unwrap();
            for (number, bytes) in files {
                std::fs::write(place.join(format!("3.log.{number}")), bytes).unwrap();
            }
            read(&logs, query()).await;
            read(&logs, LogQuery { tail_lines: Some(lines), ..query() }).await;
            logs.tail_text("c", 3, lines, 50).await;
            write(&logs, 3, &[b"sense\n".to_vec()]).await;
            assert!(read(&logs, query()).await.ends_with(b"sense\n"));
        });
    }
}

/// The last line of a program often has no end, and its outputs end at the same moment.
#[tokio::test]
async fn outputs_that_end_together_lose_nothing() {
    for silent in 0..2 {
        let (_dir, logs) = logs(SMALL);
        let (mut stdout, mut stderr, task) = begin(&logs, 0);
        // Whose turn it is changes with each time that something is read.
        for _ in 0..silent {
            stdout.write_all(b"once\n").await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        stdout.write_all(b"out").await.unwrap();
        stderr.write_all(b"err").await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        drop((stdout, stderr));
        task.await.unwrap();
        let text = String::from_utf8(read(&logs, query()).await).unwrap();
        assert!(text.contains("out") && text.contains("err"), "{text:?}");
    }
}

#[tokio::test]
async fn both_outputs_are_told_apart() {
    let (_dir, logs) = logs(Limits::default());
    let (mut stdout, mut stderr, copying) = begin(&logs, 0);
    stdout.write_all(b"out\n").await.unwrap();
    stderr.write_all(b"err\n").await.unwrap();
    drop(stdout);
    stderr.write_all(b"late").await.unwrap();
    drop(stderr);
    copying.await.unwrap();
    let of = |stream: &str| LogQuery {
        stream: Some(stream.to_owned()),
        ..query()
    };
    assert_eq!(read(&logs, of("Stdout")).await, b"out\n");
    assert_eq!(read(&logs, of("Stderr")).await, b"err\nlate");
    assert_eq!(read(&logs, of("All")).await.len(), 12);
    let last = LogQuery {
        tail_lines: Some(1),
        ..of("Stdout")
    };
    assert_eq!(read(&logs, last).await, b"out\n");
}

#[tokio::test]
async fn a_followed_log_is_seen_as_it_is_written() {
    let (_dir, logs) = logs(Limits::default());
    let (mut stdout, stderr, copying) = begin(&logs, 0);
    drop(stderr);
    stdout.write_all(b"one\ntwo\n").await.unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;

    let follow = LogQuery {
        follow: true,
        tail_lines: Some(1),
        ..query()
    };
    let mut log = logs.read(&follow).await.unwrap();
    assert_eq!(log.next().await.unwrap().unwrap(), "two\n");
    assert!(log.next().now_or_never().is_none());
    stdout.write_all(b"three\nfou").await.unwrap();
    assert_eq!(log.next().await.unwrap().unwrap(), "three\n");
    // A log that is not followed ends where it is now.
    assert_eq!(read(&logs, query()).await, b"one\ntwo\nthree\n");

    drop(stdout);
    assert_eq!(log.next().await.unwrap().unwrap(), "fou");
    assert!(log.next().await.is_none());
    copying.await.unwrap();
    // A container that has ended is followed to its end at once.
    assert_eq!(read(&logs, follow).await, b"fou");
}

#[tokio::test]
async fn a_limit_ends_a_followed_log() {
    let (_dir, logs) = logs(Limits::default());
    let (mut stdout, _stderr, copying) = begin(&logs, 0);
    let follow = LogQuery {
        follow: true,
        limit_bytes: Some(6),
        ..query()
    };
    let mut log = logs.read(&follow).await.unwrap();
    stdout.write_all(b"one\ntwo\n").await.unwrap();
    assert_eq!(log.next().await.unwrap().unwrap(), "one\ntw");
    assert!(log.next().await.is_none());
    copying.abort();
}

#[tokio::test]
async fn followers_survive_rotation_and_files_are_bounded() {
    let limits = Limits {
        segment_bytes: 100_000,
        segments: 3,
    };
    let (dir, logs) = logs(limits);
    let (mut stdout, stderr, copying) = begin(&logs, 0);
    drop(stderr);
    let follow = LogQuery {
        follow: true,
        ..query()
    };
    let mut log = logs.read(&follow).await.unwrap();
    let (mut said, mut seen) = (Vec::new(), Vec::new());
    for round in 0..200 {
        let line = format!("{round} {}\n", "x".repeat(4000));
        stdout.write_all(line.as_bytes()).await.unwrap();
        said.extend_from_slice(line.as_bytes());
        while seen.len() < said.len() {
            seen.extend_from_slice(&log.next().await.unwrap().unwrap());
        }
    }
    drop(stdout);
    assert!(log.next().await.is_none());
    assert!(seen == said);
    copying.await.unwrap();

    let mut sizes = 0;
    let mut count = 0;
    for entry in std::fs::read_dir(dir.path().join("logs/c")).unwrap() {
        let size = entry.unwrap().metadata().unwrap().len();
        assert!(size <= 100_000);
        sizes += size;
        count += 1;
    }
    assert_eq!(count, 3);
    let kept = read(&logs, query()).await;
    assert!(said.ends_with(&kept) && kept.len() as u64 > sizes - 10_000);
    let tail = LogQuery {
        tail_lines: Some(40),
        ..query()
    };
    assert_eq!(read(&logs, tail).await, last_lines(&said, 40));
}

#[tokio::test]
async fn what_is_asked_for_is_what_was_there_then() {
    let (_dir, logs) = logs(SMALL);
    let (mut stdout, stderr, task) = begin(&logs, 0);
    let part = |from: u32| -> Vec<u8> {
        let lines =
            (from..from + 4000).map(|number| format!("line {number} of a log that goes on\n"));
        lines.collect::<String>().into_bytes()
    };
    let (before, after) = (part(0), part(4000));
    let written = async |all: &[u8]| {
        while read(&logs, query()).await.len() < all.len() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    stdout.write_all(&before).await.unwrap();
    written(&before).await;
    let mut log = logs.read(&query()).await.unwrap();
    let mut seen = log.next().await.unwrap().unwrap().to_vec();
    // The file that was being written when it was asked for is full meanwhile, and so are others after it.
    stdout.write_all(&after).await.unwrap();
    written(&[&before[..], &after].concat()).await;
    while let Some(more) = log.next().await {
        seen.extend(more.unwrap());
    }
    assert!(seen == before, "{} bytes of {}", seen.len(), before.len());
    drop((stdout, stderr));
    task.await.unwrap();
}

#[tokio::test]
async fn a_slow_follower_loses_only_what_is_gone() {
    let limits = Limits {
        segment_bytes: 100_000,
        segments: 2,
    };
    let (_dir, logs) = logs(limits);
    let (mut stdout, stderr, copying) = begin(&logs, 0);
    drop(stderr);
    stdout.write_all(b"first\n").await.unwrap();
    let follow = LogQuery {
        follow: true,
        ..query()
    };
    let mut log = logs.read(&follow).await.unwrap();
    assert_eq!(log.next().await.unwrap().unwrap(), "first\n");
    for _ in 0..100 {
        stdout.write_all(&[b'x'; 9999]).await.unwrap();
        stdout.write_all(b"\n").await.unwrap();
    }
    stdout.write_all(b"last\n").await.unwrap();
    drop(stdout);
    copying.await.unwrap();
    let seen: Vec<_> = log.try_collect().await.unwrap();
    let seen = seen.concat();
    assert!(seen.ends_with(b"x\nlast\n"));
    assert!(seen.len() < 400_000);
}

#[tokio::test]
async fn the_run_before_is_kept_and_those_before_it_are_not() {
    let (dir, logs) = logs(Limits::default());
    let previous = LogQuery {
        previous: true,
        ..query()
    };
    let problem = logs.read(&query()).await.err().unwrap();
    assert_eq!(problem.reason, "NotFound");
    for attempt in 0..4 {
        write(&logs, attempt, &[format!("run {attempt}\n").into_bytes()]).await;
        let problem = logs.read(&previous).await.err();
        assert_eq!(problem.is_some(), attempt == 0);
    }
    assert_eq!(read(&logs, query()).await, b"run 3\n");
    assert_eq!(read(&logs, previous).await, b"run 2\n");
    assert_eq!(
        std::fs::read_dir(dir.path().join("logs/c"))
            .unwrap()
            .count(),
        2
    );
    // Somebody else who sees the files.
    let others = LogDir::new(dir.path().join("logs"));
    assert_eq!(read(&others, query()).await, b"run 3\n");
}

#[tokio::test]
async fn a_run_that_never_began_leaves_no_log() {
    let (_dir, logs) = logs(Limits::default());
    write(&logs, 0, &[b"run 0\n".to_vec()]).await;
    drop(logs.writer("c", 1).unwrap());
    assert_eq!(read(&logs, query()).await, b"run 0\n");
    write(&logs, 1, &[]).await;
    assert_eq!(read(&logs, query()).await, b"");
}

#[tokio::test]
async fn termination_messages_are_the_end_of_the_log() {
    let (_dir, logs) = logs(Limits::default());
    write(&logs, 0, &["a\nb\nää\n".as_bytes().to_vec()]).await;
    assert_eq!(logs.tail_text("c", 0, 80, 2048).await, "a\nb\nää\n");
    assert_eq!(logs.tail_text("c", 0, 1, 2048).await, "ää\n");
    assert_eq!(logs.tail_text("c", 0, 80, 4).await, "ä\n");
    assert_eq!(logs.tail_text("c", 1, 80, 2048).await, "");
    assert_eq!(logs.tail_text("../c", 0, 80, 2048).await, "");
}

#[tokio::test]
async fn names_stay_within_the_directory() {
    let (_dir, logs) = logs(Limits::default());
    for name in ["", "..", "a/b", "a\0b", "."] {
        assert!(logs.writer(name, 0).is_err(), "{name}");
    }
}

/// Not a test of correctness: `cargo nextest run --release -p sandbox --run-ignored all speed --no-capture`.
#[tokio::test]
#[ignore = "measures"]
async fn speed() {
    let line = format!("{}\n", "x".repeat(100));
    let block = line.repeat(600).into_bytes();
    let total = 600_000_000;
    let limits = Limits {
        segment_bytes: 2_000_000_000,
        segments: 5,
    };
    let (_dir, logs) = logs(limits);
    let writer = logs.writer("c", 0).unwrap();
    let (input, mut output) = std::io::pipe().unwrap();
    let speaker = std::thread::spawn(move || {
        for _ in 0..total / block.len() {
            std::io::Write::write_all(&mut output, &block).unwrap();
        }
    });
    let begun = std::time::Instant::now();
    let input = Receiver::from_owned_fd(input.into()).unwrap();
    writer.copy(input, None::<Receiver>).await;
    speaker.join().unwrap();
    let rate = |bytes: usize| bytes as f64 / 1e6 / begun.elapsed().as_secs_f64();
    println!("written: {:.0} MB/s", rate(total));
    let begun = std::time::Instant::now();
    let mut log = logs.read(&query()).await.unwrap();
    let mut read = 0;
    while let Some(piece) = log.next().await {
        read += piece.unwrap().len();
    }
    println!(
        "read: {:.0} MB/s",
        read as f64 / 1e6 / begun.elapsed().as_secs_f64()
    );
}
