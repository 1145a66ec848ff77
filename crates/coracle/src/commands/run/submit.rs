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

use super::RunSettings;
use super::file_check::{self, CarryRequest, FileCheckResult, LeaderLocation};
use super::send_archive::carry;
use super::srun::{Srun, TerminationSignals};
use super::workload::Workload;
use crate::exit;
use cluster::carry::archive::CarryArchive;
use cluster::carry::script::{self, SHELL, ShellCommand};
use releases::Release;

/// The parameters of the job or step.
struct SubmitRequest<'a> {
    slurm: Slurm,
    settings: &'a RunSettings,
    /// An existing job and its first node.
    within: Option<(u32, &'a str)>,
    archive: Arc<CarryArchive>,
    /// Manifests from standard input, which have been read and checked already.
    stdin: Option<Vec<u8>>,
}

/// Submits a new job with the user's options.
pub async fn new_job(
    settings: &RunSettings,
    workload: &Workload,
    stdin: Option<Vec<u8>>,
) -> anyhow::Result<ExitCode> {
    let slurm = Slurm::find().map_err(cluster::slurm_failure)?;
    slurm.ping().await.map_err(cluster::slurm_failure)?;
    SubmitRequest::new(slurm, settings, workload, None, stdin)?
        .submit(wants_terminal(workload))
        .await
}

/// Runs again on the first node of an allocation, from `salloc`'s shell.
pub async fn first_node(
    settings: &RunSettings,
    workload: &Workload,
    allocation: &Allocation,
    stdin: Option<Vec<u8>>,
) -> anyhow::Result<ExitCode> {
    let slurm = Slurm::find().map_err(cluster::slurm_failure)?;
    let first = allocation.nodes.first().ok_or_else(|| {
        Failure::new(
            FailureCode::Slurm,
            format!("job {} has no nodes", allocation.job_id),
        )
        .with_hint("the variables of another job seem to be set: `unset SLURM_JOB_ID`")
    })?;
    let within = Some((allocation.job_id, first.as_str()));
    SubmitRequest::new(slurm, settings, workload, within, stdin)?
        .submit(wants_terminal(workload))
        .await
}

impl<'a> SubmitRequest<'a> {
    fn new(
        slurm: Slurm,
        settings: &'a RunSettings,
        workload: &Workload,
        within: Option<(u32, &'a str)>,
        stdin: Option<Vec<u8>>,
    ) -> anyhow::Result<Self> {
        // A node may have a release that this host does not see, but mostly the user has not installed one, and would wait in the
        // queue to learn that. `srun coracle run` uses the node's release.
        let release = Release::find(settings.options.kubernetes.as_deref())?;
        let seed = releases::seed::find(&release, &settings.options.service_cidr);
        let archive = CarryArchive {
            program: std::env::current_exe().context("cannot find our own program")?,
            release: Some(Release {
                dir: std::path::absolute(&release.dir).unwrap_or(release.dir),
                version: release.version,
            }),
            seed,
            workload: workload.file(&settings.workload),
            is_workload_file: super::workload::is_manifest,
        };
        Ok(Self {
            slurm,
            settings,
            within,
            archive: Arc::new(archive),
            stdin,
        })
    }

    async fn submit(&self, terminal: bool) -> anyhow::Result<ExitCode> {
        let code = if terminal {
            self.submit_with_terminal().await?
        } else {
            self.submit_without_terminal().await?
        };
        Ok(exit::code(code))
    }

    async fn submit_without_terminal(&self) -> anyhow::Result<i32> {
        let needed = self.archive.needed_files();
        let mut settings = self.settings.clone();
        settings.options.report_end = true;
        let args = settings.args_inside();
        let shell = file_check::start_command(&self.archive.program, &needed, args);
        let invocation = self.shell_invocation(&shell, self.within, false);
        let mut srun = Srun::start(&self.slurm, &invocation, self.stdin.as_deref())?;
        let carry_on_request = async |line: &str| match file_check::parse_carry_request(line) {
            Some(request) => carry(&self.slurm, self.archive.clone(), &request).await,
            None => Ok(()),
        };
        srun.run(carry_on_request).await
    }

    /// The first step checks the files and holds the job; the second has the terminal.
    async fn submit_with_terminal(&self) -> anyhow::Result<i32> {
        let needed = self.archive.needed_files();
        let shell = file_check::report_command(&self.archive.program, &needed);
        let invocation = self.shell_invocation(&shell, self.within, false);
        let mut holder = Srun::start_with_pipes(&self.slurm, &invocation)?;
        let check = match holder.read_stdout_until(file_check::parse_result).await? {
            Ok(result) => result,
            Err(code) => return Ok(code),
        };
        let code = self.run_in_terminal(check).await;
        // On failure too, because the holder removes the carried files.
        holder.finish().await;
        code
    }

    async fn run_in_terminal(&self, check: FileCheckResult) -> anyhow::Result<i32> {
        let args = self.settings.args_inside();
        let within = Some((check.job, check.node.as_str()));
        let mut invocation = match check.dir {
            None => self.invocation(&self.archive.program, &args, within, true),
            Some(dir) => {
                let mut signals = TerminationSignals::listen()?;
                let shell = script::start_command("coracle: error:", &dir, &args);
                let request = CarryRequest {
                    dir,
                    job: check.job,
                    node: check.node.clone(),
                };
                tokio::select! {
                    carried = carry(&self.slurm, self.archive.clone(), &request) => carried?,
                    signal = signals.next() => return Ok(exit::of_signal(signal)),
                }
                self.shell_invocation(&shell, within, true)
            }
        };
        // Without it, srun would set it to the leader's node alone.
        let nodes = ("SLURM_JOB_NODELIST".to_owned(), check.nodes);
        invocation.env_set.push(nodes);
        let leader = LeaderLocation {
            job: check.job,
            node: check.node,
        };
        let mut srun = Srun::start_in_terminal(&self.slurm, &invocation, leader)?;
        srun.run(async |_| Ok(())).await
    }

    fn shell_invocation(
        &self,
        shell: &ShellCommand,
        within: Option<(u32, &str)>,
        terminal: bool,
    ) -> slurm::Invocation {
        let mut invocation = self.invocation(Path::new(SHELL), &shell.args, within, terminal);
        invocation.env_set.push(shell.variable());
        invocation
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
        let env = slurm::environment_names();
        submission.invocation(&self.slurm, env.iter().map(String::as_str))
    }
}

/// Whether to run in a pseudo-terminal: for programs that are started from a terminal.
fn wants_terminal(workload: &Workload) -> bool {
    matches!(workload, Workload::Program { .. })
        && std::io::stdin().is_terminal()
        && std::io::stdout().is_terminal()
}
