//! Applies the platform's heartbeat response to this machine.

use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;

use super::config::SyncConfig;
use super::heartbeat::{self, AcceptedToken, HeartbeatReply};
use crate::system::certificate;
use crate::system::epoch;
use crate::system::layout::Layout;
use crate::system::quiesce;
use crate::system::quiesce::{Quiesce, QuiesceError};
use crate::system::upgrade_token::TokenError;
use crate::update::protocol;
use crate::update::protocol::{LastUpdate, UpdateRequest, UpdateResult};
use svc_base::clock;
use svc_base::error_chain::format_chain;
use svc_base::fsx::{self, FileError};
use svc_http::proof::{ProofKey, ProofKeys};
use svc_http::request_id;
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;
use svc_machine::name::ImageVersion;
use svc_wire::heartbeat as wire;

/// Marks this machine as replaced or deleted. The gateway, backups and sync agent stop once the file exists.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SupersededRecord {
    version: u32,
    at: String,
    machine_id: MachineId,
    #[serde(rename = "mine")]
    own_epoch: Epoch,
    /// The slot's current epoch, if the platform sent it.
    pub epoch: Option<Epoch>,
}

impl SupersededRecord {
    pub fn write(&self, layout: &Layout) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(&layout.superseded(), &text, 0o644)
    }
}

/// Stores the epoch, keys, certificate settings, token and update request from a heartbeat response. If this machine
/// has been replaced or deleted, doesn't store anything and returns a record for the caller to write.
pub fn apply_response(
    config: &SyncConfig,
    HeartbeatReply { response, accepted }: HeartbeatReply,
) -> Result<Option<SupersededRecord>, FileError> {
    if response.superseded {
        return Ok(Some(SupersededRecord {
            version: 1,
            at: clock::rfc3339_ms(clock::now_ms()),
            machine_id: config.identity.machine,
            own_epoch: config.epoch(),
            epoch: response.epoch,
        }));
    }
    if let Some(epoch) = response.epoch {
        epoch::raise(&config.layout, config.identity.epoch, epoch)?;
    }
    // Ignore an empty key set: it would lock the platform out.
    if let Some(keys) = response.proof_keys.filter(|keys| !keys.keys.is_empty()) {
        let keys = keys.keys.into_iter().map(|wire::ProofKey { kid, x }| ProofKey { kid, x });
        store_proof_keys(&config.layout, &ProofKeys { keys: keys.collect() })?;
    }
    if let Some(settings) = &response.certificate
        && let Err(error) = certificate::write_settings(&config.layout, settings)
    {
        tracing::error!(error = %format_chain(&error), "could not store certificate settings");
    }
    // Not fatal: the current token remains valid, so the rest of the response still applies.
    if let Err(error) = store_next_token(config, response.next_token.as_ref(), accepted.as_ref()) {
        tracing::error!(error = %format_chain(&error), "could not store this machine's next token");
    }
    if let Some(desired) = response.desired_image_version {
        // Drop malformed ids, as the updater wouldn't store them with the outcome.
        let desired_request_id = response.desired_request_id.filter(|id| request_id::is_well_formed(id));
        request_update(config, desired, desired_request_id)?;
    }
    Ok(None)
}

/// Resumes the writers if `quiesce`, read before the heartbeat, stopped them for an operation that the response doesn't
/// name: that operation finished without resuming them.
pub async fn resume_writers(
    config: &SyncConfig,
    quiesce: &Quiesce,
    named_operation: Option<&str>,
) -> Result<(), QuiesceError> {
    let operation = quiesce.operation_id;
    if named_operation == Some(operation.to_string().as_str()) {
        return Ok(());
    }
    if quiesce::resume(&config.layout, operation).await? {
        tracing::warn!(%operation, "resumed writers left stopped by a finished operation");
    }
    Ok(())
}

/// Requests an update to the platform's desired release, unless it's already current, an update is pending or in
/// progress, or the release has failed on this machine for the same request. A rejected or rolled-back release would
/// only fail again, so retrying it takes a new request. Requests are compared by id rather than time: the updater
/// stores the id with the outcome, no matter whether the sync agent or the gateway wrote the request.
fn request_update(
    config: &SyncConfig,
    desired: ImageVersion,
    desired_request_id: Option<String>,
) -> Result<(), FileError> {
    let layout = &config.layout;
    if desired == heartbeat::current_image_version(config)
        || layout.request("update").exists()
        || layout.update_journal().exists()
        || protocol::read_last(layout)?
            .is_some_and(|last| has_failed(&last, &desired, desired_request_id.as_deref()))
    {
        return Ok(());
    }
    tracing::info!(%desired, "platform requested a different release");
    let request_id = desired_request_id.unwrap_or_else(request_id::generate);
    UpdateRequest::with_request_id(request_id, desired).write(layout)
}

/// Returns whether the last update failed for the same request. Without a request id, all requests for the release are
/// treated as the same one.
fn has_failed(last: &LastUpdate, desired: &ImageVersion, request_id: Option<&str>) -> bool {
    let is_same_request = request_id.is_none_or(|id| last.request_id.as_deref() == Some(id));
    last.outcome.version == *desired && last.outcome.outcome != UpdateResult::Updated && is_same_request
}

/// Stores the next token. If there's none and the platform accepted only the previous token, reverts to that one. Does
/// nothing during an update: the updater has written the current token to `host.env`, the only place older releases
/// read it from.
fn store_next_token(
    config: &SyncConfig,
    next: Option<&SecretString>,
    accepted: Option<&AcceptedToken>,
) -> Result<(), TokenError> {
    let Some(AcceptedToken { token, rejected }) = accepted else { return Ok(()) };
    if config.layout.update_journal().exists() {
        return Ok(());
    }
    let upgrade_token = &config.platform.upgrade_token;
    match (next, rejected) {
        (Some(next), _) if next.expose_secret() != upgrade_token.current().expose_secret() => {
            upgrade_token.store(next, token)?;
            tracing::info!("received this machine's next token");
            Ok(())
        }
        (None, Some(rejected)) => upgrade_token.store(token, rejected),
        _ => Ok(()),
    }
}

fn store_proof_keys(layout: &Layout, keys: &ProofKeys) -> Result<(), FileError> {
    let text = serde_json::to_vec(keys).expect("keys serialize to JSON");
    let path = layout.proof_keys();
    if fsx::read_if_exists(&path)?.is_some_and(|current| current == text) {
        return Ok(());
    }
    fsx::write_atomic(&path, &text, 0o644)?;
    let kids: Vec<&str> = keys.keys.iter().map(|key| key.kid.as_str()).collect();
    tracing::info!(?kids, "received new proof keys");
    Ok(())
}
