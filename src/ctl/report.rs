//! Prints a diagnostic command's report, and determines the exit code.

use anyhow::anyhow;

use super::output::{self, Output};
use super::show::{self, View};
use svc_base::applet::{Exit, Failure};
use svc_base::diagnosis::{Level, Report};

/// Prints a report. Fails if it contains a problem or, with the threshold [`Level::Skipped`], a skipped check.
pub fn print(report: &Report, threshold: Level, out: &Output) -> Result<(), Failure> {
    if out.is_json {
        output::print(&format!("{}\n", report.to_json()))?;
    } else {
        output::print(&show::report::show(&View::for_stdout(), report))?;
    }
    let failure_count = report.count(Level::Problem)
        + if threshold == Level::Skipped { report.count(Level::Skipped) } else { 0 };
    if failure_count == 0 {
        return Ok(());
    }
    Err(Failure::new(Exit::Refused, anyhow!("{}: {}", report.subject, report.tally())))
}
