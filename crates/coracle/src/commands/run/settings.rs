//! Splits the command line of `coracle run` into Coracle's options, Slurm's options and the workload.

use console::{Failure, FailureCode};
use std::ffi::OsString;
use std::net::Ipv4Addr;

use clap::Parser;

use crate::cli::{LateOptions, RunArgs, RunOptions};
use cluster::NODE_PREFIX;

/// The parsed command line.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Coracle's options.
    pub options: RunOptions,
    /// Slurm's options, one argument each.
    pub slurm: Vec<String>,
    /// The workload, as named by the user.
    pub workload: OsString,
    pub args: Vec<OsString>,
}

impl Settings {
    /// Splits and checks the command line.
    pub fn resolve(args: RunArgs) -> anyhow::Result<Self> {
        let words = split(args.rest)?;
        let mut options = args.options;
        if !words.ours.is_empty() {
            match LateOptions::try_parse_from(&words.ours) {
                Ok(late) => merge(&mut options, late.options),
                Err(error) if !error.use_stderr() => error.exit(),
                Err(error) => return Err(usage(error.render().to_string().trim()).into()),
            }
        }
        let Some(workload) = words.workload else {
            if let [.., option, value] = words.slurm.as_slice()
                && slurm::srun_options::takes_value(option)
            {
                return Err(usage("no workload is given")
                    .hint(format!("{value} was taken for the value of {option}; write {option}=VALUE, or -- before the workload"))
                    .into());
            }
            return Err(usage("no workload is given")
                .hint("name a program, a script or manifests: `coracle run -N2 app.yaml`; `coracle run --help` explains")
                .into());
        };
        check_cidr("--pod-cidr", &options.pod_cidr, NODE_PREFIX.into())?;
        check_cidr("--service-cidr", &options.service_cidr, 28)?;
        if overlap(&options.pod_cidr, &options.service_cidr) {
            return Err(usage("--pod-cidr and --service-cidr overlap")
                .hint("pods and services need networks of their own")
                .into());
        }
        Ok(Self {
            options,
            slurm: words.slurm,
            workload,
            args: words.args,
        })
    }

    /// The arguments of `coracle` inside an allocation.
    pub fn words_inside(&self) -> Vec<String> {
        let text = |word: &OsString| word.to_string_lossy().into_owned();
        let mut words = vec!["run".to_owned()];
        let o = &self.options;
        if o.verbose {
            words.push("--verbose".to_owned());
        }
        if o.report_end {
            words.push("--report-end".to_owned());
        }
        if o.early {
            words.push("--early".to_owned());
        }
        if o.pods_as_steps {
            words.push("--pods-as-steps".to_owned());
        }
        for (name, dir) in [("logs", &o.logs), ("kubernetes", &o.kubernetes)] {
            if let Some(dir) = dir {
                words.push(format!("--{name}={}", dir.display()));
            }
        }
        words.push(format!("--api-port={}", o.api_port));
        words.push(format!("--start-timeout={}", o.start_timeout));
        words.push(format!("--pod-cidr={}", o.pod_cidr));
        words.push(format!("--service-cidr={}", o.service_cidr));
        words.push("--".to_owned());
        words.push(text(&self.workload));
        words.extend(self.args.iter().map(text));
        words
    }
}

/// Merges options that stand after Slurm's options; values other than the default win.
fn merge(options: &mut RunOptions, late: RunOptions) {
    let default = defaults();
    options.verbose |= late.verbose;
    options.report_end |= late.report_end;
    options.early |= late.early;
    options.pods_as_steps |= late.pods_as_steps;
    options.logs = late.logs.or(options.logs.take());
    options.kubernetes = late.kubernetes.or(options.kubernetes.take());
    if late.api_port != default.api_port {
        options.api_port = late.api_port;
    }
    if late.start_timeout != default.start_timeout {
        options.start_timeout = late.start_timeout;
    }
    if late.pod_cidr != default.pod_cidr {
        options.pod_cidr = late.pod_cidr;
    }
    if late.service_cidr != default.service_cidr {
        options.service_cidr = late.service_cidr;
    }
}

fn defaults() -> RunOptions {
    LateOptions::try_parse_from(std::iter::empty::<OsString>())
        .map(|late| late.options)
        .unwrap_or_default()
}

/// Whether two valid IPv4 networks overlap.
fn overlap(a: &str, b: &str) -> bool {
    let ranges = control_plane::components::address_range(a)
        .zip(control_plane::components::address_range(b));
    ranges.is_some_and(|(a, b)| a.start() <= b.end() && b.start() <= a.end())
}

