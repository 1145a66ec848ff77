//! Runs `coracle kubernetes fetch|import|ls` against a web server with configurable faults.

// Clippy's exception for tests does not apply to helpers of integration tests.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

const KUBE: [&str; 4] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
];
const ARCH: &str = if cfg!(target_arch = "x86_64") {
    "amd64"
} else {
    "arm64"
};

/// The server's faults for a path.
#[derive(Debug, Clone, Copy, Default)]
struct ServerFaults {
    /// (bytes, times): closes the connection after this many bytes of the body, this many times.
    break_after: Option<(usize, usize)>,
    /// Stops sending after this many bytes of the body.
    stall_after: Option<usize>,
    /// Answers 503 this many times.
    unavailable: usize,
    /// Ignores the Range header and sends the whole file.
    no_ranges: bool,
}

#[derive(Debug, Clone)]
struct ReceivedRequest {
    path: String,
    range: Option<String>,
    if_range: Option<String>,
}

#[derive(Default)]
struct ServerState {
    files: HashMap<String, Vec<u8>>,
    faults_by_path: HashMap<String, ServerFaults>,
    log: Vec<ReceivedRequest>,
}

#[derive(Clone)]
struct FakeServer {
    url: String,
    state: Arc<Mutex<ServerState>>,
}

impl FakeServer {
    /// Serves a release whose programs are random data.
    fn start() -> FakeServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = FakeServer {
            url,
            state: Arc::default(),
        };
        for (i, name) in KUBE.iter().enumerate() {
            server.put_program(name, noise(i as u64, 300_000 + i));
        }
        server.put_etcd(&etcd_tar(|tar| {
            append(
                tar,
                &etcd_member(),
                tar::EntryType::Regular,
                b"this is etcd",
            )
        }));
        let state = server.state.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = state.clone();
                thread::spawn(move || serve(stream, &state));
            }
        });
        server
    }

    fn put(&self, path: &str, content: impl Into<Vec<u8>>) {
        self.state
            .lock()
            .unwrap()
            .files
            .insert(path.to_owned(), content.into());
    }

    fn put_program(&self, name: &str, content: Vec<u8>) {
        self.put(&format!("{}.sha256", program(name)), sha256(&content));
        self.put(&program(name), content);
    }

    fn put_etcd(&self, archive: &[u8]) {
        let other = "0".repeat(64);
        let name = format!("etcd-v3.7.0-linux-{ARCH}.tar.gz");
        self.put(
            "/etcd/v3.7.0/SHA256SUMS",
            format!(
                "{other}  etcd-v3.7.0-darwin-amd64.zip\n{}  {name}\n",
                sha256(archive)
            ),
        );
        self.put(&format!("/etcd/v3.7.0/{name}"), archive);
    }

    fn get(&self, path: &str) -> Vec<u8> {
        self.state.lock().unwrap().files[path].clone()
    }

    fn set_faults(&self, path: &str, faults: ServerFaults) {
        self.state
            .lock()
            .unwrap()
            .faults_by_path
            .insert(path.to_owned(), faults);
    }

    fn requests(&self, path: &str) -> Vec<ReceivedRequest> {
        self.state
            .lock()
            .unwrap()
            .log
            .iter()
            .filter(|request| request.path == path)
            .cloned()
            .collect()
    }

    fn forget_requests(&self) {
        self.state.lock().unwrap().log.clear();
    }
}

