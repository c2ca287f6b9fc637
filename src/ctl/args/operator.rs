//! Arguments of `svcctl operator` and `svcctl audit`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use jiff::{Span, SpanRelativeTo, Timestamp, Unit};

use svc_machine::id::AuditId;
use svc_machine::name::OperatorName;
use svc_wire::operator::Scope;

#[derive(Debug, Subcommand)]
pub enum OperatorCommand {
    /// Add a named operator with a token
    #[command(
        after_help = "Scopes: read (machines, operations, rollouts, slots, the audit log), operate (changes to machines, rollouts \
and pointers; snapshots; file backups), billing (subscriptions, usage), metrics (the platform's \
metrics), admin (operators, the audit log, the keys of file backups). No scope implies another, and you can grant only \
scopes that you have. The token is shown once.\n\n\
Example: svcctl operator add ada --scope read,operate --token-file ada.token"
    )]
    Add {
        /// Name of the operator, used in the audit log
        #[arg(value_name = "NAME")]
        name: OperatorName,
        /// Scopes, separated by commas
        #[arg(long = "scope", value_name = "SCOPE", required = true, value_delimiter = ',', value_parser = Scope::ALL.map(Scope::as_str))]
        scopes: Vec<String>,
        #[command(flatten)]
        token: TokenOptions,
    },
    /// List operators, including expired and revoked ones
    #[command(after_help = "Example: svcctl operator list")]
    List,
    /// Issue a new token for an operator; the old token stays valid for the overlap
    #[command(after_help = "Example: svcctl operator rotate ada --overlap 1h --token-file ada.token")]
    Rotate {
        /// The operator
        #[arg(value_name = "NAME")]
        name: OperatorName,
        /// How long the old token stays valid, at most 7d; 0s revokes it now
        #[arg(long = "overlap", value_name = "DURATION", default_value = "1h", value_parser = parse_seconds)]
        overlap_seconds: u64,
        #[command(flatten)]
        token: TokenOptions,
    },
    /// Revoke all tokens of an operator permanently
    #[command(after_help = "Example: svcctl operator revoke ada")]
    Revoke {
        /// The operator
        #[arg(value_name = "NAME")]
        name: OperatorName,
        /// Skip the confirmation
        #[arg(long)]
        yes: bool,
    },
    /// Show which operator you are, and your scopes
    #[command(after_help = "Example: svcctl operator whoami --secret-file ada.token")]
    Whoami,
}

/// Token lifetime and output file.
#[derive(Debug, Args)]
pub struct TokenOptions {
    /// How long the token is valid, at most 400d
    #[arg(long = "ttl", value_name = "DURATION", default_value = "90d", value_parser = parse_seconds)]
    pub ttl_seconds: u64,
    /// Write the token to this file, readable only by you, instead of printing it
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Audit {
    /// Only entries by this actor: an operator's name, `operator` for PLATFORM_SECRET, `platform`, or `machine:ID`
    #[arg(long, value_name = "NAME")]
    pub actor: Option<String>,
    /// Only entries with this action, such as `recover` or `operator.add`
    #[arg(long, value_name = "ACTION")]
    pub action: Option<String>,
    /// Only entries about this target: a machine's, an operation's or a rollout's id, USER/SLOT, or the name of an
    /// operator or an alarm
    #[arg(long, value_name = "TARGET")]
    pub target: Option<String>,
    /// Only entries since this time: RFC 3339, or an age such as 24h
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub since: Option<Timestamp>,
    /// Only entries before this time
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub until: Option<Timestamp>,
    /// Maximum number of entries
    #[arg(long, value_name = "COUNT", default_value = "100", value_parser = clap::value_parser!(u16).range(1..=500))]
    pub limit: u16,
    /// Cursor from the previous page, to list older entries
    #[arg(long, value_name = "CURSOR")]
    pub cursor: Option<AuditId>,
    /// Print new entries as they are written; with --json, one entry per line
    #[arg(long, conflicts_with_all = ["cursor", "until"])]
    pub follow: bool,
}

/// Parses a duration in whole seconds, such as `90d`, `1h` or `30s`. Days are 24 hours.
fn parse_seconds(text: &str) -> Result<u64, String> {
    let invalid = || "must be a duration such as 90d, 1h or 30s".to_owned();
    let span: Span = text.parse().map_err(|_| invalid())?;
    let seconds = span.total((Unit::Second, SpanRelativeTo::days_are_24_hours())).map_err(|_| invalid())?;
    if seconds < 0.0 || seconds.fract() != 0.0 {
        return Err(invalid());
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole, and not negative")]
    Ok(seconds as u64)
}

/// Parses a time, or an age such as `24h`.
fn parse_time(text: &str) -> Result<Timestamp, String> {
    if let Ok(time) = text.parse() {
        return Ok(time);
    }
    let invalid = || "must be a time such as 2026-01-02T03:04:05Z, or an age such as 24h".to_owned();
    let age = i64::try_from(parse_seconds(text).map_err(|_| invalid())?).map_err(|_| invalid())?;
    Timestamp::now().checked_sub(jiff::SignedDuration::from_secs(age)).map_err(|_| invalid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_seconds_requires_units() {
        assert_eq!(
            (parse_seconds("90d"), parse_seconds("1h"), parse_seconds("0s")),
            (Ok(7_776_000), Ok(3600), Ok(0))
        );
        for invalid in ["", "7", "-1h", "1 month", "1.5", "soon"] {
            assert!(parse_seconds(invalid).is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn parse_time_accepts_times_and_ages() {
        assert_eq!(parse_time("2026-01-02T03:04:05Z").unwrap().to_string(), "2026-01-02T03:04:05Z");
        let age_seconds = Timestamp::now().as_second() - parse_time("1h").unwrap().as_second();
        assert!((3600..3605).contains(&age_seconds), "{age_seconds}");
        assert!(parse_time("yesterday").is_err());
    }
}
