//! The shell script that receives this program on a node, from its standard input, and executes it.
//!
//! If other users knew a path in `/tmp` before it exists, they could create it first. So the script on the node makes the
//! directory, with a random name. From then on only this user can enter it or, `/tmp` being sticky, rename it. No path is
//! among the arguments of the carrying step.

use std::path::Path;

use super::program_stream::{CARRY_BLOCK_SIZE, ProgramStream};

/// The shell that runs it.
pub const SHELL: &str = "/bin/sh";
/// The variable with the script that [`SHELL`] evaluates. `srun` passes variables with this prefix on even with `--export=NONE`.
const SCRIPT_VARIABLE: &str = "SLURM_CORACLE_SCRIPT";
/// Evaluates the script. `ps` and `squeue` show this in place of a page of shell.
const EVALUATE: &str = r#"eval "$SLURM_CORACLE_SCRIPT""#;

/// A command of [`SHELL`] whose script is in its environment.
#[derive(Debug, Clone)]
pub struct ShellCommand {
    /// The arguments of [`SHELL`].
    pub args: Vec<String>,
    script: String,
}

impl ShellCommand {
    /// Runs `script` with the positional parameters `args`.
    pub fn new(script: &str, args: impl IntoIterator<Item = String>) -> Self {
        let fixed = ["-c", EVALUATE, "coracle"].map(str::to_owned);
        Self {
            args: fixed.into_iter().chain(args).collect(),
            // The programs that the script executes do not need it.
            script: format!("unset {SCRIPT_VARIABLE}\n{script}"),
        }
    }

    /// The variable that the environment of the command must have.
    pub fn variable(&self) -> (String, String) {
        (SCRIPT_VARIABLE.to_owned(), self.script.clone())
    }
}

/// Quotes a word for [`SHELL`].
pub fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// `make_dir` sets `$dir`; `receive_program BLOCKS DIGEST` writes `coracle.part` in `$at`. `refuse` reports the reason and removes
/// `$dir`. Other users must not be able to rename any directory of the program's path, so `/tmp` itself is checked too.
///
/// A directory that another process of this user may remove is entered first: its name may then belong to another user.
const FUNCTIONS: &str = r#"
dir=
refuse() {
  [ -z "$dir" ] || rm -rf "$dir"
  echo "$prefix ${SLURMD_NODENAME:-this node}: cannot receive the program: $1" >&2
  exit 73
}
trap 'rm -rf "$dir"; exit 143' TERM INT HUP
make_dir() {
  me=$(id -u)
  case $(stat -Lc %u:%A /tmp) in
    0:d*[tT] | 0:d????-??-? | "$me":d*[tT] | "$me":d????-??-?) ;;
    *) refuse "other users can rename files in /tmp (it is neither sticky nor private)" ;;
  esac
  dir=$(mktemp -d /tmp/coracle-carried.XXXXXXXXXXXXXXXX) || refuse "cannot make a directory in /tmp"
  at=$dir
}
enter_dir() {
  cd -P "$1" || refuse "cannot enter $1"
  case $(stat -c %u:%A .) in
    "$(id -u)":drwx--?---) dir=$1 at=. ;;
    *) refuse "$1 is not a directory of this user alone" ;;
  esac
}
receive_program() {
  dd bs=$block count="$1" iflag=fullblock status=none | gzip -dc >"$at/coracle.part" ||
    refuse "cannot unpack it to $dir"
  sum=$(sha256sum <"$at/coracle.part") || refuse "cannot verify it without sha256sum"
  [ "${sum%% *}" = "$2" ] || refuse "its SHA-256 digest is wrong"
  chmod 700 "$at/coracle.part"
  [ -x "$at/coracle.part" ] || refuse "programs cannot be executed from /tmp"
}
"#;

/// Receives the program and executes it.
const RUN: &str = r#"
make_dir
receive_program "$1" "$2"
shift 2
mv "$dir/coracle.part" "$dir/coracle"
exec "$dir/coracle" "$@"
"#;

/// Receives the program into a directory that another step has made, and executes it to receive the archive there.
const RECEIVE: &str = r#"
enter_dir "$3"
receive_program "$1" "$2"
exec ./coracle.part internal receive "$dir"
"#;

/// Becomes the program in a directory that another step has made.
const START: &str = r#"
exec 9<"$1"
case $(stat -Lc %u:%A /proc/self/fd/9) in
  "$(id -u)":drwx--?---) ;;
  *) refuse "$1 is not a directory of this user alone" ;;
