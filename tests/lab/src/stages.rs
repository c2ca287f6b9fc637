//! Boot stage durations, from the platform's record and the machine's clock.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use serde_json::Value;

use kit::scenario::{HANDLE, MachineRecord, Stack};

/// Stages that the machine reports to the platform, in order.
const REPORTED_STAGES: [&str; 5] = ["bundle", "database", "restore", "gateway", "register"];

/// Measures the machine's first-boot stages.
pub async fn measure_boot(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    let power_on = vm.last_powered_on_at().context("the machine was never on")?;
    let clock =
        "echo $(date +%s%3N) $(cut -d. -f1 /proc/uptime) $(systemctl show -P UserspaceTimestampMonotonic)";
    let output = vm.run(clock, Duration::from_secs(60)).await?.into_stdout()?;
    let numbers: Vec<i64> = output.split_whitespace().filter_map(|field| field.parse().ok()).collect();
    let [now_ms, up_seconds, userspace_us] = numbers[..] else {
        anyhow::bail!("unexpected output: {output:?}")
    };
    let userspace = Timestamp::from_millisecond(now_ms - up_seconds * 1000 + userspace_us / 1000)?;

    let record: Value = stack.svcctl(&["--json", "status", HANDLE]).await?.ensure_success()?.json()?;
    let stages = record["boot"]["stages"].as_array().context("the record has no boot stages")?;
    let started_at = |stage: &str| {
        let entry = stages.iter().find(|entry| entry["stage"] == stage);
        entry.and_then(|entry| entry["at"].as_str()?.parse::<Timestamp>().ok())
    };
    let mut marks = vec![("kernel", power_on), ("cloud-init", userspace)];
    for stage in REPORTED_STAGES {
        let when =
            started_at(stage).with_context(|| format!("the stage {stage} was not reported: {stages:?}"))?;
        marks.push((stage, when));
    }
    let end: Timestamp = record["registeredAt"].as_str().context("not registered")?.parse()?;
    let end_times = marks.iter().skip(1).map(|mark| mark.1).chain([end]);
    let parts: Vec<String> = marks
        .iter()
        .zip(end_times)
        .map(|((name, begin), end)| format!("{name} {:.1}", end.duration_since(*begin).as_secs_f64()))
        .collect();
    let total = end.duration_since(power_on).as_secs_f64();
    ensure!(total > 0.0, "registered before power-on");
    Ok(((), format!("{total:.1} s from power-on: {} s", parts.join(", "))))
}
