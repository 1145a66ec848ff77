//! A new job, by `srun` with the user's options.

use std::ffi::OsString;
use std::path::Path;

use crate::Slurm;
use crate::invocation::{Invocation, removed_for_steps};

/// A program to run in a new job, one task per node unless the user's options say otherwise.
#[derive(Debug, Clone)]
pub struct Submission<'a> {
    /// The user's Slurm options, verbatim (`-N4`, `--partition=main`, …). They come last and so override ours.
    pub options: &'a [String],
    /// Use this running job instead of a new one, on this node.
    pub within: Option<(u32, &'a str)>,
    /// The program, as an absolute path.
    pub program: &'a Path,
    /// Its arguments.
    pub args: &'a [String],
    /// Connect the program to our terminal.
    pub terminal: bool,
    /// The job's name unless the user gives one.
    pub name: &'a str,
}

impl Submission<'_> {
    /// The `srun` command line; `env` are the names of the variables in our environment.
    ///
    /// A new job inherits the whole environment, since the user sets `SLURM_PARTITION` and the like. Inside a job they
    /// belong to the outer step.
    pub fn invocation<'e>(
        &self,
        slurm: &Slurm,
        env: impl IntoIterator<Item = &'e str>,
    ) -> Invocation {
        let mut args: Vec<OsString> = vec![
            format!("--job-name={}", self.name).into(),
            // Forward Ctrl-C to the tasks at once. By default the first one prints the state of the tasks.
            "--disable-status".into(),
            // Tasks other than the leader may end early, with any exit code.
            "--kill-on-bad-exit=0".into(),
            "--wait=0".into(),
            "--mpi=none".into(),
        ];
        args.push(if self.terminal {
            "--pty".into()
        } else {
            // Only the first task, the leader, reads standard input.
            "--input=0".into()
        });
        // The leader's step must leave the resources to steps that the workload or pods start later.
        let env: Vec<&str> = env.into_iter().collect();
        if self.within.is_none() {
            args.extend(self.sharing_option(&env).map(OsString::from));
        }
        if let Some((job, node)) = self.within {
            args.extend([
                format!("--jobid={job}").into(),
                "--nodes=1".into(),
                "--ntasks=1".into(),
                format!("--nodelist={node}").into(),
                // Share all resources of the job with its other steps.
                "--overlap".into(),
                "--mem=0".into(),
                "--cpu-bind=none".into(),
            ]);
        }
        args.extend(self.options.iter().map(Into::into));
        args.push(self.program.into());
        args.extend(self.args.iter().map(Into::into));
        Invocation {
            program: slurm.srun.clone(),
            args,
            env_remove: match self.within {
                Some(_) => removed_for_steps(env),
                None => Vec::new(),
            },
            env_set: Vec::new(),
        }
    }

    /// The option that makes the first step of a job leave resources to later steps.
    ///
    /// With `--exclusive` a step cannot overlap, but it takes only one CPU per task if the number of tasks is given.
    /// So this adds the number unless the user gives one.
    /// `srun` accepts abbreviations of `--exclusive`, down to the shortest that is not one of `--exclude`.
    fn sharing_option(&self, env: &[&str]) -> Option<&'static str> {
        let given = |names: &[&str], variables: &[&str]| {
            let by_option = |option: &String| names.iter().any(|name| option.starts_with(name));
            self.options.iter().any(by_option) || env.iter().any(|name| variables.contains(name))
        };
        if !given(&["--exclus"], &["SLURM_EXCLUSIVE"]) {
            Some("--overlap")
        } else if !given(&["-n", "--ntasks"], &["SLURM_NTASKS", "SLURM_NPROCS"]) {
            Some("--ntasks-per-node=1")
        } else {
            None
        }
    }
}
