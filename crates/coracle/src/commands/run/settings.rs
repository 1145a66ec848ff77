//! Splits the command line of `coracle run` into Coracle's options, Slurm's options and the workload.

use console::{Failure, FailureCode};
use std::ffi::OsString;
use std::net::Ipv4Addr;

use clap::Parser;

use crate::cli::{RunArgs, RunOptions, TrailingOptions};
use cluster::NODE_PREFIX_LEN;

/// The parsed command line.
#[derive(Debug, Clone)]
pub struct RunSettings {
    /// Coracle's options.
    pub options: RunOptions,
    /// Slurm's options, one argument each.
    pub slurm: Vec<String>,
    /// The workload, as named by the user.
    pub workload: OsString,
    pub args: Vec<OsString>,
}

impl RunSettings {
    /// Splits and checks the command line.
    pub fn resolve(args: RunArgs) -> anyhow::Result<Self> {
        let split = split_args(args.rest)?;
        let mut options = args.options;
        if !split.coracle.is_empty() {
            match TrailingOptions::try_parse_from(&split.coracle) {
                Ok(late) => merge(&mut options, late.options),
                Err(error) if !error.use_stderr() => error.exit(),
                Err(error) => return Err(usage(error.render().to_string().trim()).into()),
            }
        }
        let Some(workload) = split.workload else {
            if let [.., option, value] = split.slurm.as_slice()
                && slurm::srun_options::takes_value(option)
            {
                return Err(usage("no workload is given")
                    .with_hint(format!("{value} was taken for the value of {option}; write {option}=VALUE, or -- before the workload"))
                    .into());
            }
            return Err(usage("no workload is given")
                .with_hint("name a program, a script or manifests: `coracle run -N2 app.yaml`; `coracle run --help` explains")
                .into());
        };
        check_cidr("--pod-cidr", &options.pod_cidr, NODE_PREFIX_LEN.into())?;
        check_cidr("--service-cidr", &options.service_cidr, 28)?;
        if networks_overlap(&options.pod_cidr, &options.service_cidr) {
            return Err(usage("--pod-cidr and --service-cidr overlap")
                .with_hint("pods and services need separate networks")
                .into());
        }
        Ok(Self {
            options,
            slurm: split.slurm,
            workload,
            args: split.args,
        })
    }

    /// The arguments of `coracle` inside an allocation.
    pub fn args_inside(&self) -> Vec<String> {
        let text = |arg: &OsString| arg.to_string_lossy().into_owned();
        let mut args = vec!["run".to_owned()];
        let options = &self.options;
        if options.verbose {
            args.push("--verbose".to_owned());
        }
        if options.report_end {
            args.push("--report-end".to_owned());
        }
        if options.early {
            args.push("--early".to_owned());
        }
        if options.pods_as_steps {
            args.push("--pods-as-steps".to_owned());
        }
        args.extend(options.log_args());
        for (name, dir) in [("logs", &options.logs), ("kubernetes", &options.kubernetes)] {
            if let Some(dir) = dir {
                args.push(format!("--{name}={}", dir.display()));
            }
        }
        args.push(format!("--api-port={}", options.api_port));
        args.push(format!("--start-timeout={}", options.start_timeout));
        args.push(format!("--pod-cidr={}", options.pod_cidr));
        args.push(format!("--service-cidr={}", options.service_cidr));
        args.push("--".to_owned());
        args.push(text(&self.workload));
        args.extend(self.args.iter().map(text));
        args
    }
}

/// Merges options that stand after Slurm's options; values other than the default win.
fn merge(options: &mut RunOptions, late: RunOptions) {
    let default = defaults();
    options.verbose |= late.verbose;
    options.report_end |= late.report_end;
    options.early |= late.early;
    options.pods_as_steps |= late.pods_as_steps;
    options.merge_log_options(&late, &default);
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
    TrailingOptions::try_parse_from(std::iter::empty::<OsString>())
        .map(|late| late.options)
        .unwrap_or_default()
}

