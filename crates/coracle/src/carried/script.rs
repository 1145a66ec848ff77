//! The shell that receives our program on a node, from its standard input, and becomes it.
//!
//! A path in `/tmp` that other users learn before it exists is theirs to create. So the node itself makes the
//! directory, with a name that exists nowhere before. From then on it belongs to this user alone: others can neither
//! look into it nor, `/tmp` being sticky, rename it. No path is among the arguments of the step that carries.

use std::path::Path;

use super::program::{BLOCK, Program};

/// The shell that runs it.
pub const SHELL: &str = "/bin/sh";

/// `make_dir` sets `$dir`; `receive_program BLOCKS DIGEST` fills `coracle.part` in `$at`. `refuse` says why not, and leaves
/// nothing. Whatever the program is executed from must not be for others to rename, so neither `/tmp` itself.
///
/// The shell enters a directory that another process of this user may remove: its name may then belong to another user.
const FUNCTIONS: &str = r#"
dir=
refuse() {
  [ -z "$dir" ] || rm -rf "$dir"
  echo "$says ${SLURMD_NODENAME:-this node}: cannot receive the program: $1" >&2
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
  [ "${sum%% *}" = "$2" ] || refuse "what arrived is not what was sent"
  chmod 700 "$at/coracle.part"
  [ -x "$at/coracle.part" ] || refuse "programs cannot be executed from /tmp"
}
"#;

/// Receives the program and becomes it.
const RUN: &str = r#"
make_dir
receive_program "$1" "$2"
shift 2
mv "$dir/coracle.part" "$dir/coracle"
exec "$dir/coracle" "$@"
"#;

/// Receives the program into a directory that another step has made, and has it receive the rest there.
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

/// The functions for a script, whose messages begin with `says`: a constant without quotes.
pub fn functions(says: &'static str) -> String {
    format!("says='{says}' block={BLOCK}{FUNCTIONS}")
}

/// The words for [`SHELL`] that receive `program` and call it with `args`. The program removes its directory.
pub fn run(says: &'static str, program: &Program, args: &[String]) -> Vec<String> {
    let mut words = words(says, RUN, program);
    words.extend_from_slice(args);
    words
}

/// The words for [`SHELL`] that receive `program`, and a bundle after it, into `dir` on that node.
pub fn receive(says: &'static str, program: &Program, dir: &Path) -> Vec<String> {
    let mut words = words(says, RECEIVE, program);
    words.push(dir.to_string_lossy().into_owned());
    words
}

/// The words for [`SHELL`] that call the program in `dir`, which is complete, with `args`.
pub fn start(says: &'static str, dir: &Path, args: &[String]) -> Vec<String> {
    let mut words = shell(says, START);
    words.push(dir.to_string_lossy().into_owned());
    words.extend_from_slice(args);
    words
}

fn words(says: &'static str, then: &str, program: &Program) -> Vec<String> {
    let mut words = shell(says, then);
    words.extend([program.blocks().to_string(), program.digest().to_owned()]);
    words
}

