//! The report: a table for people, JSON for programs. Only `write` has side effects.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::compare::{ComparedRow, Verdict};
use super::figures::{Figure, Row};

#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    pub area: &'static str,
    pub rounds: u32,
    pub rows: Vec<Row>,
}

const HEADER: [&str; 8] = ["", "svc", "against", "theirs", "unit", "ratio", "target", "met"];

impl Report {
    /// Returns the number of targets met, and the total number of targets.
    pub fn count_targets(&self) -> (usize, usize) {
        let targets = self.rows.iter().filter_map(|row| row.is_met);
        (targets.clone().filter(|is_met| *is_met).count(), targets.count())
    }

    pub fn all_met(&self) -> bool {
        let (met, all) = self.count_targets();
        met == all
    }

    pub fn table(&self) -> String {
        let mut lines = vec![HEADER.map(str::to_owned)];
        lines.extend(self.rows.iter().map(cells));
        let mut text = align(&lines, &[1, 3, 5]);
        let (met, all) = self.count_targets();
        let rounds = self.rounds;
        text.push_str(&format!("{}: {met} of {all} targets met; medians of {rounds} rounds\n", self.area));
        text
    }

    pub fn json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(row_json).collect();
        json!({ "area": self.area, "rows": rows })
    }

    /// Writes the report as JSON.
    ///
    /// # Errors
    /// Fails if the directory cannot be created, or the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        let text = serde_json::to_string_pretty(&self.json())? + "\n";
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Renders the rows for a comparison with an earlier build.
pub fn comparison_table(rows: &[ComparedRow]) -> String {
    let mut lines = vec![["", "before", "now", "unit", "ratio", ""].map(str::to_owned)];
    lines.extend(rows.iter().map(|row| {
        let verdict = match row.verdict {
            Verdict::Better => "better",
            Verdict::Same => "",
            Verdict::Worse => "WORSE",
        };
        [
            row.name.to_owned(),
            format_figure(row.baseline),
            format_figure(row.current),
            row.unit.to_owned(),
            format!("{:.3}", row.ratio),
            verdict.to_owned(),
        ]
    }));
    align(&lines, &[1, 2, 4])
}

/// Aligns the numeric columns to the right, and all others to the left.
fn align<const N: usize>(lines: &[[String; N]], numeric_columns: &[usize]) -> String {
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let padded = line.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            let is_numeric = numeric_columns.contains(&column);
            if is_numeric { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        text.push_str(padded.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

fn row_json(row: &Row) -> Value {
    let target = row.target.describe(row.unit);
    json!({
        "name": row.name,
        "ours": round_figure(row.ours.median),
        "against": row.against,
        "theirs": row.theirs.map(|theirs| round_figure(theirs.median)),
        "unit": row.unit,
        "ratio": row.ratio.map(round_figure),
        "target": if target.is_empty() { Value::Null } else { target.into() },
        "isMet": row.is_met,
        "oursSpreadPercent": round_figure(row.ours.spread_percent),
        "theirsSpreadPercent": row.theirs.map(|theirs| round_figure(theirs.spread_percent)),
    })
}

fn round_figure(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn cells(row: &Row) -> [String; 8] {
    [
        row.name.to_owned(),
        format_figure(row.ours),
        row.against.unwrap_or_default().to_owned(),
        row.theirs.map(format_figure).unwrap_or_default(),
        row.unit.to_owned(),
        row.ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default(),
        row.target.describe(row.unit),
        match row.is_met {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "",
        }
        .to_owned(),
    ]
}

fn format_figure(figure: Figure) -> String {
    let Figure { median, spread_percent } = figure;
    let digits = match median.abs() {
        small if small < 10.0 => 2,
        medium if medium < 100.0 => 1,
        _ => 0,
    };
    format!("{median:.digits$} ±{spread_percent:.0}%")
}

#[cfg(test)]
mod tests {
    use super::super::figures::{PRODUCT, Spec, Tally, Target};
    use super::*;

    fn report() -> Report {
        let mut tally = Tally::default();
        for (ours, theirs) in [(1500.0, 1000.0), (1200.0, 1000.0), (1800.0, 1000.0)] {
            tally.add("requests/s", PRODUCT, ours);
            tally.add("requests/s", "peer", theirs);
            tally.add("idle memory", PRODUCT, 21.5);
        }
        let specs = [
            Spec {
                name: "requests/s",
                unit: "1/s",
                against: Some("peer"),
                target: Target::RatioAtLeast(1.1),
            },
            Spec { name: "idle memory", unit: "MiB", against: None, target: Target::AtMost(20.0) },
            Spec { name: "requests/s", unit: "1/s", against: Some("peer"), target: Target::None },
        ];
        let rows = specs.iter().filter_map(|spec| tally.row(spec)).collect();
        Report { area: "test", rounds: 3, rows }
    }

    #[test]
    fn table_is_aligned_and_counts_met_targets() {
        let table = report().table();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "                   svc  against    theirs  unit  ratio  target       met");
        assert_eq!(lines[1], "requests/s   1500 ±10%  peer     1000 ±0%  1/s    1.50  ratio ≥ 1.1  yes");
        assert_eq!(lines[2], "idle memory   21.5 ±0%                     MiB          ≤ 20 MiB     NO");
        assert_eq!(lines[4], "test: 1 of 2 targets met; medians of 3 rounds");
    }

    #[test]
    fn comparison_table_marks_figures_that_got_worse() {
        let figure = |median| Figure { median, spread_percent: 1.0 };
        let row = |name, current, verdict| ComparedRow {
            name,
            unit: "1/s",
            baseline: figure(1000.0),
            current: figure(current),
            ratio: current / 1000.0,
            verdict,
        };
        let table =
            comparison_table(&[row("finds", 900.0, Verdict::Worse), row("inserts", 1001.0, Verdict::Same)]);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "           before       now  unit  ratio");
        assert_eq!(lines[1], "finds    1000 ±1%   900 ±1%  1/s   0.900  WORSE");
        assert_eq!(lines[2], "inserts  1000 ±1%  1001 ±1%  1/s   1.001");
    }

    #[test]
    fn json_has_every_field_of_a_row() {
        let json = report().json();
        assert_eq!(json["area"], "test");
        let first = &json["rows"][0];
        let expected = serde_json::json!({ "name": "requests/s", "ours": 1500.0, "against": "peer",
            "theirs": 1000.0, "unit": "1/s", "ratio": 1.5, "target": "ratio ≥ 1.1", "isMet": true,
            "oursSpreadPercent": 10.0, "theirsSpreadPercent": 0.0 });
        assert_eq!(*first, expected);
        let second = &json["rows"][1];
        assert_eq!((&second["against"], &second["ratio"]), (&Value::Null, &Value::Null));
        assert_eq!((&second["isMet"], &second["target"]), (&false.into(), &"≤ 20 MiB".into()));
        assert_eq!((&json["rows"][2]["isMet"], &json["rows"][2]["target"]), (&Value::Null, &Value::Null));
    }

    #[test]
    fn all_met_is_false_if_a_target_is_missed() {
        let mut report = report();
        assert!(!report.all_met());
        report.rows.remove(1);
        assert!(report.all_met());
    }
}
