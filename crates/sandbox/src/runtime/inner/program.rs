//! The last steps of a process in a container: user, capabilities, system call filter, then the exec of its program.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use linux::credentials::while_dumpable;
use linux::mount_target::TargetKind;
use rustix::fs::Uid;
use rustix::process::Signal;
use rustix::thread::CapabilitySet;

use super::error::{InnerError, cannot};
use super::message::{ProcessPlan, SeccompProfile};
use super::self_exe::SelfExe;
use super::user::{ResolvedUser, look_up};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Executes the program of `plan` in the current root, unless that is `self_exe`. Returns only on failure.
pub fn exec_program(
    plan: &ProcessPlan,
    self_exe: SelfExe,
) -> Result<std::convert::Infallible, InnerError> {
    let user = look_up(&plan.user).map_err(InnerError::program)?;
    // Created before the change of user, as other runtimes do.
    if !plan.cwd.as_os_str().is_empty() {
        let _ =
            linux::mount_target::open_or_create(Path::new("/"), &plan.cwd, TargetKind::Directory);
    }
    // Ignore the error: only root may lower the value. Being dumpable for a moment is safe, because this process's root is the
    // container's by now.
    let score = plan.oom_score_adj.to_string();
    let _ = while_dumpable(|| std::fs::write("/proc/self/oom_score_adj", score));

    // With the job's session keyring, the kernel would use the job's keys on behalf of this process. Ignore the error: the
    // user's quota of keyrings may be used up.
    let _ = linux::keyring::join_new_session_keyring();
    if plan.no_new_privileges {
        linux::credentials::set_no_new_privs().map_err(cannot("set no_new_privs"))?;
    }
    chown_stdio(plan, &user);
    let parent = rustix::process::getppid();
    let kept = switch_user(plan, &user)?;
    install_filters(plan, kept)?;
    linux::credentials::limit_capabilities(kept, user.uid == 0)
        .map_err(cannot("drop capabilities"))?;
    // Set again, because the kernel clears it when a process changes its user.
    linux::process::set_parent_death_signal(parent, Signal::KILL)
        .map_err(cannot("set the parent death signal"))?;
    // After the change of user, because the container's user must have access to the directory.
    change_directory(&plan.cwd)?;
    let (name, rest) = plan
        .args
        .split_first()
        .ok_or_else(|| InnerError::program("no command specified".to_owned()))?;
    let mut env = plan.env.clone();
    if !env.iter().any(|(name, _)| name == "HOME") {
        env.push(("HOME".to_owned(), user.home));
    }
    let path = env
        .iter()
        .rev()
        .find(|(name, _)| name == "PATH")
        .map(|(_, value)| value.as_str());
    let program = find_executable(name, path.unwrap_or(DEFAULT_PATH))?;
    self_exe.deny(&program)?;
    // A second safeguard, for descriptors without O_CLOEXEC; old kernels do not support it.
    let _ = linux::descriptors::close_all_on_exec();
    // Last, because descriptors that are still open count until the exec.
    linux::descriptors::restore_limit().map_err(cannot("restore the limit of open files"))?;
    linux::process_limit::lower_for_program().map_err(cannot("set the limit of processes"))?;
    let error = Command::new(&program)
        .arg0(name)
        .args(rest)
        .env_clear()
        .envs(env)
        .exec();
    Err(InnerError::program(format!(
        "exec {}: {}",
        program.display(),
        errno_text(&error)
    )))
}

/// Installs system call filters: after our own change of user, because one of them only pretends such changes, and before capabilities
/// are dropped, because installing a filter needs them.
fn install_filters(plan: &ProcessPlan, kept: CapabilitySet) -> Result<(), InnerError> {
    if plan.user.single_id {
        linux::seccomp::install_fakeroot().map_err(cannot("install a system call filter"))?;
    }
    let filtered = match plan.seccomp {
        SeccompProfile::Unconfined => Ok(()),
        SeccompProfile::DenyKeyrings => linux::seccomp::install_without_keyrings(),
        SeccompProfile::RuntimeDefault => linux::seccomp::install_default(kept),
    };
    filtered.map_err(cannot("install a system call filter"))
}

