//! A command that runs in the background of a test.

use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::{Output, eventually};

/// Grace period of a command that still runs when it is dropped.
const GRACE_PERIOD: Duration = Duration::from_secs(25);

/// A started command. On drop it is terminated, gracefully if possible.
#[derive(Debug)]
pub struct Running {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Stream,
    stderr: Stream,
}

impl Running {
    pub(crate) fn new(name: String, mut child: Child) -> Self {
        Self {
            name,
            stdin: child.stdin.take(),
            stdout: Stream::read(child.stdout.take()),
            stderr: Stream::read(child.stderr.take()),
            child,
        }
    }

    /// Writes to its standard input.
    pub fn write(&mut self, text: &str) {
        if let Some(stdin) = &mut self.stdin {
            // Ignore errors: the command has exited, and its exit code says more.
            let _ = stdin.write_all(text.as_bytes());
        }
    }

    /// Closes its standard input.
    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Its standard output so far.
    pub fn stdout(&self) -> String {
        self.stdout.text()
    }

    /// Its standard output from byte `start` on, and the number of the next byte.
    pub(crate) fn stdout_from(&self, start: usize) -> (String, usize) {
        let all = self.stdout.text.lock().unwrap();
        let new = all.get(start..).unwrap_or_default();
        (String::from_utf8_lossy(new).into_owned(), all.len())
    }

    /// Its standard error so far.
    pub fn stderr(&self) -> String {
        self.stderr.text()
    }

    /// Sends a signal to the command, as the user's shell on that host would.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.child.id().cast_signed()) {
            let _ = kill_process(pid, signal);
        }
    }

    /// Waits until standard output contains `text`.
    #[track_caller]
    pub fn wait_for_stdout(&mut self, text: &str) {
        self.wait_for_text(text, |running| running.stdout().contains(text));
    }

    /// Waits until standard error contains `text`.
    #[track_caller]
    pub fn wait_for_stderr(&mut self, text: &str) {
        self.wait_for_text(text, |running| running.stderr().contains(text));
    }

    #[track_caller]
    fn wait_for_text(&mut self, text: &str, has_text: impl Fn(&Self) -> bool) {
        let seen = eventually(Duration::from_secs(60), || {
            let exited = self.has_exited();
            // The exit status was taken before the output is checked, so that the command's last output counts.
            if has_text(self) {
                Some(true)
            } else {
                exited.then_some(false)
            }
        });
        let so_far = self.so_far();
        assert!(
            seen == Some(true),
            "{}: never printed {text:?}{so_far}",
            self.name
        );
    }

    /// Whether it has exited.
    pub fn has_exited(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Waits for its exit and for the end of its output.
    #[track_caller]
    pub fn wait(mut self, timeout: Duration) -> Output {
        let status = eventually(timeout, || self.child.try_wait().ok().flatten());
        let Some(status) = status else {
            let so_far = self.so_far();
            panic!(
                "{} did not exit within {} s{so_far}",
                self.name,
                timeout.as_secs()
            );
        };
        let read = |stream: &mut Stream| stream.finish();
        assert!(
            read(&mut self.stdout) && read(&mut self.stderr),
            "{} has exited, but another process still holds its output open{}",
            self.name,
            self.so_far()
        );
        Output {
            code: status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or(0)),
            ..self.so_far()
        }
    }

    fn so_far(&self) -> Output {
        Output {
            code: -1,
            stdout: self.stdout(),
            stderr: self.stderr(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.has_exited() {
            return;
        }
        self.stdin = None;
        self.signal(Signal::TERM);
        if eventually(GRACE_PERIOD, || self.has_exited().then_some(())).is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// An output stream, read by a thread.
#[derive(Debug)]
struct Stream {
    text: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

impl Stream {
    fn read(from: Option<impl Read + Send + 'static>) -> Self {
        let text = Arc::new(Mutex::new(Vec::new()));
        let shared = text.clone();
        let reader = std::thread::spawn(move || {
            let Some(mut from) = from else { return };
            let mut chunk = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut chunk) {
                shared.lock().unwrap().extend(&chunk[..count]);
            }
        });
        Self {
            text,
            reader: Some(reader),
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.text.lock().unwrap()).into_owned()
    }

    /// Waits for end-of-file; false after a time-out.
    fn finish(&mut self) -> bool {
        let Some(reader) = self.reader.take() else {
            return true;
        };
        let finished = eventually(Duration::from_secs(5), || {
            reader.is_finished().then_some(())
        });
        finished.is_some()
    }
}
