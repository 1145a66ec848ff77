//! The options of `srun`: whether an argument is one of them, and whether the next argument is its value.
//!
//! Callers need this to find the first argument that is not an option. A built-in list covers Slurm 22.05 to 26.05. The site's own
//! `srun --help` adds options of other versions and of the site's SPANK plugins.

use std::collections::BTreeMap;

/// Short options with a value: `-N 2`. (`-N2` is one argument.)
const SHORT_WITH_VALUE: &str = "ABbcCdDeFGiJLmMnNopPqrRStTwWx";
/// Short options without a separate value.
const SHORT_WITHOUT_VALUE: &str = "EhHIkKlOQsuvVXZ";

/// Long options with a value.
const LONG_WITH_VALUE: &str = "account acctg-freq bb bbf bcast bcast-exclude begin chdir cluster-constraint clusters comment constraint \
    container container-id core-spec cores-per-socket cpu-bind cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency \
    distribution epilog error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node \
    gpus-per-socket gpus-per-task gres gres-flags het-group hint input job-name jobid licenses mail-type mail-user mcs-label mem \
    mem-bind mem-per-cpu mem-per-gpu mincpus mpi network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu \
    ntasks-per-node ntasks-per-socket ntasks-per-tres open-mode output partition power prefer priority profile prolog qos relative \
    reservation segment signal slurmd-debug sockets-per-node switches task-epilog task-prolog thread-spec threads \
    threads-per-core time time-min tmp tree-width treewidth tres-bind tres-per-task uid wait wckey";

/// Long options without a separate value. Some take one after `=`.
const LONG_WITHOUT_VALUE: &str = "async compress consolidate-segments contiguous disable-status exact exclusive external-launcher \
    get-user-env help hold ignore-pbs immediate interactive jobid-verbose kill-on-bad-exit label multi-prog nice no-allocate no-kill \
    no-requeue nvmps oom-kill-step overcommit overlap oversubscribe preserve-env propagate pty quiet quit-on-interrupt reboot requeue \
    resv-ports send-libs share spread-job spread-segments stepmgr test-only unbuffered usage use-min-nodes verbose version wait-for-children x11";

/// Whether an option has a value, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionValue {
    /// The next argument is its value.
    NextArgument,
    /// The option is complete: its value is attached, or it has none.
    Complete,
}

/// The options that one `srun` accepts.
#[derive(Debug, Clone)]
pub struct SrunOptions {
    /// Long names, and whether the option takes a separate value.
    long: BTreeMap<String, bool>,
    short: BTreeMap<char, bool>,
}

impl SrunOptions {
    /// The options of the supported versions of Slurm.
    pub fn built_in() -> Self {
        let long = |names: &str, value: bool| -> Vec<(String, bool)> {
            let names = names.split_whitespace();
            names.map(|name| (name.to_owned(), value)).collect()
        };
        let short = |letters: &'static str, value: bool| letters.chars().map(move |c| (c, value));
        Self {
            long: [long(LONG_WITH_VALUE, true), long(LONG_WITHOUT_VALUE, false)]
                .concat()
                .into_iter()
                .collect(),
            short: short(SHORT_WITH_VALUE, true)
                .chain(short(SHORT_WITHOUT_VALUE, false))
                .collect(),
        }
    }

    /// Adds the options in the output of `srun --help`. Known ones stay as they are: the help omits the `=` of some.
    pub fn add_from_help(&mut self, help: &str) {
        for line in help.lines() {
            let text = line.trim_start();
            // Options are indented by two columns, or by six without a short form. Descriptions are further right.
            if !(1..=6).contains(&(line.len() - text.len())) || !text.starts_with('-') {
                continue;
            }
            let Some(at) = text.find("--") else {
                continue;
            };
            let rest = &text[at + 2..];
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '-');
            let (name, rest) = rest.split_at(end.unwrap_or(rest.len()));
            if name.is_empty() {
                continue;
            }
            let value = rest.starts_with('=');
            self.long.entry(name.to_owned()).or_insert(value);
            let mut short = text[..at].chars().skip(1);
            if let (Some(letter), Some(',' | ' ')) = (short.next(), short.next()) {
                self.short.entry(letter).or_insert(value);
            }
        }
    }

    /// Whether the argument is an option of `srun`, and whether the next argument is its value; `None` if it is unknown.
    pub fn value_of(&self, arg: &str) -> Option<OptionValue> {
        let separate = if let Some(long) = arg.strip_prefix("--") {
            let (name, attached) = match long.split_once('=') {
                Some((name, _)) => (name, true),
                None => (long, false),
            };
            self.takes_value(name)? && !attached
        } else {
            let mut letters = arg.strip_prefix('-')?.chars();
            let value = *self.short.get(&letters.next()?)?;
            value && letters.next().is_none()
        };
        Some(match separate {
            true => OptionValue::NextArgument,
            false => OptionValue::Complete,
        })
    }

    /// `srun` accepts every abbreviation that is unique.
    fn takes_value(&self, name: &str) -> Option<bool> {
        if let Some(value) = self.long.get(name) {
            return Some(*value);
        }
        let mut matching = self
            .long
            .range(name.to_owned()..)
            .take_while(|(long, _)| !name.is_empty() && long.starts_with(name));
        let (_, value) = matching.next()?;
        // If it is ambiguous, srun reports that; the value is only needed to find the workload.
        matching.all(|(_, other)| other == value).then_some(*value)
    }

    /// The long names, without dashes.
    pub fn long_names(&self) -> impl Iterator<Item = &str> {
        self.long.keys().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_sruns_option_parsing() {
        let options = SrunOptions::built_in();
        for option in [
            "-N",
            "-p",
            "--nodes",
            "--partition",
            "-t",
            "--mem",
            "--gres",
            "-A",
            "-w",
            "--part",
        ] {
            assert_eq!(
                options.value_of(option),
                Some(OptionValue::NextArgument),
                "{option}"
            );
        }
        for option in [
            "-N2",
            "--nodes=2",
            "--exclusive",
            "-Q",
            "--overlap",
            "-l",
            "-s",
            "--pty",
            "--nice",
            "--part=main",
        ] {
            assert_eq!(
                options.value_of(option),
                Some(OptionValue::Complete),
                "{option}"
            );
        }
        for unknown in ["--frobnicate", "--frobnicate=1", "-y", "-y2", "--", "--=1"] {
            assert_eq!(options.value_of(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn built_in_list_has_all_options_of_help() {
        let built_in = SrunOptions::built_in();
        let mut with_help = built_in.clone();
        with_help.add_from_help(include_str!("../fixtures/srun-help-22.05.txt"));
        assert_eq!(built_in.long, with_help.long);
        assert_eq!(built_in.short, with_help.short);
    }

    #[test]
    fn options_of_plugins_are_read_from_help() {
        let mut options = SrunOptions::built_in();
        options.add_from_help(
            "Options provided by plugins:\n      --container-image=[USER@]IMAGE  [pyxis] the image\n      \
             --container-remap-root  [pyxis] become root\n  -y, --yes[=how]  \n                              --no-option in a text\n  - --\n",
        );
        let value = |option| options.value_of(option);
        assert_eq!(value("--container-image"), Some(OptionValue::NextArgument));
        assert_eq!(value("--container-remap-root"), Some(OptionValue::Complete));
        assert_eq!(value("--yes"), Some(OptionValue::Complete));
        assert_eq!(value("-y"), Some(OptionValue::Complete));
        assert_eq!(value("--no-option"), None);
    }
}