fn change_directory(cwd: &Path) -> Result<(), InnerError> {
    let cwd = match cwd.as_os_str().is_empty() {
        true => Path::new("/"),
        false => cwd,
    };
    linux::mount_target::chdir_without_magic_links(cwd).map_err(|error| {
        InnerError::program(format!(
            "chdir to cwd ({}): {}",
            cwd.display(),
            errno_text(&error)
        ))
    })
}

/// Makes the user the owner of the standard streams, so that it can open them again as /dev/stdout and the like. Errors are
/// ignored: the open descriptors work all the same.
fn chown_stdio(plan: &ProcessPlan, user: &ResolvedUser) {
    if plan.user.single_id || user.uid == 0 {
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
        // Not /dev/null, which all containers share.
        let device = found.st_rdev;
        if (rustix::fs::major(device), rustix::fs::minor(device)) != (1, 3) {
            let _ = rustix::fs::fchown(stream, Some(Uid::from_raw(user.uid)), None);
        }
    }
}

/// Switches to the user; returns the capabilities that a program of root will have.
fn switch_user(plan: &ProcessPlan, user: &ResolvedUser) -> Result<CapabilitySet, InnerError> {
    // A new user namespace grants all capabilities, so they are bounded after it. A process that has joined a container's user
    // namespace has this uid already.
    let is_other_user = rustix::process::getuid().as_raw() != user.uid;
    if plan.user.single_id && is_other_user {
        while_dumpable(|| linux::namespace::enter_as_user(user.uid, user.gid))
            .flatten()
            .map_err(cannot(
                "create a user namespace for the container's single id",
            ))?;
    }
    let kept = capabilities(&plan.capabilities);
    linux::credentials::limit_bounding_set(kept).map_err(cannot("bound capabilities"))?;
    if plan.user.single_id {
        return Ok(kept);
    }
    let became = linux::credentials::become_user(user.uid, user.gid, &user.groups).map_err(|error| {
        InnerError::program(format!(
            "cannot switch to user {} and group {}: {} (hint: the ids must be among your subordinate ids on this node)",
            user.uid, user.gid, errno_text(&error)
        ))
    });
    became.map(|()| kept)
}

/// The capabilities with these names, such as `NET_ADMIN`. Unknown names were rejected when the plan was made.
fn capabilities(names: &[String]) -> CapabilitySet {
    names
        .iter()
        .filter_map(|name| CapabilitySet::from_name(name))
        .fold(CapabilitySet::empty(), CapabilitySet::union)
        .intersection(linux::credentials::all_capabilities())
}

/// Finds a program as a shell does. Errors have the texts of runc.
fn find_executable(name: &str, path: &str) -> Result<PathBuf, InnerError> {
    let exec_error = |why: &str| InnerError::program(format!("exec: \"{name}\": {why}"));
    let is_program = |file: &Path| {
        std::fs::metadata(file)
            .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        let file = PathBuf::from(name);
        return match std::fs::metadata(&file) {
            _ if is_program(&file) => Ok(file),
            Ok(found) if found.is_dir() => Err(exec_error("is a directory")),
            Ok(_) => Err(exec_error("permission denied")),
            Err(error) => Err(InnerError::program(format!(
                "exec: \"{name}\": stat {name}: {}",
                errno_text(&error)
            ))),
        };
    }
    std::env::split_paths(path)
        .map(|dir| dir.join(name))
        .find(|file| is_program(file))
        .ok_or_else(|| exec_error("executable file not found in $PATH"))
}

/// The text of an error as Go prints it: lower case, without the number.
fn errno_text(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    text.to_lowercase()
}
