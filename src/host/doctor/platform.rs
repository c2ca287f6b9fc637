//! The way to the platform, this machine's standing with it, and the clock, by the platform's.

use std::time::Duration;

use http::{HeaderMap, header};
use jiff::Timestamp;

use super::settings;
use crate::chain::chain;
use crate::diagnosis::Findings;
use crate::host::system::config::PlatformLink;
use crate::host::system::layout::Layout;
use crate::http::client::{self, Deadlines};

/// Proofs live a minute, and tokens have thirty seconds of leeway.
const MOST_OFF: i64 = 20;
const CALL: Deadlines = Deadlines {
    connect: Duration::from_secs(4),
    whole: Some(Duration::from_secs(8)),
    idle: Duration::from_secs(8),
};

async fn ask(layout: &Layout) -> Result<HeaderMap, String> {
    let Some(link) = PlatformLink::read(&mut settings(layout), layout) else {
        return Err("PLATFORM_INTERNAL_URL or UPGRADE_TOKEN is missing".to_owned());
    };
    let client = client::build(CALL).map_err(|error| format!("{error:#}"))?;
    let url = link.url("/livez");
    let answer = client.get(url.clone()).send().await;
    let answer = answer.map_err(|error| chain(&error.without_url()))?;
    match answer.status() {
        status if status.is_success() => Ok(answer.headers().clone()),
        status => Err(format!("{url} answered {status}")),
    }
}

pub async fn check(layout: &Layout) -> Findings {
    let findings = Findings::of("platform");
    if layout.superseded().exists() {
        return findings.problem(
            "another machine has taken this one's place",
            "nothing: it stops by itself, and its server is deleted",
        );
    }
    match ask(layout).await {
        Ok(_) => findings.ok("it answers, and this machine is the slot's current one as far as it was told"),
        Err(why) => findings.problem(
            format!("the platform cannot be reached: {why}"),
            "PLATFORM_INTERNAL_URL in host.env; the network's way out of this machine",
        ),
    }
}

pub async fn clock(layout: &Layout) -> Findings {
    let findings = Findings::of("clock");
    let Ok(headers) = ask(layout).await else {
        return findings.skipped("it is compared with the platform's, which cannot be reached");
    };
    let now = Timestamp::now();
    match date(&headers) {
        Some(theirs) => {
            let off = now.as_second() - theirs.as_second();
            if off.abs() <= MOST_OFF {
                return findings.ok(format!("within {MOST_OFF} s of the platform's"));
            }
            let way = if off > 0 { "ahead of" } else { "behind" };
            findings.problem(
                format!("{} s {way} the platform's: proofs will be refused", off.abs()),
                "timedatectl status; systemctl restart systemd-timesyncd",
            )
        }
        None => findings.skipped("the platform's answer has no date"),
    }
}

fn date(headers: &HeaderMap) -> Option<Timestamp> {
    let text = headers.get(header::DATE)?.to_str().ok()?;
    Some(jiff::fmt::rfc2822::parse(text).ok()?.timestamp())
}
