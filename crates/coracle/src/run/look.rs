//! What runs first on the nodes: a few lines of shell, which every host has, that look whether the node
//! sees what a leader needs.
//!
//! Only there can this be known, and only once: a second attempt would cost a second place in the queue,
//! and what the user pipes in would be gone with the first.

use std::path::Path;

use crate::carried::bundle::Needed;

/// The shell that runs it.
pub const SHELL: &str = "/bin/sh";

/// What begins the line by which a node asks for the bundle.
pub const ASKS: &str = "coracle-carry: ";

/// Sets `seen`, and leaves the words that follow `--`. A file that is opened is seen as it is, also
/// where a network file system keeps older answers.
const LOOK: &str = r#"
program=$1 copy=$2 seen=yes
shift 2
stamp() { stat -Lc %s-%Y - <"$1"; }
while [ "$1" != -- ]; do
  if [ -z "$2" ]; then
    [ -e "$1" ] || seen=no
  else
    [ "$(stamp "$1" 2>/dev/null)" = "$2" ] || seen=no
  fi
  shift 2
done
shift
"#;

/// Becomes `coracle run`, at once or when the bundle is there; if it is told to end before, what came of it is
/// removed. A directory of that name that isn't ours
/// alone is somebody else's trick. The tasks that don't lead wait to be dismissed, as in `follow.rs`.
const START: &str = r#"
[ $seen = no ] || exec "$program" "$@"
if [ "${SLURM_PROCID:-0}" != 0 ]; then
  trap 'kill $!; exit 0' URG TERM INT HUP
  while :; do sleep 60 & wait $!; done
fi
trap 'rm -rf "$copy" "$copy".*; exit 143' TERM INT HUP
echo "coracle-carry: $copy $SLURM_JOB_ID $SLURMD_NODENAME" >&2
until [ -x "$copy/coracle" ] && [ -O "$copy" ] && [ ! -L "$copy" ]; do
  sleep 0.1 2>/dev/null || sleep 1
done
exec "$copy/coracle" "$@"
"#;

/// Only says what it saw, and keeps the job until its input ends. What was brought meanwhile and did not
/// find its way is removed; a leader has done so itself.
const TELL: &str = r#"
[ "${SLURM_PROCID:-0}" = 0 ] || exit 0
echo "coracle-look: $seen $SLURM_JOB_NODELIST $SLURM_JOB_ID $SLURMD_NODENAME"
trap '' TERM INT HUP
cat >/dev/null
rm -rf "$copy" "$copy".*
"#;

/// What a node told.
#[derive(Debug, PartialEq, Eq)]
pub struct Told {
    /// It sees everything.
    pub sees_all: bool,
    /// The job.
    pub job: u32,
    /// The node.
    pub node: String,
    /// All nodes of the job, as Slurm writes them.
    pub nodes: String,
}

/// The words for [`SHELL`] that call `coracle` with `words`, from `copy` where a node doesn't see all
/// that is needed.
pub fn and_start(
    program: &Path,
    copy: &Path,
    needed: &[Needed],
    words: Vec<String>,
) -> Vec<String> {
    let mut all = words_of(START, program, copy, needed);
    all.extend(words);
    all
}

/// The words for [`SHELL`] that only look, and hold the job.
pub fn and_tell(program: &Path, copy: &Path, needed: &[Needed]) -> Vec<String> {
    words_of(TELL, program, copy, needed)
}

/// The job and the node of a line in which a node asks for the bundle that goes to `copy`.
pub fn asks(line: &str, copy: &Path) -> Option<(u32, String)> {
    let rest = line.strip_prefix(ASKS)?.strip_prefix(copy.to_str()?)?;
    job_and_node(rest)
}

/// What a node told of what it sees, among all that it printed.
pub fn told(output: &str) -> Option<Told> {
    output.lines().find_map(|line| {
        let (seen, rest) = line.strip_prefix("coracle-look: ")?.split_once(' ')?;
        let (nodes, rest) = rest.split_once(' ')?;
        let (job, node) = job_and_node(rest)?;
        Some(Told {
            sees_all: seen == "yes",
            job,
            node,
            nodes: nodes.to_owned(),
        })
    })
}

fn job_and_node(text: &str) -> Option<(u32, String)> {
    let (job, node) = text.trim().split_once(' ')?;
    Some((job.parse().ok()?, node.to_owned()))
}

fn words_of(then: &str, program: &Path, copy: &Path, needed: &[Needed]) -> Vec<String> {
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let script = format!("{LOOK}{then}");
    let mut words = vec!["-c".to_owned(), script, "coracle".to_owned()];
    words.extend([text(program), text(copy)]);
    for thing in needed {
        words.extend([text(&thing.path), thing.stamp.clone()]);
    }
    words.push("--".to_owned());
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::process::Command;

    fn sees(needed: &[Needed]) -> bool {
        let words = and_tell(Path::new("/p"), Path::new("/tmp/c"), needed);
        let output = Command::new(SHELL)
            .args(words)
            .env("SLURM_JOB_ID", "7")
            .env("SLURM_JOB_NODELIST", "node[1-2]")
            .env("SLURMD_NODENAME", "node1")
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        let told = told(&String::from_utf8_lossy(&output.stdout)).unwrap();
        assert_eq!((told.job, told.node.as_str()), (7, "node1"));
        told.sees_all
    }

    #[test]
    fn what_is_missing_or_another_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("it's a \"file\"");
        std::fs::write(&file, "text").unwrap();
        let needed = |path: &Path, stamp: String| Needed {
            path: path.to_owned(),
            stamp,
        };
        let stamp = |path: &Path| {
            let meta = path.metadata().unwrap();
            format!("{}-{}", meta.size(), meta.mtime())
        };
        let here = || needed(&file, String::new());
        assert!(sees(&[]));
        assert!(sees(&[here(), needed(&file, stamp(&file))]));
        assert!(sees(&[needed(dir.path(), stamp(dir.path()))]));
        assert!(!sees(&[
            needed(Path::new("/no/such"), String::new()),
            here()
        ]));
        assert!(!sees(&[needed(Path::new("/no/such"), "1-1".into())]));
        assert!(!sees(&[needed(&file, "4-1".into())]));
    }

    #[test]
    fn a_program_that_is_seen_is_started_with_its_words() {
        let echo = Path::new("/bin/echo");
        let words = vec!["a b".to_owned(), String::new(), "--".to_owned()];
        let needed = [Needed {
            path: echo.to_owned(),
            stamp: String::new(),
        }];
        let words = and_start(echo, Path::new("/tmp/c"), &needed, words);
        let output = Command::new(SHELL).args(words).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "a b  --\n");
    }

    #[test]
    fn only_the_own_bundle_is_asked_for() {
        let copy = Path::new("/tmp/coracle-12");
        let line = "coracle-carry: /tmp/coracle-12 43 node1\n";
        assert_eq!(asks(line, copy), Some((43, "node1".to_owned())));
        assert_eq!(asks(line, Path::new("/tmp/coracle-13")), None);
        assert_eq!(asks("coracle: ready", copy), None);
    }
}
