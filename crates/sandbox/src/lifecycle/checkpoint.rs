//! How a pod's containers stand, on disk: an end that the API server was not told of outlives sandbox and kubelet.
//!
//! The sandbox writes the file whenever a run begins or ends. If it is gone, the kubelet reads the file, so that a container that
//! has ended keeps its exit code and is not run again. The file holds what the pod's status shows, and nothing else.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::core::v1::{ContainerState, ContainerStateTerminated, ContainerStatus};
use rustix::fs::OFlags;

use pod_protocol::PodState;

/// The file, in the pod's directory.
pub const NAME: &str = "checkpoint";
/// The file while it is written.
const NEW: &str = "checkpoint.new";
/// Room for some hundred containers with long termination messages.
const MAX_BYTES: u64 = 8 * 1024 * 1024;

/// The checkpoint of one pod, as its sandbox keeps it.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// What the file says.
    state: PodState,
    frozen: bool,
}

impl Checkpoint {
    /// That of the pod whose directory `dir` is.
    pub fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            kept: Mutex::default(),
        }
    }

    /// Whether [`Self::save`] would write this state.
    pub fn is_outdated_by(&self, state: &PodState) -> bool {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        !kept.frozen && runs(&kept.state) != runs(state)
    }

    /// Writes what `newest` returns, if a run has begun or ended since. `newest` is called when earlier writes are done, so that
    /// concurrent calls never leave an older state. Blocks until the disk has it.
    pub fn save(&self, newest: impl FnOnce() -> PodState) -> io::Result<()> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let state = PodState {
            events: Vec::new(),
            ..newest()
        };
        if kept.frozen || runs(&kept.state) == runs(&state) {
            return Ok(());
        }
        write(&self.dir, &state)?;
        kept.state = state;
        Ok(())
    }

    /// Makes later calls of [`Self::save`] do nothing.
    pub fn freeze(&self) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.frozen = true;
    }
}

/// The part of a container's status that says which runs there were.
#[derive(PartialEq)]
struct Run<'a> {
    name: &'a str,
    id: Option<&'a str>,
    restarts: i32,
    ended: Option<&'a ContainerStateTerminated>,
    ended_before: Option<&'a ContainerStateTerminated>,
}

/// The runs of a pod, and whether it is over. Probes and back-offs change a state far more often, and need not be remembered.
fn runs(state: &PodState) -> (bool, Vec<Run<'_>>) {
    let lists = [
        &state.init_containers,
        &state.containers,
        &state.ephemeral_containers,
    ];
    let statuses = lists.into_iter().flatten();
    (state.finished, statuses.filter_map(run).collect())
}

fn run(status: &ContainerStatus) -> Option<Run<'_>> {
    let has_run = status.container_id.is_some() || status.restart_count > 0;
    has_run.then_some(Run {
        name: &status.name,
        id: status.container_id.as_deref(),
        restarts: status.restart_count,
        ended: end(status.state.as_ref()),
        ended_before: end(status.last_state.as_ref()),
    })
}

fn end(state: Option<&ContainerState>) -> Option<&ContainerStateTerminated> {
    state?.terminated.as_ref()
}

fn write(dir: &Path, state: &PodState) -> io::Result<()> {
    let text = serde_json::to_vec(state)?;
    if text.len() as u64 > MAX_BYTES {
        let message = format!("the pod's state has {} bytes", text.len());
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    let new = dir.join(NEW);
    let mut options = File::options();
    options.create(true).truncate(true).write(true).mode(0o600);
    options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    let mut file = options.open(&new)?;
    // Not synced: it outlives processes, but not the machine, which takes the pod and its directory with it.
    file.write_all(&text)?;
    std::fs::rename(&new, dir.join(NAME))
}

/// Reads the checkpoint of the pod whose directory `dir` is; `None` if it has none.
pub fn read(dir: &Path) -> io::Result<Option<PodState>> {
    let invalid = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidData, why.to_owned()));
    let mut options = File::options();
    // A pipe or a link in its place is not ours, and must not hold us up.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    options.read(true).custom_flags(flags.bits().cast_signed());
    let file = match options.open(dir.join(NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let found = file.metadata()?;
    if !found.is_file() || found.uid() != rustix::process::geteuid().as_raw() {
        return invalid("not a file of this user");
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

    fn running() -> PodState {
        state(json!({ "containerID": "coracle://1", "state": { "running": {} } }))
    }

    fn ended() -> PodState {
        state(json!({ "containerID": "coracle://1", "state": { "terminated": { "exitCode": 3 } } }))
    }

    #[test]
    fn a_checkpoint_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
        let checkpoint = Checkpoint::new(dir.path());
        for state in [running(), ended()] {
            checkpoint.save(|| state.clone()).unwrap();
            assert_eq!(read(dir.path()).unwrap(), Some(state));
        }
        let found = std::fs::metadata(dir.path().join(NAME)).unwrap();
        assert_eq!(found.permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn only_runs_that_begin_or_end_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::new(dir.path());
        let waiting = json!({ "state": { "waiting": { "reason": "ContainerCreating" } } });
        checkpoint.save(|| state(waiting)).unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
        checkpoint.save(running).unwrap();
        let mut ready = running();
        ready.containers[0].ready = true;
        checkpoint.save(|| ready).unwrap();
        assert_eq!(read(dir.path()).unwrap(), Some(running()));

        checkpoint.freeze();
        checkpoint.save(ended).unwrap();
        assert_eq!(read(dir.path()).unwrap(), Some(running()));
    }

    #[test]
    fn what_is_no_checkpoint_is_an_error_and_never_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        let refused = || {
            let refused = read(dir.path()).is_err();
            std::fs::remove_file(&path).unwrap();
            refused
        };
        std::fs::write(&path, "{").unwrap();
        assert!(refused());
        std::fs::write(&path, vec![b' '; 9 << 20]).unwrap();
        assert!(refused());
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        assert!(refused());
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        assert!(refused());
    }
}
