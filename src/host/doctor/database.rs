//! The machine's own PostgreSQL: there, version 16, on this machine alone.

use std::time::Instant;

use tokio_postgres::config::Host;

use super::settings;
use crate::chain::chain;
use crate::config::Env;
use crate::diagnosis::Findings;
use crate::host::config::DatabaseUrl;
use crate::host::layout::Layout;
use crate::host::pgconn::Server;

const NEXT: &str = "systemctl status svc-postgres; journalctl -u svc-postgres -n 50";

pub async fn check(layout: &Layout) -> Findings {
    let findings = Findings::of("database");
    let mut env = settings(layout);
    let findings = match is_own(&mut env) {
        Ok(_) => findings,
        Err(why) => findings.problem(why, "DATABASE_URL in host.env must name 127.0.0.1:5432"),
    };
    let Some(Ok(config)) = DatabaseUrl::read(&mut env).as_ref().map(DatabaseUrl::config) else {
        return findings;
    };
    let server = Server::new(config);
    let start = Instant::now();
    let client = match server.connect(server.database(), "svcctl doctor").await {
        Ok(client) => client,
        Err(error) => return findings.problem(chain(&error), NEXT),
    };
    let asked = client.query_one("SELECT current_setting('server_version'), pg_is_in_recovery()", &[]).await;
    match asked {
        Ok(row) => {
            let version: String = row.get(0);
            if !version.starts_with("16") {
                let what = format!("it is PostgreSQL {version}; snapshots and tools are of 16");
                return findings.problem(what, "SVC_POSTGRES_IMAGE and the unit svc-postgres say what runs");
            }
            findings.or_ok(format!(
                "PostgreSQL {version}, database {}, answers in {} ms",
                server.database(),
                start.elapsed().as_millis()
            ))
        }
        Err(error) => findings.problem(chain(&error), NEXT),
    }
}

/// Where `DATABASE_URL` leads; an error where that is not this machine.
pub fn is_own(env: &mut Env) -> Result<String, String> {
    let Some(url) = DatabaseUrl::read(env) else {
        return Err("DATABASE_URL is not set, or not for us to read".to_owned());
    };
    let config = url.config().map_err(|error| error.to_string())?;
    for host in config.get_hosts() {
        match host {
            Host::Tcp(name) if name == "localhost" => {}
            Host::Tcp(name) if name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback()) => {}
            Host::Unix(_) => {}
            Host::Tcp(name) => return Err(format!("the database is on {name}, not on this machine")),
        }
    }
    let port = config.get_ports().first().copied().unwrap_or(5432);
    Ok(format!("the database is this machine's own, on port {port}"))
}
