//! `coracle kubeconfig`: prints the kubeconfig of a running cluster.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use cluster::carry;
use console::{Failure, FailureCode, print_stderr};

use crate::running_clusters::ClusterSelector;
use crate::running_clusters::access::ClusterAccess;

/// `coracle kubeconfig`
#[derive(Debug, Clone, Args)]
#[command(after_help = AFTER_HELP)]
pub struct KubeconfigArgs {
    /// Write it to this new file, which only you can read
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Which cluster.
    #[command(flatten)]
    pub selector: ClusterSelector,
}

const AFTER_HELP: &str = "\
The kubeconfig contains the key of the cluster's administrator: whoever can read it can use the
cluster as you. `coracle kubectl` and `coracle shell` need no file.

Examples:
  coracle kubeconfig -o cluster.conf         then: KUBECONFIG=cluster.conf helm list
  coracle kubeconfig --job 1234              print that of the cluster in another job";

/// Entry point of the command.
pub fn main(args: KubeconfigArgs) -> anyhow::Result<ExitCode> {
    if args.selector.here {
        // The program may be a copy that was carried here.
        carry::remove();
    }
    let access = crate::block_on(ClusterAccess::find(&args.selector.clone().or_enclosing()))?;
    match &args.output {
        Some(path) => {
            write_private(path, &access.kubeconfig)?;
            let (name, path) = (&access.name, path.display());
            print_stderr(format_args!("coracle: kubeconfig of {name} is in {path}"));
        }
        None => std::io::stdout().write_all(access.kubeconfig.as_bytes())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Creates a file that only the user can read. An existing file may have other permissions, or be opened by others.
fn write_private(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    let created = options.write(true).create_new(true).mode(0o600).open(path);
    let written = created.and_then(|mut file| file.write_all(text.as_bytes()));
    Ok(written.map_err(|error| {
        let hint = match error.kind() {
            std::io::ErrorKind::AlreadyExists => "remove it, or choose another name",
            _ => "choose another file",
        };
        Failure::new(
            FailureCode::CannotWrite,
            format!("cannot write {}", path.display()),
        )
        .with_source(error)
        .with_hint(hint)
    })?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn file_is_new_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        write_private(&path, "text").unwrap();
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = write_private(&path, "other").unwrap_err();
        assert!(error.to_string().contains("cannot write"), "{error}");
        assert_eq!(std::fs::read_to_string(path).unwrap(), "text");
    }
}
