//! Parses the body of a heartbeat field by field, so that a rejection lists every error.

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::api::attention;
use crate::api::call::ApiCall;
use crate::api::register::HostRegistration;
use crate::db::machine_changes;
use svc_base::untrusted_text;
use svc_http::fields::Fields;
use svc_http::problem::Problem;
use svc_machine::epoch::{Epoch, MAX_EPOCH};
use svc_machine::name::ImageVersion;
use svc_store::bundle::MAX_KEYS;
use svc_wire::heartbeat::{ComponentHealth, Heartbeat, MAX_PROOF_KIDS, MAX_TRUSTED_KEYS, TrustedKeyIds};
use svc_wire::host::{
    CertificateSource, ComponentStatus, FileBackupReport, HostCertificate, LastBackup, LastUpdate,
    MAX_DAMAGED_KEYS, Outcome, SnapshotCheck, SnapshotChecks, UpdateOutcome,
};
use svc_wire::machine::{Disk, Health};

// A host trusts one set of bundle keys, so both limits must be equal.
const _: () = assert!(MAX_TRUSTED_KEYS == MAX_KEYS);

/// A valid heartbeat. Its texts are bounded and printable, except for `proof_kids`, which are only compared.
pub struct HeartbeatReport {
    pub sent: Heartbeat,
    /// When the last verified snapshot that the host reports was taken.
    pub backup_taken_at: Option<Timestamp>,
    /// The registration that the platform accepted, according to the host.
    pub registration: Option<HostRegistration>,
}

impl HeartbeatReport {
    /// Returns the columns that the platform stores.
    pub fn columns(&self) -> machine_changes::Heartbeat<'_> {
        let sent = &self.sent;
        machine_changes::Heartbeat {
            image_version: &sent.image_version,
            health: self.stored_health(),
            last_backup: sent.last_backup.as_ref().map(|report| json!(report)),
            last_update: sent.last_update.as_ref().map(|report| json!(report)),
            checks: sent.checks.as_ref().map(|report| json!(report)),
            is_updating: sent.updating,
            attention: json!(sent.attention),
            backup_taken_at: self.backup_taken_at,
            proof_kids: &sent.proof_kids,
            trusted_keys: sent.trusted_keys.as_ref(),
            certificate: sent.certificate.as_ref().map(|report| json!(report)),
            files: sent.files.as_ref().map(|report| json!(report)),
        }
    }

    /// Returns whether the host reports an attention item with this code.
    pub fn has_attention_item(&self, code: &str) -> bool {
        self.sent.attention.iter().any(|item| item.code == code)
    }

    pub fn stored_health(&self) -> Value {
        let ComponentHealth { gateway, database, code } = self.sent.health.clone();
        json!(Health { gateway, database, code, disk: self.sent.disk })
    }
}

/// Parses a heartbeat's body.
///
/// # Errors
/// `unsupported_media_type` if the body is not sent as JSON; `invalid_request`, with every error, if it is invalid.
pub fn parse_report(call: &ApiCall) -> Result<HeartbeatReport, Problem> {
    let mut fields = call.host_fields()?;
    let image_version = fields.required("imageVersion");
    let epoch = read_epoch(&mut fields);
    let health = read_health(&mut fields);
    let disk = read_disk(&mut fields);
    let last_backup = read_last_backup(&mut fields);
    let last_update = read_last_update(&mut fields);
    let checks = read_checks(&mut fields);
    let updating = fields.boolean("updating").unwrap_or(false);
    let attention = attention::read_items(&mut fields);
    let proof_kids = fields.strings("proofKids", MAX_PROOF_KIDS);
    let trusted_keys = read_trusted_keys(&mut fields);
    let certificate = read_certificate(&mut fields);
    let files = read_files(&mut fields);
    let registration = read_registration(&mut fields);
    let report = (|| {
        let (last_backup, backup_taken_at) = last_backup.unzip();
        let sent = Heartbeat {
            image_version: image_version?,
            epoch: epoch?,
            health: health?,
            disk,
            last_backup,
            last_update,
            checks,
            updating,
            attention,
            proof_kids,
            trusted_keys,
            certificate,
            files,
            registration: registration.as_ref().map(|registration| registration.sent.clone()),
        };
        Some(HeartbeatReport { sent, backup_taken_at: backup_taken_at.flatten(), registration })
    })();
    fields.finish(report)
}

