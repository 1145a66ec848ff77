//! The settings of `coracle run`, resolved from its command line.

use console::{Failure, FailureCode};
use std::ffi::OsString;
use std::path::{Component, Path};

use clap::Parser;
use slurm::srun_options::OptionValue;

use super::networks;
use super::split_args;
use crate::cli::{RunArgs, RunOptions, TrailingOptions};
use cluster::enrolment::HostPathMapping;

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
        let (split, srun_options) = split_args::split(&args.rest)?;
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
                && srun_options.value_of(option) == Some(OptionValue::NextArgument)
            {
                return Err(usage("no workload is given")
                    .with_hint(format!("{value} was taken for the value of {option}; write {option}=VALUE, or -- before the workload"))
                    .into());
            }
            return Err(usage("no workload is given")
                .with_hint("name a program, a script or manifests: `coracle run -N2 app.yaml`; `coracle run --help` explains")
                .into());
        };
        networks::check(&options.pod_cidr, &options.service_cidr)?;
        for node_path in &options.node_path {
            parse_node_path(node_path)?;
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
        args.extend(options.log_args(&defaults()));
        for (name, dir) in [("logs", &options.logs), ("kubernetes", &options.kubernetes)] {
            if let Some(dir) = dir {
                args.push(format!("--{name}={}", dir.display()));
            }
        }
        for node_path in &options.node_path {
            args.push(format!("--node-path={node_path}"));
        }
        // Omit defaults: `ps` and `squeue` show this command line.
        let default = defaults();
        let values = [
            (
                "api-port",
                options.api_port.to_string(),
                default.api_port.to_string(),
            ),
            (
                "start-timeout",
                options.start_timeout.to_string(),
                default.start_timeout.to_string(),
            ),
            ("pod-cidr", options.pod_cidr.clone(), default.pod_cidr),
            (
                "service-cidr",
                options.service_cidr.clone(),
                default.service_cidr,
            ),
        ];
        let changed = values
            .into_iter()
            .filter(|(_, value, default)| value != default);
        args.extend(changed.map(|(name, value, _)| format!("--{name}={value}")));
        args.push("--".to_owned());
        args.push(text(&self.workload));
        args.extend(self.args.iter().map(text));
        args
    }
}

/// The directories that pods find under other paths. The first one is that of KSI, which mounts the current directory as `/app`.
pub fn host_path_mappings(options: &RunOptions) -> Result<Vec<HostPathMapping>, Failure> {
    let current = std::env::current_dir().ok().map(|dir| HostPathMapping {
        path: "/app".into(),
        dir,
        only_if_missing: true,
    });
    let named: Vec<_> = (options.node_path.iter())
        .map(|text| parse_node_path(text))
        .collect::<Result<_, _>>()?;
    let names_app = named
        .iter()
        .any(|mapping| mapping.path == Path::new("/app"));
    let current = current.filter(|_| !names_app);
    Ok(current.into_iter().chain(named).collect())
}

/// Parses a value of `--node-path`.
fn parse_node_path(text: &str) -> Result<HostPathMapping, Failure> {
    let is_clean = |path: &Path| {
        path.is_absolute() && path.components().all(|part| part != Component::ParentDir)
    };
    let parts = text.split_once('=');
    let parts = parts.map(|(path, dir)| (Path::new(path), Path::new(dir)));
    match parts {
        Some((path, dir)) if is_clean(path) && is_clean(dir) => Ok(HostPathMapping {
            path: path.components().collect(),
            dir: dir.components().collect(),
            only_if_missing: false,
        }),
        _ => Err(usage(&format!("--node-path: {text:?} is not PATH=DIR"))
            .with_hint("both are absolute paths without ..: --node-path=/data=/scratch/me/data")),
    }
}

/// Merges options that stand after Slurm's options; values other than the default win.
fn merge(options: &mut RunOptions, late: RunOptions) {
    let default = defaults();
    options.verbose |= late.verbose;
    options.report_end |= late.report_end;
    options.early |= late.early;
    options.dry_run |= late.dry_run;
    options.pods_as_steps |= late.pods_as_steps;
    options.merge_log_options(&late, &default);
    options.logs = late.logs.or(options.logs.take());
    options.kubernetes = late.kubernetes.or(options.kubernetes.take());
    options.node_path.extend(late.node_path);
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

/// An error in the command line.
pub(super) fn usage(message: &str) -> Failure {
    Failure::new(FailureCode::Usage, message.trim_start_matches("error: "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(line: &str) -> anyhow::Result<RunSettings> {
        let words = ["coracle", "run"].into_iter().chain(line.split(' '));
        let cli = crate::cli::Cli::try_parse_from(words).unwrap();
        let crate::cli::Command::Run(args) = cli.command else {
            panic!("{line}");
        };
        RunSettings::resolve(args)
    }

    #[test]
    fn command_line_inside_has_no_defaults() {
        let inside = |line: &str| resolve(line).unwrap().args_inside().join(" ");
        assert_eq!(inside("-N2 app.yaml"), "run -- app.yaml");
        assert_eq!(
            inside("--early -N2 --api-port=7000 --pod-cidr 10.0.0.0/8 sh -c true"),
            "run --early --api-port=7000 --pod-cidr=10.0.0.0/8 -- sh -c true"
        );
    }

    #[test]
    fn value_taken_for_the_workload_is_named() {
        let error = resolve("--nodes app.yaml").unwrap_err();
        let hint = error.downcast_ref::<Failure>().and_then(Failure::hint);
        assert!(
            hint.is_some_and(|hint| hint.contains("app.yaml was taken for the value of --nodes"))
        );
    }

    #[test]
    fn node_paths_are_checked() {
        let mapping = parse_node_path("/data/=/scratch/me//data").unwrap();
        assert_eq!(mapping.path, Path::new("/data"));
        assert_eq!(mapping.dir, Path::new("/scratch/me/data"));
        for bad in ["", "/data", "data=/x", "/data=x", "/data=/x/../y", "=/x"] {
            let failure = parse_node_path(bad).unwrap_err();
            assert!(failure.hint().is_some(), "{bad}");
        }
        // The current directory is /app, unless another one is named.
        let options = |node_path: &[&str]| RunOptions {
            node_path: node_path.iter().map(|text| (*text).to_owned()).collect(),
            ..RunOptions::default()
        };
        let mappings = host_path_mappings(&options(&["/data=/x"])).unwrap();
        assert!(mappings[0].only_if_missing && mappings[0].path == Path::new("/app"));
        assert_eq!(mappings.len(), 2);
        let mappings = host_path_mappings(&options(&["/app=/x"])).unwrap();
        assert_eq!(mappings.len(), 1);
        assert_eq!(mappings[0].dir, Path::new("/x"));
    }
}
