//! Fuzzes log files as a full disk, a crash or another program may leave them: `make fuzz`, or `FUZZ_SECONDS=600 cargo nextest run fuzz_`.

use std::time::{Duration, Instant};

use futures::TryStreamExt;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::filter::{FilteredOutput, LogFilter};
use super::record::{LogRecord, OutputStream};
use super::*;

/// A line of a file: mostly a record, sometimes a truncated one, sometimes garbage.
fn line() -> impl Strategy<Value = Vec<u8>> {
    let record = (
        0..10_u8,
        prop_oneof![Just("stdout"), Just("stderr")],
        prop_oneof![4 => Just("F"), 2 => Just("P"), 1 => Just("F:x"), 1 => Just("")],
        prop::collection::vec(
            any::<u8>().prop_filter("no line feed", |byte| *byte != b'\n'),
            0..80,
        ),
    )
        .prop_map(|(second, stream, tag, content)| {
            let head = format!("2026-01-01T00:00:0{second}.000000000Z {stream} {tag} ");
            [head.as_bytes(), &content].concat()
        });
    let truncated = (record.clone(), any::<prop::sample::Index>()).prop_map(|(record, at)| {
        let end = at.index(record.len() + 1);
        record[..end].to_vec()
    });
    let long = (60_000..80_000_usize).prop_map(|length| vec![b'l'; length]);
    let garbage = prop::collection::vec(any::<u8>(), 0..60);
    prop_oneof![40 => record, 6 => truncated, 1 => long, 3 => garbage]
}

fn file() -> impl Strategy<Value = Vec<u8>> {
    (prop::collection::vec(line(), 0..30), any::<bool>()).prop_map(|(lines, ended)| {
        let mut file = lines.join(&b'\n');
        if ended {
            file.push(b'\n');
        }
        file
    })
}

fn filter() -> impl Strategy<Value = LogFilter> {
    let stream = prop_oneof![
        Just(None),
        Just(Some(OutputStream::Stdout)),
        Just(Some(OutputStream::Stderr))
    ];
    let since = prop::option::of(0..10_u8)
        .prop_map(|second| second.map(|second| format!("2026-01-01T00:00:0{second}.000000000Z")));
    (stream, since, any::<bool>(), prop::option::of(0..500_u64)).prop_map(
        |(stream, since, timestamps, limit_bytes)| LogFilter {
            stream,
            since,
            timestamps,
            limit_bytes,
        },
    )
}

fn filtered(file: &[u8], filter: &LogFilter, piece: usize) -> Vec<u8> {
    let mut output = FilteredOutput::new(filter.clone());
    let mut out = Vec::new();
    for piece in file.chunks(piece) {
        if output.is_done() {
            break;
        }
        output.push(piece, &mut out);
    }
    output.finish(&mut out);
    out
}

/// The expected output, computed line by line.
fn expected(file: &[u8], filter: &LogFilter) -> Vec<u8> {
    let mut out = Vec::new();
    let mut at_line_start = true;
    let lines: Vec<_> = file.split(|byte| *byte == b'\n').collect();
    for (index, line) in lines.iter().enumerate() {
        let Some(record) = LogRecord::parse(line).filter(|_| line.len() <= 64 * 1024) else {
            continue;
        };
        let is_earlier = filter
            .since
            .as_ref()
            .is_some_and(|since| record.time < since.as_bytes());
        if is_earlier || !filter.includes(record.stream) {
            continue;
        }
        if filter.timestamps && at_line_start {
            out.extend(record.time);
            out.push(b' ');
        }
        out.extend(record.content);
        at_line_start = record.ends_line && index + 1 < lines.len();
        if at_line_start {
            out.push(b'\n');
        }
    }
    if let Some(limit) = filter.limit_bytes {
        out.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    }
    out
}

#[test]
fn fuzz_log_files() {
    let seconds = std::env::var("FUZZ_SECONDS").ok();
    let seconds = seconds.and_then(|text| text.parse().ok()).unwrap_or(0);
    let end = Instant::now() + Duration::from_secs(seconds);
    let cases = (file(), filter(), 1..100_000_usize, 1..200_usize, 0..40_u64);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    loop {
        let mut runner = TestRunner::new(Config {
            failure_persistence: None,
            ..Config::default()
        });
        let done = runner.run(&cases, |(file, filter, large, small, tail)| {
            let expected = expected(&file, &filter);
            prop_assert_eq!(&filtered(&file, &filter, large), &expected);
            prop_assert_eq!(&filtered(&file, &filter, small), &expected);
            runtime.block_on(check_tail(&file, tail));
            Ok(())
        });
        if let Err(failure) = done {
            panic!("{failure}");
        }
        if Instant::now() >= end {
            return;
        }
    }
}

/// Checks that the last lines are the end of the log.
async fn check_tail(file: &[u8], tail: u64) {
    let dir = tempfile::tempdir().unwrap();
    let logs = LogDir::new(dir.path());
    std::fs::create_dir(dir.path().join("c")).unwrap();
    std::fs::write(dir.path().join("c/0.log"), file).unwrap();
    let read = |tail_lines| {
        let query = LogQuery {
            container: "c".to_owned(),
            tail_lines,
            ..LogQuery::default()
        };
        let logs = logs.clone();
        async move {
            let log = logs.read(&query).await.unwrap();
            let pieces: Vec<_> = log.try_collect().await.unwrap();
            pieces.concat()
        }
    };
    let all = read(None).await;
    let last = read(Some(tail)).await;
    assert!(all.ends_with(&last), "tail {tail}");
    let lines = last.split_inclusive(|byte| *byte == b'\n').count() as u64;
    // The last line of each stream may have no line feed.
    assert!(lines <= tail + 1, "tail {tail} gives {lines}");
}
