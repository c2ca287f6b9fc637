//! The platform's database: reachable, with a known schema and a matching clock.

use std::time::{Duration, Instant};

use jiff::Timestamp;

use crate::config::PlatformConfig;
use crate::db::{self, migrate};
use svc_base::diagnosis::Findings;
use svc_http::problem::chain;

pub async fn check(config: &PlatformConfig) -> Findings {
    let findings = Findings::new("database");
    let next = "check that it is running, PLATFORM_DATABASE_URL, and the database's log";
    let mut settings = config.database.clone();
    settings.connect_timeout(Duration::from_secs(8)).application_name("svcctl doctor");
    let start = Instant::now();
    let client = match db::connect(&settings).await {
        Ok((client, _)) => client,
        Err(error) => return findings.problem(chain(&error), next),
    };
    let read = client.query_one("SELECT current_setting('server_version'), now()", &[]).await;
    let (version, now): (String, Timestamp) = match read {
        Ok(row) => (row.get(0), row.get(1)),
        Err(error) => return findings.problem(chain(&error), next),
    };
    let waited = start.elapsed().as_millis();
    // Leases and deadlines use the database's clock, tokens this machine's. The round trip is not counted as a
    // difference.
    let off = Timestamp::now().as_millisecond() - now.as_millisecond();
    let tolerated = (config.timing.max_clock_skew + start.elapsed()).as_millis();
    let findings = if u128::from(off.unsigned_abs()) > tolerated {
        findings.problem(
            format!("its clock differs from this machine's by {:.1} s", off.abs() as f64 / 1000.0),
            "timedatectl status, on both machines",
        )
    } else {
        findings
    };
    let newest = migrate::newest_version();
    let applied = "SELECT max(version)::int FROM refinery_schema_history";
    let applied = client.query_one(applied, &[]).await.map(|row| row.get::<_, Option<i32>>(0));
    match applied.ok().flatten().map(i32::unsigned_abs) {
        None => findings.warning(
            "it has no svc schema yet",
            "svc-platform creates it at its first start; check that this is the right database",
        ),
        Some(applied) if applied > newest => findings.problem(
            format!("its schema has version {applied}, this binary supports {newest}"),
            "a newer svc-platform migrated it: install that release",
        ),
        Some(applied) if applied < newest => findings.warning(
            format!("its schema has version {applied}, this binary has {newest}"),
            "svc-platform migrates it at its next start",
        ),
        Some(applied) => {
            findings.or_ok(format!("PostgreSQL {version}, schema {applied}, responds in {waited} ms"))
        }
    }
}
