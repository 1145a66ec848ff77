//! `coracle shell`: a shell whose kubectl uses a running cluster.

use std::ffi::OsStr;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use console::print_stderr;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};

use crate::exit;
use crate::running_clusters::ClusterSelector;
use crate::running_clusters::access::{ClusterAccess, find_kubectl, memory_file};

/// `coracle shell`
#[derive(Debug, Clone, Args)]
#[command(after_help = AFTER_HELP)]
pub struct ShellArgs {
    /// Which cluster.
    #[command(flatten)]
    pub selector: ClusterSelector,
}

const AFTER_HELP: &str = "\
Starts $SHELL with KUBECONFIG set and kubectl in PATH. The prompt shows the cluster's name. The end
of the shell does not end the cluster.

Examples:
  coracle shell
  coracle shell --job 1234
  echo 'kubectl get nodes' | coracle shell";

/// Entry point of the command.
pub fn main(args: ShellArgs) -> anyhow::Result<ExitCode> {
    crate::block_on(run(args))
}

async fn run(args: ShellArgs) -> anyhow::Result<ExitCode> {
    let kubectl = find_kubectl()?;
    let access = ClusterAccess::find(&args.selector.clone().or_enclosing()).await?;
    let shell = std::env::var_os("SHELL").map(PathBuf::from);
    let shell = shell.filter(|shell| shell.is_absolute());
    let shell = shell.unwrap_or_else(|| "/bin/sh".into());
    let mut command = Command::new(&shell);
    command.envs(access.environment(&kubectl)?);
    if std::io::stdin().is_terminal() {
        let name = &access.name;
        print_stderr(format_args!("coracle: shell for cluster {name}"));
        show_name_in_prompt(&mut command, &shell, name)?;
    }
    // Ctrl-C is for the shell's commands.
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot execute {}", shell.display()))?;
    let status = loop {
        tokio::select! {
            status = child.wait() => break status?,
            _ = interrupts.recv() => {}
        }
    };
    Ok(exit::code(exit::of_child(status)))
}

/// Makes an interactive shell show the cluster's name in its prompt.
fn show_name_in_prompt(command: &mut Command, shell: &Path, name: &str) -> anyhow::Result<()> {
    if shell.file_name() == Some(OsStr::new("bash")) {
        let file = memory_file("bashrc", &bashrc(name))?;
        command.arg("--rcfile").arg(file);
    } else {
        // The user's start-up files may override it.
        command.env("PS1", format!("({name}) $ "));
    }
    Ok(())
}

/// Bash's start-up file: the user's own, then the prompt.
fn bashrc(name: &str) -> String {
    format!("[ ! -r ~/.bashrc ] || . ~/.bashrc\nPS1=\"({name}) ${{PS1-\\$ }}\"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_shows_cluster() {
        let command = |shell: &str| {
            let mut command = Command::new(shell);
            show_name_in_prompt(&mut command, Path::new(shell), "coracle-1-a").unwrap();
            command.into_std()
        };
        let bash = command("/bin/bash");
        let args: Vec<&OsStr> = bash.get_args().collect();
        assert_eq!(args[0], "--rcfile");
        let text = std::fs::read_to_string(args[1]).unwrap();
        assert!(
            text.ends_with("PS1=\"(coracle-1-a) ${PS1-\\$ }\"\n"),
            "{text}"
        );
        let other = command("/bin/sh");
        let prompt = other.get_envs().next().unwrap();
        let expected = (OsStr::new("PS1"), Some(OsStr::new("(coracle-1-a) $ ")));
        assert_eq!(prompt, expected);
    }
}
