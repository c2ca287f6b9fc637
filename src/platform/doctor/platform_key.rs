//! Checks the platform keys: whether `PLATFORM_KEY_PREVIOUS` is missing, still needed, or no longer needed.

use crate::config::PlatformConfig;
use crate::db::{Db, DbError, platform_keys};
use crate::keys::{self, KeyError, Seal};
use crate::platform_key::KeyIds;
use crate::platform_key_rotation::marker::{self, MarkerError, MarkerKey};
use crate::platform_key_rotation::{self, dependents::KeyDependents};
use crate::tokens::TokenMint;
use svc_base::diagnosis::Findings;
use svc_base::error_chain::format_chain;
use svc_store::StoreError;

/// The database state that the check assesses.
struct KeyUsage {
    dependents: KeyDependents,
    /// Whether the rotation to the current key is complete, so that `svc-platform` starts without the previous key.
    is_rotation_complete: bool,
    /// Whether the database has a record of the previous key. If not, that key is set in preparation for a rotation.
    is_previous_recorded: bool,
    /// The number of running processes, and the number of those that have the previous key configured, as their current
    /// or as their previous key.
    processes: (i64, i64),
    /// The error for an active signing key, or the key of a slot's file backups, that neither platform key decrypts.
    undecryptable_key_error: Option<KeyError>,
}

pub async fn check(config: &PlatformConfig) -> Findings {
    let findings = Findings::new("platform-key");
    let ids = config.keys.ids();
    let (findings, named_key) = match load_named_key(config, &ids).await {
        Ok(named_key) => (findings, named_key),
        Err(MarkerError::UnknownKey(other)) => return findings.problem(other.to_string(), other.advice()),
        Err(error @ MarkerError::Store(StoreError::Corrupt { .. })) => {
            let path = marker::MARKER_PATH;
            let next = format!("if PLATFORM_KEY is the current key, delete {path} from the object store");
            return findings.problem(format!("svc-platform cannot start: {}", format_chain(&error)), next);
        }
        Err(error) => (
            findings.warning(
                format!("cannot check whether PLATFORM_KEY is the current key: {}", format_chain(&error)),
                "correct the problem that the check `store` reports, and run this check again",
            ),
            None,
        ),
    };
    match load_usage(config).await {
        Ok(Some(usage)) => assess(findings, &ids, &usage, named_key),
        Ok(None) => findings.skipped("this release of svc-platform has not started yet"),
        Err(error) => {
            findings.problem(format!("{error:#}"), "correct the problem that the check `database` reports")
        }
    }
}

/// Reads which of the keys the store names as the current one; `None` if the store cannot be opened.
async fn load_named_key(config: &PlatformConfig, ids: &KeyIds) -> Result<Option<MarkerKey>, MarkerError> {
    match config.store.open() {
        Ok(bucket) => marker::check(&bucket, ids).await.map(Some),
        // The check `store` reports this error.
        Err(_) => Ok(None),
    }
}

