//! Checks the platform connection, whether this machine has been replaced or deleted, and clock skew against the
//! platform.

use std::time::Duration;

use http::HeaderMap;
use jiff::{SignedDuration, Timestamp};

use super::services_env;
use crate::system::config::PlatformAccess;
use crate::system::heartbeat_failure::HeartbeatFailure;
use crate::system::layout::Layout;
use crate::system::platform_response::response_date;
use svc_base::diagnosis::Findings;
use svc_base::error_chain::format_chain;
use svc_http::client::{self, Timeouts};

/// Below the skew that causes rejections: proofs and tokens have a leeway of 30 s.
const MAX_CLOCK_SKEW_SECONDS: i64 = 20;
/// Shorter heartbeat outages are only a warning, since the platform may be restarting.
const MIN_PROBLEM_AGE: SignedDuration = SignedDuration::from_mins(2);
const TIMEOUTS: Timeouts = Timeouts {
    connect: Duration::from_secs(4),
    total: Some(Duration::from_secs(8)),
    idle: Duration::from_secs(8),
};

async fn fetch_headers(layout: &Layout) -> Result<HeaderMap, String> {
    let Some(platform) = PlatformAccess::read(&mut services_env(layout), layout) else {
        return Err("PLATFORM_INTERNAL_URL or UPGRADE_TOKEN is missing or invalid".to_owned());
    };
    let client = client::build(TIMEOUTS).map_err(|error| format!("{error:#}"))?;
    let url = platform.url("/livez");
    let response = client.get(url.clone()).send().await;
    let response = response.map_err(|error| format_chain(&error.without_url()))?;
    match response.status() {
        status if status.is_success() => Ok(response.headers().clone()),
        status => Err(format!("{url} returned {status}")),
    }
}

pub async fn check(layout: &Layout) -> Findings {
    let findings = Findings::new("platform");
    if layout.superseded().exists() {
        return findings.problem(
            "this machine has been replaced or deleted",
            "do nothing: this machine stops automatically, and its server will be deleted",
        );
    }
    match fetch_headers(layout).await {
        Ok(_) => check_heartbeats(findings, layout),
        Err(error) => findings.problem(
            format!("the platform cannot be reached: {error}"),
            "check PLATFORM_INTERNAL_URL in host.env, and this machine's outbound network",
        ),
    }
}

/// Reports failing heartbeats. A reachable platform may still reject them.
fn check_heartbeats(findings: Findings, layout: &Layout) -> Findings {
    let failure = match HeartbeatFailure::read(layout) {
        Ok(failure) => failure,
        Err(error) => return findings.skipped(format!("{error}; run the doctor as root")),
    };
    let Some(HeartbeatFailure { since, error, is_refused, .. }) = failure else {
        return findings.ok(
            "the platform is reachable, no heartbeat has failed since the last success, and this machine has not been \
             replaced or deleted",
        );
    };
    let next = if is_refused {
        "run `svcctl fleet` as an operator: its alarms name the cause, for example that the platform has the wrong key"
    } else {
        "run `svcctl doctor platform` on the platform's server, and `journalctl -u svc-sync-agent` here"
    };
    if Timestamp::now().duration_since(since) < MIN_PROBLEM_AGE {
        findings.warning(format!("the last heartbeat failed: {error}"), next)
    } else {
        findings.problem(format!("all heartbeats since {since:.0} have failed: {error}"), next)
    }
}

pub async fn check_clock(layout: &Layout) -> Findings {
    let findings = Findings::new("clock");
    let Ok(headers) = fetch_headers(layout).await else {
        return findings.skipped(
            "the clock was not compared with the platform's, because the platform cannot be reached",
        );
    };
    let now = Timestamp::now();
    match response_date(&headers) {
        Some(platform_time) => {
            let skew = now.as_second() - platform_time.as_second();
            if skew.abs() <= MAX_CLOCK_SKEW_SECONDS {
                return findings
                    .ok(format!("the clock is within {MAX_CLOCK_SKEW_SECONDS} s of the platform's"));
            }
            let direction = if skew > 0 { "ahead of" } else { "behind" };
            findings.problem(
                format!(
                    "this machine's clock is {} s {direction} the platform's: this machine may refuse the platform's \
                     requests",
                    skew.abs()
                ),
                "run `timedatectl status; systemctl restart systemd-timesyncd`",
            )
        }
        None => findings.skipped("the platform's response has no Date header"),
    }
}