/// Reads the ids of the keys whose release signatures the host accepts.
fn read_trusted_keys(fields: &mut Fields) -> Option<TrustedKeyIds> {
    let mut inner = fields.optional_nested("trustedKeys")?;
    let sequence = inner.required_number("sequence").map(u32::try_from);
    if matches!(sequence, Some(Err(_))) {
        inner.add_error("sequence", format!("must be at most {}", u32::MAX));
    }
    if !inner.has("ids") {
        inner.add_error("ids", "is required");
    }
    let ids = inner.strings("ids", MAX_TRUSTED_KEYS);
    let is_id = |id: &String| id.len() == 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !ids.iter().all(is_id) {
        inner.add_error("ids", "must each be 16 hexadecimal digits");
    }
    fields.close(inner);
    Some(TrustedKeyIds { sequence: sequence?.ok()?, ids })
}

/// Reads the certificate that the host presents.
fn read_certificate(fields: &mut Fields) -> Option<HostCertificate> {
    let mut inner = fields.optional_nested("certificate")?;
    let host_name = inner.optional_host_text("hostName");
    let source: Option<CertificateSource> = inner.required("source");
    let (issued_at, expires_at) = (inner.required_time("issuedAt"), inner.required_time("expiresAt"));
    let is_trusted = inner.boolean("isTrusted").unwrap_or(false);
    let error = inner.optional_host_text("error");
    let next_attempt_at = inner.optional_time("nextAttemptAt").map(Into::into);
    fields.close(inner);
    Some(HostCertificate {
        host_name,
        source: source?.into(),
        issued_at: issued_at?.into(),
        expires_at: expires_at?.into(),
        is_trusted,
        error,
        next_attempt_at,
    })
}

/// Reads the state of the file backup.
fn read_files(fields: &mut Fields) -> Option<FileBackupReport> {
    let mut inner = fields.optional_nested("files")?;
    let report = FileBackupReport {
        saved_until: inner.optional_time("savedUntil").map(Into::into),
        changed_since: inner.optional_time("changedSince").map(Into::into),
        pending_bytes: inner.optional_number("pendingBytes"),
        files: inner.required_number("files").unwrap_or(0),
        bytes: inner.required_number("bytes").unwrap_or(0),
        restored_as_of: inner.optional_time("restoredAsOf").map(Into::into),
        error: inner.optional_host_text("error"),
        verified_at: inner.optional_time("verifiedAt").map(Into::into),
        drilled_at: inner.optional_time("drilledAt").map(Into::into),
        damage: inner.optional_host_text("damage"),
    };
    fields.close(inner);
    Some(report)
}

/// Reads the registration that the host sends again with each heartbeat.
fn read_registration(fields: &mut Fields) -> Option<HostRegistration> {
    let mut inner = fields.optional_nested("registration")?;
    let registration = HostRegistration::read(&mut inner);
    fields.close(inner);
    registration
}

fn read_health(fields: &mut Fields) -> Option<ComponentHealth> {
    let mut inner = fields.required_nested("health")?;
    let gateway: Option<ComponentStatus> = inner.required("gateway");
    let database: Option<ComponentStatus> = inner.required("database");
    let code: Option<ComponentStatus> = inner.optional("code");
    fields.close(inner);
    Some(ComponentHealth { gateway: gateway?.into(), database: database?.into(), code: code.map(Into::into) })
}

/// Reads the disk's size and free space; `None` if the host could not measure them.
fn read_disk(fields: &mut Fields) -> Option<Disk> {
    let mut inner = fields.optional_nested("disk")?;
    let (total, free) = (inner.required_number("totalBytes"), inner.required_number("freeBytes"));
    fields.close(inner);
    Some(Disk { total_bytes: total?, free_bytes: free? })
}

