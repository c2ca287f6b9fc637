//! pgbench: runs equivalents of the bridge's statements directly in PostgreSQL, as the upper bound.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

use kit::child;
use kit::pg::PgServer;

/// Returns the transactions per second for one statement.
pub fn measure_tps(server: &PgServer, database: &str, sql: &str, clients: u32, seconds: u32) -> Result<f64> {
    let dir = tempfile::tempdir()?;
    let script = dir.path().join("statement.sql");
    fs::write(&script, format!("{sql}\n"))?;
    let mut command = server.binaries().client_command("pgbench");
    command.env("PGPASSWORD", server.password());
    command.args(["--host", "127.0.0.1", "--port", &server.port().to_string(), "--username", "postgres"]);
    command.args(["--protocol", "prepared", "--no-vacuum", "--client", &clients.to_string()]);
    command.args(["--jobs", "1", "--time", &seconds.to_string(), "--file"]).arg(&script).arg(database);
    parse_tps(&child::run(command, Duration::from_secs(u64::from(seconds) + 30))?)
}

fn parse_tps(output: &str) -> Result<f64> {
    let line = output.lines().find_map(|line| line.strip_prefix("tps = "));
    let number = line.and_then(|line| line.split_whitespace().next());
    number
        .with_context(|| format!("pgbench printed no tps: {output}"))?
        .parse()
        .context("cannot parse pgbench's tps")
}

#[cfg(test)]
mod tests {
    #[test]
    fn tps_is_parsed_from_output() {
        let output = "number of failed transactions: 0 (0.000%)\ninitial connection time = 9.1 ms\n\
            tps = 13835.250000 (without initial connection time)\n";
        assert_eq!(super::parse_tps(output).expect("the output has a tps line"), 13835.25);
        assert!(super::parse_tps("pgbench: error: connection refused").is_err());
    }
}
