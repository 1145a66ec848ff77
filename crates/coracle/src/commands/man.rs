//! `coracle man`: prints a manual page, generated from the same source as `--help`.

use console::{Failure, FailureCode};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Command, CommandFactory};
use clap_mangen::Man;

use crate::cli::Cli;

/// `coracle man`
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  coracle man | man -l -                          the page of coracle
  coracle man image pull | man -l -               the page of a subcommand
  coracle man --dir ~/.local/share/man/man1       installs all pages: man coracle-run")]
pub struct ManArgs {
    /// The subcommand; without it, the page of coracle itself
    command: Vec<String>,
    /// Write the pages of all commands into this directory
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    dir: Option<PathBuf>,
}

/// Entry point of the command.
pub fn main(args: ManArgs) -> anyhow::Result<ExitCode> {
    let mut root = Cli::command().disable_help_subcommand(true);
    root.build();
    if let Some(dir) = &args.dir {
        std::fs::create_dir_all(dir).map_err(|error| cannot_write(dir, error))?;
        write_all(&root, dir)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut command = &root;
    for name in &args.command {
        command = command
            .get_subcommands()
            .find(|known| known.get_name() == name && !known.is_hide_set())
            .ok_or_else(|| {
                let path = args.command.join(" ");
                Failure::new(FailureCode::Usage, format!("unknown command {path:?}"))
                    .with_hint("`coracle --help` lists the commands")
            })?;
    }
    io::stdout().write_all(&page(command)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the pages of a command and of its subcommands.
fn write_all(command: &Command, dir: &Path) -> anyhow::Result<()> {
    let path = dir.join(Man::new(command.clone()).get_filename());
    std::fs::write(&path, page(command)?).map_err(|error| cannot_write(&path, error))?;
    for command in command.get_subcommands().filter(|c| !c.is_hide_set()) {
        write_all(command, dir)?;
    }
    Ok(())
}

fn cannot_write(path: &Path, error: io::Error) -> Failure {
    Failure::new(
        FailureCode::CannotWrite,
        format!("cannot write {}", path.display()),
    )
    .with_source(error)
    .with_hint("choose a writable directory")
}

/// The manual page of one command.
fn page(command: &Command) -> io::Result<Vec<u8>> {
    let man = Man::new(command.clone())
        .source(format!("coracle {}", env!("CARGO_PKG_VERSION")))
        .manual("Coracle");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    // clap_mangen's synopsis ignores `override_usage`.
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim();
    preformatted(&mut page, "SYNOPSIS", usage)?;
    man.render_description_section(&mut page)?;
    if command.get_arguments().any(|arg| !arg.is_hide_set()) {
        man.render_options_section(&mut page)?;
    }
    if command.get_subcommands().any(|c| !c.is_hide_set()) {
        man.render_subcommands_section(&mut page)?;
    }
    // clap_mangen's section joins lines, but this text has tables and examples.
    let notes = command
        .get_after_long_help()
        .or_else(|| command.get_after_help());
    if let Some(notes) = notes {
        preformatted(&mut page, "NOTES", &notes.to_string())?;
    }
    Ok(page)
}

/// Appends a section with the line breaks of `text`: `.nf` disables filling.
fn preformatted(page: &mut Vec<u8>, title: &str, text: &str) -> io::Result<()> {
    writeln!(page, ".SH {title}\n.nf")?;
    for line in text.lines() {
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        // At the start of a line, a dot or an apostrophe would begin a roff request.
        let guard = if line.starts_with(['.', '\'']) {
            "\\&"
        } else {
            ""
        };
        writeln!(page, "{guard}{line}")?;
    }
    writeln!(page, ".fi")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page() {
        let dir = tempfile::tempdir().unwrap();
        let mut root = Cli::command().disable_help_subcommand(true);
        root.build();
        write_all(&root, dir.path()).unwrap();
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert!(read("coracle.1").contains("coracle\\-run(1)"));
        let run = read("coracle-run.1");
        for text in [
            "coracle run [OPTIONS] [SLURM OPTIONS] WORKLOAD [ARGS]...",
            "\\-\\-pod\\-cidr",
            "  helm template chart/ | coracle run \\-N2 \\-",
        ] {
            assert!(run.contains(text), "{text} in {run}");
        }
        assert!(!run.contains("report"), "hidden options are not shown");
        assert!(dir.path().join("coracle-image-pull.1").exists());
        assert!(!dir.path().join("coracle-internal.1").exists());
    }

    #[test]
    fn text_is_escaped() {
        let mut page = Vec::new();
        preformatted(&mut page, "X", ".a\n'b\nc\\d -e").unwrap();
        let page = String::from_utf8(page).unwrap();
        assert_eq!(page, ".SH X\n.nf\n\\&.a\n\\&'b\nc\\ed \\-e\n.fi\n");
    }
}
