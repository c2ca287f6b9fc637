//! The machine's own PostgreSQL: there, version 16, on this machine alone.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Instant;

use tokio_postgres::config::Host;

use super::settings;
use crate::chain::chain;
use crate::config::Env;
use crate::diagnosis::Findings;
use crate::host::snapshots::database_identity;
use crate::host::system::config::DatabaseUrl;
use crate::host::system::layout::Layout;
use crate::host::system::postgres::Server;

/// Where `svc-postgres` listens.
const PORT: u16 = 5432;
const NEXT_IDENTITY: &str =
    "`svcctl recover`, or on this machine `svc-restore replace` or `svc-restore adopt`";
const NEXT: &str = "systemctl status svc-postgres; journalctl -u svc-postgres -n 50";

pub async fn check(layout: &Layout) -> Findings {
    let findings = Findings::of("database");
    let mut env = settings(layout);
    let findings = match own_port(layout, &mut env) {
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
    if let Err(error) = database_identity::check(layout, &client).await {
        return findings.problem(chain(&error), NEXT_IDENTITY);
    }
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

/// The port of this machine's own database, where `DATABASE_URL` leads to it; else why not.
pub fn own_port(layout: &Layout, env: &mut Env) -> Result<u16, String> {
    let Some(url) = DatabaseUrl::read(env) else {
        return Err("DATABASE_URL is not set, or not for us to read".to_owned());
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
    let port = config.get_ports().first().copied().unwrap_or(PORT);
    // Another root shares its network with others, and has a port of its own.
    if port != PORT && layout.root() == Path::new("/") {
        return Err(format!("the database is on port {port}, where svc-postgres does not listen"));
    }
    Ok(port)
}

/// Whether the server that the gateway says it is connected to is the one on this port of this machine.
pub fn is_own(server: &str, port: u16) -> Result<String, String> {
    let is_here = |at: SocketAddr| at.ip().is_loopback() && at.port() == port;
    if server == "socket" || server.parse().is_ok_and(is_here) {
        return Ok(format!("the gateway is connected to this machine's own, {server}"));
    }
    Err(format!(
        "the gateway is connected to {server}, and this machine's own database is on 127.0.0.1:{port}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machines_own_server_is_its_own() {
        for own in ["127.0.0.1:5432", "[::1]:5432", "socket"] {
            assert!(is_own(own, PORT).is_ok(), "{own}");
        }
        for other in ["127.0.0.1:5433", "192.0.2.7:5432", ""] {
            assert!(is_own(other, PORT).unwrap_err().contains("127.0.0.1:5432"), "{other}");
        }
        let port = |root: &str, url: &str| {
            own_port(&Layout::new(root), &mut Env::from_pairs([("DATABASE_URL", url)]))
        };
        assert_eq!(port("/", "postgres://svc:pw@127.0.0.1:5432/svc"), Ok(PORT));
        assert_eq!(port("/machine", "postgres://svc:pw@localhost:7001/svc"), Ok(7001));
        for (url, why) in [
            ("postgres://svc:pw@127.0.0.1:5433/svc", "on port 5433"),
            ("postgres://svc:pw@192.0.2.7/svc", "on 192.0.2.7"),
        ] {
            let said = port("/", url).unwrap_err();
            assert!(said.contains(why) && !said.contains("pw"), "{said}");
        }
    }
}