/// Reads the report on the last backup and, if it succeeded, when its snapshot was taken.
fn read_last_backup(fields: &mut Fields) -> Option<(LastBackup, Option<Timestamp>)> {
    let mut inner = fields.optional_nested("lastBackup")?;
    let status: Option<Outcome> = inner.required("status");
    let key = inner.optional_host_text("key");
    let (began_at, taken_at) = (inner.optional_time("beganAt"), inner.optional_time("takenAt"));
    let size_bytes = inner.optional_number("sizeBytes");
    let error = inner.optional_host_text("error");
    fields.close(inner);
    let status = status?;
    let report = LastBackup {
        status: status.into(),
        began_at: began_at.map(Into::into),
        key,
        taken_at: taken_at.map(Into::into),
        size_bytes,
        error,
    };
    Some((report, taken_at.filter(|_| status == Outcome::Success)))
}

fn read_last_update(fields: &mut Fields) -> Option<LastUpdate> {
    let mut inner = fields.optional_nested("lastUpdate")?;
    let version: Option<ImageVersion> = inner.required("version");
    let outcome: Option<UpdateOutcome> = inner.required("outcome");
    let stage: Option<String> = inner.required("stage");
    let error = inner.optional_host_text("error");
    let at = inner.required_time("at");
    fields.close(inner);
    Some(LastUpdate {
        version: version?.into(),
        outcome: outcome?.into(),
        stage: untrusted_text::truncate_printable(&stage?),
        at: at?.into(),
        error,
    })
}

/// Reads the report on the last snapshot checks, by kind.
fn read_checks(fields: &mut Fields) -> Option<SnapshotChecks> {
    let mut inner = fields.optional_nested("checks")?;
    let checks =
        SnapshotChecks { verify: read_check(&mut inner, "verify"), drill: read_check(&mut inner, "drill") };
    fields.close(inner);
    Some(checks)
}

fn read_check(checks: &mut Fields, kind: &str) -> Option<SnapshotCheck> {
    let mut inner = checks.optional_nested(kind)?;
    let status: Option<Outcome> = inner.required("status");
    let at = inner.required_time("at");
    let key = inner.optional_host_text("key");
    let damaged = inner.strings("damaged", MAX_DAMAGED_KEYS);
    let damaged: Vec<String> = damaged.iter().map(|key| untrusted_text::truncate_printable(key)).collect();
    let error = inner.optional_host_text("error");
    checks.close(inner);
    Some(SnapshotCheck { status: status?.into(), at: at?.into(), key, damaged, error })
}

