//! The shell script that receives this program on a node, from its standard input, and executes it.
//!
//! If other users knew a path in `/tmp` before it exists, they could create it first. So the script on the node makes the
//! directory, with a random name. From then on only this user can enter it or, `/tmp` being sticky, rename it. No path is
//! among the arguments of the carrying step.

use std::path::Path;

use super::program::{BLOCK, Program};

/// The shell that runs it.
pub const SHELL: &str = "/bin/sh";

/// `make_dir` sets `$dir`; `receive_program BLOCKS DIGEST` writes `$dir/coracle.part`. `refuse` reports the reason and removes
/// `$dir`. Other users must not be able to rename any directory of the program's path, so `/tmp` itself is checked too.
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
}
check_dir() {
  case $(stat -c %u:%A "$dir") in
    "$(id -u)":drwx--?---) ;;
    *) bad=$dir dir=; refuse "$bad is not a directory of this user alone" ;;
  esac
}
receive_program() {
  dd bs=$block count="$1" iflag=fullblock status=none | gzip -dc >"$dir/coracle.part" ||
    refuse "cannot unpack it to $dir"
  sum=$(sha256sum <"$dir/coracle.part") || refuse "cannot verify it without sha256sum"
  [ "${sum%% *}" = "$2" ] || refuse "what arrived is not what was sent"
  chmod 700 "$dir/coracle.part"
  [ -x "$dir/coracle.part" ] || refuse "programs cannot be executed from /tmp"
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

/// Receives the program into a directory that another step has made, and executes it to receive the bundle.
const RECEIVE: &str = r#"
dir=$3
check_dir
receive_program "$1" "$2"
exec "$dir/coracle.part" internal receive "$dir"
"#;

/// The functions for a script whose messages begin with `says`, which must not contain quotes.
pub fn functions(says: &'static str) -> String {
    format!("says='{says}' block={BLOCK}{FUNCTIONS}")
}

/// The arguments of [`SHELL`] that receive `program` and execute it with `args`. The program removes its directory.
pub fn run(says: &'static str, program: &Program, args: &[String]) -> Vec<String> {
    let mut words = words(says, RUN, program);
    words.extend_from_slice(args);
    words
}

/// The arguments of [`SHELL`] that receive `program`, and a bundle after it, into `dir` on that node.
pub fn receive(says: &'static str, program: &Program, dir: &Path) -> Vec<String> {
    let mut words = words(says, RECEIVE, program);
    words.push(dir.to_string_lossy().into_owned());
    words
}

fn words(says: &'static str, then: &str, program: &Program) -> Vec<String> {
    vec![
        "-c".to_owned(),
        format!("{}{then}", functions(says)),
        "coracle".to_owned(),
        program.blocks().to_string(),
        program.digest().to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File, Permissions};
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Command, Output, Stdio};

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
        let mut child = Command::new(SHELL)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // A shell that refuses does not read.
        let _ = stdin.write_all(&stream);
        drop(stdin);
        child.wait_with_output().unwrap()
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
    fn program_runs_in_private_directory() {
        let tmp = tempfile::tempdir().unwrap();
        let where_am_i = ["/proc/self/exe"];
        let output = received(tmp.path(), "/bin/readlink", &where_am_i, unchanged);
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
    fn program_reads_rest_of_stream() {
        let tmp = tempfile::tempdir().unwrap();
        let output = received(tmp.path(), "/bin/cat", &["-"], unchanged);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "for the program\n");
    }

    #[test]
    fn changed_or_truncated_program_never_runs() {
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
    fn refuses_tmp_that_others_can_rename() {
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
}
