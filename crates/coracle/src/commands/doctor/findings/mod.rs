//! Turns a [`Survey`] into a [`DoctorReport`]. Each file is an area, each function a finding; none of them probes anything.

mod network;
mod pods;
mod slurm;
mod storage;

use super::report::{DoctorReport, Finding, FindingStatus};
use super::survey::Survey;

/// The version of the JSON schema.
const SCHEMA: u32 = 1;

/// A finding without its status. The fields are common to all outcomes, so that no finding lacks one.
struct FindingTemplate {
    id: &'static str,
    area: &'static str,
    title: &'static str,
    with_it: &'static str,
    without_it: &'static str,
}

impl FindingTemplate {
    fn ok(&self, found: impl Into<String>) -> Finding {
        self.finding(FindingStatus::Ok, found.into(), None)
    }

    fn degraded(&self, found: impl Into<String>, next_step: impl Into<Option<String>>) -> Finding {
        self.finding(FindingStatus::Degraded, found.into(), next_step.into())
    }

    fn missing(&self, found: impl Into<String>, next_step: impl Into<Option<String>>) -> Finding {
        self.finding(FindingStatus::Missing, found.into(), next_step.into())
    }

    fn finding(&self, status: FindingStatus, found: String, next_step: Option<String>) -> Finding {
        Finding {
            id: self.id.to_owned(),
            area: self.area.to_owned(),
            title: self.title.to_owned(),
            status,
            found,
            with_it: self.with_it.to_owned(),
            without_it: self.without_it.to_owned(),
            next: next_step,
        }
    }
}

/// Derives the findings and the verdict from the facts.
pub fn make_report(survey: &Survey) -> DoctorReport {
    let findings = [
        pods::findings(survey),
        network::findings(survey),
        storage::findings(survey),
        slurm::findings(survey),
    ]
    .concat();
    let has_status = |id: &str, accepted: &[FindingStatus]| {
        findings
            .iter()
            .any(|finding| finding.id == id && accepted.contains(&finding.status))
    };
    // Root file systems need overlayfs, FUSE or, failing these, space for a copy. So only space is required.
    let pods_can_run = has_status(
        "user-namespaces",
        &[FindingStatus::Ok, FindingStatus::Degraded],
    ) && has_status(
        "local-scratch",
        &[FindingStatus::Ok, FindingStatus::Degraded],
    );
    let slurm_usable = has_status(
        "slurm-commands",
        &[FindingStatus::Ok, FindingStatus::Degraded],
    ) && has_status("slurm-controller", &[FindingStatus::Ok]);
    DoctorReport {
        schema: SCHEMA,
        coracle: env!("CARGO_PKG_VERSION").to_owned(),
        host: survey.host.clone(),
        pods_can_run,
        slurm_usable,
        findings,
    }
}

/// A probe's result; a probe that has not run counts as failed.
fn probe_result<'a>(survey: &'a Survey, probe: &str) -> Result<&'a str, &'a str> {
    match survey.probes.get(probe) {
        Some(Ok(detail)) => Ok(detail),
        Some(Err(detail)) => Err(detail),
        None => Err("not run"),
    }
}

/// The next step of findings that fail because user namespaces don't work: refers to the finding about those.
fn needs_user_namespaces(survey: &Survey) -> Option<String> {
    probe_result(survey, "user-namespace").is_err().then(|| {
        "make user namespaces work first (see above), then run the doctor again".to_owned()
    })
}

#[cfg(test)]
mod tests;
