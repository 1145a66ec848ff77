//! Tests of writer and reader together, with real pipes and files.

use std::time::Duration;

use futures::{FutureExt, StreamExt, TryStreamExt};
use pod_protocol::{LogSource, RequestErrorKind};
use proptest::prelude::*;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe::{self, Receiver, Sender};

use super::*;

const SMALL: LogLimits = LogLimits {
    max_file_bytes: 50_000,
    max_files: 1000,
};

fn logs(limits: LogLimits) -> (tempfile::TempDir, LogDir) {
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

/// Writes a complete log with standard output only.
async fn write(logs: &LogDir, attempt: u32, chunks: &[Vec<u8>]) {
    let (mut output, input) = pipe::pipe().unwrap();
    let writer = logs.writer("c", attempt).unwrap();
    let writing = async {
        for chunk in chunks {
            output.write_all(chunk).await.unwrap();
        }
        drop(output);
    };
    tokio::join!(writing, writer.copy(input, None::<Receiver>));
}

/// Starts a log; the test writes to the returned pipes.
fn begin(logs: &LogDir, attempt: u32) -> (Sender, Sender, tokio::task::JoinHandle<()>) {
    let (stdout, stdout_end) = pipe::pipe().unwrap();
    let (stderr, stderr_end) = pipe::pipe().unwrap();
    let writer = logs.writer("c", attempt).unwrap();
    let task = tokio::spawn(writer.copy(stdout_end, Some(stderr_end)));
    (stdout, stderr, task)
}

fn block_on<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(test)
}

/// As `tail -n`.
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
    fn written_output_is_read_back(chunks in output(), lines in 0..30_usize) {
        block_on(async {
            let (_dir, logs) = logs(SMALL);
            write(&logs, 0, &chunks).await;
            let written = chunks.concat();
            assert!(read(&logs, query()).await == written);

            let tail_lines = Some(lines as u64);
            let tail = read(&logs, LogQuery { tail_lines, ..query() }).await;
            assert!(tail == last_lines(&written, lines));
            let limit_bytes = Some(1000);
            let head = read(&logs, LogQuery { limit_bytes, ..query() }).await;
            assert!(head == written[..written.len().min(1000)]);
        });
    }

    #[test]
    fn garbage_files_are_readable(files in prop::collection::vec((0..9_u32, prop::collection::vec(any::<u8>(), 0..300)), 0..6), lines in 0..5_u64) {
        block_on(async {
            let (dir, logs) = logs(SMALL);
            let log_dir = dir.path().join("logs/c");
            std::fs::create_dir_all(&log_dir).unwrap();
            std::fs::write(log_dir.join("3.log"), b"no record\n").unwrap();
            for (number, bytes) in files {
                std::fs::write(log_dir.join(format!("3.log.{number}")), bytes).unwrap();
            }
            read(&logs, query()).await;
            read(&logs, LogQuery { tail_lines: Some(lines), ..query() }).await;
            logs.tail_text("c", 3, lines, 50).await;
            write(&logs, 3, &[b"sense\n".to_vec()]).await;
            assert!(read(&logs, query()).await.ends_with(b"sense\n"));
        });
    }
}

