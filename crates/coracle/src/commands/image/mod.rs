//! `coracle image …`: the user's store of container images.
//!
//! The crate `images` implements the operations; this module has their command line and output.

mod list;
mod progress_stream;
mod pull_progress;

use console::{Failure, FailureCode, print_stderr};
use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use images::archive::{self, ArchiveFormat, LoadedImage, SaveError};
use images::{
    ImageStore, PruneOptions, PullPolicy, PullRequest, Reference, ReferenceError, RegistryConfig,
};
use indicatif::HumanBytes;

use progress_stream::ProgressStream;

/// `coracle image …`
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Pull images from their registries
    ///
    /// They are stored compressed in ~/.local/share/coracle/images, for the nodes of all of your clusters: a pod
    /// with `imagePullPolicy: IfNotPresent` then starts without a request to a registry. Credentials come from
    /// ~/.docker/config.json; ~/.config/coracle/registries.toml configures mirrors and registries without TLS
    /// (docs/images.md).
    #[command(after_help = "Examples:
  coracle image pull busybox registry.k8s.io/pause:3.10
  coracle image pull registry.site.example:5000/team/app@sha256:…")]
    Pull(PullArgs),

    /// Load images from an archive
    ///
    /// The archive is from `docker save` or `podman save`, or an OCI image layout: a file, a directory or standard
    /// input. It may be compressed.
    #[command(after_help = "Examples:
  docker save app:1 | ssh cluster coracle image load
  coracle image load -i app.tar.gz
  coracle image load -i layout/ --name team/app:1")]
    Load(LoadArgs),

    /// Save images to an archive that Docker, Podman and others can load
    #[command(after_help = "Examples:
  coracle image save -o app.tar team/app:1
  coracle image save --format oci-dir -o layout team/app:1
  coracle image save team/app:1 | ssh elsewhere docker load")]
    Save(SaveArgs),

    /// List the images in the store
    Ls(LsArgs),

    /// Remove images from the store
    ///
    /// A name with a digest (NAME@sha256:…) removes all tags of that name that refer to the image.
    Rm(RmArgs),

    /// Free disk space: remove data that no image needs, and images by age and size
    #[command(after_help = "Examples:
  coracle image prune                       leftovers only
  coracle image prune --older-than 30d      images that weren't used for 30 days, too
  coracle image prune --keep-bytes 20G      the least recently used, until 20 GiB are left")]
    Prune(PruneArgs),
}

/// The directory of the store.
#[derive(Debug, Args)]
pub struct StoreArgs {
    /// Use this store instead of ~/.local/share/coracle/images
    #[arg(long, value_name = "DIR", env = "CORACLE_IMAGES")]
    pub store: Option<PathBuf>,
}

/// `coracle image pull`
#[derive(Debug, Args)]
pub struct PullArgs {
    /// Images, by name
    #[arg(required = true, value_name = "IMAGE")]
    pub images: Vec<String>,
    /// Do not contact the registry for images that are in the store
    #[arg(long)]
    pub missing: bool,
    #[command(flatten)]
    store: StoreArgs,
}

/// `coracle image load`
#[derive(Debug, Args)]
pub struct LoadArgs {
    /// The archive or directory; - is standard input
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub input: PathBuf,
    /// The name of the image, if the archive has one image
    #[arg(long, value_name = "IMAGE")]
    pub name: Option<String>,
    #[command(flatten)]
    store: StoreArgs,
}

