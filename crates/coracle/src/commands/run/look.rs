//! What runs first on the nodes: a few lines of shell, which every host has, that look whether the node
//! sees what a leader needs.
//!
//! Only there can this be known, and only once: a second attempt would cost a second place in the queue,
//! and what the user pipes in would be gone with the first.

use std::path::{Path, PathBuf};

use cluster::carry;
use cluster::carry::bundle::Needed;
use cluster::carry::script::functions;

/// What begins a line on standard error that is for the submitting side and not for the user.
pub const CONTROL: &str = "coracle-control: ";
/// The line by which a leader reports that the workload has ended with 0.
pub const FINISHED: &str = "coracle-control: finished";

/// Sets `seen`, and leaves the words that follow `--`. A file that is opened is seen as it is, also
/// where a network file system keeps older answers.
const LOOK: &str = r#"
program=$1 seen=yes
shift
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
/// removed. The tasks that don't lead wait to be dismissed, as in `follow.rs`.
///
/// The receiver removes the directory if it fails, and its name is known to others by then: they could make it anew. So the
/// program is looked for and executed through a descriptor of the directory that was made here.
const START: &str = r#"
[ $seen = no ] || exec "$program" "$@"
if [ "${SLURM_PROCID:-0}" != 0 ]; then
  trap 'kill $!; exit 0' URG TERM INT HUP
  while :; do sleep 60 & wait $!; done
fi
make_dir
exec 9<"$dir"
echo "coracle-control: carry $dir $SLURM_JOB_ID $SLURMD_NODENAME" >&2
until [ -x /proc/self/fd/9/coracle ]; do
  sleep 0.1 2>/dev/null || sleep 1
done
exec /proc/self/fd/9/coracle "$@"
"#;

/// Only says what it saw, and keeps the job until its input ends. What was brought meanwhile and did not
/// find its way is removed; a leader has done so itself.
const TELL: &str = r#"
[ "${SLURM_PROCID:-0}" = 0 ] || exit 0
trap '' TERM INT HUP
[ $seen = yes ] || make_dir
echo "coracle-look: $seen $SLURM_JOB_NODELIST ${dir:--} $SLURM_JOB_ID $SLURMD_NODENAME"
cat >/dev/null
[ -z "$dir" ] || rm -rf "$dir"
"#;

/// Where a node waits for the bundle.
#[derive(Debug, PartialEq, Eq)]
pub struct Asked {
    /// The directory that it has made for it.
    pub dir: PathBuf,
    /// The job.
    pub job: u32,
    /// The node.
    pub node: String,
}

/// What a node told.
#[derive(Debug, PartialEq, Eq)]
pub struct Told {
    /// Where it wants the bundle, unless it sees everything.
    pub dir: Option<PathBuf>,
    /// The job.
    pub job: u32,
    /// The node.
    pub node: String,
    /// All nodes of the job, as Slurm writes them.
    pub nodes: String,
}

/// The words for the shell that call `coracle` with `words`: the program at `program`, or one that is carried there
/// where a node doesn't see all that is needed.
pub fn and_start(program: &Path, needed: &[Needed], words: Vec<String>) -> Vec<String> {
    let mut all = words_of(START, program, needed);
    all.extend(words);
    all
}

/// The words for the shell that only look, and hold the job.
pub fn and_tell(program: &Path, needed: &[Needed]) -> Vec<String> {
    words_of(TELL, program, needed)
}

/// What a node asks in this line, if it asks for the bundle.
pub fn asks(line: &str) -> Option<Asked> {
    let (dir, rest) = line
        .strip_prefix(CONTROL)?
        .strip_prefix("carry ")?
        .split_once(' ')?;
    let (job, node) = job_and_node(rest)?;
    let dir = carry::parse_dir(dir)?;
    Some(Asked { dir, job, node })
}

/// What a node told of what it sees, among all that it printed.
pub fn told(output: &str) -> Option<Told> {
    // A line that is complete.
    let lines = output.split_inclusive('\n').filter(|l| l.ends_with('\n'));
    lines.into_iter().find_map(|line| {
        let (seen, rest) = line.strip_prefix("coracle-look: ")?.split_once(' ')?;
        let (nodes, rest) = rest.split_once(' ')?;
        let (dir, rest) = rest.split_once(' ')?;
        let (job, node) = job_and_node(rest)?;
        let dir = match seen {
            "yes" => None,
            _ => Some(carry::parse_dir(dir)?),
        };
        Some(Told {
            dir,
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

fn words_of(then: &str, program: &Path, needed: &[Needed]) -> Vec<String> {
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let script = format!("{}{LOOK}{then}", functions("coracle: error:"));
    let mut words = vec!["-c".to_owned(), script, "coracle".to_owned(), text(program)];
    for thing in needed {
        words.extend([text(&thing.path), thing.stamp.clone()]);
    }
    words.push("--".to_owned());
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use cluster::carry::script::SHELL;
    use std::os::unix::fs::MetadataExt;
    use std::process::Command;

    fn sees(needed: &[Needed]) -> bool {
        let words = and_tell(Path::new("/p"), needed);
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
        told.dir.is_none()
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
        let words = and_start(echo, &needed, words);
        let output = Command::new(SHELL).args(words).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "a b  --\n");
    }

    #[test]
    fn only_a_directory_for_the_bundle_is_asked_for() {
        let line = "coracle-control: carry /tmp/coracle-carried.0123456789abcdef 43 node1\n";
        let asked = asks(line).unwrap();
        assert_eq!((asked.job, asked.node.as_str()), (43, "node1"));
        for other in [
            "coracle: ready",
            FINISHED,
            "coracle-control: carry /home/user1 43 node1",
            "coracle-control: carry /tmp/coracle-carried.0123456789abcdef node1",
        ] {
            assert_eq!(asks(other), None, "{other}");
        }
    }
}
