//! The report: text for people, JSON for programs.

use std::io::{IsTerminal, Write};

use serde::{Deserialize, Serialize};

/// The state of a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FindingStatus {
    /// As it should be.
    Ok,
    /// A fallback is used.
    Degraded,
    /// Features that depend on it do not work.
    Missing,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// A stable identifier for programs.
    pub id: String,
    /// The affected part of Coracle: pods, network, storage or slurm.
    pub area: String,
    /// A name for people.
    pub title: String,
    /// The state.
    pub status: FindingStatus,
    /// The observed facts.
    pub found: String,
    /// The effect if the feature works.
    #[serde(rename = "with")]
    pub with_it: String,
    /// The effect if it does not.
    #[serde(rename = "without")]
    pub without_it: String,
    /// How to fix it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// All findings of one host. The help of `coracle doctor` documents the JSON form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DoctorReport {
    /// The version of the JSON schema.
    pub schema: u32,
    /// Coracle's version.
    pub coracle: String,
    /// The host that was checked.
    pub host: String,
    /// Whether pods can run there.
    pub pods_can_run: bool,
    /// Whether Slurm's commands work there, which `coracle run` needs.
    pub slurm_usable: bool,
    /// The results of all checks.
    pub findings: Vec<Finding>,
}

impl DoctorReport {
    /// Writes the report to standard output.
    pub fn print(&self, json: bool) -> anyhow::Result<()> {
        let mut stdout = std::io::stdout().lock();
        let text = if json {
            serde_json::to_string_pretty(self)? + "\n"
        } else {
            self.render(stdout.is_terminal() && colours_wanted())
        };
        stdout.write_all(text.as_bytes())?;
        Ok(())
    }

    /// Formats the report for people.
    pub fn render(&self, colours: bool) -> String {
        let paint = |code: &str, text: &str| {
            if colours {
                format!("\x1b[{code}m{text}\x1b[0m")
            } else {
                text.to_owned()
            }
        };
        let mut text = format!(
            "{}: {}\n",
            paint("1", &printable(&self.host)),
            self.verdict()
        );
        let mut area = "";
        for finding in &self.findings {
            if finding.area != area {
                area = &finding.area;
                text.push_str(&format!(
                    "\n{}\n",
                    paint("1", &printable(area).to_uppercase())
                ));
            }
            let (label, code) = match finding.status {
                FindingStatus::Ok => ("ok", "32"),
                FindingStatus::Degraded => ("degraded", "33"),
                FindingStatus::Missing => ("missing", "31"),
            };
            // Pad before colouring, because escape sequences count as characters but have no width.
            let label = paint(code, &format!("{label:<8}"));
            text.push_str(&format!(
                "  {label}  {:<21}  {}\n",
                printable(&finding.title),
                printable(&finding.found)
            ));
            let mut detail = |label: &str, value: &str, code: &str| {
                let line = format!("{label:<10}  {}", printable(value));
                text.push_str(&format!("              {}\n", paint(code, &line)));
            };
            detail("with it", &finding.with_it, "2");
            detail("without it", &finding.without_it, "2");
            if let Some(next) = &finding.next {
                detail("next step", next, "36");
            }
        }
        text
    }

    fn verdict(&self) -> &'static str {
        match (self.pods_can_run, self.slurm_usable) {
            (true, true) => "pods can run here, and Slurm can be used",
            (true, false) => {
                "pods can run here, but `coracle run` needs Slurm, which can't be used from here"
            }
            (false, _) => "pods can NOT run here; see what is missing below",
        }
    }
}

/// Removes control characters: a report from another host must not be able to move the cursor.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

fn colours_wanted() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}
