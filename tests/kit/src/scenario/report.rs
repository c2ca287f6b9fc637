//! A scenario report: each step with its duration, printed when the step ends, and written to `report.json`.

use std::fs;
use std::future::Future;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::Serialize;

/// A step that takes longer is considered stuck.
const STEP_TIMEOUT: Duration = Duration::from_secs(240);

#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub ok: bool,
    pub steps: Vec<Step>,
    /// The scenario's name.
    #[serde(skip)]
    name: &'static str,
    #[serde(skip)]
    step_timeout: Duration,
}

#[derive(Debug, Clone, Serialize)]
pub struct Step {
    pub name: String,
    pub ok: bool,
    pub ms: u64,
    pub detail: String,
}

/// A step failed; the report has the details.
#[derive(Debug)]
pub struct StepFailed;

impl Report {
    pub fn new() -> Self {
        Self::with_timeout("demo", STEP_TIMEOUT)
    }

    /// Creates a report for the scenario `name`, with a timeout per step.
    pub fn with_timeout(name: &'static str, step_timeout: Duration) -> Self {
        Self { ok: false, steps: Vec::new(), name, step_timeout }
    }

    /// Runs a step, which returns its result and a line of detail.
    pub async fn step<T>(
        &mut self,
        name: &str,
        work: impl Future<Output = Result<(T, String)>>,
    ) -> Result<T, StepFailed> {
        let started = Instant::now();
        let result = match tokio::time::timeout(self.step_timeout, work).await {
            Ok(result) => result,
            Err(_) => Err(anyhow!("timed out after {} s", self.step_timeout.as_secs())),
        };
        let ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (value, ok, detail) = match result {
            Ok((value, detail)) => (Some(value), true, detail),
            Err(error) => (None, false, format!("{error:#}")),
        };
        let step = Step { name: name.to_owned(), ok, ms, detail };
        println!("{}", step.line());
        self.steps.push(step);
        value.ok_or(StepFailed)
    }

    /// Runs a step that is reported only if it fails.
    pub async fn hidden_step(
        &mut self,
        name: &str,
        work: impl Future<Output = Result<()>>,
    ) -> Result<(), StepFailed> {
        let result = match tokio::time::timeout(self.step_timeout, work).await {
            Ok(result) => result,
            Err(_) => Err(anyhow!("timed out after {} s", self.step_timeout.as_secs())),
        };
        match result {
            Ok(()) => Ok(()),
            Err(error) => self.step(name, async { Err(error) }).await,
        }
    }

    /// The first failed step.
    pub fn failed_step(&self) -> Option<&Step> {
        self.steps.iter().find(|step| !step.ok)
    }

    /// Returns a line with the result, the step counts, and the total duration.
    pub fn summary(&self) -> String {
        let ms: u64 = self.steps.iter().map(|step| step.ms).sum();
        let passed = self.steps.iter().filter(|step| step.ok).count();
        let failed = self.steps.len() - passed;
        let verdict = match self.failed_step() {
            None if self.ok => "success".to_owned(),
            None => "interrupted".to_owned(),
            Some(step) => format!("failed at `{}`", step.name),
        };
        format!("{}: {verdict}; {passed} steps passed, {failed} failed, {:.1} s", self.name, seconds(ms))
    }

    /// Writes the report atomically, so that concurrent demos do not interfere.
    pub fn write(&self, path: &Path) -> Result<()> {
        let dir = path.parent().context("the report's path has no directory")?;
        fs::create_dir_all(dir)?;
        let mut file = tempfile::NamedTempFile::new_in(dir)?;
        serde_json::to_writer_pretty(&mut file, self)?;
        file.write_all(b"\n")?;
        file.persist(path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(())
    }
}

impl Default for Report {
    fn default() -> Self {
        Self::new()
    }
}

impl Step {
    fn line(&self) -> String {
        let mark = if self.ok { "ok  " } else { "FAIL" };
        format!("{mark}  {:<14} {:>6.2} s  {}", self.name, seconds(self.ms), self.detail)
    }
}

fn seconds(ms: u64) -> f64 {
    Duration::from_millis(ms).as_secs_f64()
}
