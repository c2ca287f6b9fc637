//! How long each stage of a boot took, by the platform's record and the machine's own clock.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use serde_json::Value;

use crate::story::{HANDLE, MachineRecord, Stack};

/// Stages as the platform hears of them, in their order.
const HEARD: [&str; 5] = ["bundle", "database", "restore", "gateway", "register"];

/// The stages of the machine's first boot, with their seconds.
pub async fn of_boot(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let power_on = on.on_since().context("it was never on")?;
    let clock =
        "echo $(date +%s%3N) $(cut -d. -f1 /proc/uptime) $(systemctl show -P UserspaceTimestampMonotonic)";
    let said = on.run(clock, Duration::from_secs(60)).await?.success()?;
    let numbers: Vec<i64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [now_ms, up_seconds, userspace_us] = numbers[..] else { anyhow::bail!("the clock says {said:?}") };
    let userspace = Timestamp::from_millisecond(now_ms - up_seconds * 1000 + userspace_us / 1000)?;

    let record: Value = stack.svcctl(&["--json", "status", HANDLE]).await?.success()?.json()?;
    let told = record["boot"]["stages"].as_array().context("the record has no boot stages")?;
    let at = |stage: &str| {
        let entry = told.iter().find(|entry| entry["stage"] == stage);
        entry.and_then(|entry| entry["at"].as_str()?.parse::<Timestamp>().ok())
    };
    let mut marks = vec![("kernel", power_on), ("cloud-init", userspace)];
    for stage in HEARD {
        let when =
            at(stage).with_context(|| format!("the platform never heard of the stage {stage}: {told:?}"))?;
        marks.push((if stage == "register" { "registered" } else { stage }, when));
    }
    let end: Timestamp = record["registeredAt"].as_str().context("not registered")?.parse()?;
    let ends = marks.iter().skip(1).map(|mark| mark.1).chain([end]);
    let parts: Vec<String> = marks
        .iter()
        .zip(ends)
        .map(|((name, begin), end)| format!("{name} {:.1}", end.duration_since(*begin).as_secs_f64()))
        .collect();
    let whole = end.duration_since(power_on).as_secs_f64();
    ensure!(whole > 0.0, "registered before its power came on");
    Ok(((), format!("{whole:.1} s from power-on: {} s", parts.join(", "))))
}
