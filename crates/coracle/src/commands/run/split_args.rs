//! Splits the command line of `coracle run` into Coracle's options, Slurm's options and the workload.

use console::Failure;
use std::ffi::OsString;

use clap::CommandFactory;
use slurm::Slurm;
use slurm::srun_options::{OptionValue, SrunOptions};

use super::settings::usage;
use crate::cli::TrailingOptions;

/// Names that are at least this similar are suggested (Jaro-Winkler similarity).
const MIN_SIMILARITY: f64 = 0.85;

/// The parts of a command line.
#[derive(Debug, Default, PartialEq)]
pub struct SplitArgs {
    /// Coracle's options, and their values.
    pub coracle: Vec<String>,
    /// Slurm's options, and their values.
    pub slurm: Vec<String>,
    /// The first argument that is neither.
    pub workload: Option<OsString>,
    /// The arguments after it.
    pub args: Vec<OsString>,
}

#[derive(Debug)]
enum SplitError {
    UnknownOption(String),
    NoValue(String),
}

/// Splits the arguments after those that clap has recognised as Coracle's. Returns the known options of `srun` too.
///
/// Asks `srun` for its options only if an option is not in the built-in list: that takes time, and needs Slurm.
pub fn split(rest: &[OsString]) -> Result<(SplitArgs, SrunOptions), Failure> {
    let mut options = SrunOptions::built_in();
    let mut result = split_with(rest, &options);
    if let Err(SplitError::UnknownOption(_)) = result
        && let Ok(slurm) = Slurm::find()
        && let Ok(of_this_host) = crate::block_on(async { Ok(slurm.srun_options().await?) })
    {
        options = of_this_host;
        result = split_with(rest, &options);
    }
    match result {
        Ok(split) => Ok((split, options)),
        Err(SplitError::NoValue(option)) => Err(usage(&format!("{option} needs a value"))),
        Err(SplitError::UnknownOption(option)) => Err(unknown_option(&option, &options)),
    }
}

/// Collects options up to the first argument that is none. That argument is the workload, and the rest are its arguments.
fn split_with(rest: &[OsString], srun: &SrunOptions) -> Result<SplitArgs, SplitError> {
    let mut split = SplitArgs::default();
    let mut rest = rest.iter();
    while let Some(arg) = rest.next() {
        let text = arg.to_string_lossy().into_owned();
        if text == "--" {
            split.workload = rest.next().cloned();
            break;
        }
        if text == "-" || !text.starts_with('-') {
            split.workload = Some(arg.clone());
            break;
        }
        let (list, value) = match coracle_option_value(&text) {
            Some(value) => (&mut split.coracle, value),
            None => match srun.value_of(&text) {
                Some(value) => (&mut split.slurm, value),
                None => return Err(SplitError::UnknownOption(text)),
            },
        };
        list.push(text.clone());
        if value == OptionValue::NextArgument {
            let value = rest.next().ok_or(SplitError::NoValue(text))?;
            list.push(value.to_string_lossy().into_owned());
        }
    }
    split.args = rest.cloned().collect();
    Ok(split)
}

/// Whether the argument is an option of Coracle, and whether the next argument is its value.
fn coracle_option_value(arg: &str) -> Option<OptionValue> {
    let (name, attached) = arg
        .split_once('=')
        .map_or((arg, false), |(name, _)| (name, true));
    if matches!(name, "-h" | "--help") {
        return Some(OptionValue::Complete);
    }
    let command = TrailingOptions::command();
    let option = command.get_arguments().find(|option| {
        let long = option.get_long().map(|long| format!("--{long}"));
        let short = option.get_short().map(|short| format!("-{short}"));
        [long, short].iter().flatten().any(|known| known == name)
    })?;
    let takes_value = option.get_action().takes_values();
    Some(match takes_value && !attached {
        true => OptionValue::NextArgument,
        false => OptionValue::Complete,
    })
}

fn unknown_option(option: &str, srun: &SrunOptions) -> Failure {
    let name = option.split('=').next().unwrap_or(option);
    let hint = match similar_option(name, srun) {
        Some(similar) => format!("did you mean --{similar}?"),
        None => {
            "`coracle run --help` and `srun --help` list the options; `--` ends them".to_owned()
        }
    };
    usage(&format!("unknown option {name}")).with_hint(hint)
}

/// The long option whose name is most similar.
fn similar_option(name: &str, srun: &SrunOptions) -> Option<String> {
    let name = name.strip_prefix("--")?;
    let command = TrailingOptions::command();
    let shown = command
        .get_arguments()
        .filter(|option| !option.is_hide_set());
    let ours = shown.filter_map(|option| option.get_long());
    let scored = ours
        .chain(srun.long_names())
        .map(|known| (strsim::jaro_winkler(name, known), known));
    let best = scored.max_by(|(a, _), (b, _)| a.total_cmp(b));
    best.filter(|(similarity, _)| *similarity >= MIN_SIMILARITY)
        .map(|(_, known)| known.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn try_split(line: &str) -> Result<SplitArgs, SplitError> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        split_with(&words, &SrunOptions::built_in())
    }

    #[test]
    fn arguments_are_split() {
        let split_line = |line| try_split(line).unwrap();
        insta::assert_debug_snapshot!(split_line(
            "-N 2 -pmain --time=10 --logs /x -v --mem 4G --exclusive app.sh -v --time 3"
        ));
        let options = split_line("--pods-as-steps -N2 --early app.sh").coracle;
        assert_eq!(options, ["--pods-as-steps", "--early"]);
        assert_eq!(split_line("-N2 -").workload, Some("-".into()));
        assert_eq!(split_line("-- -odd").workload, Some("-odd".into()));
        assert_eq!(split_line("-N2").workload, None);
        assert!(matches!(try_split("-N"), Err(SplitError::NoValue(_))));
    }

    #[test]
    fn unknown_options_are_named_with_similar_ones() {
        let hint = |line: &str| match try_split(line) {
            Err(SplitError::UnknownOption(option)) => {
                let failure = unknown_option(&option, &SrunOptions::built_in());
                format!("{failure}: {}", failure.hint().unwrap_or_default())
            }
            other => panic!("{line}: {other:?}"),
        };
        let lines = [
            "--frobnicate app.yaml",
            "-N2 --pod-cdir=10.0.0.0/8 app.yaml",
            "--partitoin main app.yaml",
            "-y app.yaml",
        ];
        insta::assert_snapshot!(lines.map(hint).join("\n"), @r"
        unknown option --frobnicate: `coracle run --help` and `srun --help` list the options; `--` ends them
        unknown option --pod-cdir: did you mean --pod-cidr?
        unknown option --partitoin: did you mean --partition?
        unknown option -y: `coracle run --help` and `srun --help` list the options; `--` ends them
        ");
    }
}
