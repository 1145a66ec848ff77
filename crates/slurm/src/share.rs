//! One step of a running job for one process on one node, with a share of the job's resources that is its own.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use crate::Slurm;
use crate::invocation::{Invocation, removed_for_steps};

/// A step that holds what it asks for until it ends: other steps of the job don't get it, and Slurm enforces and accounts it as
/// the site has configured.
///
/// Steps that were started with `--overlap` ([`AgentStep`](crate::AgentStep) is one) hold nothing, so this one fits beside
/// them. A step without it (`srun -N2 program` as the job's first) holds all of the job, and this one is refused.
#[derive(Debug, Clone)]
pub struct ShareStep<'a> {
    /// The running job.
    pub job_id: u32,
    /// Where to start the program.
    pub node: &'a str,
    /// CPUs; a step has at least one.
    pub cpus: u64,
    /// Memory; `None` for as much as the job has, shared with others of whom none is said.
    pub memory_mb: Option<u64>,
    /// Generic resources by name, such as `gpu`.
    pub gres: &'a [(String, u64)],
    /// The program, as an absolute path that means the same on the node.
    pub program: &'a Path,
    /// Its arguments. Other users of the node can read them.
    pub args: &'a [String],
    /// The step's name, as `squeue -s` and `sacct` show it.
    pub name: &'a str,
    /// How long to wait for others to end their steps before it is refused.
    pub patience: Duration,
}

impl ShareStep<'_> {
    /// The `srun` command line; `env` are the names of our own environment.
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
            // Without it a step takes all CPUs of the node, whatever it asks for.
            "--exact".into(),
            format!("--cpus-per-task={}", self.cpus.max(1)),
            // Zero is all of the job's memory, of which nothing is taken away from others.
            format!("--mem={}", self.memory_mb.unwrap_or(0)),
            // A step that doesn't say takes all that the job has.
            format!("--gres={}", self.gres()),
            // A second is the least that it knows.
            format!("--immediate={}", self.patience.as_secs().max(1)),
            "--mpi=none".into(),
            "--export=ALL".into(),
            // Whoever writes to srun's standard input speaks to the program: that is how secrets travel, and not by arguments.
            "--input=all".into(),
            "--kill-on-bad-exit=0".into(),
            "--chdir=/".into(),
            "--quiet".into(),
        ]
        .map(OsString::from)
        .to_vec();
        args.push(self.program.into());
        args.extend(self.args.iter().map(Into::into));
        Invocation {
            program: slurm.srun.clone(),
            args,
            env_remove: removed_for_steps(env),
            env_set: Vec::new(),
        }
    }

    fn gres(&self) -> String {
        let wanted: Vec<_> = self
            .gres
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| format!("{name}:{count}"))
            .collect();
        if wanted.is_empty() {
            "none".to_owned()
        } else {
            wanted.join(",")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::tests::slurm;

    #[test]
    fn it_asks_for_its_share_and_no_more() {
        let args = ["internal".to_owned(), "sandbox".to_owned()];
        let mut step = ShareStep {
            job_id: 12,
            node: "node2",
            cpus: 2,
            memory_mb: Some(300),
            gres: &[("gpu".to_owned(), 1), ("shard".to_owned(), 4)],
            program: Path::new("/proc/77/exe"),
            args: &args,
            name: "default/web-0",
            patience: Duration::from_secs(5),
        };
        let env = ["HOME", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_OVERLAP"];
        let asked = step.invocation(&slurm(), env);
        insta::assert_snapshot!(asked.display().replace(" --", "\n  --"), @r"
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
        assert_eq!(asked.env_remove, ["SLURM_NTASKS", "SLURM_OVERLAP"]);

        (step.cpus, step.memory_mb, step.gres) = (0, None, &[]);
        step.patience = Duration::ZERO;
        let least = step.invocation(&slurm(), env).display();
        let words = " --exact --cpus-per-task=1 --mem=0 --gres=none --immediate=1 ";
        assert!(least.contains(words), "{least}");
    }
}
