//! HTTP load by wrk: keep-alive connections that each send the next request when the answer is there.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::child;
use crate::packages::{Deb, Located, Program};

const WRK: Program = Program {
    path: "usr/bin/wrk",
    debs: &[
        Deb {
            name: "wrk",
            version: "4.1.0-3+b2",
            sha256: "b0206dc74df85365a248ddac2433c0ee3f210579fc5ed83758e73354bb1bbefb",
        },
        Deb {
            name: "libluajit-5.1-2",
            version: "2.1.0~beta3+git20220320+dfsg-4.1+deb12u1",
            sha256: "1f0ea919d09d47420993aca0102ec0aed46338b2bf7e072a4b4566c5616f09d2",
        },
    ],
};

pub struct Wrk {
    program: Located,
}

/// What every connection sends.
#[derive(Debug, Clone, Default)]
pub struct Request {
    pub url: String,
    pub headers: Vec<(String, String)>,
    /// A `POST` with it, else a `GET`.
    pub body: Option<String>,
}

/// What came of a load.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct Outcome {
    pub requests: u64,
    pub micros: u64,
    pub bytes: u64,
    /// Latencies in microseconds.
    pub p50: f64,
    pub p99: f64,
    /// Answers of status 400 and above.
    refused: u64,
    /// Connections that were not made, writes and answers in time.
    failed: u64,
}

impl Wrk {
    pub fn fetch() -> Result<Self> {
        Ok(Self { program: WRK.locate()? })
    }

    /// Sends the request over and over.
    ///
    /// # Errors
    /// Also when an answer was a refusal, or a connection failed: such figures are of something else.
    pub fn load(&self, request: &Request, connections: u32, seconds: u32) -> Result<Outcome> {
        let dir = tempfile::tempdir()?;
        let script = dir.path().join("load.lua");
        fs::write(&script, lua(request, dir.path())?)?;
        let mut command = self.program.command();
        // One thread drives all connections: on a small machine the measured server needs the other cores.
        command.args(["--threads", "1", "--connections", &connections.to_string()]);
        command.args(["--duration", &format!("{seconds}s"), "--timeout", "10s", "--script"]);
        command.arg(&script).arg(&request.url);
        let said = child::run(command, Duration::from_secs(u64::from(seconds) + 30))?;
        let outcome = outcome(&said)?;
        ensure!(
            outcome.refused == 0,
            "{} of {} answers were refusals: {}",
            outcome.refused,
            outcome.requests,
            said
        );
        ensure!(outcome.failed == 0, "{} connections failed: {said}", outcome.failed);
        ensure!(outcome.requests > 0, "no answer at all: {said}");
        Ok(outcome)
    }
}

impl Outcome {
    pub fn per_second(&self) -> f64 {
        self.requests as f64 / (self.micros as f64 / 1e6)
    }

    pub fn mib_per_second(&self) -> f64 {
        self.bytes as f64 / f64::from(1 << 20) / (self.micros as f64 / 1e6)
    }

    /// Of a server's processor time, each request's part, in microseconds.
    pub fn cpu_micros(&self, spent: Duration) -> f64 {
        spent.as_secs_f64() * 1e6 / self.requests as f64
    }
}

const FIGURES: &str = "figures ";

fn outcome(said: &str) -> Result<Outcome> {
    let line = said.lines().find_map(|line| line.strip_prefix(FIGURES));
    serde_json::from_str(line.with_context(|| format!("wrk said no figures: {said}"))?)
        .context("wrk's figures")
}

fn lua(request: &Request, dir: &Path) -> Result<String> {
    let mut script = String::new();
    for (name, value) in &request.headers {
        writeln!(script, "wrk.headers[{}] = {}", quoted(name), quoted(value))?;
    }
    if let Some(body) = &request.body {
        let file = dir.join("body");
        fs::write(&file, body)?;
        let file = quoted(&file.display().to_string());
        writeln!(script, "wrk.method = \"POST\"\nlocal file = io.open({file}, \"rb\")")?;
        writeln!(script, "wrk.body = file:read(\"*a\")\nfile:close()")?;
    }
    script.push_str(
        r#"
function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\nfigures {"requests":%d,"micros":%d,"bytes":%d,"p50":%d,"p99":%d,"refused":%d,"failed":%d}\n',
    summary.requests, summary.duration, summary.bytes, latency:percentile(50), latency:percentile(99),
    errors.status, errors.connect + errors.write + errors.timeout))
end
"#,
    );
    Ok(script)
}

/// A string literal of Lua.
fn quoted(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("\"{escaped}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_in_what_wrk_says() {
        let said = "Running 1s test\n  2 requests in 1.00s\n\nfigures {\"requests\":200,\"micros\":2000000,\
            \"bytes\":4194304,\"p50\":17,\"p99\":40,\"refused\":0,\"failed\":0}\n";
        let outcome = outcome(said).expect("figures");
        assert_eq!((outcome.per_second(), outcome.mib_per_second()), (100.0, 2.0));
        assert_eq!(outcome.cpu_micros(Duration::from_millis(2)), 10.0);
        assert!(super::outcome("unable to connect").is_err());
    }

    #[test]
    fn a_script_quotes_what_it_is_given() {
        let dir = tempfile::tempdir().expect("a directory");
        let request = Request {
            url: "http://127.0.0.1:1/".to_owned(),
            headers: vec![("x-a".to_owned(), "say \"hi\" \\ there".to_owned())],
            body: Some("{\"a\":[[1]]}".to_owned()),
        };
        let script = lua(&request, dir.path()).expect("a script");
        assert!(script.contains(r#"wrk.headers["x-a"] = "say \"hi\" \\ there""#), "{script}");
        assert_eq!(fs::read_to_string(dir.path().join("body")).expect("the body"), "{\"a\":[[1]]}");
    }
}
