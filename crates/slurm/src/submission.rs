//! A new job from outside of any: `srun` with the user's own options.

use std::ffi::OsString;
use std::path::Path;

use crate::Slurm;
use crate::invocation::Invocation;

/// A program to run in a new job, one task per node unless the user's options say otherwise.
#[derive(Debug, Clone)]
pub struct Submission<'a> {
    /// The user's Slurm options, verbatim (`-N4`, `--partition=main`, …). They come after ours and win.
    pub options: &'a [String],
    /// The program, as an absolute path.
    pub program: &'a Path,
    /// Its arguments.
    pub args: &'a [String],
    /// Copy the program to this path on each node first and run the copy.
    pub bcast: Option<&'a Path>,
    /// The job's name unless the user gives one.
    pub name: &'a str,
}

impl Submission<'_> {
    /// The `srun` command line. The user's environment is left alone: `SLURM_PARTITION` and the like are their wishes.
    pub fn invocation(&self, slurm: &Slurm) -> Invocation {
        let mut args: Vec<OsString> = vec![
            format!("--job-name={}", self.name).into(),
            // Ctrl-C goes to the tasks at once, which end in order, instead of printing the state of tasks first.
            "--disable-status".into(),
            // Only the first task leads, so only it may read what the user pipes in.
            "--input=0".into(),
            // The tasks that do not lead end when they like.
            "--kill-on-bad-exit=0".into(),
            "--wait=0".into(),
            "--mpi=none".into(),
        ];
        if let Some(destination) = self.bcast {
            let mut bcast = OsString::from("--bcast=");
            bcast.push(destination);
            args.push(bcast);
            args.push("--send-libs=no".into());
        }
        args.extend(self.options.iter().map(Into::into));
        args.push(self.program.into());
        args.extend(self.args.iter().map(Into::into));
        Invocation {
            program: slurm.srun.clone(),
            args,
            env_remove: Vec::new(),
            env_set: Vec::new(),
        }
    }
}