fn serve(stream: TcpStream, state: &Mutex<ServerState>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap())
        .lines()
        .map_while(Result::ok);
    let Some(path) = lines
        .next()
        .and_then(|line| Some(line.split(' ').nth(1)?.to_owned()))
    else {
        return;
    };
    let headers: HashMap<String, String> = lines
        .take_while(|line| !line.is_empty())
        .filter_map(|line| {
            line.split_once(": ")
                .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        })
        .collect();
    let (range, if_range) = (
        headers.get("range").cloned(),
        headers.get("if-range").cloned(),
    );
    let request = ReceivedRequest {
        path: path.clone(),
        range: range.clone(),
        if_range: if_range.clone(),
    };

    let (content, faults, unavailable, cut) = {
        let mut state = state.lock().unwrap();
        state.log.push(request);
        let content = state.files.get(&path).cloned();
        let faults = state.faults_by_path.entry(path).or_default();
        let unavailable = faults.unavailable > 0;
        faults.unavailable = faults.unavailable.saturating_sub(1);
        let cut = match &mut faults.break_after {
            Some((bytes, times)) if *times > 0 => {
                *times -= 1;
                Some(*bytes)
            }
            _ => None,
        };
        (content, *faults, unavailable, cut)
    };
    let Some(content) = content else {
        return respond(stream, "404 Not Found", "", b"not here", None, None);
    };
    if unavailable {
        return respond(stream, "503 Service Unavailable", "", b"busy", None, None);
    }
    let etag = format!("\"{}\"", &sha256(&content)[..16]);
    let start = range.and_then(|range| {
        range
            .strip_prefix("bytes=")?
            .strip_suffix('-')?
            .parse::<usize>()
            .ok()
    });
    let same = if_range.is_none_or(|wanted| wanted == etag);
    match start.filter(|_| same && !faults.no_ranges) {
        Some(start) if start >= content.len() => {
            respond(stream, "416 Range Not Satisfiable", "", b"", None, None)
        }
        Some(start) => {
            let range = format!(
                "ETag: {etag}\r\nContent-Range: bytes {start}-{}/{}\r\n",
                content.len() - 1,
                content.len()
            );
            respond(
                stream,
                "206 Partial Content",
                &range,
                &content[start..],
                cut,
                faults.stall_after,
            );
        }
        None => respond(
            stream,
            "200 OK",
            &format!("ETag: {etag}\r\n"),
            &content,
            cut,
            faults.stall_after,
        ),
    }
}

fn respond(
    mut stream: TcpStream,
    status: &str,
    headers: &str,
    body: &[u8],
    cut: Option<usize>,
    stall: Option<usize>,
) {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n{headers}\r\n",
        body.len()
    );
    let sent = cut.or(stall).unwrap_or(body.len()).min(body.len());
    // The client may have closed the connection.
    let _ = stream
        .write_all(head.as_bytes())
        .and_then(|()| stream.write_all(&body[..sent]));
    if stall.is_some() {
        thread::sleep(Duration::from_secs(60));
    }
    let _ = stream.shutdown(Shutdown::Both);
}

fn program(name: &str) -> String {
    format!("/release/v1.37.1/bin/linux/{ARCH}/{name}")
}

fn etcd_member() -> String {
    format!("etcd-v3.7.0-linux-{ARCH}/etcd")
}

fn sha256(content: &[u8]) -> String {
    Sha256::digest(content)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(|| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    })
    .take(len)
    .collect()
}

fn etcd_tar(build: impl FnOnce(&mut tar::Builder<flate2::write::GzEncoder<Vec<u8>>>)) -> Vec<u8> {
    let gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let mut tar = tar::Builder::new(gz);
    build(&mut tar);
    tar.into_inner().unwrap().finish().unwrap()
}

/// Adds a member with exactly this name: the tar crate's own API refuses `..`.
fn append<W: Write>(tar: &mut tar::Builder<W>, name: &str, kind: tar::EntryType, content: &[u8]) {
    let mut header = tar::Header::new_gnu();
    header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
    header.set_entry_type(kind);
    header.set_size(content.len() as u64);
    header.set_mode(0o755);
    if kind == tar::EntryType::Symlink {
        header.set_link_name("/bin/sh").unwrap();
    }
    header.set_cksum();
    tar.append(&header, content).unwrap();
}

/// A user with a separate home directory.
struct User {
    home: tempfile::TempDir,
}

#[derive(Debug)]
struct Outcome {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl User {
    fn new() -> User {
        User {
            home: tempfile::tempdir().unwrap(),
        }
    }

