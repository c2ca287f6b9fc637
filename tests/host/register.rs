//! A machine registers once, and resends an identical body until it gets a final response, even across restarts.

use anyhow::{Context, Result};
use serde_json::json;

use super::machine::{Machine, RunEnv, RunResult};
use super::platform::{Platform, ScriptedResponse, start_gateway};

const DIGEST: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

fn registered_response() -> ScriptedResponse {
    ScriptedResponse::Json(200, json!({ "status": "running", "epoch": 1 }))
}

/// Runs `svc-register` and waits for it on another thread, because the test's runtime serves the platform and the
/// gateway.
async fn register(machine: &Machine, args: &[&str], extra_env: RunEnv<'_>) -> Result<RunResult> {
    let args: Vec<&str> = ["svc-register"].iter().chain(args).copied().collect();
    let running = machine.spawn(&args, extra_env)?;
    tokio::task::spawn_blocking(move || running.wait()).await?
}

/// Creates a machine with an installed release. The release's directory contains the bundle's digest, because the
/// service's user cannot read `update.env`.
async fn machine_with_release(platform: &Platform) -> Result<(Machine, String)> {
    let machine = Machine::bare(1)?;
    machine.set_current_release("1.0.0", DIGEST)?;
    platform.configure(&machine)?;
    let listen = start_gateway(&machine).await?;
    Ok((machine, format!("0.0.0.0:{}", listen.port())))
}

#[tokio::test]
async fn machine_is_registered_once() -> Result<()> {
    let platform = Platform::start(registered_response()).await?;
    let (machine, listen) = machine_with_release(&platform).await?;
    let extra_env = [("GATEWAY_LISTEN", listen.as_str())];
    register(&machine, &[], &extra_env).await?.expect(0);
    register(&machine, &["register"], &extra_env).await?.expect(0);
    let calls = platform.calls();
    assert_eq!(calls.len(), 1, "{calls:?}");
    assert_eq!(calls[0].path, "/vps/register");
    assert_eq!(calls[0].authorization, "Bearer registration-token-of-a-machine");
    let body: serde_json::Value = serde_json::from_str(&calls[0].body)?;
    let identity = svc::http::tls::Identity::read(
        &machine.path("var/lib/svc/tls/cert.pem"),
        &machine.path("var/lib/svc/tls/key.pem"),
    )?;
    assert_eq!(body["machineId"], machine.id.to_string());
    assert_eq!(body["tlsSpkiSha256"], identity.pin()?.to_string());
    assert_eq!(body["imageVersion"], "1.0.0");
    assert_eq!(body["bundleSha256"], DIGEST);
    assert!(body["bootMs"].is_u64());
    Ok(())
}

#[tokio::test]
async fn registration_body_survives_lost_replies_and_kills() -> Result<()> {
    let platform = Platform::start(registered_response()).await?;
    let (machine, listen) = machine_with_release(&platform).await?;
    let extra_env =
        |points: &'static str| [("GATEWAY_LISTEN", listen.clone()), ("FAILPOINTS", points.to_owned())];
    for point in svc::host::link::register::FAILPOINTS {
        let kill: &'static str = Box::leak(format!("{point}=return(kill)").into_boxed_str());
        let extra_env = extra_env(kill);
        let extra_env: Vec<(&str, &str)> =
            extra_env.iter().map(|(name, value)| (*name, value.as_str())).collect();
        register(&machine, &[], &extra_env).await?.expect_killed();
    }
    platform.queue([
        ScriptedResponse::Lost,
        ScriptedResponse::Json(503, json!({ "detail": "x".repeat(300 << 10) })),
        ScriptedResponse::Json(429, json!({})),
        registered_response(),
    ]);
    register(&machine, &[], &[("GATEWAY_LISTEN", &listen)]).await?.expect(0);
    let calls = platform.calls();
    assert_eq!(calls.len(), 5, "there must be one call before the last kill, and four after it: {calls:?}");
    assert!(calls.iter().all(|call| call == &calls[0]), "{calls:?}");
    Ok(())
}

#[tokio::test]
async fn refusal_is_final_and_a_lost_response_is_retried() -> Result<()> {
    let refused = json!({ "code": "registration_rejected", "detail": "The token has already been used." });
    let platform = Platform::start(ScriptedResponse::Json(401, refused)).await?;
    let (machine, listen) = machine_with_release(&platform).await?;
    let extra_env = [("GATEWAY_LISTEN", listen.as_str()), ("REGISTER_PLATFORM_DEADLINE_SECONDS", "1")];
    let result = register(&machine, &[], &extra_env).await?.expect(77);
    assert!(result.stderr.contains("The token has already been used."), "{}", result.stderr);
    assert_eq!(platform.calls().len(), 1);

    let unresponsive = Platform::start(ScriptedResponse::Lost).await?;
    unresponsive.configure(&machine)?;
    register(&machine, &[], &extra_env).await?.expect(75);
    assert!(unresponsive.calls().len() > 1);

    let rejecting = Platform::start(ScriptedResponse::Json(400, json!({ "detail": "no" }))).await?;
    rejecting.configure(&machine)?;
    register(&machine, &[], &extra_env).await?.expect(70);
    Ok(())
}

#[tokio::test]
async fn registration_waits_for_the_gateway_with_the_stored_key() -> Result<()> {
    let platform = Platform::start(registered_response()).await?;
    let (machine, listen) = machine_with_release(&platform).await?;
    let extra_env = [("GATEWAY_LISTEN", listen.as_str()), ("REGISTER_GATEWAY_DEADLINE_SECONDS", "1")];
    // Another gateway's key replaces the machine's.
    start_gateway(&machine).await?;
    register(&machine, &[], &extra_env).await?.expect(75);
    std::fs::remove_dir_all(machine.path("var/lib/svc/tls"))?;
    register(&machine, &[], &extra_env).await?.expect(75);
    assert!(platform.calls().is_empty());
    Ok(())
}

#[tokio::test]
async fn failed_boot_is_reported_without_secrets() -> Result<()> {
    let platform = Platform::start(ScriptedResponse::Json(202, json!({}))).await?;
    let machine = Machine::bare(1)?;
    platform.configure(&machine)?;
    machine.set_env_vars(
        "host.env",
        &[("DATABASE_URL", "postgres://postgres:hunter2hunter2@127.0.0.1:1/svc")],
    )?;
    let message = format!("no bundle\nupgrade-token-of-a-machine hunter2hunter2 {}", "x".repeat(9000));
    register(&machine, &["failure", "--stage", "bundle", "--message", &message], &[]).await?.expect(0);
    let call = platform.calls().pop().context("no call was recorded")?;
    assert_eq!(call.path, format!("/vps/{}/boot-failure", machine.id));
    assert_eq!(call.authorization, "Bearer registration-token-of-a-machine");
    let body: serde_json::Value = serde_json::from_str(&call.body)?;
    assert_eq!(body["stage"], "bundle");
    let message = body["message"].as_str().context("no message")?;
    assert!(message.starts_with("no bundle [hidden] [hidden] xxx") && message.len() <= 500, "{message}");
    register(&machine, &["failure", "--stage", "elsewhere", "--message", "x"], &[]).await?.expect(64);
    Ok(())
}