esac
shift
exec /proc/self/fd/9/coracle "$@"
"#;

/// The functions for a script with this prefix of error messages, which must not contain quotes.
pub fn functions(message_prefix: &'static str) -> String {
    format!("prefix='{message_prefix}' block={CARRY_BLOCK_SIZE}{FUNCTIONS}")
}

/// The command that receives `program` and executes it with `args`. The program removes its directory.
pub fn run_command(
    message_prefix: &'static str,
    program: &ProgramStream,
    args: &[String],
) -> ShellCommand {
    let mut parameters = stream_parameters(program);
    parameters.extend_from_slice(args);
    command(message_prefix, RUN, parameters)
}

/// The command that receives `program`, and an archive after it, into `dir` on that node.
pub fn receive_command(
    message_prefix: &'static str,
    program: &ProgramStream,
    dir: &Path,
) -> ShellCommand {
    let mut parameters = stream_parameters(program);
    parameters.push(dir.to_string_lossy().into_owned());
    command(message_prefix, RECEIVE, parameters)
}

/// The command that executes the complete program in `dir` with `args`.
pub fn start_command(message_prefix: &'static str, dir: &Path, args: &[String]) -> ShellCommand {
    let dir = dir.to_string_lossy().into_owned();
    let parameters = std::iter::once(dir).chain(args.iter().cloned());
    command(message_prefix, START, parameters.collect())
}

fn stream_parameters(program: &ProgramStream) -> Vec<String> {
    vec![program.blocks().to_string(), program.digest().to_owned()]
}

