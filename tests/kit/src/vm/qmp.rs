//! The subset of QEMU's control protocol (QMP) that is needed to press a virtual machine's power button.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

const TIMEOUT: Duration = Duration::from_secs(10);

pub(super) async fn execute(socket: &Path, command: &str) -> Result<()> {
    let response = tokio::time::timeout(TIMEOUT, exchange(socket, command)).await;
    response.with_context(|| format!("QMP {command}: timed out"))?.with_context(|| format!("QMP {command}"))
}

async fn exchange(socket: &Path, name: &str) -> Result<()> {
    let (read, mut write) = UnixStream::connect(socket).await?.into_split();
    let mut lines = BufReader::new(read).lines();
    for command in ["qmp_capabilities", name] {
        write.write_all(format!("{}\n", json!({ "execute": command })).as_bytes()).await?;
        loop {
            let line = lines.next_line().await?.context("the connection was closed")?;
            let response: Value = serde_json::from_str(&line)?;
            if response.get("error").is_some() {
                bail!("{line}");
            }
            // The greeting and events are skipped.
            if response.get("return").is_some() {
                break;
            }
        }
    }
    Ok(())
}