    fn root(&self) -> PathBuf {
        self.home.path().join("data/coracle/kubernetes")
    }

    fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .args(args)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.home.path())
            .env("XDG_DATA_HOME", self.home.path().join("data"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn coracle(&self, args: &[&str]) -> Outcome {
        finish(self.start(args))
    }

    fn start(&self, args: &[&str]) -> Child {
        let args = [&["kubernetes"], args].concat();
        self.command(env!("CARGO_BIN_EXE_coracle"), &args)
            .spawn()
            .unwrap()
    }

    fn fetch(&self, server: &FakeServer) -> Outcome {
        self.coracle(&["fetch", "--mirror", &server.url])
    }

    /// The paths of all files below the root, except the lock.
    fn files(&self) -> Vec<String> {
        let mut files = Vec::new();
        let mut dirs = vec![self.root()];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                if entry.file_type().unwrap().is_dir() {
                    dirs.push(entry.path());
                } else if entry
                    .path()
                    .extension()
                    .is_none_or(|extension| extension != "lock")
                {
                    files.push(
                        entry
                            .path()
                            .strip_prefix(self.root())
                            .unwrap()
                            .display()
                            .to_string(),
                    );
                }
            }
        }
        files.sort();
        files
    }

    fn part(&self, name: &str) -> PathBuf {
        self.root()
            .join(format!(".partial/v1.37.1-{ARCH}/{name}.part"))
    }

    fn assert_installed(&self, server: &FakeServer) {
        let release = self.root().join("v1.37.1");
        for name in KUBE {
            assert!(
                fs::read(release.join(name)).unwrap() == server.get(&program(name)),
                "{name}"
            );
        }
        assert_eq!(fs::read(release.join("etcd")).unwrap(), b"this is etcd");
        for name in [&KUBE[..], &["etcd"]].concat() {
            assert_eq!(
                fs::metadata(release.join(name))
                    .unwrap()
                    .permissions()
                    .mode()
                    & 0o7777,
                0o755,
                "{name}"
            );
        }
        assert_eq!(self.files().len(), 6, "{:?}", self.files());
    }
}

