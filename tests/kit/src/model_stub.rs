//! A stub for the model APIs that coding agents call: `tests/agents/stub/stub.py` describes its scripts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::child::OwnedChild;

const START_TIMEOUT: Duration = Duration::from_secs(20);

/// A running stub on loopback, stopped on drop.
#[derive(Debug)]
pub struct ModelStub {
    port: u16,
    request_log: PathBuf,
    _process: OwnedChild,
}

impl ModelStub {
    /// Starts a stub; its files are written to the existing directory `dir`.
    ///
    /// # Errors
    /// Fails if the script file cannot be written, if Python is missing, or if the stub exits or does not start within
    /// `START_TIMEOUT`, for example because the script is invalid.
    pub fn start(script: &Value, dir: &Path) -> Result<Self> {
        let stub = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("agents").join("stub/stub.py");
        let (script_file, port_file) = (dir.join("model-script.json"), dir.join("model-port"));
        let request_log = dir.join("model-requests.jsonl");
        fs::write(&script_file, script.to_string())?;
        let mut python = Command::new("python3");
        python.arg(stub).arg(&script_file).arg(&port_file).arg(&request_log);
        python.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut process = OwnedChild::spawn(&mut python).context("cannot start python3")?;
        let deadline = Instant::now() + START_TIMEOUT;
        while !port_file.exists() {
            ensure!(process.status().is_none(), "the model API stub exited during startup");
            ensure!(Instant::now() < deadline, "the model API stub did not start within {START_TIMEOUT:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        let port = fs::read_to_string(&port_file)?.trim().parse().context("cannot parse the stub's port")?;
        Ok(Self { port, request_log, _process: process })
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the base URL, without `/v1`.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Returns the number of requests so far.
    pub fn request_count(&self) -> usize {
        fs::read_to_string(&self.request_log).map_or(0, |text| text.lines().count())
    }
}
