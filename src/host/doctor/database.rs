//! Checks that `DATABASE_URL` points to this machine's PostgreSQL, that the server is reachable and runs version 16,
//! and that it holds the restored database.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Instant;

use tokio_postgres::config::Host;

use super::services_env;
use crate::snapshots::database_identity;
use crate::snapshots::database_identity::IdentityError;
use crate::system::config::DatabaseUrl;
use crate::system::layout::Layout;
use crate::system::postgres::PostgresServer;
use svc_base::config::Env;
use svc_base::diagnosis::Findings;
use svc_base::error_chain::format_chain;

/// The `svc-postgres` port.
const POSTGRES_PORT: u16 = 5432;
const IDENTITY_NEXT_STEP: &str = "if this database is the right one, run `svc-restore adopt`; otherwise \
                                  restore the latest snapshot: here with `svc-restore replace`, or on a new \
                                  server with `svcctl recover USER`";
const NEXT_STEP: &str = "run `systemctl status svc-postgres; journalctl -u svc-postgres -n 50`";

pub async fn check(layout: &Layout) -> Findings {
    let findings = Findings::new("database");
    let mut env = services_env(layout);
    let findings = match read_own_port(layout, &mut env) {
        Ok(_) => findings,
        Err(error) => {
            findings.problem(error, "set DATABASE_URL in host.env to the database on 127.0.0.1:5432")
        }
    };
    let Some(Ok(config)) = DatabaseUrl::read(&mut env).as_ref().map(DatabaseUrl::config) else {
        return findings;
    };
    let server = PostgresServer::new(config);
    let start = Instant::now();
    let client = match server.connect(server.database(), "svcctl doctor").await {
        Ok(client) => client,
        Err(error) => return findings.problem(format_chain(&error), NEXT_STEP),
    };
    if let Err(error) = database_identity::check(layout, &client).await {
        return findings.problem(format_chain(&error), identity_next_step(&error));
    }
    let result = client.query_one("SELECT current_setting('server_version')", &[]).await;
    match result {
        Ok(row) => {
            let version: String = row.get(0);
            if !version.starts_with("16") {
                let what = format!("the server runs PostgreSQL {version}, but snapshots and tools need 16");
                let next = "check SVC_POSTGRES_IMAGE in update.env, and the unit svc-postgres";
                return findings.problem(what, next);
            }
            findings.or_ok(format!(
                "PostgreSQL {version}, database {}, responds in {} ms",
                server.database(),
                start.elapsed().as_millis()
            ))
        }
        Err(error) => findings.problem(format_chain(&error), NEXT_STEP),
    }
}

/// Returns the next step after a failed identity check. Adopting or restoring a database is suggested only after a
/// mismatch.
fn identity_next_step(error: &IdentityError) -> &'static str {
    if error.is_mismatch() { IDENTITY_NEXT_STEP } else { NEXT_STEP }
}

/// Returns the port of this machine's database from `DATABASE_URL`.
///
/// # Errors
/// The reason, if `DATABASE_URL` is missing, unreadable or invalid, or doesn't point to this machine's database.
pub fn read_own_port(layout: &Layout, env: &mut Env) -> Result<u16, String> {
    let Some(url) = DatabaseUrl::read(env) else {
        return Err("DATABASE_URL is not set, or this user has no permission to read it".to_owned());
    };
    let config = url.config().map_err(|error| error.to_string())?;
    for host in config.get_hosts() {
        match host {
            Host::Tcp(name) if name == "localhost" => {}
            Host::Tcp(name) if name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback()) => {}
            Host::Unix(_) => {}
            Host::Tcp(name) => return Err(format!("the database is on {name}, not on this machine")),
        }
    }
    let port = config.get_ports().first().copied().unwrap_or(POSTGRES_PORT);
    // Under a different root, as in tests, several machines share a network, so ports differ.
    if port != POSTGRES_PORT && layout.root() == Path::new("/") {
        return Err(format!("the database is on port {port}, where svc-postgres does not listen"));
    }
    Ok(port)
}

/// Checks that the gateway-reported database server is the local one on `port`.
///
/// # Errors
/// A message naming both servers, if the gateway is connected to a different one.
pub fn check_gateway_server(server: &str, port: u16) -> Result<String, String> {
    let is_here = |address: SocketAddr| address.ip().is_loopback() && address.port() == port;
    if server == "socket" || server.parse().is_ok_and(is_here) {
        return Ok(format!("the gateway is connected to this machine's own database, {server}"));
    }
    Err(format!(
        "the gateway is connected to {server}, but this machine's own database is on 127.0.0.1:{port}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_next_step_suggests_restore_only_for_mismatch() {
        let mismatch = IdentityError::Mismatch { difference: "x".to_owned() };
        assert_eq!(identity_next_step(&mismatch), IDENTITY_NEXT_STEP);
        assert_eq!(identity_next_step(&IdentityError::Absent("svc".to_owned())), NEXT_STEP);
    }

    #[test]
    fn check_gateway_server_accepts_only_local_server() {
        for own in ["127.0.0.1:5432", "[::1]:5432", "socket"] {
            assert!(check_gateway_server(own, POSTGRES_PORT).is_ok(), "{own}");
        }
        for other in ["127.0.0.1:5433", "192.0.2.7:5432", ""] {
            assert!(
                check_gateway_server(other, POSTGRES_PORT).unwrap_err().contains("127.0.0.1:5432"),
                "{other}"
            );
        }
    }

    #[test]
    fn read_own_port_accepts_only_local_database() {
        let port = |root: &str, url: &str| {
            read_own_port(&Layout::new(root), &mut Env::from_pairs([("DATABASE_URL", url)]))
        };
        assert_eq!(port("/", "postgres://svc:pw@127.0.0.1:5432/svc"), Ok(POSTGRES_PORT));
        assert_eq!(port("/machine", "postgres://svc:pw@localhost:7001/svc"), Ok(7001));
        for (url, expected) in [
            ("postgres://svc:pw@127.0.0.1:5433/svc", "on port 5433"),
            ("postgres://svc:pw@192.0.2.7/svc", "on 192.0.2.7"),
        ] {
            let error = port("/", url).unwrap_err();
            assert!(error.contains(expected) && !error.contains("pw"), "{error}");
        }
    }
}
