//! `coracle kubernetes …`: downloads or imports a release of upstream Kubernetes, and lists the installed ones.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};

use console::{Phases, print_stderr};
use releases::{
    FetchOptions, ImportOptions, PINNED_ETCD, PINNED_KUBERNETES, Release, ReleaseSearch,
};

use crate::cli::DEFAULT_SERVICE_CIDR;

/// `coracle kubernetes …`
#[derive(Debug, Subcommand)]
pub enum KubernetesCommand {
    /// Download the official release of Kubernetes and etcd
    ///
    /// Coracle runs upstream's own kube-apiserver, kube-controller-manager, kube-scheduler and etcd.
    /// This command downloads them, and kubectl, from upstream's servers, checks their SHA-256
    /// checksums, and installs them for you alone in ~/.local/share/coracle/kubernetes/VERSION. Run
    /// it once, on a host with access to the internet, which compute nodes do not need. It needs
    /// about 400 MB of disk space.
    ///
    /// An interrupted download is resumed by the next call. Proxies are taken from https_proxy and
    /// no_proxy.
    #[command(after_help = "Examples:
  coracle kubernetes fetch
  coracle kubernetes fetch --version v1.36.0
  coracle kubernetes fetch --mirror https://mirror.site.example/kubernetes")]
    Fetch(FetchArgs),

    /// Install Kubernetes from programs that are on this machine already
    ///
    /// For hosts without internet, and for your own builds: DIR contains kube-apiserver,
    /// kube-controller-manager, kube-scheduler, etcd and kubectl. This command checks that each is a
    /// program for this machine and prints its version, and copies it to
    /// ~/.local/share/coracle/kubernetes/VERSION.
    #[command(after_help = "Examples:
  coracle kubernetes import ./kubernetes/server/bin
  coracle kubernetes import target/dist --version v1.37.1")]
    Import(ImportArgs),

    /// Prepare the store that new clusters start from
    ///
    /// `fetch`, `import` and the first cluster of a release do this automatically. If a release is
    /// installed for all users, in a directory that they can't write to, its owner runs this once.
    Prepare(WhichArgs),

    /// List the versions that are installed, and which one is used
    ///
    /// One line for each: its version; whether it is `used`, `available` or `incomplete`; its
    /// directory. Coracle uses the newest complete version of the first directory of releases that
    /// has one.
    Ls(WhichArgs),
}

/// Options of `coracle kubernetes ls` and `prepare`.
#[derive(Debug, Args)]
pub struct WhichArgs {
    /// Search only this directory of releases, or use this release [env: CORACLE_KUBERNETES]
    #[arg(long, value_name = "DIR")]
    pub kubernetes: Option<PathBuf>,
}

/// Options of `coracle kubernetes fetch`.
#[derive(Debug, Args)]
#[command(disable_version_flag = true)]
pub struct FetchArgs {
    /// The version of Kubernetes, for example v1.37.1
    #[arg(long, value_name = "V", default_value = PINNED_KUBERNETES)]
    version: String,

    /// The version of etcd, for example v3.7.0
    #[arg(long, value_name = "V", default_value = PINNED_ETCD)]
    etcd_version: String,

    /// Download from a copy of https://dl.k8s.io instead, with etcd's releases below URL/etcd/V/
    #[arg(long, value_name = "URL")]
    mirror: Option<String>,

    /// Install into this directory of releases instead of ~/.local/share/coracle/kubernetes
    #[arg(long, value_name = "DIR")]
    into: Option<PathBuf>,

    /// Download an installed version again, and replace it
    #[arg(long)]
    force: bool,
}

impl From<FetchArgs> for FetchOptions {
    fn from(args: FetchArgs) -> Self {
        Self {
            version: args.version,
            etcd_version: args.etcd_version,
            mirror: args.mirror,
            into: args.into,
            force: args.force,
        }
    }
}

