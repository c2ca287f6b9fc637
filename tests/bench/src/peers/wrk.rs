//! HTTP load with wrk: a fixed number of connections, each with one request in flight.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use kit::child;
use kit::packages::{Deb, DebTool, FetchedProgram};

const WRK: DebTool = DebTool {
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
    program: FetchedProgram,
}

/// The request that every connection sends.
#[derive(Debug, Clone, Default)]
pub struct Request {
    pub url: String,
    pub headers: Vec<(String, String)>,
    /// Sent as `POST`; without a body, the request is a `GET`.
    pub body: Option<String>,
}

/// The results of a load test.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct LoadResult {
    pub requests: u64,
    /// Duration of the load, in microseconds.
    pub micros: u64,
    /// Bytes received.
    pub bytes: u64,
    /// Latencies in microseconds.
    pub p50: f64,
    pub p99: f64,
    /// Responses with status 400 and above.
    error_responses: u64,
    /// Failed connection attempts and writes, and timeouts.
    failed: u64,
}

impl Wrk {
    pub fn fetch() -> Result<Self> {
        Ok(Self { program: WRK.locate_or_fetch()? })
    }

    /// Sends the request repeatedly.
    ///
    /// # Errors
    /// Fails if wrk fails, a response is an error, a connection fails or times out, or there is no response: the
    /// figures would be meaningless.
    pub fn run_load(&self, request: &Request, connections: u32, seconds: u32) -> Result<LoadResult> {
        let dir = tempfile::tempdir()?;
        let script = dir.path().join("load.lua");
        fs::write(&script, lua_script(request, dir.path())?)?;
        let mut command = self.program.command();
        // A single thread for all connections leaves the other cores of a small machine to the server.
        command.args(["--threads", "1", "--connections", &connections.to_string()]);
        command.args(["--duration", &format!("{seconds}s"), "--timeout", "10s", "--script"]);
        command.arg(&script).arg(&request.url);
        let output = child::run(command, Duration::from_secs(u64::from(seconds) + 30))?;
        let result = parse_result(&output)?;
        ensure!(
            result.error_responses == 0,
            "{} of {} responses were errors: {output}",
            result.error_responses,
            result.requests
        );
        ensure!(result.failed == 0, "{} connection attempts or requests failed: {output}", result.failed);
        ensure!(result.requests > 0, "no response: {output}");
        Ok(result)
    }
}

impl LoadResult {
    pub fn requests_per_second(&self) -> f64 {
        self.requests as f64 / (self.micros as f64 / 1e6)
    }

    pub fn mib_per_second(&self) -> f64 {
        self.bytes as f64 / f64::from(1 << 20) / (self.micros as f64 / 1e6)
    }

    /// Returns the server CPU time per request, in microseconds.
    pub fn cpu_micros_per_request(&self, cpu: Duration) -> f64 {
        cpu.as_secs_f64() * 1e6 / self.requests as f64
    }
}

const FIGURES: &str = "figures ";

fn parse_result(output: &str) -> Result<LoadResult> {
    let line = output.lines().find_map(|line| line.strip_prefix(FIGURES));
    serde_json::from_str(line.with_context(|| format!("wrk printed no figures: {output}"))?)
        .context("cannot parse wrk's figures")
}

fn lua_script(request: &Request, dir: &Path) -> Result<String> {
    let mut script = String::new();
    for (name, value) in &request.headers {
        writeln!(script, "wrk.headers[{}] = {}", quote_lua(name), quote_lua(value))?;
    }
    if let Some(body) = &request.body {
        let file = dir.join("body");
        fs::write(&file, body)?;
        let file = quote_lua(&file.display().to_string());
        writeln!(script, "wrk.method = \"POST\"\nlocal file = io.open({file}, \"rb\")")?;
        writeln!(script, "wrk.body = file:read(\"*a\")\nfile:close()")?;
    }
    script.push_str(
        r#"
function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\nfigures {"requests":%d,"micros":%d,"bytes":%d,"p50":%d,"p99":%d,"error_responses":%d,"failed":%d}\n',
    summary.requests, summary.duration, summary.bytes, latency:percentile(50), latency:percentile(99),
    errors.status, errors.connect + errors.write + errors.timeout))
end
"#,
    );
    Ok(script)
}

/// Formats a Lua string literal.
fn quote_lua(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("\"{escaped}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_parsed_from_output() {
        let output = "Running 1s test\n  2 requests in 1.00s\n\nfigures {\"requests\":200,\"micros\":2000000,\
            \"bytes\":4194304,\"p50\":17,\"p99\":40,\"error_responses\":0,\"failed\":0}\n";
        let result = parse_result(output).expect("the output has figures");
        assert_eq!((result.requests_per_second(), result.mib_per_second()), (100.0, 2.0));
        assert_eq!(result.cpu_micros_per_request(Duration::from_millis(2)), 10.0);
        assert!(parse_result("unable to connect").is_err());
    }

    #[test]
    fn headers_are_quoted_and_body_is_written_to_a_file() {
        let dir = tempfile::tempdir().expect("the directory is created");
        let request = Request {
            url: "http://127.0.0.1:1/".to_owned(),
            headers: vec![("x-a".to_owned(), "say \"hi\" \\ there".to_owned())],
            body: Some("{\"a\":[[1]]}".to_owned()),
        };
        let script = lua_script(&request, dir.path()).expect("the script is written");
        assert!(script.contains(r#"wrk.headers["x-a"] = "say \"hi\" \\ there""#), "{script}");
        assert_eq!(
            fs::read_to_string(dir.path().join("body")).expect("the body is written"),
            "{\"a\":[[1]]}"
        );
    }
}
