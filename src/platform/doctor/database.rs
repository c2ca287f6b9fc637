//! Checks that the platform's database is reachable, has a supported schema, and has a clock that agrees with this
//! machine's.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio_postgres::error::SqlState;

use crate::config::PlatformConfig;
use crate::db::{self, migrate};
use svc_base::diagnosis::Findings;
use svc_http::problem::format_chain;

pub async fn check(config: &PlatformConfig) -> Findings {
    let findings = Findings::new("database");
    let next = "check that the database is running and that PLATFORM_DATABASE_URL is correct; see also the database's log";
    let mut settings = config.database.clone();
    settings.connect_timeout(Duration::from_secs(8)).application_name("svcctl doctor");
    let start = Instant::now();
    let client = match db::connect(&settings).await {
        Ok((client, _)) => client,
        Err(error) => return findings.problem(format_chain(&error), next),
    };
    let result = client.query_one("SELECT current_setting('server_version'), now()", &[]).await;
    let (version, now): (String, Timestamp) = match result {
        Ok(row) => (row.get(0), row.get(1)),
        Err(error) => return findings.problem(format_chain(&error), next),
    };
    let response_ms = start.elapsed().as_millis();
    // Leases and deadlines use the database's clock; tokens use this machine's. The round trip does not count as skew.
    let skew_ms = Timestamp::now().as_millisecond() - now.as_millisecond();
    let tolerated_ms = (config.timing.max_clock_skew + start.elapsed()).as_millis();
    let findings = if u128::from(skew_ms.unsigned_abs()) > tolerated_ms {
        findings.problem(
            format!(
                "the database's clock differs from this machine's by {:.1} s",
                skew_ms.abs() as f64 / 1000.0
            ),
            "run `timedatectl status` on both machines, and synchronize their clocks",
        )
    } else {
        findings
    };
    let newest = migrate::NEWEST_VERSION;
    let query = "SELECT max(version)::int FROM refinery_schema_history";
    let applied = match client.query_one(query, &[]).await {
        Ok(row) => row.get::<_, Option<i32>>(0),
        Err(error) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => None,
        Err(error) => {
            let reason = format!("cannot read the schema's version: {}", format_chain(&error));
            let is_denied = error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE);
            let use_owner = "check that PLATFORM_DATABASE_URL names the user that owns the schema";
            return findings.problem(reason, if is_denied { use_owner } else { next });
        }
    };
    match applied.map(i32::unsigned_abs) {
        None => findings.warning(
            "the database has no svc schema yet",
            "svc-platform creates the schema when it first starts; check that this is the right database",
        ),
        Some(applied) if applied > newest => findings.problem(
            format!(
                "the database's schema has version {applied}, which is newer than this binary's {newest}"
            ),
            "a newer svc-platform has migrated the schema: install that release",
        ),
        Some(applied) if applied < newest => findings.warning(
            format!("the database's schema has version {applied}, but this binary needs {newest}"),
            "start svc-platform, which migrates the schema",
        ),
        Some(applied) => {
            findings.or_ok(format!("PostgreSQL {version}, schema {applied}, responds in {response_ms} ms"))
        }
    }
}
