//! The state of a pod's containers on disk: an exit that was not yet reported to the API server survives sandbox and
//! kubelet.
//!
//! The sandbox writes the file whenever a run of a container begins or ends. If the sandbox was killed, the kubelet reads
//! the file, so that a terminated container keeps its exit code and is not run again. The file contains a [`PodState`]
//! without its events.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use k8s_openapi::api::core::v1::{ContainerState, ContainerStateTerminated, ContainerStatus};
use rustix::fs::OFlags;

use pod_protocol::PodState;

/// Name of the file in the pod's directory.
pub const FILE_NAME: &str = "checkpoint";
/// Temporary name, renamed to [`FILE_NAME`] when the file is complete.
const TEMPORARY_NAME: &str = "checkpoint.new";
/// Room for some hundred containers with long termination messages.
const MAX_BYTES: u64 = 8 * 1024 * 1024;

/// The checkpoint of one pod, as its sandbox writes it.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    saved: Mutex<SavedState>,
}

#[derive(Debug, Default)]
struct SavedState {
    /// The state in the file.
    state: PodState,
    frozen: bool,
}

impl Checkpoint {
    /// The checkpoint in the pod directory `dir`.
    pub fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            saved: Mutex::default(),
        }
    }

    /// Whether [`Self::save`] would write this state.
    pub fn is_outdated_by(&self, state: &PodState) -> bool {
        let saved = self.saved.lock().unwrap();
        !saved.frozen && run_keys(&saved.state) != run_keys(state)
    }

    /// Writes the state that `newest` returns, if a run has begun or ended since the last write. `newest` is called
    /// after earlier writes are done, so that concurrent calls never leave an older state. Blocks until the file is
    /// written.
    pub fn save(&self, newest: impl FnOnce() -> PodState) -> io::Result<()> {
        let mut saved = self.saved.lock().unwrap();
        let state = PodState {
            events: Vec::new(),
            ..newest()
        };
        if saved.frozen || run_keys(&saved.state) == run_keys(&state) {
            return Ok(());
        }
        write(&self.dir, &state)?;
        saved.state = state;
        Ok(())
    }

    /// Makes later calls of [`Self::save`] do nothing.
    pub fn freeze(&self) {
        let mut saved = self.saved.lock().unwrap();
        saved.frozen = true;
    }
}

/// The part of a container's status that identifies its runs.
#[derive(PartialEq)]
struct RunKey<'a> {
    name: &'a str,
    id: Option<&'a str>,
    restart_count: i32,
    terminated: Option<&'a ContainerStateTerminated>,
    last_terminated: Option<&'a ContainerStateTerminated>,
}

/// Whether the pod is finished, and its runs. Probes and back-offs change the state far more often, and cause no write.
fn run_keys(state: &PodState) -> (bool, Vec<RunKey<'_>>) {
    let lists = [
        &state.init_containers,
        &state.containers,
        &state.ephemeral_containers,
    ];
    let statuses = lists.into_iter().flatten();
    (state.finished, statuses.filter_map(run_key).collect())
}

fn run_key(status: &ContainerStatus) -> Option<RunKey<'_>> {
    let has_run = status.container_id.is_some() || status.restart_count > 0;
    has_run.then_some(RunKey {
        name: &status.name,
        id: status.container_id.as_deref(),
        restart_count: status.restart_count,
        terminated: terminated(status.state.as_ref()),
        last_terminated: terminated(status.last_state.as_ref()),
    })
}

fn terminated(state: Option<&ContainerState>) -> Option<&ContainerStateTerminated> {
    state?.terminated.as_ref()
}

fn write(dir: &Path, state: &PodState) -> io::Result<()> {
    let text = serde_json::to_vec(state)?;
    if text.len() as u64 > MAX_BYTES {
        let message = format!("the pod's state has {} bytes", text.len());
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    let temporary = dir.join(TEMPORARY_NAME);
    let mut options = File::options();
    options.create(true).truncate(true).write(true).mode(0o600);
    options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    let mut file = options.open(&temporary)?;
    // Not synced: the file has to outlive processes, but not the machine. If the machine is lost, so is the pod.
    file.write_all(&text)?;
    std::fs::rename(&temporary, dir.join(FILE_NAME))
}

/// Reads the checkpoint in the pod directory `dir`; `None` if it does not exist.
pub fn read(dir: &Path) -> io::Result<Option<PodState>> {
    let invalid = |reason: &str| {
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            reason.to_owned(),
        ))
    };
    let mut options = File::options();
    // The path may be a symbolic link, which is not followed, or a FIFO, on which opening would block.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    options.read(true).custom_flags(flags.bits().cast_signed());
    let file = match options.open(dir.join(FILE_NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.uid() != rustix::process::geteuid().as_raw() {
        return invalid("not a regular file of this user");
    }
    let mut text = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return invalid("too large");
    }
    Ok(Some(serde_json::from_slice(&text)?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use serde_json::json;

    use super::*;

    fn state(container: serde_json::Value) -> PodState {
        let mut status =
            json!({ "name": "a", "image": "i", "imageID": "", "ready": false, "restartCount": 0 });
        let fields = status.as_object_mut().unwrap();
        fields.extend(container.as_object().unwrap().clone());
        PodState {
            containers: vec![serde_json::from_value(status).unwrap()],
            ..Default::default()
        }
    }

    fn running_pod() -> PodState {
        state(json!({ "containerID": "coracle://1", "state": { "running": {} } }))
    }

    fn terminated_pod() -> PodState {
        state(json!({ "containerID": "coracle://1", "state": { "terminated": { "exitCode": 3 } } }))
    }

    #[test]
    fn checkpoint_round_trips() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
        let checkpoint = Checkpoint::new(dir.path());
        for state in [running_pod(), terminated_pod()] {
            checkpoint.save(|| state.clone()).unwrap();
            assert_eq!(read(dir.path()).unwrap(), Some(state));
        }
        let metadata = std::fs::metadata(dir.path().join(FILE_NAME)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn saves_only_when_a_run_begins_or_ends() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::new(dir.path());
        let waiting = json!({ "state": { "waiting": { "reason": "ContainerCreating" } } });
        checkpoint.save(|| state(waiting)).unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
        checkpoint.save(running_pod).unwrap();
        let mut ready = running_pod();
        ready.containers[0].ready = true;
        checkpoint.save(|| ready).unwrap();
        assert_eq!(read(dir.path()).unwrap(), Some(running_pod()));

        checkpoint.freeze();
        checkpoint.save(terminated_pod).unwrap();
        assert_eq!(read(dir.path()).unwrap(), Some(running_pod()));
    }

    #[test]
    fn read_rejects_anything_but_a_valid_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        let is_rejected = || {
            let result = read(dir.path());
            std::fs::remove_file(&path).unwrap();
            result.is_err()
        };
        std::fs::write(&path, "{").unwrap();
        assert!(is_rejected());
        std::fs::write(&path, vec![b' '; 9 << 20]).unwrap();
        assert!(is_rejected());
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        assert!(is_rejected());
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        assert!(is_rejected());
    }
}
