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

/// The form of a printed report.
#[derive(Debug, Clone, Copy)]
pub enum ReportFormat {
    /// For people.
    Text {
        /// Show findings that are in order too.
        verbose: bool,
    },
    /// For programs.
    Json,
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
    pub fn print(&self, format: ReportFormat) -> anyhow::Result<()> {
        let mut stdout = std::io::stdout().lock();
        let text = match format {
            ReportFormat::Json => serde_json::to_string_pretty(self)? + "\n",
            ReportFormat::Text { verbose } => {
                self.render(verbose, stdout.is_terminal() && colours_wanted())
            }
        };
        stdout.write_all(text.as_bytes())?;
        Ok(())
    }

    /// Formats the report for people: what is missing or degraded, and one line for the rest; all findings if `verbose`.
    pub fn render(&self, verbose: bool, colours: bool) -> String {
        let paint = Paint(colours);
        let host = paint.apply("1", &printable(&self.host));
        let mut text = format!("{host}: {}\n", self.verdict());
        let is_shown = |finding: &&Finding| verbose || finding.status != FindingStatus::Ok;
        let mut area = "";
        for finding in self.findings.iter().filter(is_shown) {
            if finding.area != area {
                area = &finding.area;
                let heading = paint.apply("1", &printable(area).to_uppercase());
                text.push_str(&format!("\n{heading}\n"));
            }
            text.push_str(&render_finding(finding, paint));
        }
        if !verbose {
            let hidden = self.findings.iter().filter(|finding| !is_shown(finding));
            let titles: Vec<String> = hidden.map(|finding| printable(&finding.title)).collect();
            if !titles.is_empty() {
                let label = paint.apply("32", "ok");
                text.push_str(&format!(
                    "\n  {label}: {} (-v shows details)\n",
                    titles.join(", ")
                ));
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

/// One finding: its line, its effect, and the next step if something can be done.
fn render_finding(finding: &Finding, paint: Paint) -> String {
    let (label, code, effect) = match finding.status {
        FindingStatus::Ok => ("ok", "32", &finding.with_it),
        FindingStatus::Degraded => ("degraded", "33", &finding.without_it),
        FindingStatus::Missing => ("missing", "31", &finding.without_it),
    };
    // Pad before colouring, because escape sequences count as characters but have no width.
    let label = paint.apply(code, &format!("{label:<8}"));
    let mut text = format!(
        "  {label}  {:<21}  {}\n",
        printable(&finding.title),
        printable(&finding.found)
    );
    let mut detail = |label: &str, value: &str, code: &str| {
        let line = format!("{label:<9}  {}", printable(value));
        text.push_str(&format!("              {}\n", paint.apply(code, &line)));
    };
    detail("effect", effect, "2");
    if let Some(next) = &finding.next {
        detail("next step", next, "36");
    }
    text
}

/// Colours text if the terminal shows colours.
#[derive(Clone, Copy)]
struct Paint(bool);

impl Paint {
    fn apply(self, code: &str, text: &str) -> String {
        if self.0 {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
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
