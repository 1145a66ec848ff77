//! The shell script that runs first on the nodes. It checks whether the node sees the files that a leader needs.
//!
//! Only the node can check this, and there is one attempt: a second job would queue again, and the first would have consumed
//! standard input.

use std::path::{Path, PathBuf};

use cluster::carry;
use cluster::carry::archive::NeededFile;
use cluster::carry::script::{ShellCommand, functions, quote};

/// Prefix of control lines: lines on standard error for the submitting host, not for the user.
pub const CONTROL_PREFIX: &str = "coracle-control: ";
/// The control line by which a leader reports that the workload exited with 0.
pub const WORKLOAD_SUCCEEDED: &str = "coracle-control: finished";

/// Sets `seen` to whether the node sees all files, and shifts the arguments up to `--`. It opens the files instead of calling stat on
/// paths, because network file systems may return cached attributes.
const CHECK_SCRIPT: &str = r#"
program=$1 seen=yes
shift
size_and_mtime() { stat -Lc %s-%Y - <"$1"; }
while [ "$1" != -- ]; do
  if [ -z "$2" ]; then
    [ -e "$1" ] || seen=no
  else
    [ "$(size_and_mtime "$1" 2>/dev/null)" = "$2" ] || seen=no
  fi
  shift 2
done
shift
"#;

/// Reports the job, then executes `coracle run`, either at once or when the archive has arrived; removes the directory if it is terminated before. Other tasks
/// than the first wait for a signal, as in `waiting_tasks.rs`.
///
/// The receiver removes the directory if it fails. Other users know its name by then and could create it again. So the script
/// finds and executes the program through a descriptor of the directory that it has made.
const START_SCRIPT: &str = r#"
[ "${SLURM_PROCID:-0}" != 0 ] || echo "coracle-control: job $SLURM_JOB_ID $SLURMD_NODENAME" >&2
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

/// Prints the result of the check, and holds the job until standard input ends. Then it removes the carried files, which a leader that
/// started has already removed itself.
const REPORT_SCRIPT: &str = r#"
[ "${SLURM_PROCID:-0}" = 0 ] || exit 0
trap '' TERM INT HUP
[ $seen = yes ] || make_dir
echo "coracle-check: $seen $SLURM_JOB_NODELIST ${dir:--} $SLURM_JOB_ID $SLURMD_NODENAME"
cat >/dev/null
[ -z "$dir" ] || rm -rf "$dir"
"#;

/// A node's request for the archive.
#[derive(Debug, PartialEq, Eq)]
pub struct CarryRequest {
    /// The directory on the node that receives it.
    pub dir: PathBuf,
    /// The job in which the node waits.
    pub job: u32,
    /// The first node of the job.
    pub node: String,
}

/// The job of a leader, and the node on which the leader runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderLocation {
    pub job: u32,
    pub node: String,
}

/// The result of the check on a node.
#[derive(Debug, PartialEq, Eq)]
pub struct FileCheckResult {
    /// The directory that receives the archive; `None` if the node sees all files.
    pub dir: Option<PathBuf>,
    /// The job in which the node waits.
    pub job: u32,
    /// The first node of the job.
    pub node: String,
    /// All nodes of the job, in Slurm's notation.
    pub nodes: String,
}

/// The command that executes `coracle` with the arguments `args`: the file `program`, or a carried copy if the node does not see
/// all of `needed`.
pub fn start_command(program: &Path, needed: &[NeededFile], args: Vec<String>) -> ShellCommand {
    command(START_SCRIPT, program, needed, args)
}

/// The command that only checks, and holds the job.
pub fn report_command(program: &Path, needed: &[NeededFile]) -> ShellCommand {
    command(REPORT_SCRIPT, program, needed, Vec::new())
}

/// Parses a control line that requests the archive.
pub fn parse_carry_request(line: &str) -> Option<CarryRequest> {
    let (dir, rest) = line
        .strip_prefix(CONTROL_PREFIX)?
        .strip_prefix("carry ")?
        .split_once(' ')?;
    let (job, node) = job_and_node(rest)?;
    let dir = carry::parse_dir(dir)?;
    Some(CarryRequest { dir, job, node })
}

/// Parses a control line that reports the leader's job.
pub fn parse_location(line: &str) -> Option<LeaderLocation> {
    let rest = line.strip_prefix(CONTROL_PREFIX)?.strip_prefix("job ")?;
    let (job, node) = job_and_node(rest)?;
    Some(LeaderLocation { job, node })
}

