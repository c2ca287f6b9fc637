//! Text view of a findings report.

use super::{Color, View};
use svc_base::diagnosis::{Level, Report};

fn level_color(level: Level) -> Color {
    match level {
        Level::Ok => Color::Good,
        Level::Warning => Color::Warning,
        Level::Problem => Color::Bad,
        Level::Skipped => Color::Faint,
    }
}

/// Renders each finding with its advice below, and the totals at the end.
pub fn show(view: &View, report: &Report) -> String {
    let check_width = report.findings.iter().map(|finding| finding.check.len()).max().unwrap_or_default();
    let mut text = String::new();
    for finding in &report.findings {
        let level = format!("{:<7}", finding.level.as_str());
        let indent = " ".repeat(7 + 2 + check_width + 2);
        let what = finding.what.replace('\n', &format!("\n{indent}"));
        text.push_str(&format!(
            "{}  {:<check_width$}  {what}\n",
            view.paint(Some(level_color(finding.level)), &level),
            finding.check
        ));
        if let Some(next) = &finding.next {
            text.push_str(&format!("{indent}next: {next}\n"));
        }
    }
    text.push_str(&format!("{}: {}\n", report.subject, report.tally()));
    text
}
