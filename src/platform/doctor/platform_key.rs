//! The platform keys: whether `PLATFORM_KEY_PREVIOUS` is missing, still needed, or removable.

use crate::config::PlatformConfig;
use crate::db::{Db, DbError, platform_keys};
use crate::key_change::mark::{self, MarkError, NamedKey};
use crate::key_change::{self, need::KeyNeed};
use crate::keys::{self, KeyError, Seal};
use crate::platform_key::KeyIds;
use crate::tokens::TokenMint;
use svc_base::chain::chain;
use svc_base::diagnosis::Findings;
use svc_store::StoreError;

/// The relevant state of the database.
struct KeyUsage {
    need: KeyNeed,
    /// Whether the previous key has been used here.
    is_previous_used: bool,
    /// Number of running processes, and of those that have the previous key.
    processes: (i64, i64),
    /// The error of an active signing key that neither of two keys decrypts.
    unopened: Option<KeyError>,
}

pub async fn check(config: &PlatformConfig) -> Findings {
    let findings = Findings::new("platform-key");
    let ids = config.keys.ids();
    let (findings, named) = match named_key(config, &ids).await {
        Ok(named) => (findings, Some(named)),
        Err(MarkError::UnknownKey(other)) => return findings.problem(other.to_string(), other.advice()),
        Err(error @ MarkError::Store(StoreError::Corrupt { .. })) => {
            let next = format!(
                "delete {} if PLATFORM_KEY is the current key; svc-platform will not start",
                mark::MARK_PATH
            );
            return findings.problem(chain(&error), next);
        }
        Err(error) => (
            findings.warning(
                format!("cannot check whether PLATFORM_KEY is the current one: {}", chain(&error)),
                "see the check `store`",
            ),
            None,
        ),
    };
    match load_usage(config).await {
        Ok(Some(usage)) => assess(findings, &ids, &usage, named),
        Ok(None) => findings.skipped("svc-platform of this release has not started yet"),
        Err(error) => findings.problem(format!("{error:#}"), "see the check `database`"),
    }
}

/// Which of the keys the store names as the current one.
async fn named_key(config: &PlatformConfig, ids: &KeyIds) -> Result<NamedKey, MarkError> {
    match config.store.open() {
        Ok(bucket) => mark::check(&bucket, ids).await,
        // The check of the store reports it.
        Err(_) => Ok(NamedKey::NoMark),
    }
}

fn assess(findings: Findings, ids: &KeyIds, usage: &KeyUsage, named: Option<NamedKey>) -> Findings {
    if let Some(error) = &usage.unopened {
        return findings
            .problem(error.to_string(), "one of the two keys is wrong; svc-platform will not start");
    }
    let findings = match &ids.previous {
        None if usage.need.is_empty() => findings.ok(format!("{} made all stored secrets", ids.current)),
        None => findings.problem(
            format!("PLATFORM_KEY {} is not the only key that is needed: another made {}", ids.current, usage.need),
            "set PLATFORM_KEY_PREVIOUS to the earlier PLATFORM_KEY; svc-platform will not start",
        ),
        Some(previous) if !usage.is_previous_used && usage.need.is_empty() => {
            let (all, with) = usage.processes;
            findings.ok(format!(
                "{previous} is prepared, and in force in {with} of {all} running processes: once in all, it may become \
                 PLATFORM_KEY, and {} PLATFORM_KEY_PREVIOUS",
                ids.current
            ))
        }
        Some(previous) if usage.need.is_empty() && named == Some(NamedKey::Previous) => findings.warning(
            format!("PLATFORM_KEY_PREVIOUS {previous} is still needed: the object store names it as the current key"),
            "keep it; a running svc-platform records the new key once it reaches the store; then run this again",
        ),
        Some(previous) if usage.need.is_empty() => findings.warning(
            format!("PLATFORM_KEY_PREVIOUS {previous} is no longer needed: it can be dropped"),
            "remove it, and restart svc-platform; keep it as long as copies of the database from before the change",
        ),
        Some(previous) if usage.need.has_processes() => findings.warning(
            format!("PLATFORM_KEY_PREVIOUS {previous} is still needed: {}", usage.need),
            format!(
                "restart the processes that have the other key as PLATFORM_KEY, with {} as PLATFORM_KEY and {previous} as \
                 PLATFORM_KEY_PREVIOUS: nothing is made again before that. Each logged its id at its start, with the address \
                 of its API",
                ids.current
            ),
        ),
        Some(previous) => findings.warning(
            format!("PLATFORM_KEY_PREVIOUS {previous} is still needed: {}", usage.need),
            "keep it; running platforms and heartbeats replace it automatically; then run this again",
        ),
    };
    match usage.need.silent() {
        Some(silent) => findings.warning(
            format!("{silent} without a token of PLATFORM_KEY"),
            "not waited for: the token rotates at the next heartbeat; after a restored database, recover them first",
        ),
        None => findings,
    }
}

async fn load_usage(config: &PlatformConfig) -> anyhow::Result<Option<KeyUsage>> {
    let db = Db::new(&config.database, 1)?;
    let session = db.session().await?;
    if !platform_keys::has_tables(&session).await? || !platform_keys::has_any(&session).await? {
        return Ok(None);
    }
    Ok(Some(read_usage(config, &session).await?))
}

async fn read_usage(
    config: &PlatformConfig,
    client: &impl deadpool_postgres::GenericClient,
) -> Result<KeyUsage, DbError> {
    let unopened = error_of_unopened_key(config, client).await?;
    let (ids, ttl) = (config.keys.ids(), key_change::row_ttl(&config.timing));
    let mint = TokenMint::new(&config.keys.current).with_previous(config.keys.previous.as_ref());
    let silence = config.timing.keys.max_silence;
    let need = KeyNeed::find(client, &ids.current, &mint, &Seal::of(&config.keys), silence, ttl).await?;
    let (is_previous_used, processes) = match &ids.previous {
        Some(previous) => (
            platform_keys::is_known(client, previous).await?,
            platform_keys::count_with_key(client, previous, ttl).await?,
        ),
        None => (false, (0, 0)),
    };
    Ok(KeyUsage { need, is_previous_used, processes, unopened })
}

/// The error with which `svc-platform` would refuse to start. With one key, `need` names the signing keys.
async fn error_of_unopened_key(
    config: &PlatformConfig,
    client: &impl deadpool_postgres::GenericClient,
) -> Result<Option<KeyError>, DbError> {
    if config.keys.previous.is_none() {
        return Ok(None);
    }
    match keys::ensure_opened(client, &Seal::of(&config.keys)).await {
        Ok(()) => Ok(None),
        Err(KeyError::Db(error)) => Err(error),
        Err(error) => Ok(Some(error)),
    }
}
