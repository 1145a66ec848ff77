//! Outside of an allocation's nodes: `coracle run` asks Slurm to call it again inside.
//!
//! Usually that is one `srun`, whose tasks become `coracle run` at once. Where the first node doesn't see
//! all that is needed it says so, and waits until it was carried there ([`carry`]). A program that wants a
//! terminal is started by a step of its own, because nothing else can be told through a terminal.

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

/// What is asked of Slurm.
struct Request<'a> {
    slurm: Slurm,
    settings: &'a Settings,
    /// A job that is there already, and its first node.
    within: Option<(u32, &'a str)>,
    bundle: Arc<Bundle>,
}

/// Asks Slurm for a new job with the user's options.
pub async fn new_job(settings: &Settings, workload: &Workload) -> anyhow::Result<ExitCode> {
    let slurm = Slurm::find().map_err(cluster::slurm_failure)?;
    slurm.ping().await.map_err(cluster::slurm_failure)?;
    Request::new(slurm, settings, workload, None)?
        .call_again(wants_terminal(workload))
        .await
}

/// Moves from `salloc`'s shell to the first node of the allocation.
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
        // The node may have one that this host has not: its leader will say if it doesn't.
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

    /// A first step looks, and keeps the job; the second has the terminal.
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
        // Also if that failed: the holder removes what was brought in vain.
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
        // Or srun would tell the leader of its own node only.
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

/// A program that is started from a terminal gets one there too; manifests don't care.
fn wants_terminal(workload: &Workload) -> bool {
    matches!(workload, Workload::Program { .. })
        && std::io::stdin().is_terminal()
        && std::io::stdout().is_terminal()
}