/// Assesses the keys. `named_key` is `None` if the store could not be read.
fn assess(findings: Findings, ids: &KeyIds, usage: &KeyUsage, named_key: Option<MarkerKey>) -> Findings {
    if let Some(error) = &usage.undecryptable_key_error {
        return findings.problem(
            format!("svc-platform cannot start: {error}"),
            "correct PLATFORM_KEY or PLATFORM_KEY_PREVIOUS: one of them is wrong",
        );
    }
    let findings = match &ids.previous {
        None if usage.dependents.is_empty() => findings.ok(format!("all stored secrets use {}", ids.current)),
        // The tokens of hosts that were silent when the rotation ended are valid until they rotate.
        None if usage.is_rotation_complete && usage.dependents.has_only_tokens() => findings.warning(
            format!(
                "the key rotation to {} is complete, but an earlier key was used for {}",
                ids.current, usage.dependents
            ),
            "wait for the machines' next heartbeats, which replace the tokens, and run this check again",
        ),
        None => findings.problem(
            format!(
                "svc-platform cannot start: PLATFORM_KEY {} is not sufficient, because another key is needed by {}",
                ids.current, usage.dependents
            ),
            "set PLATFORM_KEY_PREVIOUS to the earlier PLATFORM_KEY",
        ),
        Some(previous) if !usage.is_previous_recorded && usage.dependents.is_empty() => {
            let (running, prepared) = usage.processes;
            findings.ok(format!(
                "{previous} is prepared, and active in {prepared} of {running} running processes: once all \
                 processes have this key, you can set it as PLATFORM_KEY, and {} as PLATFORM_KEY_PREVIOUS",
                ids.current
            ))
        }
        Some(previous) if usage.dependents.is_empty() && named_key == Some(MarkerKey::Previous) => {
            findings.warning(
                format!(
                    "PLATFORM_KEY_PREVIOUS {previous} is still needed: the object store names it as the current key"
                ),
                "keep PLATFORM_KEY_PREVIOUS until a running svc-platform has recorded the new key in the store, \
                 and run this check again",
            )
        }
        // A running svc-platform replaces the marker in the store only once it reaches the store. Without the key that
        // the marker names, svc-platform would stop once the store is available again.
        Some(previous) if usage.dependents.is_empty() && named_key.is_none() => findings.warning(
            format!(
                "PLATFORM_KEY_PREVIOUS {previous} may still be needed: the object store, which may name it as the \
                 current key, could not be read"
            ),
            "keep PLATFORM_KEY_PREVIOUS, correct the problem that the check `store` reports, and run this check again",
        ),
        Some(previous) if usage.dependents.is_empty() => findings.warning(
            format!("PLATFORM_KEY_PREVIOUS {previous} is no longer needed: it can be dropped"),
            "remove PLATFORM_KEY_PREVIOUS, and restart svc-platform; archive the key for as long as you keep \
             copies of the database from before the rotation",
        ),
        Some(previous) if usage.dependents.has_processes() => findings.warning(
            format!("PLATFORM_KEY_PREVIOUS {previous} is still needed: {}", usage.dependents),
            format!(
                "restart the processes that have a different PLATFORM_KEY, with {} as PLATFORM_KEY and \
                 {previous} as PLATFORM_KEY_PREVIOUS: until then, no secrets are migrated to the new key. \
                 Each process logged its id and the address of its API when it started",
                ids.current
            ),
        ),
        Some(previous) => findings.warning(
            format!("PLATFORM_KEY_PREVIOUS {previous} is still needed: {}", usage.dependents),
            "keep PLATFORM_KEY_PREVIOUS until the secrets that use it have been replaced, which svc-platform \
             and the machines' heartbeats do automatically; then run this check again",
        ),
    };
    match usage.dependents.describe_silent() {
        Some(silent) => findings.warning(
            format!("the tokens of {silent} were not issued with PLATFORM_KEY"),
            "if the database has been restored from a copy, recover these machines before you remove \
             PLATFORM_KEY_PREVIOUS; otherwise no action is needed, because each token rotates at the \
             machine's next heartbeat",
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
    let undecryptable_key_error = find_undecryptable_key_error(config, client).await?;
    let (ids, ttl) = (config.keys.ids(), platform_key_rotation::row_ttl(&config.timing));
    let mint = TokenMint::new(&config.keys.current).with_previous(config.keys.previous.as_ref());
    let max_gap = config.timing.keys.max_heartbeat_gap;
    let seal = Seal::from_keys(&config.keys);
    let dependents = KeyDependents::find(client, &ids.current, &mint, &seal, max_gap, ttl).await?;
    let is_rotation_complete = platform_keys::load_progress(client, &ids.current).await?.is_rotation_complete;
    let (is_previous_recorded, processes) = match &ids.previous {
        Some(previous) => (
            platform_keys::is_recorded(client, previous).await?,
            platform_keys::count_with_key(client, previous, ttl).await?,
        ),
        None => (false, (0, 0)),
    };
    Ok(KeyUsage {
        dependents,
        is_rotation_complete,
        is_previous_recorded,
        processes,
        undecryptable_key_error,
    })
}

/// Returns the error that prevents `svc-platform` from starting, if any. With a single key, this check is unnecessary,
/// because [`KeyDependents`] then lists the stored keys that this key does not decrypt.
async fn find_undecryptable_key_error(
    config: &PlatformConfig,
    client: &impl deadpool_postgres::GenericClient,
) -> Result<Option<KeyError>, DbError> {
    if config.keys.previous.is_none() {
        return Ok(None);
    }
    match keys::ensure_keys_can_be_opened(client, &config.keys.ids(), &Seal::from_keys(&config.keys)).await {
        Ok(()) => Ok(None),
        Err(KeyError::Db(error)) => Err(error),
        Err(error) => Ok(Some(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform_key::KeyId;

    #[test]
    fn assess_advises_removal_only_if_store_was_read() {
        let id = |byte: u8| KeyId::from_key(&vec![byte; 32].into());
        let ids = KeyIds { current: id(2), previous: Some(id(1)) };
        let usage = KeyUsage {
            dependents: KeyDependents::default(),
            is_rotation_complete: true,
            is_previous_recorded: true,
            processes: (1, 1),
            undecryptable_key_error: None,
        };
        let cases = [
            (Some(MarkerKey::Current), "can be dropped"),
            (Some(MarkerKey::NoMarker), "can be dropped"),
            (Some(MarkerKey::Previous), "is still needed"),
            (None, "may still be needed"),
        ];
        for (named_key, expected) in cases {
            let findings = assess(Findings::new("platform-key"), &ids, &usage, named_key).into_list();
            assert_eq!(findings.len(), 1, "{named_key:?}: {findings:?}");
            assert!(findings[0].what.contains(expected), "{named_key:?}: {findings:?}");
        }
    }
}
