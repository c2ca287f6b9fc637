//! Looks inside a machine: what must hold on every one that runs.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::story::{MachineRecord, Stack};

const SOUND: &str = include_str!("sound.sh");
const DEADLINE: Duration = Duration::from_secs(300);

/// Every check of `sound.sh`.
pub async fn sound(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let said = on.run(SOUND, DEADLINE).await?;
    let (held, broken): (Vec<&str>, Vec<&str>) = said
        .stdout
        .lines()
        .filter(|line| line.starts_with("ok ") || line.starts_with("BROKEN "))
        .partition(|line| line.starts_with("ok "));
    if !said.status.success() || !broken.is_empty() || held.is_empty() {
        bail!("{} hold; {}\n{}{}", held.len(), broken.join("; "), said.stdout, said.stderr);
    }
    Ok(((), format!("{} looks inside: {}", held.len(), held.join(", ").replace("ok ", ""))))
}

/// Before a machine goes away for good.
pub async fn keep_journal(stack: &Stack, machine: &MachineRecord) {
    if let Ok(on) = stack.provider.machine(&machine.server)
        && let Err(error) = on.keep_journal().await
    {
        println!("      (no journal of {}: {error:#})", machine.server);
    }
}

/// Of every machine that is still on.
pub async fn keep_journals(stack: &Stack, machines: &Path) {
    for entry in fs::read_dir(machines).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Ok(machine) = stack.provider.machine(&name)
            && machine.is_on()
        {
            machine.keep_journal().await.ok();
        }
    }
}
