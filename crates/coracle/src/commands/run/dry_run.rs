//! `coracle run --dry-run`: checks everything that can be checked without a job.
//!
//! Manifests are applied to a temporary API server on this host, which has no nodes. That is more than `kubectl apply --dry-run=server`
//! does: namespaces and custom resources that the manifests define exist when later objects need them.

use console::{Failure, FailureCode, Phases, print_stderr};
use std::process::ExitCode;

use cluster::TemporaryControlPlane;
use releases::Release;
use slurm::Slurm;

use super::RunSettings;
use super::manifests;
use super::workload::{Manifests, Workload, environment};

/// Runs the checks. `in_job` means that no job would be requested; `text` is standard input if the manifests come from there.
pub async fn run(
    settings: &RunSettings,
    workload: &Workload,
    in_job: bool,
    text: Option<&[u8]>,
) -> anyhow::Result<ExitCode> {
    let release = Release::find(settings.options.kubernetes.as_deref())?;
    if !in_job {
        let slurm = Slurm::find().map_err(cluster::slurm_failure)?;
        let estimate = slurm.test_request(&settings.slurm).await;
        let estimate = estimate.map_err(cluster::slurm_failure)?;
        print_stderr(format_args!("{}", describe_request(&estimate)));
    }
    match workload {
        Workload::Program { program, .. } => print_stderr(format_args!(
            "coracle: {} would run with Kubernetes {}; its own requests are not checked",
            program.display(),
            release.version
        )),
        Workload::Manifests(manifests) => {
            apply_to_temporary_api(settings, &release, manifests, text).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn describe_request(estimate: &str) -> String {
    match estimate {
        "" => "coracle: Slurm would accept the job".to_owned(),
        estimate => format!("coracle: Slurm would accept the job: {estimate}"),
    }
}

async fn apply_to_temporary_api(
    settings: &RunSettings,
    release: &Release,
    manifests: &Manifests,
    text: Option<&[u8]>,
) -> anyhow::Result<()> {
    let options = &settings.options;
    let mut phases = Phases::new();
    let seed = cluster::ensure_seed(release, &options.service_cidr, &mut phases).await;
    phases.begin("temporary API server responds");
    let started =
        TemporaryControlPlane::start(release, &options.service_cidr, &options.pod_cidr, seed);
    let control_plane = started.await.map_err(cannot_start)?;
    let result = async {
        control_plane.wait_until_ready().await?;
        phases.end();
        let dir = control_plane.dir()?;
        let env = environment(
            "temporary",
            &dir.kubeconfig(),
            &dir.programs(),
            &dir.cache(),
            &control_plane.api,
            "",
            0,
        );
        manifests::apply_with_retries(manifests, text, &env).await
    }
    .await;
    phases.cancel();
    control_plane.stop().await;
    let applied = result?;
    for object in &applied {
        print_stderr(format_args!("coracle: the API server accepts {object}"));
    }
    Ok(())
}

/// A login host may lack what a control plane needs.
fn cannot_start(error: anyhow::Error) -> Failure {
    let code = error
        .chain()
        .find_map(|cause| cause.downcast_ref::<Failure>())
        .map_or(FailureCode::NotStarted, Failure::code);
    Failure::new(code, "cannot start a temporary API server on this host")
        .with_source(error)
        .with_hint("`coracle doctor` shows what this host lacks; on a node: `srun coracle run --dry-run …`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_is_optional() {
        insta::assert_snapshot!(describe_request("2 processors on nodes node[1-2]"), @"coracle: Slurm would accept the job: 2 processors on nodes node[1-2]");
        assert_eq!(describe_request(""), "coracle: Slurm would accept the job");
    }
}
