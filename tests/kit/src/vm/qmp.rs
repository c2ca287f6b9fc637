//! QEMU's control socket (QMP), as far as the power button needs it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

const DEADLINE: Duration = Duration::from_secs(10);

/// Runs one command.
pub(super) async fn command(socket: &Path, name: &str) -> Result<()> {
    let said = tokio::time::timeout(DEADLINE, talk(socket, name)).await;
    said.with_context(|| format!("QMP {name}: no answer in time"))?.with_context(|| format!("QMP {name}"))
}

async fn talk(socket: &Path, name: &str) -> Result<()> {
    let (read, mut write) = UnixStream::connect(socket).await?.into_split();
    let mut lines = BufReader::new(read).lines();
    for command in ["qmp_capabilities", name] {
        write.write_all(format!("{}\n", json!({ "execute": command })).as_bytes()).await?;
        loop {
            let line = lines.next_line().await?.context("it has ended")?;
            let said: Value = serde_json::from_str(&line)?;
            if said.get("error").is_some() {
                bail!("{line}");
            }
            // Greeting and events come in between.
            if said.get("return").is_some() {
                break;
            }
        }
    }
    Ok(())
}