fn read_epoch(fields: &mut Fields) -> Option<Epoch> {
    let number = fields.required_number("epoch")?;
    let epoch = u32::try_from(number).ok().map(Epoch).filter(|epoch| *epoch <= MAX_EPOCH);
    if epoch.is_none() {
        fields.add_error("epoch", format!("must be at most {MAX_EPOCH}"));
    }
    epoch
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::extract::Request;
    use http::header::CONTENT_TYPE;

    use super::*;
    use svc_machine::id::MachineId;
    use svc_wire::machine::Attention;
    use svc_wire::registration::{Registration, RestoredFiles};
    use svc_wire::text::Time;

    async fn parse(body: &Value) -> Result<HeartbeatReport, Problem> {
        let request = Request::builder().header(CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(body.to_string())).unwrap();
        parse_report(&ApiCall::read(request).await?)
    }

    fn sample_time() -> Time {
        Time::from_stored("2026-11-21T11:05:00.000Z")
    }

    /// Returns a heartbeat with every field.
    fn full_heartbeat() -> Heartbeat {
        let check = |status: Outcome| SnapshotCheck {
            status: status.into(),
            at: sample_time(),
            key: Some("k".to_owned()),
            damaged: vec!["d".to_owned()],
            error: Some("e".to_owned()),
        };
        Heartbeat {
            image_version: "2026.11.1".parse().unwrap(),
            epoch: Epoch(3),
            health: ComponentHealth {
                gateway: ComponentStatus::Ok.into(),
                database: ComponentStatus::Failing.into(),
                code: Some(ComponentStatus::Ok.into()),
            },
            disk: Some(Disk { total_bytes: 9, free_bytes: 5 }),
            last_backup: Some(LastBackup {
                status: Outcome::Success.into(),
                began_at: Some(sample_time()),
                key: Some("k".to_owned()),
                taken_at: Some(sample_time()),
                size_bytes: Some(7),
                error: Some("e".to_owned()),
            }),
            last_update: Some(LastUpdate {
                version: "2026.11.1".parse::<ImageVersion>().unwrap().into(),
                outcome: UpdateOutcome::RolledBack.into(),
                stage: "health".to_owned(),
                at: sample_time(),
                error: Some("e".to_owned()),
            }),
            checks: Some(SnapshotChecks {
                verify: Some(check(Outcome::Success)),
                drill: Some(check(Outcome::Error)),
            }),
            updating: true,
            attention: vec![Attention { code: "snapshot_held".to_owned(), detail: "d".to_owned() }],
            proof_kids: vec!["proof-1".to_owned()],
            trusted_keys: Some(TrustedKeyIds { sequence: 2, ids: vec!["614c4b637b092e93".to_owned()] }),
            certificate: Some(HostCertificate {
                host_name: Some("a.hosts.example.com".to_owned()),
                source: CertificateSource::Acme.into(),
                issued_at: sample_time(),
                expires_at: sample_time(),
                is_trusted: true,
                error: Some("e".to_owned()),
                next_attempt_at: Some(sample_time()),
            }),
            files: Some(FileBackupReport {
                saved_until: Some(sample_time()),
                changed_since: Some(sample_time()),
                pending_bytes: Some(1),
                files: 7,
                bytes: 8,
                restored_as_of: Some(sample_time()),
                error: Some("e".to_owned()),
                verified_at: Some(sample_time()),
                drilled_at: Some(sample_time()),
                damage: Some("d".to_owned()),
            }),
            registration: Some(Registration {
                machine_id: MachineId::new(),
                image_version: "2026.11.1".parse().unwrap(),
                bundle_sha256: "ab".repeat(32),
                tls_spki_sha256: "cd".repeat(32),
                boot_ms: Some(5),
                restored_files: Some(RestoredFiles {
                    as_of: Some(sample_time()),
                    error: Some("e".to_owned()),
                }),
            }),
        }
    }

    #[tokio::test]
    async fn parse_report_reads_every_field() {
        let full = full_heartbeat();
        let report = parse(&json!(full)).await.unwrap();
        assert_eq!(report.sent, full);
        assert_eq!(report.backup_taken_at, Some(sample_time().parse().unwrap()));
        assert!(report.registration.is_some());
    }

    #[tokio::test]
    async fn parse_report_accepts_older_and_newer_hosts() {
        let mut minimal = json!(full_heartbeat());
        let optional = [
            "disk",
            "lastBackup",
            "lastUpdate",
            "checks",
            "updating",
            "attention",
            "proofKids",
            "trustedKeys",
            "certificate",
            "registration",
        ];
        for name in optional {
            minimal.as_object_mut().unwrap().shift_remove(name);
        }
        minimal["someday"] = json!({ "new": 1 });
        minimal["health"]["someday"] = json!(1);
        let sent = parse(&minimal).await.unwrap().sent;
        assert_eq!((sent.last_backup, sent.updating, sent.attention), (None, false, vec![]));
        assert_eq!(sent.disk, None);
        for name in optional {
            minimal[name] = Value::Null;
        }
        assert!(parse(&minimal).await.is_ok());
    }

    #[tokio::test]
    async fn parse_report_lists_every_invalid_field() {
        let mut invalid = json!(full_heartbeat());
        invalid["epoch"] = json!(u64::from(u32::MAX));
        invalid["disk"] = json!({ "totalBytes": 9 });
        invalid["health"]["gateway"] = json!("well");
        invalid["trustedKeys"]["ids"][0] = json!("x");
        invalid["checks"]["drill"]["at"] = json!("soon");
        let problem = parse(&invalid).await.err().unwrap();
        let errors = problem.members["errors"].as_array().unwrap();
        let pointers: Vec<_> = errors.iter().map(|error| error["pointer"].as_str().unwrap()).collect();
        assert_eq!(
            pointers,
            ["/epoch", "/health/gateway", "/disk/freeBytes", "/checks/drill/at", "/trustedKeys/ids"]
        );
    }
}