/// Finds the result of the check in a node's output.
pub fn parse_result(output: &str) -> Option<FileCheckResult> {
    // Skip a line that has not arrived completely.
    let lines = output.split_inclusive('\n').filter(|l| l.ends_with('\n'));
    lines.into_iter().find_map(|line| {
        let (seen, rest) = line.strip_prefix("coracle-check: ")?.split_once(' ')?;
        let (nodes, rest) = rest.split_once(' ')?;
        let (dir, rest) = rest.split_once(' ')?;
        let (job, node) = job_and_node(rest)?;
        let dir = match seen {
            "yes" => None,
            _ => Some(carry::parse_dir(dir)?),
        };
        Some(FileCheckResult {
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

/// The files are parameters in the script, not on the command line, which `ps` shows.
fn command(body: &str, program: &Path, needed: &[NeededFile], args: Vec<String>) -> ShellCommand {
    let text = |path: &Path| quote(&path.to_string_lossy());
    let mut parameters = text(program);
    for file in needed {
        parameters.push_str(&format!(
            " {} {}",
            text(&file.path),
            quote(&file.size_and_mtime)
        ));
    }
    let functions = functions("coracle: error:");
    let script = format!("set -- {parameters} -- \"$@\"\n{functions}{CHECK_SCRIPT}{body}");
    ShellCommand::new(&script, args)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cluster::carry::script::SHELL;
    use std::os::unix::fs::MetadataExt;
    use std::process::Command;

    fn sees(needed: &[NeededFile]) -> bool {
        let command = report_command(Path::new("/p"), needed);
        let output = Command::new(SHELL)
            .args(&command.args)
            .envs([command.variable()])
            .env("SLURM_JOB_ID", "7")
            .env("SLURM_JOB_NODELIST", "node[1-2]")
            .env("SLURMD_NODENAME", "node1")
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        let result = parse_result(&String::from_utf8_lossy(&output.stdout)).unwrap();
        assert_eq!((result.job, result.node.as_str()), (7, "node1"));
        result.dir.is_none()
    }

    #[test]
    fn missing_or_different_files_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("it's a \"file\"");
        std::fs::write(&file, "text").unwrap();
        let needed = |path: &Path, size_and_mtime: String| NeededFile {
            path: path.to_owned(),
            size_and_mtime,
        };
        let size_and_mtime = |path: &Path| {
            let meta = path.metadata().unwrap();
            format!("{}-{}", meta.size(), meta.mtime())
        };
        let here = || needed(&file, String::new());
        assert!(sees(&[]));
        assert!(sees(&[here(), needed(&file, size_and_mtime(&file))]));
        assert!(sees(&[needed(dir.path(), size_and_mtime(dir.path()))]));
        assert!(!sees(&[
            needed(Path::new("/no/such"), String::new()),
            here()
        ]));
        assert!(!sees(&[needed(Path::new("/no/such"), "1-1".into())]));
        assert!(!sees(&[needed(&file, "4-1".into())]));
    }

    #[test]
    fn visible_program_is_executed_with_its_arguments() {
        let echo = Path::new("/bin/echo");
        let args = vec!["a b".to_owned(), String::new(), "--".to_owned()];
        let needed = [NeededFile {
            path: echo.to_owned(),
            size_and_mtime: String::new(),
        }];
        let shell = start_command(echo, &needed, args);
        assert_eq!(shell.args[2..], ["coracle", "a b", "", "--"]);
        let mut command = Command::new(SHELL);
        command.args(&shell.args).envs([shell.variable()]);
        command.env("SLURM_JOB_ID", "7");
        command.env("SLURMD_NODENAME", "node1");
        let output = command.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "a b  --\n");
        let reported = LeaderLocation {
            job: 7,
            node: "node1".to_owned(),
        };
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(parse_location(&stderr), Some(reported));
        // Only the leader reports.
        let output = command.env("SLURM_PROCID", "1").output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    }

    #[test]
    fn only_valid_carry_requests_are_parsed() {
        let line = "coracle-control: carry /tmp/coracle-carried.0123456789abcdef 43 node1\n";
        let request = parse_carry_request(line).unwrap();
        assert_eq!((request.job, request.node.as_str()), (43, "node1"));
        for other in [
            "coracle: ready",
            WORKLOAD_SUCCEEDED,
            "coracle-control: job 43 node1",
            "coracle-control: carry /home/user1 43 node1",
            "coracle-control: carry /tmp/coracle-carried.0123456789abcdef node1",
        ] {
            assert_eq!(parse_carry_request(other), None, "{other}");
        }
    }
}