/// Options of `coracle kubernetes import`.
#[derive(Debug, Args)]
#[command(disable_version_flag = true)]
pub struct ImportArgs {
    /// The directory with kube-apiserver, kube-controller-manager, kube-scheduler, etcd and kubectl (or
    /// links with these names to one program `kube`)
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// Their version (default: the version that kube-apiserver reports)
    #[arg(long, value_name = "V")]
    version: Option<String>,

    /// Install into this directory of releases instead of ~/.local/share/coracle/kubernetes
    #[arg(long, value_name = "DIR")]
    into: Option<PathBuf>,

    /// Replace this version if it is installed already
    #[arg(long)]
    force: bool,
}

impl From<ImportArgs> for ImportOptions {
    fn from(args: ImportArgs) -> Self {
        Self {
            dir: args.dir,
            version: args.version,
            into: args.into,
            force: args.force,
        }
    }
}

/// Entry point of the command.
pub fn main(command: KubernetesCommand) -> anyhow::Result<ExitCode> {
    crate::block_on(run(command))?;
    Ok(ExitCode::SUCCESS)
}

async fn run(command: KubernetesCommand) -> anyhow::Result<()> {
    match command {
        KubernetesCommand::Fetch(args) => {
            let (release, was_installed) = releases::fetch(&args.into()).await?;
            report_installed(&release, was_installed).await
        }
        KubernetesCommand::Import(args) => {
            let (release, was_installed) = releases::import(&args.into()).await?;
            report_installed(&release, was_installed).await
        }
        KubernetesCommand::Prepare(args) => {
            prepare(&Release::find(args.kubernetes.as_deref())?).await;
            Ok(())
        }
        KubernetesCommand::Ls(args) => Ok(ls(
            &ReleaseSearch::new(args.kubernetes.as_deref()),
            &mut io::stdout().lock(),
        )?),
    }
}

/// Reports a release after `fetch` or `import`, also if it was installed before.
async fn report_installed(release: &Release, was_installed: bool) -> anyhow::Result<()> {
    let Release { dir, version } = release;
    match was_installed {
        true => print_stderr(format_args!(
            "Kubernetes {version} is already installed in {}; --force replaces it",
            dir.display()
        )),
        false => print_stderr(format_args!(
            "installed Kubernetes {version} in {}",
            dir.display()
        )),
    }
    prepare(release).await;
    match Release::find(None) {
        Ok(used) if used == *release => {}
        Ok(used) => print_stderr(format_args!(
            "note: {} in {} is used by default; `--kubernetes {}` chooses this one",
            used.version,
            used.dir.display(),
            dir.display()
        )),
        Err(_) => print_stderr(format_args!(
            "note: `--kubernetes {}` or CORACLE_KUBERNETES chooses it",
            dir.display()
        )),
    }
    Ok(())
}

/// Makes the seed, so that the first cluster need not wait for it. If that fails (a host without user namespaces), the first cluster
/// makes it.
async fn prepare(release: &Release) {
    let mut phases = Phases::new();
    let _ = cluster::ensure_seed(release, DEFAULT_SERVICE_CIDR, &mut phases).await;
    phases.end();
}

fn ls(search: &ReleaseSearch, out: &mut impl Write) -> io::Result<()> {
    let releases = search.all();
    let used = search.find();
    if let Err(error) = &used {
        print_stderr(format_args!("{error}"));
        error
            .hint()
            .iter()
            .for_each(|hint| print_stderr(format_args!("hint: {hint}")));
    }
    let used = used.ok().map(|release| release.dir);
    let width = releases
        .iter()
        .map(|found| found.version.to_string().len())
        .max()
        .unwrap_or(0);
    let mut table = String::new();
    for found in &releases {
        let state = match found.missing.is_empty() {
            _ if used.as_ref() == Some(&found.dir) => "used",
            true => "available",
            false => "incomplete",
        };
        table += &format!(
            "{:width$}  {state:10}  {}\n",
            found.version.to_string(),
            found.dir.display()
        );
    }
    match out.write_all(table.as_bytes()).and_then(|()| out.flush()) {
        // `ls | head -1` closes the pipe early, which is no error.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}
