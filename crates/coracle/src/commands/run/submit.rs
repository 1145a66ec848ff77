//! Outside of an allocation's nodes: submits a job or step in which `coracle run` runs again.
//!
//! Usually that is one `srun`, whose tasks execute `coracle run` at once. If the first node does not see all needed files, it sends a
//! control line and waits until they are carried there ([`carry`]). A program that uses a terminal is started by a second step, because
//! control lines can't be separated from a terminal's output.

use console::{Failure, FailureCode};
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use slurm::{Allocation, Slurm, Submission};

use super::Settings;
use super::look::{self, Asked, Told};
use super::send_bundle::carry;
use super::srun::{Ends, Srun};
use super::workload::Workload;
use crate::exit;
use cluster::carry::bundle::Bundle;
use cluster::carry::script::{self, SHELL};
use releases::Release;

/// The parameters of the job or step.
struct Request<'a> {
    slurm: Slurm,
    settings: &'a Settings,
    /// An existing job and its first node.
    within: Option<(u32, &'a str)>,
    bundle: Arc<Bundle>,
}

/// Submits a new job with the user's options.
pub async fn new_job(settings: &Settings, workload: &Workload) -> anyhow::Result<ExitCode> {
    let slurm = Slurm::find().map_err(cluster::slurm_failure)?;
    slurm.ping().await.map_err(cluster::slurm_failure)?;
    Request::new(slurm, settings, workload, None)?
        .call_again(wants_terminal(workload))
        .await
}

/// Runs again on the first node of an allocation, from `salloc`'s shell.
pub async fn first_node(
    settings: &Settings,
    workload: &Workload,
    allocation: &Allocation,
) -> anyhow::Result<ExitCode> {
    let slurm = Slurm::find().map_err(cluster::slurm_failure)?;
    let first = allocation.nodes.first().ok_or_else(|| {
        Failure::new(
            FailureCode::Slurm,
            format!("job {} has no nodes", allocation.job_id),
        )
        .hint("this shell seems to have the variables of another job: `unset SLURM_JOB_ID`")
    })?;
    let within = Some((allocation.job_id, first.as_str()));
    Request::new(slurm, settings, workload, within)?
        .call_again(wants_terminal(workload))
        .await
}

impl<'a> Request<'a> {
    fn new(
        slurm: Slurm,
        settings: &'a Settings,
        workload: &Workload,
        within: Option<(u32, &'a str)>,
    ) -> anyhow::Result<Self> {
        // The node may have a release even if this host has none; otherwise its leader reports the error.
        let release = Release::find(settings.options.kubernetes.as_deref()).ok();
        let seed = release
            .as_ref()
            .and_then(|release| releases::seed::find(release, &settings.options.service_cidr));
        let bundle = Bundle {
            program: std::env::current_exe().context("cannot find our own program")?,
            release: release.map(|release| Release {
                dir: std::path::absolute(&release.dir).unwrap_or(release.dir),
                version: release.version,
            }),
            seed,
            workload: workload.file(&settings.workload),
            is_part: super::workload::is_manifest,
        };
        Ok(Self {
            slurm,
            settings,
            within,
            bundle: Arc::new(bundle),
        })
    }

    async fn call_again(&self, terminal: bool) -> anyhow::Result<ExitCode> {
        let code = if terminal {
            self.with_terminal().await?
        } else {
            self.without_terminal().await?
        };
        Ok(exit::code(code))
    }

    async fn without_terminal(&self) -> anyhow::Result<i32> {
        let needed = self.bundle.needed();
        let mut settings = self.settings.clone();
        settings.options.report_end = true;
        let words = settings.words_inside();
        let args = look::and_start(&self.bundle.program, &needed, words);
        let invocation = self.invocation(Path::new(SHELL), &args, self.within, false);
        let mut srun = Srun::start(&invocation, false)?;
        let bring = async |line: &str| match look::asks(line) {
            Some(asked) => carry(&self.slurm, self.bundle.clone(), &asked).await,
            None => Ok(()),
        };
        srun.run(bring).await
    }

    /// The first step checks the files and holds the job; the second has the terminal.
    async fn with_terminal(&self) -> anyhow::Result<i32> {
        let needed = self.bundle.needed();
        let args = look::and_tell(&self.bundle.program, &needed);
        let invocation = self.invocation(Path::new(SHELL), &args, self.within, false);
        let mut holder = Srun::start_held(&invocation)?;
        let told = match holder.first_words(look::told).await? {
            Ok(told) => told,
            Err(code) => return Ok(code),
        };
        let code = self.in_terminal(told).await;
        // On failure too, because the holder removes the carried files.
        holder.finish().await;
        code
    }

    async fn in_terminal(&self, told: Told) -> anyhow::Result<i32> {
        let mut program = self.bundle.program.as_path();
        let mut words = self.settings.words_inside();
        if let Some(dir) = told.dir {
            let mut ends = Ends::listen()?;
            program = Path::new(SHELL);
            words = script::start("coracle: error:", &dir, &words);
            let asked = Asked {
                dir,
                job: told.job,
                node: told.node.clone(),
            };
            tokio::select! {
                carried = carry(&self.slurm, self.bundle.clone(), &asked) => carried?,
                signal = ends.next() => return Ok(exit::of_signal(signal)),
            }
        }
        let within = Some((told.job, told.node.as_str()));
        let mut invocation = self.invocation(program, &words, within, true);
        // Without it, srun would set it to the leader's node alone.
        let nodes = ("SLURM_JOB_NODELIST".to_owned(), told.nodes);
        invocation.env_set.push(nodes);
        let mut srun = Srun::start(&invocation, true)?;
        srun.run(async |_| Ok(())).await
    }

    fn invocation(
        &self,
        program: &Path,
        args: &[String],
        within: Option<(u32, &str)>,
        terminal: bool,
    ) -> slurm::Invocation {
        let submission = Submission {
            options: if within.is_none() {
                &self.settings.slurm
            } else {
                &[]
            },
            within,
            program,
            args,
            terminal,
            name: "coracle",
        };
        let env: Vec<String> = std::env::vars_os()
            .map(|(name, _)| name.to_string_lossy().into_owned())
            .collect();
        submission.invocation(&self.slurm, env.iter().map(String::as_str))
    }
}

/// Whether to run in a pseudo-terminal: for programs that are started from a terminal.
fn wants_terminal(workload: &Workload) -> bool {
    matches!(workload, Workload::Program { .. })
        && std::io::stdin().is_terminal()
        && std::io::stdout().is_terminal()
}