fn finish(child: Child) -> Outcome {
    let output = child.wait_with_output().unwrap();
    Outcome {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

impl Outcome {
    #[track_caller]
    fn succeeded(self) -> Outcome {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self
    }

    /// Asserts that the command failed with an error and a hint, and that stderr contains all of `with`.
    #[track_caller]
    fn failed(&self, with: &[&str]) {
        assert!(self.code.is_some_and(|code| code != 0), "{self:#?}");
        assert_eq!(self.stdout, "");
        for text in with.iter().chain(&["hint: "]) {
            assert!(self.stderr.contains(text), "no {text:?} in {self:#?}");
        }
        assert!(!self.stderr.contains("panicked"), "{self:#?}");
    }
}

#[test]
fn fetch_installs_once_and_ls_lists_it() {
    let (server, user) = (FakeServer::start(), User::new());
    let outcome = user.fetch(&server).succeeded();
    user.assert_installed(&server);
    assert_eq!(outcome.stdout, "");
    for line in [
        "kube-apiserver: downloading 292.97 KiB",
        "kubectl: 292.97 KiB, checksum good",
        "installed Kubernetes v1.37.1 in ",
    ] {
        assert!(outcome.stderr.contains(line), "{outcome:#?}");
    }
    // Plain lines, because stderr is no terminal.
    assert!(!outcome.stderr.contains(['\r', '\x1b']), "{outcome:#?}");
    let version = fs::read_to_string(user.root().join("v1.37.1/VERSION")).unwrap();
    assert_eq!(
        version,
        format!("kubernetes v1.37.1\netcd v3.7.0\nfrom {}/\n", server.url)
    );
    let private = fs::metadata(user.root().join(".partial"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(private & 0o777, 0o700);

    server.forget_requests();
    let outcome = user
        .coracle(&["fetch", "--mirror", &server.url, "--version", "1.37.1"])
        .succeeded();
    assert!(
        outcome
            .stderr
            .contains("Kubernetes v1.37.1 is already installed in "),
        "{outcome:#?}"
    );
    assert!(server.requests(&program("kubectl")).is_empty());

    server.put_program("kubectl", b"another build".to_vec());
    user.coracle(&["fetch", "--mirror", &server.url, "--force"])
        .succeeded();
    user.assert_installed(&server);

    let outcome = user.coracle(&["ls"]).succeeded();
    assert_eq!(
        outcome.stdout,
        format!(
            "v1.37.1  used        {}\n",
            user.root().join("v1.37.1").display()
        )
    );
    assert_eq!(outcome.stderr, "");
}

#[test]
fn progress_bars_are_shown_on_a_terminal() {
    let (server, user) = (FakeServer::start(), User::new());
    let line = format!(
        "stty cols 120; exec {} kubernetes fetch --mirror {}",
        env!("CARGO_BIN_EXE_coracle"),
        server.url
    );
    let mut command = user.command("script", &["-qec", &line, "/dev/null"]);
    let outcome = finish(command.env("TERM", "xterm").spawn().unwrap()).succeeded();
    user.assert_installed(&server);
    for shown in ["kube-apiserver", "292.97 KiB of 292.97 KiB", "\x1b["] {
        assert!(outcome.stdout.contains(shown), "{shown:?}: {outcome:#?}");
    }
    assert!(!outcome.stdout.contains(": downloading"), "{outcome:#?}");
}

#[test]
fn ls_without_releases_prints_a_hint() {
    let outcome = User::new()
        .coracle(&["ls", "--kubernetes", "/nonexistent"])
        .succeeded();
    assert_eq!(outcome.stdout, "");
    assert!(
        outcome
            .stderr
            .contains("there is no Kubernetes release in /nonexistent\nhint: "),
        "{outcome:#?}"
    );
}

#[test]
fn broken_connection_is_resumed() {
    let (server, user) = (FakeServer::start(), User::new());
    server.set_faults(
        &program("kube-apiserver"),
        ServerFaults {
            break_after: Some((100_000, 1)),
            ..ServerFaults::default()
        },
    );
    let outcome = user.fetch(&server).succeeded();
    user.assert_installed(&server);
    let requests = server.requests(&program("kube-apiserver"));
    assert_eq!(requests.len(), 2);
    assert_eq!((&requests[0].range, &requests[0].if_range), (&None, &None));
    assert_eq!(requests[1].range.as_deref(), Some("bytes=100000-"));
    let etag = format!(
        "\"{}\"",
        &sha256(&server.get(&program("kube-apiserver")))[..16]
    );
    assert_eq!(requests[1].if_range, Some(etag));
    assert!(outcome.stderr.contains("retrying in 0.5 s"), "{outcome:#?}");
    assert!(
        outcome
            .stderr
            .contains("kube-apiserver: resuming at 97.66 KiB of 292.97 KiB"),
        "{outcome:#?}"
    );
}

#[test]
fn whole_file_is_fetched_without_range_support() {
    let (server, user) = (FakeServer::start(), User::new());
    let faults = ServerFaults {
        break_after: Some((100_000, 1)),
        no_ranges: true,
        ..ServerFaults::default()
    };
    server.set_faults(&program("kubectl"), faults);
    user.fetch(&server).succeeded();
    user.assert_installed(&server);
}

#[test]
fn status_503_is_retried() {
    let (server, user) = (FakeServer::start(), User::new());
    server.set_faults(
        &program("kubectl"),
        ServerFaults {
            unavailable: 1,
            ..ServerFaults::default()
        },
    );
    server.set_faults(
        "/etcd/v3.7.0/SHA256SUMS",
        ServerFaults {
            unavailable: 1,
            ..ServerFaults::default()
        },
    );
    user.fetch(&server).succeeded();
    user.assert_installed(&server);
}

#[test]
fn next_run_resumes_after_too_many_broken_connections() {
    let (server, user) = (FakeServer::start(), User::new());
    server.set_faults(
        &program("kube-scheduler"),
        ServerFaults {
            break_after: Some((10_000, 1000)),
            ..ServerFaults::default()
        },
    );
    let outcome = user.fetch(&server);
    outcome.failed(&[
        &program("kube-scheduler"),
        "was interrupted 5 times",
        "hint: run the same command again: it resumes",
    ]);
    assert!(!user.root().join("v1.37.1").exists());
    assert_eq!(
        fs::metadata(user.part("kube-scheduler")).unwrap().len(),
        50_000
    );

    server.set_faults(&program("kube-scheduler"), ServerFaults::default());
    server.forget_requests();
    user.fetch(&server).succeeded();
    user.assert_installed(&server);
    let requests = server.requests(&program("kube-scheduler"));
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0].range.as_deref(), Some("bytes=50000-"));
    assert!(requests[0].if_range.is_some());
    // Complete files are not downloaded again.
    assert!(server.requests(&program("kube-apiserver")).is_empty());
}

#[test]
fn next_run_resumes_a_killed_one() {
    let (server, user) = (FakeServer::start(), User::new());
    server.put_program("kubectl", noise(9, 4 << 20));
    server.set_faults(
        &program("kubectl"),
        ServerFaults {
            stall_after: Some(3 << 20),
            ..ServerFaults::default()
        },
    );
    let mut child = user.start(&["fetch", "--mirror", &server.url]);
    let deadline = Instant::now() + Duration::from_secs(30);
    while fs::metadata(user.part("kubectl")).map_or(0, |part| part.len()) < 1 << 20 {
        assert!(Instant::now() < deadline, "nothing is written");
        thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!user.root().join("v1.37.1").exists());

    server.set_faults(&program("kubectl"), ServerFaults::default());
    user.fetch(&server).succeeded();
    user.assert_installed(&server);
    assert!(server.requests(&program("kubectl"))[1].range.is_some());
}

#[test]
fn damaged_partial_file_is_downloaded_again() {
    let (server, user) = (FakeServer::start(), User::new());
    fs::create_dir_all(user.part("x").parent().unwrap()).unwrap();
    fs::write(user.part("kube-apiserver"), noise(77, 1000)).unwrap();
    fs::write(user.part("kubectl"), noise(78, 900_000)).unwrap();
    let outcome = user.fetch(&server).succeeded();
    user.assert_installed(&server);
    assert!(outcome.stderr.contains("starting over"), "{outcome:#?}");
}

#[test]
fn wrong_checksum_installs_nothing() {
    let (server, user) = (FakeServer::start(), User::new());
    let (wanted, got) = (
        "ab".repeat(32),
        sha256(&server.get(&program("kube-apiserver"))),
    );
    server.put(
        &format!("{}.sha256", program("kube-apiserver")),
        format!("{wanted}  kube-apiserver\n"),
    );
    user.fetch(&server)
        .failed(&["the checksum of kube-apiserver from ", &wanted, &got]);
    assert!(!user.root().join("v1.37.1").exists());
    assert!(!user.part("kube-apiserver").exists());
    assert_eq!(server.requests(&program("kube-apiserver")).len(), 1);
}

#[test]
fn invalid_checksum_file_is_refused() {
    let (server, user) = (FakeServer::start(), User::new());
    server.put(
        &format!("{}.sha256", program("kubectl")),
        "<html>please log in</html>",
    );
    user.fetch(&server)
        .failed(&["kubectl.sha256 has no SHA-256 checksum for kubectl"]);
    assert!(user.files().is_empty());
}

#[test]
fn unknown_and_invalid_versions_are_refused() {
    let (server, user) = (FakeServer::start(), User::new());
    let fetch = |args: &[&str]| user.coracle(&[&["fetch", "--mirror", &server.url], args].concat());
    fetch(&["--version", "v1.99.0"]).failed(&[
        "no such version v1.99.0 of Kubernetes at ",
        "versions look like v1.37.1",
    ]);
    fetch(&["--etcd-version", "v9.0.0"]).failed(&["no such version v9.0.0 of etcd at "]);
    for bad in ["latest", "1.37", "v1.37.1/../x", ""] {
        fetch(&["--version", bad]).failed(&[&format!("{bad:?} is not a version"), "like v1.37.1"]);
    }
    assert!(user.files().is_empty());
    assert!(server.requests(&program("kubectl")).is_empty());
}

#[test]
fn unreachable_server_is_reported_without_credentials() {
    let user = User::new();
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let mirror = format!("http://user:secret@127.0.0.1:{port}/k8s");
    let outcome = user.coracle(&["fetch", "--mirror", &mirror]);
    outcome.failed(&[
        "cannot connect to http://127.0.0.1:",
        "tried 5 times",
        "coracle kubernetes import DIR",
    ]);
    assert!(!outcome.stderr.contains("secret"), "{outcome:#?}");
    user.coracle(&["fetch", "--mirror", "mirror.example/k8s"])
        .failed(&["cannot be a mirror", "https://"]);
}

#[test]
fn hostile_archives_are_refused() {
    let (server, user) = (FakeServer::start(), User::new());
    server.put_etcd(&etcd_tar(|tar| {
        append(tar, &etcd_member(), tar::EntryType::Symlink, b"")
    }));
    user.fetch(&server).failed(&["is not a regular file"]);
    server.put_etcd(&etcd_tar(|tar| {
        append(tar, "../etcd", tar::EntryType::Regular, b"evil");
        append(
            tar,
            "../../../../../../../../tmp/etcd-evil",
            tar::EntryType::Regular,
            b"evil",
        );
        append(tar, "etcd", tar::EntryType::Regular, b"evil");
    }));
    user.fetch(&server)
        .failed(&[&format!("there is no {} in it", etcd_member())]);
    server.put_etcd(b"<html>no archive</html>");
    user.fetch(&server).failed(&["it cannot be read"]);
    assert!(!user.root().join("v1.37.1").exists());
    assert!(!Path::new("/tmp/etcd-evil").exists());

    // A refused archive does not prevent a later installation.
    server.put_etcd(&etcd_tar(|tar| {
        append(
            tar,
            &etcd_member(),
            tar::EntryType::Regular,
            b"this is etcd",
        )
    }));
    user.fetch(&server).succeeded();
    user.assert_installed(&server);
}

#[test]
fn concurrent_fetches_do_not_interfere() {
    let (server, user) = (FakeServer::start(), User::new());
    server.set_faults(
        &program("kubectl"),
        ServerFaults {
            break_after: Some((100_000, 2)),
            ..ServerFaults::default()
        },
    );
    let runs: Vec<_> = (0..3)
        .map(|_| user.start(&["fetch", "--mirror", &server.url]))
        .collect();
    let outcomes: Vec<_> = runs
        .into_iter()
        .map(|run| finish(run).succeeded())
        .collect();
    user.assert_installed(&server);
    assert_eq!(
        outcomes
            .iter()
            .filter(|o| o.stderr.contains("\ninstalled Kubernetes"))
            .count(),
        1,
        "{outcomes:#?}"
    );
}

/// Runs `fetch` with a separate file system as the data directory.
fn fetch_on(user: &User, server: &FakeServer, mount: &str) -> Outcome {
    fs::create_dir_all(user.home.path().join("data")).unwrap();
    let script = format!("mount -t tmpfs {mount} none \"$XDG_DATA_HOME\" && exec \"$@\"");
    let coracle = env!("CARGO_BIN_EXE_coracle");
    let args = [
        "-rm",
        "sh",
        "-c",
        &script,
        "sh",
        coracle,
        "kubernetes",
        "fetch",
        "--mirror",
        &server.url,
    ];
    finish(user.command("unshare", &args).spawn().unwrap())
}

#[test]
fn full_disk_error_says_where_and_how_much() {
    let (server, user) = (FakeServer::start(), User::new());
    let outcome = fetch_on(&user, &server, "-o size=400k");
    let dir = user.part("x").parent().unwrap().display().to_string();
    outcome.failed(&[
        "no space is left in ",
        &dir,
        "KiB more must be written",
        "hint: make room",
        "--into DIR",
    ]);
}

#[test]
fn read_only_directory_is_named() {
    let (server, user) = (FakeServer::start(), User::new());
    let outcome = fetch_on(&user, &server, "-o ro");
    outcome.failed(&[
        &format!("{} cannot be written", user.root().display()),
        "--into DIR",
    ]);
}

/// A program that prints `text`: 151 bytes of ELF.
#[cfg(target_arch = "x86_64")]
fn tiny_program(text: &str) -> Vec<u8> {
    const BASE: u64 = 0x40_0000;
    const CODE_AT: u64 = 120;
    const CODE_LEN: u64 = 31;
    let text_at = (BASE + CODE_AT + CODE_LEN) as u32;
    let size = CODE_AT + CODE_LEN + text.len() as u64;
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    elf.extend([BASE + CODE_AT, 64, 0].map(u64::to_le_bytes).concat()); // entry, program headers, sections
    elf.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 64, 0, 0, 0, 0, 0]); // flags, sizes and counts of headers
    elf.extend([1, 0, 0, 0, 5, 0, 0, 0]); // PT_LOAD, readable and executable
    elf.extend(
        [0, BASE, BASE, size, size, 0x1000]
            .map(u64::to_le_bytes)
            .concat(),
    );
    elf.extend(b"\xb8\x01\0\0\0\xbf\x01\0\0\0\xbe"); // eax = write, edi = stdout, esi =
    elf.extend(text_at.to_le_bytes());
    elf.extend(b"\xba"); // edx =
    elf.extend((text.len() as u32).to_le_bytes());
    elf.extend(b"\x0f\x05\xb8\x3c\0\0\0\x31\xff\x0f\x05"); // syscall; exit(0)
    elf.extend(text.bytes());
    elf
}