/// Whether two valid IPv4 networks overlap.
fn networks_overlap(a: &str, b: &str) -> bool {
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
        _ => Err(
            usage(&format!("{option} {cidr} is not a usable IPv4 network")).with_hint(format!(
                "write its first address and its length, between 8 and {longest}: 100.96.0.0/16"
            )),
        ),
    }
}

fn usage(message: &str) -> Failure {
    Failure::new(FailureCode::Usage, message.trim_start_matches("error: "))
}

#[derive(Debug, Default, PartialEq)]
struct SplitArgs {
    coracle: Vec<String>,
    slurm: Vec<String>,
    workload: Option<OsString>,
    args: Vec<OsString>,
}

/// Collects options up to the first argument that is none. That argument is the workload, and the rest are its arguments.
fn split_args(rest: Vec<OsString>) -> anyhow::Result<SplitArgs> {
    let mut split = SplitArgs::default();
    let mut rest = rest.into_iter();
    while let Some(arg) = rest.next() {
        let text = arg.to_string_lossy().into_owned();
        if text == "--" {
            split.workload = rest.next();
            break;
        }
        if text == "-" || !text.starts_with('-') {
            split.workload = Some(arg);
            break;
        }
        let is_coracles = is_coracle_option(&text);
        let takes_value = if is_coracles {
            coracle_option_takes_value(&text)
        } else {
            slurm::srun_options::takes_value(&text)
        };
        let list = if is_coracles {
            &mut split.coracle
        } else {
            &mut split.slurm
        };
        list.push(text.clone());
        if takes_value {
            let value = rest
                .next()
                .ok_or_else(|| usage(&format!("{text} needs a value")))?;
            list.push(value.to_string_lossy().into_owned());
        }
    }
    split.args = rest.collect();
    Ok(split)
}

const OPTIONS_WITH_VALUE: [&str; 8] = [
    "logs",
    "log-prefix",
    "give-up-after",
    "kubernetes",
    "api-port",
    "start-timeout",
    "pod-cidr",
    "service-cidr",
];

fn is_coracle_option(arg: &str) -> bool {
    matches!(
        arg,
        "-v" | "--verbose"
            | "--early"
            | "--pods-as-steps"
            | "--no-logs"
            | "--log-colour"
            | "--report-end"
            | "-h"
            | "--help"
    ) || OPTIONS_WITH_VALUE.contains(&name_of(arg))
}

fn coracle_option_takes_value(arg: &str) -> bool {
    OPTIONS_WITH_VALUE.contains(&name_of(arg)) && !arg.contains('=')
}

/// The name of an option: `logs` in `--logs=/x`.
fn name_of(arg: &str) -> &str {
    let option = arg.strip_prefix("--").unwrap_or("");
    option.split_once('=').map_or(option, |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split_line(line: &str) -> SplitArgs {
        split_args(line.split_whitespace().map(OsString::from).collect()).unwrap()
    }

    #[test]
    fn overlapping_networks_are_detected() {
        assert!(networks_overlap("100.64.0.0/10", "100.96.0.0/16"));
        assert!(networks_overlap("100.96.0.0/16", "100.96.0.0/16"));
        assert!(!networks_overlap("100.64.0.0/11", "100.96.0.0/16"));
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
    fn arguments_are_split() {
        insta::assert_debug_snapshot!(split_line(
            "-N 2 -pmain --time=10 --logs /x -v --mem 4G --exclusive app.sh -v --time 3"
        ));
        let options = split_line("--pods-as-steps -N2 --early app.sh").coracle;
        assert_eq!(options, ["--pods-as-steps", "--early"]);
        assert_eq!(split_line("-N2 -").workload, Some("-".into()));
        assert_eq!(split_line("-- -odd").workload, Some("-odd".into()));
        assert_eq!(split_line("-N2").workload, None);
        assert!(split_args(vec!["-N".into()]).is_err());
    }
}
