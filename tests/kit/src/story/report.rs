//! What the story did: each step with its time, printed as it happens and written as `report.json`.

use std::fs;
use std::future::Future;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::Serialize;

/// No step of the story takes this long; one that does has got stuck.
const LONGEST_STEP: Duration = Duration::from_secs(240);

#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub ok: bool,
    pub steps: Vec<Step>,
    /// Whose story it is.
    #[serde(skip)]
    name: &'static str,
    #[serde(skip)]
    longest_step: Duration,
}

#[derive(Debug, Clone, Serialize)]
pub struct Step {
    pub name: String,
    pub ok: bool,
    pub ms: u64,
    pub detail: String,
}

/// The story stopped at a step; the report says where and why.
#[derive(Debug)]
pub struct Stopped;

impl Report {
    pub fn new() -> Self {
        Self::of("demo", LONGEST_STEP)
    }

    /// Of a story by another name, with steps that take at most so long.
    pub fn of(name: &'static str, longest_step: Duration) -> Self {
        Self { ok: false, steps: Vec::new(), name, longest_step }
    }

    /// Runs one step, which gives its result and a line that says what was seen.
    pub async fn step<T>(
        &mut self,
        name: &str,
        work: impl Future<Output = Result<(T, String)>>,
    ) -> Result<T, Stopped> {
        let started = Instant::now();
        let end = match tokio::time::timeout(self.longest_step, work).await {
            Ok(end) => end,
            Err(_) => Err(anyhow!("not done after {} s", self.longest_step.as_secs())),
        };
        let ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (value, ok, detail) = match end {
            Ok((value, detail)) => (Some(value), true, detail),
            Err(error) => (None, false, format!("{error:#}")),
        };
        let step = Step { name: name.to_owned(), ok, ms, detail };
        println!("{}", step.line());
        self.steps.push(step);
        value.ok_or(Stopped)
    }

    /// Runs what is no part of the story; only its failure is a step.
    pub async fn quietly(
        &mut self,
        name: &str,
        work: impl Future<Output = Result<()>>,
    ) -> Result<(), Stopped> {
        let end = match tokio::time::timeout(self.longest_step, work).await {
            Ok(end) => end,
            Err(_) => Err(anyhow!("not done after {} s", self.longest_step.as_secs())),
        };
        match end {
            Ok(()) => Ok(()),
            Err(error) => self.step(name, async { Err(error) }).await,
        }
    }

    /// The step that failed.
    pub fn failed(&self) -> Option<&Step> {
        self.steps.iter().find(|step| !step.ok)
    }

    pub fn summary(&self) -> String {
        let ms: u64 = self.steps.iter().map(|step| step.ms).sum();
        let passed = self.steps.iter().filter(|step| step.ok).count();
        let failed = self.steps.len() - passed;
        let verdict = match self.failed() {
            None if self.ok => "the story holds".to_owned(),
            None => "the story was interrupted".to_owned(),
            Some(step) => format!("the story failed at `{}`", step.name),
        };
        format!("{}: {verdict}; {passed} passed, {failed} failed, {:.1} s", self.name, seconds(ms))
    }

    /// Written whole or not at all: two demos at once do not mix.
    pub fn write(&self, path: &Path) -> Result<()> {
        let dir = path.parent().context("a report lies in a directory")?;
        fs::create_dir_all(dir)?;
        let mut file = tempfile::NamedTempFile::new_in(dir)?;
        serde_json::to_writer_pretty(&mut file, self)?;
        file.write_all(b"\n")?;
        file.persist(path).with_context(|| format!("write {}", path.display()))?;
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
