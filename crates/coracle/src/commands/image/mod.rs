//! `coracle image …`: the user's store of container images.
//!
//! The crate `images` implements the operations; this module has their command line and output.

mod list;
mod passing;
mod show;

use console::{Failure, FailureCode, say};
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use images::archive::{self, ArchiveFormat, LoadError, LoadedImage, SaveError};
use images::registry::RegistryConfigError;
use images::{
    ImageError, ImageStore, ImageStoreError, PruneOptions, PullPolicy, PullRequest, Reference,
    ReferenceError, RegistryConfig,
};
use indicatif::HumanBytes;

use crate::exit;
use passing::Passing;

/// `coracle image …`
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Pull images from their registries
    ///
    /// They are kept compressed in ~/.local/share/coracle/images, where the nodes of every cluster of yours find
    /// them: a pod with `imagePullPolicy: IfNotPresent` then starts without asking a registry. Credentials are
    /// taken from ~/.docker/config.json; mirrors and registries without TLS are named in
    /// ~/.config/coracle/registries.toml (docs/images.md).
    #[command(after_help = "Examples:
  coracle image pull busybox registry.k8s.io/pause:3.10
  coracle image pull registry.site.example:5000/team/app@sha256:…")]
    Pull(PullArgs),

    /// Load images from an archive
    ///
    /// The archive is one of `docker save` or `podman save`, or an OCI image layout, as a file, a directory or
    /// through a pipe; it may be compressed.
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
    /// A name with a digest (NAME@sha256:…) stands for every tag of that name that the image has: all of them go.
    Rm(RmArgs),

    /// Make room: remove what no image needs, and images by age and size
    #[command(after_help = "Examples:
  coracle image prune                       leftovers only
  coracle image prune --older-than 30d      images that weren't used for 30 days, too
  coracle image prune --keep-bytes 20G      the least recently used, until 20 GiB are left")]
    Prune(PruneArgs),
}

/// Where the images are.
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
    /// Ask no registry for what is in the store
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
    /// Where to; - is standard output
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,
    /// What to write
    #[arg(long, value_enum, default_value_t = SaveFormat::Docker)]
    pub format: SaveFormat,
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum SaveFormat {
    /// For `docker load` and everybody who reads OCI layouts
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
    /// Images that weren't used for so long, such as 12h, 30d or 4w
    #[arg(long, value_name = "TIME", value_parser = crate::settings::amount::duration)]
    pub older_than: Option<Duration>,
    /// The least recently used images, until so much is left, such as 500M or 20G
    #[arg(long, value_name = "SIZE", value_parser = crate::settings::amount::bytes)]
    pub keep_bytes: Option<u64>,
    /// Only show what would be removed
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    store: StoreArgs,
}

/// Runs one of the commands.
pub async fn run(command: ImageCommand) -> anyhow::Result<()> {
    match command {
        ImageCommand::Pull(args) => pull(&args).await,
        ImageCommand::Load(args) => load(args).await,
        ImageCommand::Save(args) => save(args).await,
        ImageCommand::Ls(args) => Ok(list::ls(&args.store.open()?, args.json)?),
        ImageCommand::Rm(args) => rm(&args).await,
        ImageCommand::Prune(args) => prune(&args).await,
    }
}

