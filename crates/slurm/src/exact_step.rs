//! A step of a running job that runs one process on one node with resources of its own (`srun --exact`).

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use crate::Slurm;
use crate::invocation::Invocation;

/// A step that holds the requested resources until it ends: other steps of the job cannot use them. Slurm enforces and accounts them as
/// the site has configured.
///
/// Steps with `--overlap`, such as [`AgentStep`](crate::AgentStep), hold no resources, so this step can run beside
/// them. A step without it (`srun -N2 program` as the job's first) holds all resources of the job, and Slurm rejects this one.
#[derive(Debug, Clone)]
pub struct ExactStep<'a> {
    /// The id of the running job.
    pub job_id: u32,
    /// The node that runs the program.
    pub node: &'a str,
    /// CPUs; at least one is requested.
    pub cpus: u64,
    /// Memory; `None` for all of the job's memory, shared with other steps that request `None`.
    pub memory_mb: Option<u64>,
    /// Generic resources by name, such as `gpu`.
    pub gres: &'a [(String, u64)],
    /// The program, as an absolute path on the node.
    pub program: &'a Path,
    /// Its arguments. Other users of the node can read them.
    pub args: &'a [String],
    /// The step's name, as `squeue -s` and `sacct` show it.
    pub name: &'a str,
    /// How long Slurm waits for other steps to free the resources before it rejects this one (`--immediate`).
    pub resource_timeout: Duration,
}

impl ExactStep<'_> {
    /// The `srun` command line; `env` are the names of the variables in our environment.
    pub fn invocation<'e>(
        &self,
        slurm: &Slurm,
        env: impl IntoIterator<Item = &'e str>,
    ) -> Invocation {
        let mut args: Vec<OsString> = [
            format!("--jobid={}", self.job_id),
            format!("--job-name={}", self.name),
            "--nodes=1".into(),
            "--ntasks=1".into(),
            format!("--nodelist={}", self.node),
            // Without this a step holds all CPUs of the node, whatever it requests.
            "--exact".into(),
            format!("--cpus-per-task={}", self.cpus.max(1)),
            // Zero: all of the job's memory, without reserving any.
            format!("--mem={}", self.memory_mb.unwrap_or(0)),
            // Without this a step holds all generic resources of the job.
            format!("--gres={}", self.gres()),
            // One second is the minimum.
            format!("--immediate={}", self.resource_timeout.as_secs().max(1)),
            "--mpi=none".into(),
            "--export=ALL".into(),
            // Forward standard input to the program: it carries secrets, since arguments would be public.
            "--input=all".into(),
            "--kill-on-bad-exit=0".into(),
            "--chdir=/".into(),
            "--quiet".into(),
        ]
        .map(OsString::from)
        .to_vec();
        args.push(self.program.into());
        args.extend(self.args.iter().map(Into::into));
        Invocation::step(slurm, args, env)
    }

    fn gres(&self) -> String {
        let requested: Vec<_> = self
            .gres
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| format!("{name}:{count}"))
            .collect();
        if requested.is_empty() {
            "none".to_owned()
        } else {
            requested.join(",")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent_step::tests::slurm;

    #[test]
    fn step_requests_exactly_its_resources() {
        let args = ["internal".to_owned(), "sandbox".to_owned()];
        let mut step = ExactStep {
            job_id: 12,
            node: "node2",
            cpus: 2,
            memory_mb: Some(300),
            gres: &[("gpu".to_owned(), 1), ("shard".to_owned(), 4)],
            program: Path::new("/proc/77/exe"),
            args: &args,
            name: "default/web-0",
            resource_timeout: Duration::from_secs(5),
        };
        let env = ["HOME", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_OVERLAP"];
        let invocation = step.invocation(&slurm(), env);
        insta::assert_snapshot!(invocation.display().replace(" --", "\n  --"), @r"
        /usr/bin/srun
          --jobid=12
          --job-name=default/web-0
          --nodes=1
          --ntasks=1
          --nodelist=node2
          --exact
          --cpus-per-task=2
          --mem=300
          --gres=gpu:1,shard:4
          --immediate=5
          --mpi=none
          --export=ALL
          --input=all
          --kill-on-bad-exit=0
          --chdir=/
          --quiet /proc/77/exe internal sandbox
        ");
        assert_eq!(invocation.env_remove, ["SLURM_NTASKS", "SLURM_OVERLAP"]);

        (step.cpus, step.memory_mb, step.gres) = (0, None, &[]);
        step.resource_timeout = Duration::ZERO;
        let minimal = step.invocation(&slurm(), env).display();
        let options = " --exact --cpus-per-task=1 --mem=0 --gres=none --immediate=1 ";
        assert!(minimal.contains(options), "{minimal}");
    }
}
