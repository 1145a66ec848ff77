//! A step of a running job that runs one process on each of the given nodes.

use std::ffi::OsString;
use std::path::Path;

use crate::Slurm;
use crate::hostlist;
use crate::invocation::Invocation;

/// A step for agents: it overlaps with all other steps, sees all resources of the job, and survives the failure of nodes.
#[derive(Debug, Clone)]
pub struct AgentStep<'a> {
    /// The id of the running job.
    pub job_id: u32,
    /// The nodes; each runs the program once.
    pub nodes: &'a [String],
    /// The program, as an absolute path on the nodes. Never `/proc/self/exe`, which would be slurmstepd.
    pub program: &'a Path,
    /// Its arguments. Other users of the node can read them.
    pub args: &'a [String],
    /// The number of GPUs of the job on all of these nodes. Needed only if the job requests GPUs per task
    /// (`SLURM_GPUS_PER_TASK` is set), because an agent would then see the GPUs of one task. Otherwise `None`: a step sees all GPUs of the job.
    pub gpus: Option<u64>,
    /// The step's name, as `squeue -s` and `sacct` show it.
    pub name: &'a str,
}

impl AgentStep<'_> {
    /// The `srun` command line; `env` are the names of the variables in our environment.
    pub fn invocation<'e>(
        &self,
        slurm: &Slurm,
        env: impl IntoIterator<Item = &'e str>,
    ) -> Invocation {
        let count = self.nodes.len();
        let mut args: Vec<OsString> = Vec::new();
        let mut option = |text: String| args.push(text.into());

        option(format!("--jobid={}", self.job_id));
        option(format!("--job-name={}", self.name));
        option(format!("--nodes={count}"));
        option(format!("--ntasks={count}"));
        option("--ntasks-per-node=1".into());
        option(format!("--nodelist={}", hostlist::compress(self.nodes)));
        // Share CPUs, memory and GPUs with every other step, including the current one, which may hold them all.
        option("--overlap".into());
        // All of the job's memory and CPUs on the node: the agent's pods use them.
        option("--mem=0".into());
        if let Some(gpus) = self.gpus.filter(|&gpus| gpus > 0) {
            option(format!("--gpus={gpus}"));
        }
        option("--cpu-bind=none".into());
        option("--mpi=none".into());
        option("--export=ALL".into());
        // An agent that fails or ends early, or a failed node, must not end the other agents.
        option("--kill-on-bad-exit=0".into());
        option("--wait=0".into());
        option("--no-kill".into());
        // The leader writes secrets to srun's standard input, which reaches every agent; arguments would be public.
        // No --unbuffered: it would make stdout a terminal, and srun forwards whole lines at once anyway.
        option("--input=all".into());
        // A home directory may be missing on the node.
        option("--chdir=/".into());
        option("--quiet".into());
        args.push(self.program.into());
        args.extend(self.args.iter().map(Into::into));
        Invocation::step(slurm, args, env)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn slurm() -> Slurm {
        let at = |name: &str| Path::new("/usr/bin").join(name);
        Slurm {
            srun: at("srun"),
            scontrol: at("scontrol"),
            squeue: at("squeue"),
            sinfo: at("sinfo"),
            scancel: at("scancel"),
        }
    }

    #[test]
    fn agent_step_runs_one_task_per_node() {
        let nodes = hostlist::expand("node[1-2]").unwrap();
        let args = ["internal".to_owned(), "agent".to_owned()];
        let program = Path::new("/home/user1/bin/coracle");
        let mut step = AgentStep {
            job_id: 12,
            nodes: &nodes,
            program,
            args: &args,
            gpus: None,
            name: "coracle-agents",
        };
        let env = [
            "HOME",
            "SLURM_JOB_ID",
            "SLURM_NTASKS",
            "SLURM_CPU_BIND",
            "SLURM_MEM_PER_CPU",
            "SLURM_CONF",
        ];
        let shared = step.invocation(&slurm(), env);
        insta::assert_snapshot!(shared.display().replace(" --", "\n  --"), @r"
        /usr/bin/srun
          --jobid=12
          --job-name=coracle-agents
          --nodes=2
          --ntasks=2
          --ntasks-per-node=1
          --nodelist=node[1-2]
          --overlap
          --mem=0
          --cpu-bind=none
          --mpi=none
          --export=ALL
          --kill-on-bad-exit=0
          --wait=0
          --no-kill
          --input=all
          --chdir=/
          --quiet /home/user1/bin/coracle internal agent
        ");
        assert_eq!(
            shared.env_remove,
            ["SLURM_CPU_BIND", "SLURM_MEM_PER_CPU", "SLURM_NTASKS"]
        );

        step.gpus = Some(4);
        let with_gpus = step.invocation(&slurm(), env).display();
        assert!(with_gpus.contains(" --gpus=4 "), "{with_gpus}");
    }

    #[test]
    fn submission_puts_user_options_last() {
        let options = ["-N4".to_owned(), "--job-name=mine".to_owned()];
        let args = ["run".to_owned(), "app.yaml".to_owned()];
        let mut submission = crate::Submission {
            options: &options,
            within: None,
            program: Path::new("/c"),
            args: &args,
            terminal: false,
            name: "coracle",
        };
        let env = ["HOME", "SLURM_NTASKS"];
        insta::assert_snapshot!(submission.invocation(&slurm(), env).display(),
            @"/usr/bin/srun --job-name=coracle --disable-status --kill-on-bad-exit=0 --wait=0 --mpi=none --input=0 --overlap -N4 --job-name=mine /c run app.yaml");
        let with = |options: &[&str], env: &[&'static str]| {
            let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
            let submission = crate::Submission {
                options: &options,
                ..submission.clone()
            };
            let invocation = submission.invocation(&slurm(), env.iter().copied());
            let command_line = invocation.display();
            let options = command_line.split(" --input=0 ").nth(1).unwrap();
            options.strip_suffix(" /c run app.yaml").unwrap().to_owned()
        };
        let exclusive = "--exclusive=user";
        assert_eq!(
            with(&["-N2", "--exclude=a"], &[]),
            "--overlap -N2 --exclude=a"
        );
        assert_eq!(
            with(&[exclusive], &[]),
            "--ntasks-per-node=1 --exclusive=user"
        );
        assert_eq!(
            with(&["-N2"], &["SLURM_EXCLUSIVE"]),
            "--ntasks-per-node=1 -N2"
        );
        for tasks in ["-n4", "--ntasks=4", "--ntasks-per-node=2"] {
            assert_eq!(
                with(&[exclusive, tasks], &[]),
                format!("{exclusive} {tasks}")
            );
        }
        submission.options = &[];
        submission.within = Some((7, "node1"));
        submission.terminal = true;
        let inside = submission.invocation(&slurm(), env);
        insta::assert_snapshot!(inside.display(),
            @"/usr/bin/srun --job-name=coracle --disable-status --kill-on-bad-exit=0 --wait=0 --mpi=none --pty --jobid=7 --nodes=1 --ntasks=1 --nodelist=node1 --overlap --mem=0 --cpu-bind=none /c run app.yaml");
        assert_eq!(inside.env_remove, ["SLURM_NTASKS"]);
    }
}