/// The output of each component that reports its version.
const VERSION_OUTPUTS: [(&str, &str); 5] = [
    ("kube-apiserver", "Kubernetes v1.37.1\n"),
    ("kube-controller-manager", "Kubernetes v1.37.1\n"),
    ("kube-scheduler", "Kubernetes v1.37.1\n"),
    ("etcd", "etcd Version: 3.7.0\nGit SHA: unknown\n"),
    (
        "kubectl",
        "Client Version: v1.37.1\nKustomize Version: v5.8.0\n",
    ),
];

#[cfg(target_arch = "x86_64")]
fn programs(dir: &Path) -> String {
    fs::create_dir_all(dir).unwrap();
    for (name, output) in VERSION_OUTPUTS {
        // Without execute permission, as downloaded by curl.
        fs::write(dir.join(name), tiny_program(output)).unwrap();
    }
    dir.display().to_string()
}

#[test]
#[cfg(target_arch = "x86_64")]
fn import_installs_five_programs() {
    let user = User::new();
    let dir = programs(&user.home.path().join("bin"));
    let outcome = user.coracle(&["import", &dir]).succeeded();
    assert!(
        outcome.stderr.contains("installed Kubernetes v1.37.1 in "),
        "{outcome:#?}"
    );
    // No seed is made, because these programs only print their versions.
    let warnings = outcome
        .stderr
        .lines()
        .filter(|line| line.contains("warning"));
    assert!(
        warnings.clone().all(|line| line.contains("prepared store")),
        "{outcome:#?}"
    );
    assert_eq!(user.files().len(), 6);
    let version = fs::read_to_string(user.root().join("v1.37.1/VERSION")).unwrap();
    assert!(
        version.starts_with("kubernetes v1.37.1\netcd v3.7.0\nfrom "),
        "{version}"
    );
    let installed = Command::new(user.root().join("v1.37.1/kubectl"))
        .output()
        .unwrap();
    assert!(installed.stdout.starts_with(b"Client Version: v1.37.1"));

    let outcome = user.coracle(&["import", &dir]).succeeded();
    assert!(
        outcome.stderr.contains("is already installed"),
        "{outcome:#?}"
    );
    let outcome = user
        .coracle(&["import", &dir, "--version", "1.38.0"])
        .succeeded();
    assert!(
        outcome
            .stderr
            .contains("warning: kube-apiserver reports version v1.37.1, in a release of v1.38.0"),
        "{outcome:#?}"
    );
    let outcome = user.coracle(&["ls"]).succeeded();
    let lines: Vec<Vec<&str>> = outcome
        .stdout
        .lines()
        .map(|line| line.split_whitespace().take(2).collect())
        .collect();
    assert_eq!(lines, [["v1.38.0", "used"], ["v1.37.1", "available"]]);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn import_copies_a_multi_call_program_once() {
    let user = User::new();
    let dir = user.home.path().join("bin");
    fs::create_dir(&dir).unwrap();
    let outputs: String = VERSION_OUTPUTS.iter().map(|(_, output)| *output).collect();
    fs::write(dir.join("kube"), tiny_program(&outputs)).unwrap();
    for (name, _) in VERSION_OUTPUTS {
        symlink("kube", dir.join(name)).unwrap();
    }
    user.coracle(&["import", &dir.display().to_string()])
        .succeeded();
    let release = user.root().join("v1.37.1");
    assert!(
        fs::symlink_metadata(release.join("kube"))
            .unwrap()
            .is_file()
    );
    for (name, _) in VERSION_OUTPUTS {
        assert_eq!(
            fs::read_link(release.join(name)).unwrap(),
            Path::new("kube"),
            "{name}"
        );
    }
    user.coracle(&["import", &dir.display().to_string(), "--force"])
        .succeeded();
    assert_eq!(user.files().len(), 7, "{:?}", user.files());
}

#[test]
#[cfg(target_arch = "x86_64")]
fn import_refuses_other_programs() {
    let user = User::new();
    let dir = user.home.path().join("bin");
    let import = || user.coracle(&["import", &dir.display().to_string()]);
    let restore = || programs(&dir);

    import().failed(&["cannot read the directory ", "No such file"]);
    restore();
    fs::remove_file(dir.join("etcd")).unwrap();
    import().failed(&[&format!("{} has no etcd", dir.display())]);
    restore();
    fs::write(
        dir.join("kube-scheduler"),
        "#!/bin/sh\necho Kubernetes v1.37.1\n",
    )
    .unwrap();
    import().failed(&["bin/kube-scheduler cannot be used: it is not an ELF program"]);
    restore();
    let mut other_machine = tiny_program("");
    other_machine[18] = 183;
    fs::write(dir.join("kubectl"), other_machine).unwrap();
    import().failed(&[
        "bin/kubectl cannot be used: it is a program for aarch64, and this machine is x86_64",
    ]);
    restore();
    fs::write(dir.join("etcd"), tiny_program("zookeeper 3.9\n")).unwrap();
    import().failed(&["bin/etcd does not seem to be etcd: `--version` printed \"zookeeper 3.9\""]);
    restore();
    fs::write(
        dir.join("kube-apiserver"),
        tiny_program("Kubernetes v0.0.0-master+abc\n"),
    )
    .unwrap();
    import().failed(&[
        "bin/kube-apiserver was built without a version",
        "--version V",
    ]);
    restore();
    fs::remove_file(dir.join("kubectl")).unwrap();
    fs::create_dir(dir.join("kubectl")).unwrap();
    import().failed(&["bin/kubectl cannot be used"]);
    assert!(user.files().is_empty(), "{:?}", user.files());
}
