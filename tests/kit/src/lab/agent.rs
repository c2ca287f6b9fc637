//! A dispatch on a real machine.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::story::{MachineRecord, Stack};

const DISPATCH: &str = include_str!("agent.sh");
const DEADLINE: Duration = Duration::from_secs(300);

/// All of `agent.sh`.
pub async fn dispatch(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let said = on.run(DISPATCH, DEADLINE).await?;
    ensure!(said.status.success(), "{}{}", said.stdout, said.stderr);
    let last = said.stdout.lines().last().context("it says nothing")?;
    Ok(((), last.to_owned()))
}