/// `coracle image save`
#[derive(Debug, Args)]
pub struct SaveArgs {
    /// Images, by name
    #[arg(required = true, value_name = "IMAGE")]
    pub images: Vec<String>,
    /// The file or directory; - is standard output
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,
    /// The format of the archive
    #[arg(long, value_enum, default_value_t = SaveFormat::Docker)]
    pub format: SaveFormat,
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum SaveFormat {
    /// For `docker load`, and for programs that read OCI layouts
    Docker,
    /// An OCI layout, in one file
    Oci,
    /// An OCI layout, as a directory
    OciDir,
}

/// `coracle image ls`
#[derive(Debug, Args)]
pub struct LsArgs {
    /// As JSON, for programs
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

/// `coracle image rm`
#[derive(Debug, Args)]
pub struct RmArgs {
    /// Images, by name
    #[arg(required = true, value_name = "IMAGE")]
    pub images: Vec<String>,
    #[command(flatten)]
    store: StoreArgs,
}

/// `coracle image prune`
#[derive(Debug, Args)]
pub struct PruneArgs {
    /// Remove images that were not used for this long, such as 12h, 30d or 4w
    #[arg(long, value_name = "TIME", value_parser = crate::settings::amount::duration)]
    pub older_than: Option<Duration>,
    /// Remove the least recently used images until this much is left, such as 500M or 20G
    #[arg(long, value_name = "SIZE", value_parser = crate::settings::amount::bytes)]
    pub keep_bytes: Option<u64>,
    /// Only print the names of images that would be removed
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    store: StoreArgs,
}

/// Entry point of the command.
pub fn main(command: ImageCommand) -> anyhow::Result<ExitCode> {
    crate::block_on(run(command))?;
    Ok(ExitCode::SUCCESS)
}

async fn run(command: ImageCommand) -> anyhow::Result<()> {
    match command {
        ImageCommand::Pull(args) => pull(&args).await,
        ImageCommand::Load(args) => load(args).await,
        ImageCommand::Save(args) => save(args).await,
        ImageCommand::Ls(args) => Ok(list::ls(&args.store.open()?, args.json)?),
        ImageCommand::Rm(args) => rm(&args).await,
        ImageCommand::Prune(args) => prune(&args).await,
    }
}

impl StoreArgs {
    fn open(&self) -> anyhow::Result<ImageStore> {
        let dir = self.store.clone().or_else(ImageStore::default_path).ok_or_else(|| {
            Failure::new(
                FailureCode::Usage,
                "no directory for images: neither XDG_DATA_HOME nor HOME is set to an absolute path",
            )
            .with_hint("name one with `--store DIR`")
        })?;
        Ok(ImageStore::open(&dir)?)
    }
}

async fn pull(args: &PullArgs) -> anyhow::Result<()> {
    let store = args.store.open()?;
    let config = RegistryConfig::from_environment()?;
    // Parse all names before the first download.
    for reference in parse(&args.images)? {
        let request = PullRequest {
            reference: reference.to_string(),
            policy: match args.missing {
                true => PullPolicy::IfNotPresent,
                false => PullPolicy::Always,
            },
            credentials: Vec::new(),
        };
        let progress = pull_progress::PullProgressBars::new();
        let image = images::pull(&store, &request, &config, &progress).await?;
        let size = HumanBytes(image.size);
        match image.pulled {
            true => print_stderr(format_args!("pulled {} ({size})", image.reference)),
            false => print_stderr(format_args!("{} is in the store", image.reference)),
        }
        print(&image.id)?;
    }
    Ok(())
}

async fn load(args: LoadArgs) -> anyhow::Result<()> {
    let store = args.store.open()?;
    let name: Option<Reference> = args.name.as_deref().map(str::parse).transpose()?;
    let limits = crate::settings::image_limits::from_environment()
        .map_err(|error| Failure::new(FailureCode::Usage, format!("{error:#}")))?;
    let loaded = blocking(move || {
        let (source, total, reader) = match args.input == Path::new("-") {
            true => ("standard input".to_owned(), None, archive_from_stdin()?),
            false => {
                let source = args.input.display().to_string();
                if args.input.is_dir() {
                    return archive::load_directory(&store, &args.input, name.as_ref())
                        .with_context(|| format!("can't load {source}"));
                }
                let file = File::open(&args.input).map_err(|error| {
                    Failure::new(FailureCode::NoImage, format!("can't read {source}"))
                        .with_source(error)
                })?;
                // The size of a pipe is 0, so it counts as unknown.
                let size = file.metadata().ok().map(|found| found.len());
                let reader: Box<dyn Read> = Box::new(file);
                (source, size.filter(|size| *size > 0), reader)
            }
        };
        let reader = ProgressStream::new(reader, &source, total);
        archive::load(&store, reader, name.as_ref(), limits)
            .with_context(|| format!("can't load {source}"))
    })
    .await?;
    for LoadedImage { reference, digest } in loaded {
        match reference {
            Some(reference) => {
                print_stderr(format_args!("loaded {reference}"));
                print(&reference.pinned(digest))?;
            }
            None => {
                print_stderr(format_args!(
                    "an image without a name was loaded; the next prune removes it: {digest}\n\
                     hint: give it one with `--name IMAGE`"
                ));
            }
        }
    }
    Ok(())
}

fn archive_from_stdin() -> Result<Box<dyn Read>, Failure> {
    match io::stdin().is_terminal() {
        true => {
            let message = "cannot read an archive from a terminal";
            Err(Failure::new(FailureCode::Usage, message)
                .with_hint("name a file or directory with `-i FILE`"))
        }
        false => Ok(Box::new(io::stdin().lock())),
    }
}

async fn save(args: SaveArgs) -> anyhow::Result<()> {
    let store = args.store.open()?;
    let references = parse(&args.images)?;
    blocking(move || {
        let format = match args.format {
            SaveFormat::Docker => ArchiveFormat::Docker,
            SaveFormat::Oci => ArchiveFormat::Oci,
            SaveFormat::OciDir => ArchiveFormat::OciDirectory,
        };
        let (to_stdout, out) = (args.output == Path::new("-"), &args.output);
        match (to_stdout, format) {
            (true, ArchiveFormat::OciDirectory) => {
                let message = "a directory can't be written to standard output";
                Err(Failure::new(FailureCode::Usage, message)
                    .with_hint("name it with `-o DIR`")
                    .into())
            }
            (true, _) if io::stdout().is_terminal() => {
                let message = "cannot write an archive to a terminal";
                Err(Failure::new(FailureCode::Usage, message)
                    .with_hint("name a file with `-o FILE`")
                    .into())
            }
            (true, _) => {
                let to = ProgressStream::new(io::stdout().lock(), "standard output", None);
                Ok(archive::save(&store, &references, format, to, out)?)
            }
            (false, ArchiveFormat::OciDirectory) => {
                archive::save(&store, &references, format, io::sink(), out)
                    .map_err(|error| save_error(out, error))
            }
            (false, _) => save_file(&store, &references, format, out),
        }
    })
    .await
}

/// Writes to a temporary file and renames it when it is complete.
fn save_file(
    store: &ImageStore,
    references: &[Reference],
    format: ArchiveFormat,
    path: &Path,
) -> anyhow::Result<()> {
    // Write to the target of a symbolic link; do not replace the link.
    let path = fs::canonicalize(path).or_else(|_| std::path::absolute(path))?;
    let failed = |error: io::Error| save_error(&path, SaveError::Write(error));
    let name = path.display().to_string();
    let existing = fs::metadata(&path).ok();
    if existing.as_ref().is_some_and(fs::Metadata::is_dir) {
        let message = format!("can't write {name}: it is a directory");
        return Err(Failure::new(FailureCode::CannotWrite, message)
            .with_hint("name a file, or use `--format oci-dir`")
            .into());
    }
    if existing.is_some_and(|existing| !existing.is_file()) {
        // Write into a pipe or device; do not replace it by a file.
        let to = File::options().write(true).open(&path).map_err(failed)?;
        let to = ProgressStream::new(to, &name, None);
        return archive::save(store, references, format, to, &path)
            .map_err(|error| save_error(&path, error));
    }
    let dir = path.parent().unwrap_or(Path::new("/"));
    let file = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .tempfile_in(dir)
        .map_err(failed)?;
    let to = ProgressStream::new(io::BufWriter::new(&file), &name, None);
    archive::save(store, references, format, to, &path)
        .map_err(|error| save_error(&path, error))?;
    file.persist(&path).map_err(|error| failed(error.error))?;
    Ok(())
}

/// Adds the path to an error about writing.
fn save_error(path: &Path, error: SaveError) -> anyhow::Error {
    match error {
        SaveError::Write(source) => {
            let message = format!("can't write {}", path.display());
            let failure = Failure::new(FailureCode::CannotWrite, message);
            failure.with_source(source).into()
        }
        other => other.into(),
    }
}

async fn rm(args: &RmArgs) -> anyhow::Result<()> {
    let store = args.store.open()?;
    let mut unknown = Vec::new();
    for reference in parse(&args.images)? {
        let removed = store.remove(&reference)?;
        match removed.is_empty() {
            true => unknown.push(reference.to_string()),
            false => print_stderr(format_args!(
                "removed {}",
                removed_text(&reference, &removed)
            )),
        }
    }
    if unknown.len() < args.images.len() {
        let pruned = store.prune(&PruneOptions::default()).await?;
        print_stderr(format_args!("freed {}", HumanBytes(pruned.bytes)));
    }
    match unknown.is_empty() {
        true => Ok(()),
        false => Err(SaveError::Unknown(unknown.join(", ")).into()),
    }
}

/// The message for a removed image. Removing by digest also removes tags, so the message lists them.
fn removed_text(reference: &Reference, removed: &[Reference]) -> String {
    let others = removed.iter().filter(|name| *name != reference);
    let others: Vec<_> = others.map(ToString::to_string).collect();
    match others.is_empty() {
        true => reference.to_string(),
        false => format!("{reference}, and with it {}", others.join(", ")),
    }
}

async fn prune(args: &PruneArgs) -> anyhow::Result<()> {
    let store = args.store.open()?;
    let pruned = store
        .prune(&PruneOptions {
            older_than: args.older_than,
            keep_bytes: args.keep_bytes,
            dry_run: args.dry_run,
        })
        .await?;
    for reference in &pruned.references {
        print(reference)?;
    }
    let (would, size) = (
        args.dry_run.then_some("would have "),
        HumanBytes(pruned.bytes),
    );
    print_stderr(format_args!("{}freed {size}", would.unwrap_or_default()));
    Ok(())
}

fn parse(names: &[String]) -> Result<Vec<Reference>, ReferenceError> {
    names.iter().map(|name| name.parse()).collect()
}

/// Writes a line to standard output. Ignores a closed pipe.
fn print(line: &str) -> io::Result<()> {
    match writeln!(io::stdout(), "{line}") {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    tokio::task::spawn_blocking(work).await?
}
