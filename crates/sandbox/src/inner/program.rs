//! The last steps of a process before it is another program: who it is, what it may do, and the program itself.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use linux::credentials::unhidden;
use linux::place::Kind;
use rustix::fs::Uid;
use rustix::process::Signal;
use rustix::thread::CapabilitySet;

use super::failure::{Failure, failed};
use super::message::{ProcessPlan, Seccomp};
use super::own_program::OwnProgram;
use super::user::{User, look_up};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Becomes the program of `plan` in the current root, unless that is `own`. Returns only if that fails.
pub fn become_program(
    plan: &ProcessPlan,
    own: OwnProgram,
) -> Result<std::convert::Infallible, Failure> {
    let user = look_up(&plan.user).map_err(Failure::program)?;
    // As the outer root: a directory that is missing is made, as other runtimes do.
    if !plan.cwd.as_os_str().is_empty() {
        let _ = linux::place::make(Path::new("/"), &plan.cwd, Kind::Directory);
    }
    // Raising it is everybody's right, lowering it is root's; where it stays, the kernel picks by size. Who looks into us in this
    // moment finds the container's root.
    let score = plan.oom_score_adj.to_string();
    let _ = unhidden(|| std::fs::write("/proc/self/oom_score_adj", score));

    // Without it, keys of the job would do for what the kernel itself asks for on behalf of this process. The user may have no
    // room for one more keyring, which is no reason not to start.
    let _ = linux::keyring::join_new_session();
    if plan.no_new_privileges {
        linux::credentials::no_new_privileges().map_err(failed("no_new_privs"))?;
    }
    own_streams(plan, &user);
    let parent = rustix::process::getppid();
    let kept = be_user(plan, &user)?;
    // Filters come after our own changes of identity, which one of them pretends, and before capabilities go, without which
    // the kernel takes no filter.
    if plan.user.one_id {
        linux::seccomp::install_pretence().map_err(failed("installing a system call filter"))?;
    }
    let filtered = match plan.seccomp {
        Seccomp::None => Ok(()),
        Seccomp::Keyless => linux::seccomp::install_keyless(),
        Seccomp::RuntimeDefault => linux::seccomp::install_default(kept),
    };
    filtered.map_err(failed("installing a system call filter"))?;
    linux::credentials::limit_capabilities(kept, user.uid == 0).map_err(failed("capset"))?;
    // Once more, because the kernel forgets it when a process becomes another user.
    linux::process::die_with_parent(parent, Signal::KILL).map_err(failed("parent death signal"))?;
    // Last, because it must be a directory that the user may enter.
    let cwd = if plan.cwd.as_os_str().is_empty() {
        Path::new("/")
    } else {
        &plan.cwd
    };
    linux::place::enter(cwd).map_err(|error| {
        Failure::program(format!(
            "chdir to cwd ({}): {}",
            cwd.display(),
            words(&error)
        ))
    })?;

    let (name, rest) = plan
        .args
        .split_first()
        .ok_or_else(|| Failure::program("no command specified".to_owned()))?;
    let mut env = plan.env.clone();
    if !env.iter().any(|(name, _)| name == "HOME") {
        env.push(("HOME".to_owned(), user.home));
    }
    let path = env
        .iter()
        .rev()
        .find(|(name, _)| name == "PATH")
        .map(|(_, value)| value.as_str());
    let program = find(name, path.unwrap_or(DEFAULT_PATH))?;
    own.refuse(&program)?;
    // A second line behind descriptors that are made to close; old kernels don't have it.
    let _ = linux::descriptors::close_all_on_exec();
    // Last, because what was opened before us counts until the program begins.
    linux::descriptors::put_limit_back().map_err(failed("the limit of open files"))?;
    linux::process_limit::lower_for_program().map_err(failed("the limit of processes"))?;
    let error = Command::new(&program)
        .arg0(name)
        .args(rest)
        .env_clear()
        .envs(env)
        .exec();
    Err(Failure::program(format!(
        "exec {}: {}",
        program.display(),
        words(&error)
    )))
}

/// A process's streams are its user's, who may open them again by their names below /dev. Where that fails they still work.
fn own_streams(plan: &ProcessPlan, user: &User) {
    if plan.user.one_id || user.uid == 0 {
        return;
    }
    let streams = [
        rustix::stdio::stdin(),
        rustix::stdio::stdout(),
        rustix::stdio::stderr(),
    ];
    for stream in streams {
        let Ok(found) = rustix::fs::fstat(stream) else {
            continue;
        };
        // The null device is everybody's.
        let device = found.st_rdev;
        if (rustix::fs::major(device), rustix::fs::minor(device)) != (1, 3) {
            let _ = rustix::fs::fchown(stream, Some(Uid::from_raw(user.uid)), None);
        }
    }
}

/// Becomes the user; returns the capabilities that a program of root will have.
fn be_user(plan: &ProcessPlan, user: &User) -> Result<CapabilitySet, Failure> {
    // A new user namespace comes with all capabilities, so that they are bounded after it. Who has entered that of a running
    // container is this user already.
    let is_other = rustix::process::getuid().as_raw() != user.uid;
    if plan.user.one_id && is_other {
        unhidden(|| linux::namespace::rename_only_id(user.uid, user.gid))
            .flatten()
            .map_err(failed("a user namespace for the container's only id"))?;
    }
    let kept = capabilities(&plan.capabilities);
    linux::credentials::bound_capabilities(kept).map_err(failed("bounding capabilities"))?;
    if plan.user.one_id {
        return Ok(kept);
    }
    let became = linux::credentials::become_user(user.uid, user.gid, &user.groups).map_err(|error| {
        Failure::program(format!(
            "cannot become user {} with group {}: {}; it is not among the ids that this host lets you use",
            user.uid, user.gid, words(&error)
        ))
    });
    became.map(|()| kept)
}

/// What is in effect of a list of names like `NET_ADMIN`; unknown ones were refused when the plan was made.
fn capabilities(names: &[String]) -> CapabilitySet {
    let all = linux::credentials::all_capabilities();
    if names.iter().any(|name| name == "ALL") {
        return all;
    }
    names
        .iter()
        .filter_map(|name| CapabilitySet::from_name(name))
        .fold(CapabilitySet::empty(), CapabilitySet::union)
        .intersection(all)
}

/// Finds a program as a shell does, with the words of other runtimes if there is none.
fn find(name: &str, path: &str) -> Result<PathBuf, Failure> {
    let wrong = |why: &str| Failure::program(format!("exec: \"{name}\": {why}"));
    let is_program = |file: &Path| {
        std::fs::metadata(file)
            .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        let file = PathBuf::from(name);
        return match std::fs::metadata(&file) {
            _ if is_program(&file) => Ok(file),
            Ok(found) if found.is_dir() => Err(wrong("is a directory")),
            Ok(_) => Err(wrong("permission denied")),
            Err(error) => Err(Failure::program(format!(
                "exec: \"{name}\": stat {name}: {}",
                words(&error)
            ))),
        };
    }
    std::env::split_paths(path)
        .map(|dir| dir.join(name))
        .find(|file| is_program(file))
        .ok_or_else(|| wrong("executable file not found in $PATH"))
}

/// An error in the words that users of other runtimes know, without its number.
fn words(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    text.to_lowercase()
}
