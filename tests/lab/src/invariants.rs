//! Checks the invariants of running machines, and saves their journals.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};

use kit::scenario::{MachineRecord, Stack};

const CHECKS: &str = include_str!("invariants.sh");
const TIMEOUT: Duration = Duration::from_secs(300);

/// Runs all checks in `invariants.sh`.
pub async fn check_machine(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    let output = vm.run(CHECKS, TIMEOUT).await?;
    let (passed, broken): (Vec<&str>, Vec<&str>) = output
        .stdout
        .lines()
        .filter(|line| line.starts_with("ok ") || line.starts_with("BROKEN "))
        .partition(|line| line.starts_with("ok "));
    if !output.status.success() || !broken.is_empty() || passed.is_empty() {
        bail!("{} checks passed; {}\n{}{}", passed.len(), broken.join("; "), output.stdout, output.stderr);
    }
    Ok(((), format!("{} checks: {}", passed.len(), passed.join(", ").replace("ok ", ""))))
}

/// Saves a machine's journal, if the machine exists; prints an error if that fails.
pub async fn save_journal(stack: &Stack, machine: &MachineRecord) {
    if let Ok(vm) = stack.provider.machine(&machine.server)
        && let Err(error) = vm.save_journal().await
    {
        println!("      (no journal for {}: {error:#})", machine.server);
    }
}

/// Saves the journals of all machines that are on.
pub async fn save_journals(stack: &Stack, machines: &Path) {
    for entry in fs::read_dir(machines).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Ok(machine) = stack.provider.machine(&name)
            && machine.is_on()
        {
            machine.save_journal().await.ok();
        }
    }
}