/// A hint for errors about images.
pub fn hint_of(cause: &(dyn Error + 'static)) -> Option<String> {
    let hint = match store_error(cause) {
        Some(ImageStoreError::OutOfSpace { .. }) => {
            Some("make room with `coracle image prune`, or name another place with `--store DIR`")
        }
        _ if matches!(cause.downcast_ref(), Some(SaveError::Unknown(_))) => {
            Some("`coracle image ls` shows what is there")
        }
        _ if matches!(
            cause.downcast_ref(),
            Some(LoadError::Empty | LoadError::NotTar(_) | LoadError::NoImage(_))
        ) =>
        {
            Some(
                "what `docker save`, `podman save` and `coracle image save` write can be loaded, and OCI image layouts; \
                 compressed by gzip or zstd, or not at all",
            )
        }
        _ => cause.downcast_ref().and_then(ImageError::hint),
    };
    hint.map(str::to_owned)
}

/// The exit code for errors about images.
pub fn code_of(cause: &(dyn Error + 'static)) -> Option<FailureCode> {
    match store_error(cause) {
        Some(ImageStoreError::OutOfSpace { .. }) => return Some(FailureCode::CannotWrite),
        Some(ImageStoreError::Io { source, .. }) => {
            return exit::code_of_io(source).or(Some(FailureCode::NoImage));
        }
        Some(_) => return Some(FailureCode::NoImage),
        None => {}
    }
    let usage = cause.is::<ReferenceError>()
        || matches!(cause.downcast_ref(), Some(ImageError::InvalidName(_)))
        || matches!(cause.downcast_ref(), Some(LoadError::AmbiguousName(_)));
    if usage {
        return Some(FailureCode::Usage);
    }
    if let Some(SaveError::Write(_)) = cause.downcast_ref() {
        return Some(FailureCode::CannotWrite);
    }
    let ours = cause.is::<ImageError>()
        || cause.is::<LoadError>()
        || cause.is::<SaveError>()
        || cause.is::<RegistryConfigError>();
    ours.then_some(FailureCode::NoImage)
}

/// The store's error, if `cause` is one or wraps one transparently.
fn store_error<'a>(cause: &'a (dyn Error + 'static)) -> Option<&'a ImageStoreError> {
    let loading = match cause.downcast_ref() {
        Some(LoadError::Store(error)) => Some(error),
        _ => None,
    };
    let saving = match cause.downcast_ref() {
        Some(SaveError::Store(error)) => Some(error),
        _ => None,
    };
    let own = cause.downcast_ref::<ImageStoreError>();
    let image = cause.downcast_ref().and_then(ImageError::store);
    own.or(loading).or(saving).or(image)
}

impl StoreArgs {
    fn open(&self) -> anyhow::Result<ImageStore> {
        let dir = self.store.clone().or_else(ImageStore::default_path).ok_or_else(|| {
            Failure::new(
                FailureCode::Usage,
                "there is no place for images: neither XDG_DATA_HOME nor HOME is set to an absolute path",
            )
            .hint("name one with `--store DIR`")
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
        let progress = show::Bars::new();
        let image = images::pull(&store, &request, &config, &progress).await?;
        let size = HumanBytes(image.size);
        match image.pulled {
            true => say(format_args!("pulled {} ({size})", image.reference)),
            false => say(format_args!("{} is in the store", image.reference)),
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
        let (shown, total, from) = match args.input == Path::new("-") {
            true => ("standard input".to_owned(), None, input()?),
            false => {
                let shown = args.input.display().to_string();
                if args.input.is_dir() {
                    return archive::load_directory(&store, &args.input, name.as_ref())
                        .with_context(|| format!("can't load {shown}"));
                }
                let file = File::open(&args.input).map_err(|error| {
                    Failure::new(FailureCode::NoImage, format!("can't read {shown}")).because(error)
                })?;
                // The size of a pipe is 0, so it counts as unknown.
                let size = file.metadata().ok().map(|found| found.len());
                let from: Box<dyn Read> = Box::new(file);
                (shown, size.filter(|size| *size > 0), from)
            }
        };
        let from = Passing::new(from, &shown, total);
        archive::load(&store, from, name.as_ref(), limits)
            .with_context(|| format!("can't load {shown}"))
    })
    .await?;
    for LoadedImage { reference, digest } in loaded {
        match reference {
            Some(reference) => {
                say(format_args!("loaded {reference}"));
                print(&reference.pinned(digest))?;
            }
            None => {
                say(format_args!(
                    "an image has no name, and is removed by the next prune: {digest}\n\
                     hint: give it one with `--name IMAGE`"
                ));
            }
        }
    }
    Ok(())
}

fn input() -> Result<Box<dyn Read>, Failure> {
    match io::stdin().is_terminal() {
        true => {
            let message = "an archive is not read from a terminal";
            Err(Failure::new(FailureCode::Usage, message)
                .hint("name a file or directory with `-i FILE`"))
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
                    .hint("name it with `-o DIR`")
                    .into())
            }
            (true, _) if io::stdout().is_terminal() => {
                let message = "an archive is not written to a terminal";
                Err(Failure::new(FailureCode::Usage, message)
                    .hint("name a file with `-o FILE`")
                    .into())
            }
            (true, _) => {
                let to = Passing::new(io::stdout().lock(), "standard output", None);
                Ok(archive::save(&store, &references, format, to, out)?)
            }
            (false, ArchiveFormat::OciDirectory) => {
                archive::save(&store, &references, format, io::sink(), out)
                    .map_err(|error| not_saved(out, error))
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
    let failed = |error: io::Error| not_saved(&path, SaveError::Write(error));
    let name = path.display().to_string();
    let there = fs::metadata(&path).ok();
    if there.as_ref().is_some_and(fs::Metadata::is_dir) {
        let message = format!("can't write {name}: it is a directory");
        return Err(Failure::new(FailureCode::CannotWrite, message)
            .hint("name a file, or say `--format oci-dir`")
            .into());
    }
    if there.is_some_and(|there| !there.is_file()) {
        // Write into a pipe or device; do not replace it by a file.
        let to = File::options().write(true).open(&path).map_err(failed)?;
        let to = Passing::new(to, &name, None);
        return archive::save(store, references, format, to, &path)
            .map_err(|error| not_saved(&path, error));
    }
    let dir = path.parent().unwrap_or(Path::new("/"));
    let file = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .tempfile_in(dir)
        .map_err(failed)?;
    let to = Passing::new(io::BufWriter::new(&file), &name, None);
    archive::save(store, references, format, to, &path).map_err(|error| not_saved(&path, error))?;
    file.persist(&path).map_err(|error| failed(error.error))?;
    Ok(())
}

/// Adds the path to an error about writing.
fn not_saved(path: &Path, error: SaveError) -> anyhow::Error {
    match error {
        SaveError::Write(source) => {
            let message = format!("can't write {}", path.display());
            let failure = Failure::new(FailureCode::CannotWrite, message);
            failure.because(source).into()
        }
        other => other.into(),
    }
}

async fn rm(args: &RmArgs) -> anyhow::Result<()> {
    let store = args.store.open()?;
    let mut unknown = Vec::new();
    for reference in parse(&args.images)? {
        let gone = store.remove(&reference)?;
        match gone.is_empty() {
            true => unknown.push(reference.to_string()),
            false => say(format_args!("removed {}", removed(&reference, &gone))),
        }
    }
    if unknown.len() < args.images.len() {
        let gone = store.prune(&PruneOptions::default()).await?;
        say(format_args!("freed {}", HumanBytes(gone.bytes)));
    }
    match unknown.is_empty() {
        true => Ok(()),
        false => Err(SaveError::Unknown(unknown.join(", ")).into()),
    }
}

/// The message for a removed image. Removing by digest also removes tags, so it lists those.
fn removed(reference: &Reference, gone: &[Reference]) -> String {
    let others = gone.iter().filter(|name| *name != reference);
    let others: Vec<_> = others.map(ToString::to_string).collect();
    match others.is_empty() {
        true => reference.to_string(),
        false => format!("{reference}, and with it {}", others.join(", ")),
    }
}

async fn prune(args: &PruneArgs) -> anyhow::Result<()> {
    let store = args.store.open()?;
    let gone = store
        .prune(&PruneOptions {
            older_than: args.older_than,
            keep_bytes: args.keep_bytes,
            dry_run: args.dry_run,
        })
        .await?;
    for reference in &gone.references {
        print(reference)?;
    }
    let (would, size) = (
        args.dry_run.then_some("would have "),
        HumanBytes(gone.bytes),
    );
    say(format_args!("{}freed {size}", would.unwrap_or_default()));
    Ok(())
}

fn parse(names: &[String]) -> Result<Vec<Reference>, ReferenceError> {
    names.iter().map(|name| name.parse()).collect()
}

/// Writes a line to standard output. A closed pipe is no error.
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
