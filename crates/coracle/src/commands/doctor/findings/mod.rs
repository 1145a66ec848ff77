//! Turns a [`Survey`] into a [`Report`]. Each file is an area, each function a finding; none of them probes anything.

mod network;
mod pods;
mod slurm;
mod storage;

use super::report::{Finding, Report, Status};
use super::survey::Survey;

/// The version of the JSON schema.
const SCHEMA: u32 = 1;

/// A finding without its status. The fields are common to all outcomes, so that no finding lacks one.
struct Topic {
    id: &'static str,
    area: &'static str,
    title: &'static str,
    with_it: &'static str,
    without_it: &'static str,
}

impl Topic {
    fn ok(&self, found: impl Into<String>) -> Finding {
        self.finding(Status::Ok, found.into(), None)
    }

    fn degraded(&self, found: impl Into<String>, next: impl Into<Option<String>>) -> Finding {
        self.finding(Status::Degraded, found.into(), next.into())
    }

    fn missing(&self, found: impl Into<String>, next: impl Into<Option<String>>) -> Finding {
        self.finding(Status::Missing, found.into(), next.into())
    }

    fn finding(&self, status: Status, found: String, next: Option<String>) -> Finding {
        Finding {
            id: self.id.to_owned(),
            area: self.area.to_owned(),
            title: self.title.to_owned(),
            status,
            found,
            with_it: self.with_it.to_owned(),
            without_it: self.without_it.to_owned(),
            next,
        }
    }
}

/// Makes the report.
pub fn judge(survey: &Survey) -> Report {
    let findings = [
        pods::findings(survey),
        network::findings(survey),
        storage::findings(survey),
        slurm::findings(survey),
    ]
    .concat();
    let is = |id: &str, accepted: &[Status]| {
        findings
            .iter()
            .any(|finding| finding.id == id && accepted.contains(&finding.status))
    };
    // Root file systems need overlayfs, FUSE or, failing these, space for a copy. So only space is required.
    let pods_can_run = is("user-namespaces", &[Status::Ok, Status::Degraded])
        && is("local-scratch", &[Status::Ok, Status::Degraded]);
    let slurm_usable = is("slurm-commands", &[Status::Ok, Status::Degraded])
        && is("slurm-controller", &[Status::Ok]);
    Report {
        schema: SCHEMA,
        coracle: env!("CARGO_PKG_VERSION").to_owned(),
        host: survey.host.clone(),
        pods_can_run,
        slurm_usable,
        findings,
    }
}

/// A probe's result; a probe that has not run counts as failed.
fn answer<'a>(survey: &'a Survey, probe: &str) -> Result<&'a str, &'a str> {
    match survey.probes.get(probe) {
        Some(Ok(words)) => Ok(words),
        Some(Err(words)) => Err(words),
        None => Err("not tried"),
    }
}

/// The next step of findings that fail because user namespaces don't work: refers to the finding about those.
fn needs_user_namespaces(survey: &Survey) -> Option<String> {
    answer(survey, "user-namespace")
        .is_err()
        .then(|| "make user namespaces work first (see above), then look again".to_owned())
}

#[cfg(test)]
mod tests;
