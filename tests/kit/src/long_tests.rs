//! Figures from the long tests, such as injected faults and survived kills: one JSON line per test, and their totals.
//!
//! A test appends its figures with [`Figures::record`] to the file named by [`LONG_REPORT_VAR`], if the variable is
//! set. [`Totals`] adds up the lines; `cargo xtask test --long` prints and stores the result.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Environment variable with the path of the figures file, to which the tests append their figures.
pub const LONG_REPORT_VAR: &str = "SVC_LONG_REPORT";

/// Figures from one test; unused counters stay 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Figures {
    pub test: String,
    /// Number of store, network, database and disk faults, of corrupted objects, and of planned crashes.
    pub faults_injected: u64,
    /// Number of kills with SIGKILL after which all invariants held.
    pub kills_survived: u64,
    pub snapshots_taken: u64,
    /// Number of failed snapshot checks: 1 if the test's last check of the stored snapshots failed.
    pub lost: u64,
    pub fuzz_cases: u64,
}

impl Figures {
    pub fn new(test: &str) -> Self {
        Self { test: test.to_owned(), ..Self::default() }
    }

    /// Prints the figures, and appends them to the figures file in a single write, because tests run in parallel.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn record(&self) -> Result<()> {
        let mut line = serde_json::to_string(self)?;
        println!("{line}");
        line.push('\n');
        let Some(path) = std::env::var_os(LONG_REPORT_VAR) else { return Ok(()) };
        let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
        file.write_all(line.as_bytes()).with_context(|| format!("cannot append to {}", path.display()))
    }
}

/// Totals for one run of the long tests.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Totals {
    pub faults_injected: u64,
    pub kills_survived: u64,
    pub snapshots_taken: u64,
    /// Number of tests whose final check of the snapshots failed.
    pub lost: u64,
    pub fuzz_cases: u64,
    pub tests: Vec<Figures>,
}

impl Totals {
    /// # Errors
    /// Fails for a malformed line, because totals without it would be too low.
    pub fn parse(lines: &str) -> Result<Self> {
        let mut totals = Self::default();
        for (number, line) in lines.lines().enumerate() {
            let figures = serde_json::from_str(line).with_context(|| format!("line {}", number + 1))?;
            totals.add(figures);
        }
        Ok(totals)
    }

    fn add(&mut self, figures: Figures) {
        self.faults_injected += figures.faults_injected;
        self.kills_survived += figures.kills_survived;
        self.snapshots_taken += figures.snapshots_taken;
        self.lost += figures.lost;
        self.fuzz_cases += figures.fuzz_cases;
        self.tests.push(figures);
    }

    /// Returns the totals in one line.
    pub fn summary(&self) -> String {
        format!(
            "faults injected: {}, kills survived: {}, snapshots taken: {}, failed snapshot checks: {}, \
             fuzz cases: {}",
            self.faults_injected, self.kills_survived, self.snapshots_taken, self.lost, self.fuzz_cases
        )
    }

    /// Sums the figures in the file at `figures_path` and writes the totals to `report_path` as JSON. If the figures
    /// file is missing, no test has recorded figures.
    ///
    /// # Errors
    /// Fails for a malformed line or a file error.
    pub fn collect(figures_path: &Path, report_path: &Path) -> Result<Self> {
        let text = match std::fs::read_to_string(figures_path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text.with_context(|| format!("cannot read {}", figures_path.display()))?,
        };
        let totals = Self::parse(&text)?;
        let mut text = serde_json::to_vec_pretty(&totals)?;
        text.push(b'\n');
        std::fs::write(report_path, text)
            .with_context(|| format!("cannot write {}", report_path.display()))?;
        Ok(totals)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_adds_up_lines_and_rejects_malformed_ones() {
        let kills = Figures { kills_survived: 200, snapshots_taken: 70, ..Figures::new("kills") };
        let faults = Figures { kills_survived: 5, faults_injected: 3, ..Figures::new("faults") };
        let lines = format!(
            "{}\n{}\n{{\"test\":\"fuzz\",\"fuzzCases\":9}}\n",
            serde_json::to_string(&kills).expect("figures serialize"),
            serde_json::to_string(&faults).expect("figures serialize")
        );
        let totals = Totals::parse(&lines).expect("valid lines");
        assert_eq!(
            totals.summary(),
            "faults injected: 3, kills survived: 205, snapshots taken: 70, failed snapshot checks: 0, \
             fuzz cases: 9"
        );
        assert_eq!(totals.tests.len(), 3);
        assert_eq!(totals.tests[0], kills);
        for bad in ["{\"test\":1}", "{\"te", "kills: 4", ""] {
            assert!(Totals::parse(&format!("{lines}{bad}\n")).is_err(), "{bad}");
        }
    }

    #[test]
    fn parse_adds_up_failed_snapshot_checks() {
        let failed =
            serde_json::to_string(&Figures { lost: 1, ..Figures::new("a") }).expect("figures serialize");
        let passed = serde_json::to_string(&Figures::new("b")).expect("figures serialize");
        assert_eq!(Totals::parse(&format!("{failed}\n{passed}")).expect("valid lines").lost, 1);
    }

    #[test]
    fn collect_writes_a_report_even_without_figures() {
        let dir = tempfile::tempdir().expect("the directory is created");
        let (lines, report) = (dir.path().join("figures.jsonl"), dir.path().join("report.json"));
        assert_eq!(Totals::collect(&lines, &report).expect("the report is written"), Totals::default());
        std::fs::write(&lines, "{\"test\":\"a\",\"fuzzCases\":2}\n").expect("the figures are written");
        Totals::collect(&lines, &report).expect("the report is written");
        let stored: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&report).expect("the report exists"))
                .expect("the report is JSON");
        assert_eq!((&stored["fuzzCases"], &stored["lost"]), (&2.into(), &0.into()));
    }
}
