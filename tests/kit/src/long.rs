//! Figures of the long tests: what each of them tried and what was lost, one JSON line a test, and their sums.
//!
//! A test tells what it did by [`Figures::tell`], to the file that [`REPORT`] names; without the variable nobody asked. The
//! lines are summed by [`Sums`], which `cargo xtask test --long` prints and keeps.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Names the file that takes the lines.
pub const REPORT: &str = "SVC_LONG_REPORT";

/// What one test did. What it does not count stays 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Figures {
    pub test: String,
    /// Faults of store, network, database and disk, and objects that were tampered with.
    pub faults_tried: u64,
    /// Processes ended by SIGKILL after which everything held.
    pub kills_survived: u64,
    pub snapshots_taken: u64,
    /// Snapshots that were there and are not, or are not what they were.
    pub lost: u64,
    pub fuzz_cases: u64,
}

impl Figures {
    pub fn of(test: &str) -> Self {
        Self { test: test.to_owned(), ..Self::default() }
    }

    /// Prints them, and appends them to the report where there is one: by one write, since tests run side by side.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn tell(&self) -> Result<()> {
        let mut line = serde_json::to_string(self)?;
        println!("{line}");
        line.push('\n');
        let Some(path) = std::env::var_os(REPORT) else { return Ok(()) };
        let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
        file.write_all(line.as_bytes()).with_context(|| format!("append to {}", path.display()))
    }
}

/// All figures of one run of the long tests.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Sums {
    pub faults_tried: u64,
    pub kills_survived: u64,
    pub snapshots_taken: u64,
    pub lost: u64,
    pub fuzz_cases: u64,
    pub tests: Vec<Figures>,
}

impl Sums {
    /// # Errors
    /// A line that is not one of ours: sums without it would say too little.
    pub fn of(lines: &str) -> Result<Self> {
        let mut sums = Self::default();
        for (number, line) in lines.lines().enumerate() {
            let figures = serde_json::from_str(line).with_context(|| format!("line {}", number + 1))?;
            sums.add(figures);
        }
        Ok(sums)
    }

    fn add(&mut self, figures: Figures) {
        self.faults_tried += figures.faults_tried;
        self.kills_survived += figures.kills_survived;
        self.snapshots_taken += figures.snapshots_taken;
        self.lost += figures.lost;
        self.fuzz_cases += figures.fuzz_cases;
        self.tests.push(figures);
    }

    /// For a person.
    pub fn line(&self) -> String {
        format!(
            "faults tried: {}, kills survived: {}, snapshots taken: {}, lost: {}, fuzz cases: {}",
            self.faults_tried, self.kills_survived, self.snapshots_taken, self.lost, self.fuzz_cases
        )
    }

    /// Sums up what the file of lines holds and keeps it as JSON beside it. A file that is not there holds nothing: no
    /// test that counts was among those that ran.
    ///
    /// # Errors
    /// When a line is none of ours, or a file fails.
    pub fn collect(lines: &Path, report: &Path) -> Result<Self> {
        let text = match std::fs::read_to_string(lines) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text.with_context(|| format!("read {}", lines.display()))?,
        };
        let sums = Self::of(&text)?;
        let mut text = serde_json::to_vec_pretty(&sums)?;
        text.push(b'\n');
        std::fs::write(report, text).with_context(|| format!("write {}", report.display()))?;
        Ok(sums)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_counts_and_a_bad_one_is_told() {
        let kills = Figures { kills_survived: 200, snapshots_taken: 70, ..Figures::of("kills") };
        let more = Figures { kills_survived: 5, faults_tried: 3, ..Figures::of("more") };
        let lines = format!(
            "{}\n{}\n{{\"test\":\"fuzz\",\"fuzzCases\":9}}\n",
            serde_json::to_string(&kills).expect("JSON"),
            serde_json::to_string(&more).expect("JSON")
        );
        let sums = Sums::of(&lines).expect("lines of ours");
        assert_eq!(
            sums.line(),
            "faults tried: 3, kills survived: 205, snapshots taken: 70, lost: 0, fuzz cases: 9"
        );
        assert_eq!(sums.tests.len(), 3);
        assert_eq!(sums.tests[0], kills);
        for bad in ["{\"test\":1}", "{\"te", "kills: 4", ""] {
            assert!(Sums::of(&format!("{lines}{bad}\n")).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_lost_is_not_hidden_by_what_is_not() {
        let lost = serde_json::to_string(&Figures { lost: 1, ..Figures::of("a") }).expect("JSON");
        let none = serde_json::to_string(&Figures::of("b")).expect("JSON");
        assert_eq!(Sums::of(&format!("{lost}\n{none}")).expect("lines of ours").lost, 1);
    }

    #[test]
    fn sums_are_kept_also_where_nothing_was_counted() {
        let dir = tempfile::tempdir().expect("a directory");
        let (lines, report) = (dir.path().join("figures.jsonl"), dir.path().join("report.json"));
        assert_eq!(Sums::collect(&lines, &report).expect("kept"), Sums::default());
        std::fs::write(&lines, "{\"test\":\"a\",\"fuzzCases\":2}\n").expect("written");
        Sums::collect(&lines, &report).expect("kept");
        let kept: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&report).expect("there")).expect("JSON");
        assert_eq!((&kept["fuzzCases"], &kept["lost"]), (&2.into(), &0.into()));
    }
}
