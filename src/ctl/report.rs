//! The report of a diagnostic command, and its exit code.

use anyhow::anyhow;

use super::out::{self, Out};
use super::show::{self, View};
use svc_base::applet::{Exit, Failure};
use svc_base::diagnosis::{Level, Report};

/// Prints a report, and fails if a finding is at least as severe as `worst`.
pub fn print(report: &Report, worst: Level, out: &Out) -> Result<(), Failure> {
    if out.json {
        out::print(&format!("{}\n", report.json()))?;
    } else {
        out::print(&show::report::show(&View::of_stdout(), report))?;
    }
    let failed =
        report.count(Level::Problem) + if worst == Level::Skipped { report.count(Level::Skipped) } else { 0 };
    if failed == 0 {
        return Ok(());
    }
    Err(Failure::new(Exit::Refused, anyhow!("{}: {}", report.subject, report.tally())))
}
