//! `coracle completion`: prints the script by which a shell completes command lines of `coracle`.

use std::io::Write;
use std::process::ExitCode;

use clap_complete::env::{Bash, EnvCompleter, Fish, Zsh};

use crate::completion_values::VARIABLE;

/// `coracle completion`
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The script calls `coracle` for every completion. So it offers running clusters (--job), partitions
and Slurm's options too, and never gets out of date.

Examples:
  source <(coracle completion bash)               in ~/.bashrc
  source <(coracle completion zsh)                in ~/.zshrc, after compinit
  coracle completion fish | source                in ~/.config/fish/config.fish")]
pub struct CompletionArgs {
    /// The shell
    shell: Shell,
}

/// The shells with completion.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Entry point of the command.
pub fn main(args: CompletionArgs) -> anyhow::Result<ExitCode> {
    std::io::stdout().write_all(&script(args.shell)?)?;
    Ok(ExitCode::SUCCESS)
}

fn script(shell: Shell) -> std::io::Result<Vec<u8>> {
    let completer: &dyn EnvCompleter = match shell {
        Shell::Bash => &Bash,
        Shell::Zsh => &Zsh,
        Shell::Fish => &Fish,
    };
    let mut script = Vec::new();
    // By name, not by path: a newer program at another path must answer.
    completer.write_registration(VARIABLE, "coracle", "coracle", "coracle", &mut script)?;
    Ok(script)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_call_the_program() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = String::from_utf8(script(shell).unwrap()).unwrap();
            let name = format!("{shell:?}").to_lowercase();
            assert!(script.contains(VARIABLE), "{script}");
            assert!(script.contains(&name), "{script}");
        }
    }
}
