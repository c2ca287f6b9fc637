//! Tests the cost of dispatches that end before their agents have finished.

use anyhow::Result;
use reqwest::Method;
use serde_json::{Value, json};

use super::dispatch::{
    machine_with_runner, request_dispatch, wait_for_pid, wait_until_finished, wait_until_logged,
    wait_until_recorded,
};
use super::host::{Host, send_json};

async fn cancel(host: &Host, id: &str) -> Result<()> {
    send_json(host.owner_request(Method::DELETE, &format!("/api/dispatch/{id}"))).await?;
    Ok(())
}

async fn wait_until_started(host: &Host, id: &str) -> Result<()> {
    wait_until_logged(host, &format!("dispatch {id}: coder is running for")).await
}

fn error_and_cost(interaction: &Value) -> (&str, &Value, bool) {
    let is_estimated = interaction["costEstimated"].as_bool().unwrap_or_default();
    (interaction["error"]["name"].as_str().unwrap_or_default(), &interaction["cost"], is_estimated)
}

#[tokio::test]
async fn cancelled_agent_reports_its_cost_on_interrupt() -> Result<()> {
    let (machine, _runner) = machine_with_runner(&json!({}))?;
    let host = machine.start()?;
    request_dispatch(&host, json!({ "prompt": "interrupt", "id": "i" })).await?;
    wait_for_pid(&host, "sleeping.pid").await?;
    cancel(&host, "i").await?;
    let response = wait_until_finished(&host, "i").await?;
    let expected = ("Cancelled", &json!(0.02), false);
    assert_eq!(error_and_cost(&response["dispatches"][0]["interaction"]), expected);
    Ok(())
}

#[tokio::test]
async fn dispatch_ended_without_a_cost_counts_its_reservation() -> Result<()> {
    let limits = json!({ "costLimits": { "daily": 0.9, "reservation": 0.3 } });
    let (machine, _runner) = machine_with_runner(&limits)?;
    let host = machine.start()?;
    request_dispatch(&host, json!({ "prompt": "hold", "id": "cancelled" })).await?;
    wait_until_started(&host, "cancelled").await?;
    cancel(&host, "cancelled").await?;
    let response = wait_until_finished(&host, "cancelled").await?;
    let reserved = &json!(0.3);
    assert_eq!(error_and_cost(&response["dispatches"][0]["interaction"]), ("Cancelled", reserved, true));
    request_dispatch(&host, json!({ "prompt": "hold", "id": "late", "deadlineSeconds": 1 })).await?;
    let response = wait_until_finished(&host, "late").await?;
    let interaction = &response["dispatches"][0]["interaction"];
    assert_eq!(error_and_cost(interaction), ("DeadlineExceeded", reserved, true));
    request_dispatch(&host, json!({ "prompt": "hold", "id": "killed" })).await?;
    wait_until_started(&host, "killed").await?;
    let host = host.restart()?;
    let recorded = wait_until_recorded(&host, "killed").await?;
    assert_eq!(error_and_cost(&recorded), ("Interrupted", reserved, true));
    let (_, usage) = host.get("/api/usage").await?;
    assert_eq!(usage["totalCost"], json!(0.9));
    let (status, _) = request_dispatch(&host, json!({ "prompt": "ok" })).await?;
    assert_eq!(status.as_u16(), 429, "cancelling dispatches must not bypass the limit");
    Ok(())
}

#[tokio::test]
async fn unreported_usage_adds_the_reservation_to_the_cost() -> Result<()> {
    let limits = json!({ "costLimits": { "daily": 0.9, "reservation": 0.3 } });
    let (machine, _runner) = machine_with_runner(&limits)?;
    let host = machine.start()?;
    request_dispatch(&host, json!({ "prompt": "crash", "id": "c" })).await?;
    let response = wait_until_finished(&host, "c").await?;
    let expected = ("ExitCode", &json!(0.31), true);
    assert_eq!(error_and_cost(&response["dispatches"][0]["interaction"]), expected);
    Ok(())
}

#[tokio::test]
async fn dispatch_that_never_started_costs_nothing() -> Result<()> {
    let (machine, _runner) =
        machine_with_runner(&json!({ "dispatch": { "defaultAgent": "coder", "concurrency": 1 } }))?;
    let host = machine.start()?;
    request_dispatch(&host, json!({ "prompt": "hold", "id": "first" })).await?;
    request_dispatch(&host, json!({ "prompt": "ok", "id": "queued" })).await?;
    cancel(&host, "queued").await?;
    let response = wait_until_finished(&host, "queued").await?;
    assert_eq!(error_and_cost(&response["dispatches"][0]["interaction"]), ("Cancelled", &json!(0), false));
    Ok(())
}
