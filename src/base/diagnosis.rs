//! Diagnostics for a running installation. Every warning and problem comes with a next step.
//!
//! Every check has a timeout, and one that couldn't run or finish is reported by name, so a report covers all checks
//! even if a service is unresponsive. Findings never contain secrets.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use futures_util::future::join_all;
use serde::Serialize;
use serde_json::{Value, json};

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[derive(strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Level {
    Ok,
    /// Working, but needs attention.
    Warning,
    /// Broken, or will fail when needed.
    Problem,
    /// The check couldn't run.
    Skipped,
}

impl Level {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// One line of a report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub check: &'static str,
    pub level: Level,
    pub what: String,
    /// Recommended action, if any.
    pub next: Option<String>,
}

/// Findings from a single check.
#[derive(Debug)]
pub struct Findings {
    check: &'static str,
    list: Vec<Finding>,
}

impl Findings {
    pub fn new(check: &'static str) -> Self {
        Self { check, list: Vec::new() }
    }

    fn with(mut self, level: Level, what: impl Into<String>, next: Option<String>) -> Self {
        self.list.push(Finding { check: self.check, level, what: what.into(), next });
        self
    }

    #[must_use]
    pub fn ok(self, what: impl Into<String>) -> Self {
        self.with(Level::Ok, what, None)
    }

    #[must_use]
    pub fn warning(self, what: impl Into<String>, next: impl Into<String>) -> Self {
        self.with(Level::Warning, what, Some(next.into()))
    }

    #[must_use]
    pub fn problem(self, what: impl Into<String>, next: impl Into<String>) -> Self {
        self.with(Level::Problem, what, Some(next.into()))
    }

    #[must_use]
    pub fn skipped(self, reason: impl Into<String>) -> Self {
        self.with(Level::Skipped, reason, None)
    }

    /// Adds an OK finding if there are no findings yet.
    #[must_use]
    pub fn or_ok(self, what: impl Into<String>) -> Self {
        if self.list.is_empty() { self.ok(what) } else { self }
    }

    pub fn into_list(self) -> Vec<Finding> {
        self.list
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

/// A pending check.
pub struct Check<'a> {
    name: &'static str,
    timeout: Duration,
    work: Pin<Box<dyn Future<Output = Findings> + Send + 'a>>,
}

impl<'a> Check<'a> {
    pub fn new(
        name: &'static str,
        timeout: Duration,
        work: impl Future<Output = Findings> + Send + 'a,
    ) -> Self {
        Self { name, timeout, work: Box::pin(work) }
    }

    async fn run(self) -> Findings {
        let Self { name, timeout, work } = self;
        tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| {
            let what = format!("the check did not finish within {} s", timeout.as_secs());
            Findings::new(name).problem(what, "find out why the check hung, then run this command again")
        })
    }
}

/// Runs all checks concurrently. Findings are returned in check order.
pub async fn run_checks(checks: Vec<Check<'_>>) -> Vec<Finding> {
    let results = join_all(checks.into_iter().map(Check::run)).await;
    results.into_iter().flat_map(|findings| findings.list).collect()
}

/// All findings for one subject.
#[derive(Debug)]
pub struct Report {
    pub subject: String,
    pub findings: Vec<Finding>,
}

impl Report {
    pub fn count(&self, level: Level) -> usize {
        self.findings.iter().filter(|finding| finding.level == level).count()
    }

    pub fn to_json(&self) -> Value {
        json!({
            "subject": self.subject,
            "ok": self.count(Level::Problem) == 0,
            "problems": self.count(Level::Problem),
            "warnings": self.count(Level::Warning),
            "skipped": self.count(Level::Skipped),
            "findings": self.findings,
        })
    }

    /// Summarizes non-zero counts by level: `1 problem, 2 warnings, 3 ok`.
    pub fn tally(&self) -> String {
        let count_text = |level: Level, one: &str, many: &str| {
            let count = self.count(level);
            (count > 0).then(|| format!("{count} {}", if count == 1 { one } else { many }))
        };
        let parts: Vec<_> = [
            count_text(Level::Problem, "problem", "problems"),
            count_text(Level::Warning, "warning", "warnings"),
            count_text(Level::Skipped, "skipped", "skipped"),
            count_text(Level::Ok, "ok", "ok"),
        ]
        .into_iter()
        .flatten()
        .collect();
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn run_checks_reports_hung_check_as_problem() {
        let slow = Check::new("slow", Duration::from_secs(3), std::future::pending());
        let quick = Check::new("quick", Duration::from_secs(3), async { Findings::new("quick").ok("well") });
        let findings = run_checks(vec![slow, quick]).await;
        let levels: Vec<_> = findings.iter().map(|finding| (finding.check, finding.level)).collect();
        assert_eq!(levels, [("slow", Level::Problem), ("quick", Level::Ok)]);
        assert!(findings[0].what.contains("3 s") && findings[0].next.is_some(), "{findings:?}");
    }

    #[test]
    fn report_counts_findings_by_level() {
        let findings = Findings::new("a").ok("x").warning("y", "do").problem("z", "do").skipped("why");
        let report = Report { subject: "host".to_owned(), findings: findings.list };
        assert_eq!(report.tally(), "1 problem, 1 warning, 1 skipped, 1 ok");
        let json = report.to_json();
        assert_eq!((&json["ok"], &json["findings"][2]["next"]), (&false.into(), &"do".into()));
        assert!(Findings::new("a").or_ok("fine").list[0].level == Level::Ok);
    }
}
