//! A new job from outside of any: `srun` with the user's own options.

use std::ffi::OsString;
use std::path::Path;

use crate::Slurm;
use crate::invocation::{Invocation, removed_for_steps};

/// A program to run in a new job, one task per node unless the user's options say otherwise.
#[derive(Debug, Clone)]
pub struct Submission<'a> {
    /// The user's Slurm options, verbatim (`-N4`, `--partition=main`, …). They come after ours and win.
    pub options: &'a [String],
    /// A running job to use instead of a new one, and the node of it to go to.
    pub within: Option<(u32, &'a str)>,
    /// The program, as an absolute path.
    pub program: &'a Path,
    /// Its arguments.
    pub args: &'a [String],
    /// Give the program a terminal: the one that we have.
    pub terminal: bool,
    /// The job's name unless the user gives one.
    pub name: &'a str,
}

impl Submission<'_> {
    /// The `srun` command line; `env` are the names of our own environment.
    ///
    /// For a new job the environment is left alone: `SLURM_PARTITION` and the like are the user's wishes. Inside a job they
    /// are the outer step's.
    pub fn invocation<'e>(
        &self,
        slurm: &Slurm,
        env: impl IntoIterator<Item = &'e str>,
    ) -> Invocation {
        let mut args: Vec<OsString> = vec![
            format!("--job-name={}", self.name).into(),
            // Ctrl-C goes to the tasks at once, which end in order, instead of printing the state of tasks first.
            "--disable-status".into(),
            // The tasks that do not lead end when they like.
            "--kill-on-bad-exit=0".into(),
            "--wait=0".into(),
            "--mpi=none".into(),
        ];
        args.push(if self.terminal {
            "--pty".into()
        } else {
            // Only the first task leads, so only it may read what the user pipes in.
            "--input=0".into()
        });
        // The leader's step takes as little as can be from steps that are started later, by the workload or for pods.
        let env: Vec<&str> = env.into_iter().collect();
        if self.within.is_none() {
            args.extend(self.modesty(&env).map(OsString::from));
        }
        if let Some((job, node)) = self.within {
            args.extend([
                format!("--jobid={job}").into(),
                "--nodes=1".into(),
                "--ntasks=1".into(),
                format!("--nodelist={node}").into(),
                // Beside whatever else runs in the job, with all that it has.
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

    /// The option that makes a job's first step leave its resources to others.
    ///
    /// It can't share those of whole nodes. There it takes a CPU for each task, but only if their number is given.
    /// (As `srun` reads it, `--exclusive` may be shortened as long as it is not `--exclude`.)
    fn modesty(&self, env: &[&str]) -> Option<&'static str> {
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
