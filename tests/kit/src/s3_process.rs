//! Third-party S3 servers as child processes.

use std::fs::File;
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::child::{self, AtExit};

const BUCKET: &str = "svc-test";
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A running server, stopped on drop.
pub struct S3Process {
    name: &'static str,
    server: Child,
    port: u16,
}

impl S3Process {
    /// Starts the command and waits until it listens on the port.
    ///
    /// # Errors
    /// Fails if the log cannot be created or the command cannot be started; fails with the server's log if it exits or
    /// does not listen within `START_TIMEOUT`.
    pub fn start(name: &'static str, mut command: Command, port: u16, log: &Path) -> Result<Self> {
        let server = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(log)?)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        child::kill_on_exit(server.id(), AtExit::Kill);
        let mut process = Self { name, server, port };
        let deadline = Instant::now() + START_TIMEOUT;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            if process.server.try_wait()?.is_some() || Instant::now() > deadline {
                bail!("{name} did not start: {}", std::fs::read_to_string(log)?);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(process)
    }

    /// Creates the bucket and waits until it accepts objects, because a server may reject them at first.
    ///
    /// # Errors
    /// Fails if the server still rejects the bucket or an object after `START_TIMEOUT`.
    pub async fn create_bucket(&self) -> Result<()> {
        let url = format!("{}/{BUCKET}", self.endpoint());
        let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(30)).build()?;
        let deadline = Instant::now() + START_TIMEOUT;
        for url in [url.clone(), format!("{url}/ready")] {
            loop {
                let body = if url.ends_with("/ready") { "ready" } else { "" };
                let response = client.put(&url).body(body).send().await;
                match response
                    .map_err(anyhow::Error::from)
                    .and_then(|response| Ok(response.error_for_status()?))
                {
                    Ok(_) => break,
                    Err(error) if Instant::now() > deadline => return Err(error),
                    Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                }
            }
        }
        Ok(())
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The product's configuration for this server.
    pub fn env(&self) -> Vec<(String, String)> {
        let pairs = [
            ("OBJECT_STORE_URL", format!("s3://{BUCKET}")),
            ("OBJECT_STORE_ENDPOINT", self.endpoint()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", self.name.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", self.name.to_owned()),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value)).into()
    }
}

impl Drop for S3Process {
    fn drop(&mut self) {
        // Harmless if the process has already exited.
        self.server.kill().ok();
        self.server.wait().ok();
        child::unregister(self.server.id());
    }
}