/// The last line of a program often has no line feed, and both of its streams end at the same moment.
#[tokio::test]
async fn streams_that_end_together_lose_nothing() {
    for reads_before in 0..2 {
        let (_dir, logs) = logs(SMALL);
        let (mut stdout, mut stderr, task) = begin(&logs, 0);
        // Each read changes which stream is read first.
        for _ in 0..reads_before {
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
async fn stream_filter_separates_stdout_and_stderr() {
    let (_dir, logs) = logs(LogLimits::default());
    let (mut stdout, mut stderr, copying) = begin(&logs, 0);
    stdout.write_all(b"out\n").await.unwrap();
    stderr.write_all(b"err\n").await.unwrap();
    drop(stdout);
    stderr.write_all(b"late").await.unwrap();
    drop(stderr);
    copying.await.unwrap();
    let of = |stream: LogSource| LogQuery { stream, ..query() };
    assert_eq!(read(&logs, of(LogSource::Stdout)).await, b"out\n");
    assert_eq!(read(&logs, of(LogSource::Stderr)).await, b"err\nlate");
    assert_eq!(read(&logs, of(LogSource::All)).await.len(), 12);
    let last = LogQuery {
        tail_lines: Some(1),
        ..of(LogSource::Stdout)
    };
    assert_eq!(read(&logs, last).await, b"out\n");
}

#[tokio::test]
async fn follower_sees_output_as_it_is_written() {
    let (_dir, logs) = logs(LogLimits::default());
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
    // Without `follow`, the log ends at its current end.
    assert_eq!(read(&logs, query()).await, b"one\ntwo\nthree\n");

    drop(stdout);
    assert_eq!(log.next().await.unwrap().unwrap(), "fou");
    assert!(log.next().await.is_none());
    copying.await.unwrap();
    // Following a complete log ends at once.
    assert_eq!(read(&logs, follow).await, b"fou");
}

#[tokio::test]
async fn byte_limit_ends_followed_log() {
    let (_dir, logs) = logs(LogLimits::default());
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
async fn follower_survives_rotation() {
    let limits = LogLimits {
        max_file_bytes: 100_000,
        max_files: 3,
    };
    let (dir, logs) = logs(limits);
    let (mut stdout, stderr, copying) = begin(&logs, 0);
    drop(stderr);
    let follow = LogQuery {
        follow: true,
        ..query()
    };
    let mut log = logs.read(&follow).await.unwrap();
    let (mut written, mut seen) = (Vec::new(), Vec::new());
    for round in 0..200 {
        let line = format!("{round} {}\n", "x".repeat(4000));
        stdout.write_all(line.as_bytes()).await.unwrap();
        written.extend_from_slice(line.as_bytes());
        while seen.len() < written.len() {
            seen.extend_from_slice(&log.next().await.unwrap().unwrap());
        }
    }
    drop(stdout);
    assert!(log.next().await.is_none());
    assert!(seen == written);
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
    assert!(written.ends_with(&kept) && kept.len() as u64 > sizes - 10_000);
    let tail = LogQuery {
        tail_lines: Some(40),
        ..query()
    };
    assert_eq!(read(&logs, tail).await, last_lines(&written, 40));
}

#[tokio::test]
async fn reader_stops_at_end_as_of_request() {
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
    // The file that was current at the time of the request is rotated meanwhile, and so are later ones.
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
async fn slow_follower_loses_only_removed_files() {
    let limits = LogLimits {
        max_file_bytes: 100_000,
        max_files: 2,
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
async fn only_previous_attempt_is_kept() {
    let (dir, logs) = logs(LogLimits::default());
    let previous = LogQuery {
        previous: true,
        ..query()
    };
    let error = logs.read(&query()).await.err().unwrap();
    assert_eq!(error.kind, RequestErrorKind::NotFound);
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
    // As another process sees the files.
    let others = LogDir::new(dir.path().join("logs"));
    assert_eq!(read(&others, query()).await, b"run 3\n");
}

#[tokio::test]
async fn unused_writer_leaves_no_log() {
    let (_dir, logs) = logs(LogLimits::default());
    write(&logs, 0, &[b"run 0\n".to_vec()]).await;
    drop(logs.writer("c", 1).unwrap());
    assert_eq!(read(&logs, query()).await, b"run 0\n");
    write(&logs, 1, &[]).await;
    assert_eq!(read(&logs, query()).await, b"");
}

#[tokio::test]
async fn tail_text_is_end_of_log() {
    let (_dir, logs) = logs(LogLimits::default());
    write(&logs, 0, &["a\nb\nää\n".as_bytes().to_vec()]).await;
    assert_eq!(logs.tail_text("c", 0, 80, 2048).await, "a\nb\nää\n");
    assert_eq!(logs.tail_text("c", 0, 1, 2048).await, "ää\n");
    assert_eq!(logs.tail_text("c", 0, 80, 4).await, "ä\n");
    assert_eq!(logs.tail_text("c", 1, 80, 2048).await, "");
    assert_eq!(logs.tail_text("../c", 0, 80, 2048).await, "");
}

#[tokio::test]
async fn invalid_container_names_are_rejected() {
    let (_dir, logs) = logs(LogLimits::default());
    for name in ["", "..", "a/b", "a\0b", "."] {
        assert!(logs.writer(name, 0).is_err(), "{name}");
    }
}

/// A benchmark: `cargo nextest run --release -p sandbox --run-ignored all speed --no-capture`.
#[tokio::test]
#[ignore = "measures"]
async fn speed() {
    let line = format!("{}\n", "x".repeat(100));
    let block = line.repeat(600).into_bytes();
    let total = 600_000_000;
    let limits = LogLimits {
        max_file_bytes: 2_000_000_000,
        max_files: 5,
    };
    let (_dir, logs) = logs(limits);
    let writer = logs.writer("c", 0).unwrap();
    let (input, mut output) = std::io::pipe().unwrap();
    let writing = std::thread::spawn(move || {
        for _ in 0..total / block.len() {
            std::io::Write::write_all(&mut output, &block).unwrap();
        }
    });
    let begun = std::time::Instant::now();
    let input = Receiver::from_owned_fd(input.into()).unwrap();
    writer.copy(input, None::<Receiver>).await;
    writing.join().unwrap();
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