/// Checks that `cidr` is an IPv4 network with a prefix of at most `longest` bits and no host bits, as upstream requires.
fn check_cidr(option: &str, cidr: &str, longest: u32) -> Result<(), Failure> {
    let parts = cidr.split_once('/').and_then(|(address, bits)| {
        Some((address.parse::<Ipv4Addr>().ok()?, bits.parse::<u32>().ok()?))
    });
    let is_network = |address: Ipv4Addr, bits| u32::from(address).checked_shl(bits) == Some(0);
    match parts {
        Some((address, bits)) if (8..=longest).contains(&bits) && is_network(address, bits) => {
            Ok(())
        }
        _ => Err(usage(&format!(
            "{option} {cidr} is not an IPv4 network that will do"
        ))
        .hint(format!(
            "write its first address and its length, between 8 and {longest}: 100.96.0.0/16"
        ))),
    }
}

fn usage(message: &str) -> Failure {
    Failure::new(FailureCode::Usage, message.trim_start_matches("error: "))
}

#[derive(Debug, Default, PartialEq)]
struct Words {
    ours: Vec<String>,
    slurm: Vec<String>,
    workload: Option<OsString>,
    args: Vec<OsString>,
}

/// Collects options up to the first argument that is none. That argument is the workload, and the rest are its arguments.
fn split(rest: Vec<OsString>) -> anyhow::Result<Words> {
    let mut words = Words::default();
    let mut rest = rest.into_iter();
    while let Some(word) = rest.next() {
        let text = word.to_string_lossy().into_owned();
        if text == "--" {
            words.workload = rest.next();
            break;
        }
        if text == "-" || !text.starts_with('-') {
            words.workload = Some(word);
            break;
        }
        let ours = is_ours(&text);
        let takes_value = if ours {
            ours_takes_value(&text)
        } else {
            slurm::srun_options::takes_value(&text)
        };
        let list = if ours {
            &mut words.ours
        } else {
            &mut words.slurm
        };
        list.push(text.clone());
        if takes_value {
            let value = rest
                .next()
                .ok_or_else(|| usage(&format!("{text} needs a value")))?;
            list.push(value.to_string_lossy().into_owned());
        }
    }
    words.args = rest.collect();
    Ok(words)
}

const OURS_WITH_VALUE: [&str; 6] = [
    "logs",
    "kubernetes",
    "api-port",
    "start-timeout",
    "pod-cidr",
    "service-cidr",
];

fn is_ours(word: &str) -> bool {
    matches!(
        word,
        "-v" | "--verbose" | "--early" | "--pods-as-steps" | "--report-end" | "-h" | "--help"
    ) || OURS_WITH_VALUE.contains(&name_of(word))
}

fn ours_takes_value(word: &str) -> bool {
    OURS_WITH_VALUE.contains(&name_of(word)) && !word.contains('=')
}

/// The name of an option: `logs` in `--logs=/x`.
fn name_of(word: &str) -> &str {
    let word = word.strip_prefix("--").unwrap_or("");
    word.split_once('=').map_or(word, |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Words {
        split(line.split_whitespace().map(OsString::from).collect()).unwrap()
    }

    #[test]
    fn overlapping_networks_are_detected() {
        assert!(overlap("100.64.0.0/10", "100.96.0.0/16"));
        assert!(overlap("100.96.0.0/16", "100.96.0.0/16"));
        assert!(!overlap("100.64.0.0/11", "100.96.0.0/16"));
    }

    #[test]
    fn invalid_networks_are_refused() {
        for good in ["100.64.0.0/11", "10.0.0.0/8", "192.168.1.0/24"] {
            check_cidr("--service-cidr", good, 28).unwrap();
        }
        for bad in [
            "nonsense",
            "10.0.0.0",
            "10.0.0.1/8",
            "10.0.0.0/99",
            "10.0.0.0/4",
            "::/64",
        ] {
            assert!(check_cidr("--service-cidr", bad, 28).is_err(), "{bad}");
        }
    }

    #[test]
    fn ours_slurms_and_the_workload_are_told_apart() {
        insta::assert_debug_snapshot!(words(
            "-N 2 -pmain --time=10 --logs /x -v --mem 4G --exclusive app.sh -v --time 3"
        ));
        let ours = words("--pods-as-steps -N2 --early app.sh").ours;
        assert_eq!(ours, ["--pods-as-steps", "--early"]);
        assert_eq!(words("-N2 -").workload, Some("-".into()));
        assert_eq!(words("-- -odd").workload, Some("-odd".into()));
        assert_eq!(words("-N2").workload, None);
        assert!(split(vec!["-N".into()]).is_err());
    }
}