fn shell(says: &'static str, then: &str) -> Vec<String> {
    let script = format!("{}{then}", functions(says));
    vec!["-c".to_owned(), script, "coracle".to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File, Permissions};
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Child, Command, Output, Stdio};
    use std::time::{Duration, Instant};

    /// Receives the program at `path` in place of ours, in `tmp` in place of `/tmp`; `change` changes the words and the
    /// stream on their way.
    fn received(
        tmp: &Path,
        path: &str,
        args: &[&str],
        change: impl Fn(&mut Vec<String>, &mut Vec<u8>),
    ) -> Output {
        let program = Program::read(File::open(path).unwrap()).unwrap();
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let mut words = run("error:", &program, &args);
        words[1] = words[1].replace("/tmp", tmp.to_str().unwrap());
        let mut stream = program.stream().to_vec();
        stream.extend(b"for the program\n");
        change(&mut words, &mut stream);
        let mut child = spawn(&words);
        let mut stdin = child.stdin.take().unwrap();
        // A shell that refuses does not read.
        let _ = stdin.write_all(&stream);
        drop(stdin);
        child.wait_with_output().unwrap()
    }

    fn spawn(words: &[String]) -> Child {
        Command::new(SHELL)
            .args(words)
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

    fn unchanged(_: &mut Vec<String>, _: &mut Vec<u8>) {}

    fn refused(tmp: &Path, why: &str, change: impl Fn(&mut Vec<String>, &mut Vec<u8>)) {
        let output = received(tmp, "/bin/cat", &[], change);
        assert_eq!(output.status.code(), Some(73), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            said.contains("error: this node: cannot receive the program: "),
            "{said}"
        );
        assert!(said.contains(why), "{said}");
        assert_eq!(fs::read_dir(tmp).unwrap().count(), 0, "something stays");
    }

    #[test]
    fn the_program_runs_in_a_private_directory() {
        let tmp = tempfile::tempdir().unwrap();
        let where_am_i = ["/proc/self/exe"];
        let output = received(tmp.path(), "/bin/readlink", &where_am_i, unchanged);
        let program = String::from_utf8(output.stdout).unwrap();
        let dir = Path::new(program.trim()).parent().unwrap();
        assert_eq!(dir.parent(), Some(tmp.path()));
        assert_eq!(dir.metadata().unwrap().permissions().mode() & 0o7777, 0o700);
        assert_eq!(
            super::super::copy_of(Path::new(program.trim())).as_deref(),
            Some(dir)
        );
    }

    #[test]
    fn the_rest_of_the_stream_is_the_programs() {
        let tmp = tempfile::tempdir().unwrap();
        let output = received(tmp.path(), "/bin/cat", &["-"], unchanged);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "for the program\n");
    }

    #[test]
    fn changed_or_truncated_programs_never_run() {
        let tmp = tempfile::tempdir().unwrap();
        refused(tmp.path(), "cannot unpack", |_, stream| stream[10_000] ^= 1);
        refused(tmp.path(), "cannot unpack", |_, stream| {
            stream.truncate(5000)
        });
        refused(tmp.path(), "not what was sent", |words, _| {
            words[4] = "0".repeat(64);
        });
    }

    #[test]
    fn a_directory_that_others_can_rename_is_refused() {
        let tmp = tempfile::tempdir().unwrap();
        let mode = |mode| fs::set_permissions(tmp.path(), Permissions::from_mode(mode)).unwrap();
        for open in [0o777, 0o770, 0o707] {
            mode(open);
            refused(tmp.path(), "other users can rename", unchanged);
        }
        mode(0o1777);
        let output = received(tmp.path(), "/bin/cat", &["-"], unchanged);
        assert!(output.status.success(), "{output:?}");
    }
    /// Another process of ours removes the directory, and another user makes one of that name, while the program arrives.
    #[test]
    fn a_directory_that_is_replaced_is_not_used() {
        let tmp = tempfile::tempdir().unwrap();
        let (dir, away) = (tmp.path().join("dir"), tmp.path().join("away"));
        private_dir(&dir);
        // In place of ours: it runs the file called `internal`, which tells what runs it.
        let file = "/bin/dash";
        fs::write(dir.join("internal"), "readlink /proc/$$/exe\n").unwrap();
        let program = Program::read(File::open(file).unwrap()).unwrap();
        let mut child = spawn(&receive("error:", &program, &dir));
        let mut stdin = child.stdin.take().unwrap();
        let (first, rest) = program.stream().split_at(5000);
        stdin.write_all(first).unwrap();
        let began = Instant::now();
        while !dir.join("coracle.part").exists() {
            assert!(began.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(10));
        }
        fs::rename(&dir, &away).unwrap();
        private_dir(&dir);
        // What the other user has put there passes for the program until it is executed.
        fs::copy(file, dir.join("coracle.part")).unwrap();
        fs::write(dir.join("internal"), "echo attacked\n").unwrap();
        stdin.write_all(rest).unwrap();
        drop(stdin);
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let own = away.join("coracle.part");
        assert_eq!(said.trim(), own.to_str().unwrap(), "{output:?}");
    }

    #[test]
    fn only_a_private_directory_is_filled_or_executed_from() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = tmp.path().join("dir");
        private_dir(&dir);
        fs::copy("/bin/echo", dir.join(super::super::PROGRAM)).unwrap();
        let started = || {
            let words = start("error:", &dir, &["said".to_owned()]);
            spawn(&words).wait_with_output().unwrap()
        };
        let output = started();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "said\n");
        fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        let program = Program::read(File::open("/bin/cat").unwrap()).unwrap();
        let received = spawn(&receive("error:", &program, &dir));
        for output in [started(), received.wait_with_output().unwrap()] {
            assert_eq!(output.status.code(), Some(73), "{output:?}");
            assert_eq!(String::from_utf8_lossy(&output.stdout), "");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(
                said.contains("not a directory of this user alone"),
                "{said}"
            );
        }
        // It is not ours, so it stays.
        assert!(dir.exists());
    }
}