fn command(message_prefix: &'static str, body: &str, parameters: Vec<String>) -> ShellCommand {
    let script = format!("{}{body}", functions(message_prefix));
    ShellCommand::new(&script, parameters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File, Permissions};
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Child, Command, Output, Stdio};
    use std::time::{Duration, Instant};

    /// Receives the program at `path` in place of ours, in `tmp` in place of `/tmp`. `change` modifies the arguments and the stream.
    fn receive_and_run(
        tmp: &Path,
        path: &str,
        args: &[&str],
        change: impl Fn(&mut ShellCommand, &mut Vec<u8>),
    ) -> Output {
        let program = ProgramStream::compress(File::open(path).unwrap()).unwrap();
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let mut command = run_command("error:", &program, &args);
        command.script = command.script.replace("/tmp", tmp.to_str().unwrap());
        let mut stream = program.bytes().to_vec();
        stream.extend(b"for the program\n");
        change(&mut command, &mut stream);
        let mut child = spawn(&command);
        let mut stdin = child.stdin.take().unwrap();
        // A shell that refuses the program closes the pipe.
        let _ = stdin.write_all(&stream);
        drop(stdin);
        child.wait_with_output().unwrap()
    }

    fn spawn(command: &ShellCommand) -> Child {
        Command::new(SHELL)
            .args(&command.args)
            .envs([command.variable()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn private_dir(path: &Path) {
        fs::create_dir(path).unwrap();
        fs::set_permissions(path, Permissions::from_mode(0o700)).unwrap();
    }

    fn unchanged(_: &mut ShellCommand, _: &mut Vec<u8>) {}

    fn assert_refused(tmp: &Path, reason: &str, change: impl Fn(&mut ShellCommand, &mut Vec<u8>)) {
        let output = receive_and_run(tmp, "/bin/cat", &[], change);
        assert_eq!(output.status.code(), Some(73), "{output:?}");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            stderr.contains("error: this node: cannot receive the program: "),
            "{stderr}"
        );
        assert!(stderr.contains(reason), "{stderr}");
        assert_eq!(fs::read_dir(tmp).unwrap().count(), 0, "leftovers");
    }

    #[test]
    fn program_runs_in_private_directory() {
        let tmp = tempfile::tempdir().unwrap();
        let own_executable = ["/proc/self/exe"];
        let output = receive_and_run(tmp.path(), "/bin/readlink", &own_executable, unchanged);
        let program = String::from_utf8(output.stdout).unwrap();
        let dir = Path::new(program.trim()).parent().unwrap();
        assert_eq!(dir.parent(), Some(tmp.path()));
        assert_eq!(dir.metadata().unwrap().permissions().mode() & 0o7777, 0o700);
        assert_eq!(
            super::super::carried_dir(Path::new(program.trim())).as_deref(),
            Some(dir)
        );
    }

    #[test]
    fn command_line_is_short_and_script_is_not_inherited() {
        let command = ShellCommand::new("echo \"$0 $1\"; env", ["a b".to_owned()]);
        assert_eq!(command.args.join(" "), format!("-c {EVALUATE} coracle a b"));
        let output = spawn(&command).wait_with_output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(stdout.starts_with("coracle a b\n"), "{stdout}");
        assert!(!stdout.contains(SCRIPT_VARIABLE), "{stdout}");
        assert!(EVALUATE.contains(SCRIPT_VARIABLE));
        assert_eq!(quote("it's"), r"'it'\''s'");
    }

    #[test]
    fn program_reads_rest_of_stream() {
        let tmp = tempfile::tempdir().unwrap();
        let output = receive_and_run(tmp.path(), "/bin/cat", &["-"], unchanged);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "for the program\n");
    }

    #[test]
    fn changed_or_truncated_program_never_runs() {
        let tmp = tempfile::tempdir().unwrap();
        assert_refused(tmp.path(), "cannot unpack", |_, stream| stream[10_000] ^= 1);
        assert_refused(tmp.path(), "cannot unpack", |_, stream| {
            stream.truncate(5000)
        });
        assert_refused(tmp.path(), "digest is wrong", |command, _| {
            command.args[4] = "0".repeat(64);
        });
    }

    #[test]
    fn refuses_tmp_that_others_can_rename() {
        let tmp = tempfile::tempdir().unwrap();
        let mode = |mode| fs::set_permissions(tmp.path(), Permissions::from_mode(mode)).unwrap();
        for open in [0o777, 0o770, 0o707] {
            mode(open);
            assert_refused(tmp.path(), "other users can rename", unchanged);
        }
        mode(0o1777);
        let output = receive_and_run(tmp.path(), "/bin/cat", &["-"], unchanged);
        assert!(output.status.success(), "{output:?}");
    }

    /// While the program arrives, another process of ours removes the directory, and another user creates one with the same name.
    #[test]
    fn replaced_directory_is_not_used() {
        let tmp = tempfile::tempdir().unwrap();
        let (dir, away) = (tmp.path().join("dir"), tmp.path().join("away"));
        private_dir(&dir);
        // In place of our program: a shell that executes the file `internal`, which prints the path of that shell.
        let file = "/bin/dash";
        fs::write(dir.join("internal"), "readlink /proc/$$/exe\n").unwrap();
        let program = ProgramStream::compress(File::open(file).unwrap()).unwrap();
        let mut child = spawn(&receive_command("error:", &program, &dir));
        let mut stdin = child.stdin.take().unwrap();
        let (first, rest) = program.bytes().split_at(5000);
        stdin.write_all(first).unwrap();
        let began = Instant::now();
        while !dir.join("coracle.part").exists() {
            assert!(began.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(10));
        }
        fs::rename(&dir, &away).unwrap();
        private_dir(&dir);
        // The other user's file passes for the program until it is executed.
        fs::copy(file, dir.join("coracle.part")).unwrap();
        fs::write(dir.join("internal"), "echo attacked\n").unwrap();
        stdin.write_all(rest).unwrap();
        drop(stdin);
        let output = child.wait_with_output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        let own = away.join("coracle.part");
        assert_eq!(stdout.trim(), own.to_str().unwrap(), "{output:?}");
    }

    #[test]
    fn only_private_directory_is_filled_or_executed_from() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = tmp.path().join("dir");
        private_dir(&dir);
        fs::copy("/bin/echo", dir.join(super::super::PROGRAM)).unwrap();
        let started = || {
            let command = start_command("error:", &dir, &["output".to_owned()]);
            spawn(&command).wait_with_output().unwrap()
        };
        let output = started();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "output\n");
        fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        let program = ProgramStream::compress(File::open("/bin/cat").unwrap()).unwrap();
        let received = spawn(&receive_command("error:", &program, &dir));
        for output in [started(), received.wait_with_output().unwrap()] {
            assert_eq!(output.status.code(), Some(73), "{output:?}");
            assert_eq!(String::from_utf8_lossy(&output.stdout), "");
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(
                stderr.contains("not a directory of this user alone"),
                "{stderr}"
            );
        }
        // The directory of another user is not removed.
        assert!(dir.exists());
    }
}
