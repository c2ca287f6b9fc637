//! A machine whose store credentials expire requests new ones from the platform, even with a wrong clock, and stops
//! once it has been replaced.

use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode, Uri};
use jiff::{SignedDuration, Timestamp};
use kit::s3::{Fault, FaultRule, S3Server};
use nix::sys::signal::Signal;
use object_store::aws::AwsCredential;
use secrecy::ExposeSecret;
use serde_json::{Value, json};
use svc::clock::rfc3339_ms;
use svc::host::system::config::PlatformAccess;
use svc::host::system::store_credentials::{OutagePolicy, RenewingCredentials};
use svc::host::system::upgrade_token::UpgradeToken;
use svc::machine::epoch::Epoch;
use svc::store::credentials::{CredentialError, CredentialSource, TemporaryCredentials};
use svc::store::policy::{self, Overwrites, SessionWindow};
use svc::store::sts::Sts;

use super::machine::{self, BUCKET, Machine, USER, slot, wait_until};

const HOUR: Duration = Duration::from_secs(3600);

/// The platform's response to a credentials request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CredentialResponse {
    Issue,
    Superseded,
    Unavailable,
    Unauthorized,
}

/// The platform's credentials route, with real sessions from the store's STS.
struct CredentialService {
    sts: Sts,
    response: Mutex<CredentialResponse>,
    request_count: AtomicUsize,
    heartbeat_count: AtomicUsize,
}

pub struct CredentialPlatform {
    service: Arc<CredentialService>,
    base: String,
}

impl CredentialPlatform {
    pub async fn start(store: &S3Server) -> Result<Self> {
        svc::http::tls::install_provider();
        let key_id = store.access_key().to_owned();
        let caller = AwsCredential { key_id, secret_key: store.secret_key().to_owned(), token: None };
        let role = "arn:aws:iam::000000000000:role/svc-host".to_owned();
        let sts = Sts::new(&store.endpoint().parse()?, store.region().to_owned(), role, caller)?;
        let (response, request_count) = (Mutex::new(CredentialResponse::Issue), AtomicUsize::new(0));
        let service = Arc::new(CredentialService {
            sts,
            response,
            request_count,
            heartbeat_count: AtomicUsize::new(0),
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let base = format!("http://{}", listener.local_addr()?);
        let app = Router::new().fallback(respond).with_state(Arc::clone(&service));
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(Self { service, base })
    }

    pub fn set_response(&self, response: CredentialResponse) {
        *self.service.response.lock().expect("the lock is not poisoned") = response;
    }

    pub(super) fn request_count(&self) -> usize {
        self.service.request_count.load(Ordering::SeqCst)
    }

    /// Issues an outage session for a machine with epoch 1.
    pub(super) async fn issue_outage_session(&self) -> Option<TemporaryCredentials> {
        issue_outage_session(&self.service.sts).await
    }

    pub(super) fn heartbeat_count(&self) -> usize {
        self.service.heartbeat_count.load(Ordering::SeqCst)
    }

    async fn issue_session(&self) -> Result<TemporaryCredentials> {
        Ok(self
            .service
            .sts
            .assume_role("svc-host", &policy::slot_policy("aws", BUCKET, &slot(), Overwrites::Denied), HOUR)
            .await?)
    }

    /// Writes `r2.env` as user-data does, and this platform's URL; `expires_in` is relative to this machine's clock.
    pub async fn write_credentials(&self, machine: &Machine, expires_in: SignedDuration) -> Result<()> {
        let session = self.issue_session().await?;
        let token = session.session_token.as_ref().context("no session token")?;
        let expires_at = rfc3339_ms(Timestamp::now().checked_add(expires_in)?);
        machine.set_env_vars(
            "r2.env",
            &[
                ("AWS_ACCESS_KEY_ID", &session.access_key),
                ("AWS_SECRET_ACCESS_KEY", session.secret_key.expose_secret()),
                ("AWS_SESSION_TOKEN", token.expose_secret()),
                ("AWS_CREDENTIAL_EXPIRATION", &expires_at),
            ],
        )?;
        machine.set_env_vars("host.env", &[("PLATFORM_INTERNAL_URL", &self.base)])
    }
}

async fn respond(State(service): State<Arc<CredentialService>>, uri: Uri, headers: HeaderMap) -> Response {
    if uri.path().ends_with("/heartbeat") {
        service.heartbeat_count.fetch_add(1, Ordering::SeqCst);
        return axum::Json(json!({"superseded": false})).into_response();
    }
    service.request_count.fetch_add(1, Ordering::SeqCst);
    let problem = |status: u16, code: &str| {
        (StatusCode::from_u16(status).expect("the status is valid"), axum::Json(json!({"code": code})))
            .into_response()
    };
    let is_authorized =
        headers.get("authorization").is_some_and(|v| v == "Bearer upgrade-token-of-a-machine");
    if !is_authorized || !uri.path().ends_with("/storage-credentials") {
        return problem(401, "unauthorized");
    }
    let response = *service.response.lock().expect("the lock is not poisoned");
    match response {
        CredentialResponse::Issue => {}
        CredentialResponse::Superseded => return problem(403, "superseded"),
        CredentialResponse::Unavailable => return problem(503, "store_unavailable"),
        CredentialResponse::Unauthorized => return problem(401, "unauthorized"),
    }
    let policy = policy::slot_policy("aws", BUCKET, &slot(), Overwrites::Denied);
    match service.sts.assume_role("svc-host", &policy, HOUR).await {
        Ok(session) => {
            let mut response = session_json(&session);
            response["region"] = json!("auto");
            response["bucket"] = json!(BUCKET);
            response["prefix"] = json!(format!("{USER}/primary/"));
            response["outage"] = issue_outage_session(&service.sts)
                .await
                .map_or(Value::Null, |session| session_json(&session));
            axum::Json(response).into_response()
        }
        Err(_) => problem(503, "store_unavailable"),
    }
}

fn session_json(session: &TemporaryCredentials) -> Value {
    json!({
        "accessKeyId": session.access_key,
        "secretAccessKey": session.secret_key.expose_secret(),
        "sessionToken": session.session_token.as_ref().map(ExposeSecret::expose_secret),
        "expiresAt": rfc3339_ms(session.expires_at),
    })
}

/// Issues an outage session for a machine with epoch 1.
async fn issue_outage_session(sts: &Sts) -> Option<TemporaryCredentials> {
    let (from, lifetime) = (Timestamp::now(), HOUR * 12);
    let window = SessionWindow { from, until: from.checked_add(lifetime).ok()? };
    let policy = policy::outage_policy("aws", BUCKET, (&slot(), Epoch(1)), window, Overwrites::Denied);
    sts.assume_role("svc-outage", &policy, lifetime).await.ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn sts_client_works_with_moto() -> Result<()> {
    svc::http::tls::install_provider();
    let moto = tokio::task::spawn_blocking(kit::moto::Moto::start).await??;
    let key = || "moto".to_owned();
    let caller = AwsCredential { key_id: key(), secret_key: key(), token: None };
    let role = "arn:aws:iam::123456789012:role/svc-host".to_owned();
    let sts = Sts::new(&moto.s3().endpoint().parse()?, "us-east-1".to_owned(), role, caller)?;
    let policy = policy::slot_policy("aws", BUCKET, &slot(), Overwrites::Denied);
    let session = sts.assume_role("svc-host", &policy, Duration::from_secs(900)).await?;
    let remaining = session.expires_at.duration_since(Timestamp::now());
    assert!((600..=960).contains(&remaining.as_secs()), "{remaining}");
    assert!(session.access_key.starts_with("ASIA") && session.session_token.is_some());
    let error = sts.assume_role(&"x".repeat(65), &policy, Duration::from_secs(900)).await.unwrap_err();
    assert!(error.to_string().starts_with("STS returned 400 Bad Request to AssumeRole"), "{error}");
    assert!(error.to_string().contains("ValidationError"), "{error}");
    Ok(())
}

pub(super) async fn create_machine_with_credentials(
    store: &S3Server,
    platform: &CredentialPlatform,
    expires_in: SignedDuration,
) -> Result<Machine> {
    let machine = Machine::in_use(store, 1).await?;
    machine.client().await?.batch_execute("CREATE TABLE t AS SELECT generate_series(1, 100) AS id").await?;
    platform.write_credentials(&machine, expires_in).await?;
    Ok(machine)
}

#[tokio::test(flavor = "multi_thread")]
async fn valid_credentials_are_used_unchanged() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let machine = create_machine_with_credentials(&store, &platform, SignedDuration::from_hours(1)).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    assert_eq!(platform.request_count(), 0);
    assert!(machine::read_pointer(&store).await?.is_some());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_credentials_are_renewed_and_stored() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let machine = create_machine_with_credentials(&store, &platform, SignedDuration::from_secs(-60)).await?;
    store.expire_sessions();
    let result = machine.run(&["svc-db-backup"])?.expect(0);
    assert_eq!(platform.request_count(), 1, "{}", result.stderr);
    let stored = machine.path("var/lib/svc/store-credentials.json");
    assert_eq!(std::fs::metadata(&stored)?.permissions().mode() & 0o777, 0o600);
    machine.run(&["svc-db-backup"])?.expect(0);
    assert_eq!(platform.request_count(), 1, "the second run must start with the first run's session");
    let stored: Value = serde_json::from_slice(&std::fs::read(&stored)?)?;
    for secret in ["secretAccessKey", "sessionToken"] {
        assert!(!result.stderr.contains(stored[secret].as_str().context("no secret")?), "{}", result.stderr);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_clock_causes_one_extra_request() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let machine = create_machine_with_credentials(&store, &platform, SignedDuration::from_hours(9)).await?;
    store.expire_sessions();
    store.clear_requests();
    machine.run(&["svc-db-backup"])?.expect(0);
    assert_eq!(platform.request_count(), 1);
    let refused_count = store.requests().into_iter().filter(|request| request.status == Some(400)).count();
    assert_eq!(refused_count, 1, "the store must refuse exactly one request");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn backup_survives_expiring_sessions() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let machine = create_machine_with_credentials(&store, &platform, SignedDuration::from_hours(9)).await?;
    let create_noise = "CREATE TABLE noise AS SELECT decode(string_agg(md5(n::text || '-' || m), ''), 'hex') AS bytes \
        FROM generate_series(1, 2000) n, generate_series(1, 1000) m GROUP BY n";
    machine.client().await?.batch_execute(create_noise).await?;
    // A session outlives every single request of the backup, but not the backup.
    store.set_session_lifetime(Some(Duration::from_secs(4)));
    store.add_fault(FaultRule::new(Fault::Delay(Duration::from_millis(1800))).query("partNumber").always());
    store.expire_sessions();
    machine.run(&["svc-db-backup"])?.expect(0);
    assert!(platform.request_count() >= 2, "{}", platform.request_count());
    assert!(store.uploads(BUCKET).is_empty());
    let latest = svc::store::snapshot::find_latest(&machine::bucket(&store)?, &slot()).await?;
    assert!(latest.size_bytes > 10 << 20, "the dump must have several parts: {} bytes", latest.size_bytes);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn restore_works_after_initial_credentials_expire() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    create_machine_with_credentials(&store, &platform, SignedDuration::from_hours(1))
        .await?
        .run(&["svc-db-backup"])?
        .expect(0);
    // In the first round, the credentials have expired by the machine's clock; in the second, only at the store.
    for expires_in in [SignedDuration::from_hours(-3), SignedDuration::from_hours(3)] {
        let new = Machine::new(&store, 2).await?;
        platform.write_credentials(&new, expires_in).await?;
        store.expire_sessions();
        new.run(&["svc-restore"])?.expect(0);
        assert!(new.has_marker());
        let row = new.client().await?.query_one("SELECT count(*) FROM t", &[]).await?;
        assert_eq!(row.get::<_, i64>(0), 100);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn replaced_machine_gets_no_credentials_and_reports_it() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let machine = create_machine_with_credentials(&store, &platform, SignedDuration::from_hours(1)).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    let before = machine::read_pointer(&store).await?;
    platform.set_response(CredentialResponse::Superseded);
    store.expire_sessions();
    let result = machine.run(&["svc-db-backup"])?.expect(77);
    assert!(result.stderr.contains("this machine has been replaced"), "{}", result.stderr);
    assert_eq!(machine::read_pointer(&store).await?, before);
    platform.write_credentials(&machine, SignedDuration::from_secs(-1)).await?;
    let result = machine.run(&["svc-db-backup"])?.expect(77);
    assert!(result.stderr.contains("this machine has been replaced"), "{}", result.stderr);

    let new = Machine::new(&store, 2).await?;
    platform.write_credentials(&new, SignedDuration::from_secs(-1)).await?;
    let result = new.run(&["svc-restore"])?.expect(77);
    assert!(result.stderr.contains("this machine has been replaced"), "{}", result.stderr);
    assert!(!new.has_marker(), "the gate must remain closed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn platform_outage_matters_only_after_expiry() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let machine = create_machine_with_credentials(&store, &platform, SignedDuration::from_mins(10)).await?;
    platform.set_response(CredentialResponse::Unavailable);
    machine.run(&["svc-db-backup"])?.expect(0);
    assert_eq!(
        platform.request_count(),
        1,
        "while the credentials are valid, new ones must be requested only once"
    );
    platform.write_credentials(&machine, SignedDuration::from_secs(-1)).await?;
    machine.run(&["svc-db-backup"])?.expect(69);
    assert!(platform.request_count() >= 3, "the request must be repeated: {}", platform.request_count());
    platform.set_response(CredentialResponse::Unauthorized);
    machine.run(&["svc-db-backup"])?.expect(69);
    platform.set_response(CredentialResponse::Issue);
    machine.run(&["svc-db-backup"])?.expect(0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sync_agent_renews_many_sessions() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let machine = create_machine_with_credentials(&store, &platform, SignedDuration::from_secs(-1)).await?;
    store.set_session_lifetime(Some(Duration::from_secs(2)));
    let extra = [
        ("GATEWAY_LISTEN", "127.0.0.1:9"),
        ("HEARTBEAT_SECONDS", "1"),
        ("VPS_META_SECONDS", "1"),
        ("VPS_META_AT_LEAST_SECONDS", "1"),
    ];
    let running = machine.spawn(&["svc-sync-agent"], &extra)?;
    wait_until("four sessions", || platform.request_count() >= 4).await?;
    let key = format!("{USER}/primary/system/vps-meta.json");
    let first = store.read(BUCKET, &key).context("the metadata was not stored")?;
    wait_until("later metadata", || store.read(BUCKET, &key).is_some_and(|current| current != first)).await?;
    running.signal(Signal::SIGTERM)?;
    tokio::task::spawn_blocking(move || running.wait()).await??.expect(0);
    Ok(())
}

fn create_renewing_credentials(
    platform: &CredentialPlatform,
    dir: &std::path::Path,
    expires_in: SignedDuration,
) -> Result<Arc<RenewingCredentials>> {
    let access = PlatformAccess {
        base: platform.base.parse()?,
        upgrade_token: UpgradeToken::fixed("upgrade-token-of-a-machine".to_owned().into()),
    };
    let initial = TemporaryCredentials {
        access_key: "first".to_owned(),
        secret_key: "first".to_owned().into(),
        session_token: None,
        expires_at: Timestamp::now().checked_add(expires_in)?,
    };
    let machine = "00000000-0000-7000-8000-000000000001".parse()?;
    Ok(Arc::new(RenewingCredentials::new(machine, access, dir.join("credentials.json"), &initial)?))
}

#[tokio::test(flavor = "multi_thread")]
async fn one_renewal_serves_all_waiting_requests() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let dir = tempfile::tempdir()?;
    let source = create_renewing_credentials(&platform, dir.path(), SignedDuration::from_secs(-1))?;
    let tasks: Vec<_> = (0..32)
        .map(|n| {
            let source = Arc::clone(&source);
            tokio::spawn(async move {
                match n % 2 {
                    0 => source.current().await.map(|key| key.key_id.clone()),
                    _ => source.replacement_for("first").await.map(|key| key.key_id.clone()),
                }
            })
        })
        .collect();
    let mut keys = std::collections::BTreeSet::new();
    for task in tasks {
        keys.insert(task.await??);
    }
    assert_eq!((keys.len(), platform.request_count()), (1, 1));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn withdrawn_credentials_are_never_requested_again() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let dir = tempfile::tempdir()?;
    // The credentials would be valid for five more minutes.
    let source = create_renewing_credentials(&platform, dir.path(), SignedDuration::from_mins(5))?;
    platform.set_response(CredentialResponse::Superseded);
    for _ in 0..3 {
        assert!(matches!(source.current().await, Err(CredentialError::Withdrawn)));
        assert!(matches!(source.replacement_for("x").await, Err(CredentialError::Withdrawn)));
    }
    assert_eq!(platform.request_count(), 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn refusal_suspends_use_of_outage_session() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let dir = tempfile::tempdir()?;
    create_renewing_credentials(&platform, dir.path(), SignedDuration::from_secs(-1))?.current().await?;
    let file = dir.path().join("credentials.json");
    let mut stored: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
    stored["expiresAt"] = json!(rfc3339_ms(Timestamp::now().checked_sub(SignedDuration::from_secs(1))?));
    std::fs::write(&file, stored.to_string())?;
    let source_with_outage_session = || {
        let source = create_renewing_credentials(&platform, dir.path(), SignedDuration::from_secs(-60))?;
        let source = Arc::into_inner(source).context("the source is shared")?;
        anyhow::Ok(source.with_outage_policy(OutagePolicy::UseOutageSession))
    };
    platform.set_response(CredentialResponse::Unavailable);
    source_with_outage_session()?.current().await?;
    platform.set_response(CredentialResponse::Unauthorized);
    let source = source_with_outage_session()?;
    for _ in 0..2 {
        assert!(matches!(source.current().await, Err(CredentialError::Refused(_))));
    }
    platform.set_response(CredentialResponse::Unavailable);
    source.current().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_or_foreign_credentials_file_is_ignored() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let dir = tempfile::tempdir()?;
    let foreign = json!({"version": 1, "machineId": "00000000-0000-7000-8000-000000000002", "accessKeyId": "other",
        "secretAccessKey": "x", "sessionToken": null, "expiresAt": "2999-01-01T00:00:00.000Z", "lifeSeconds": 3600});
    for content in [foreign.to_string(), "{".to_owned(), String::new()] {
        std::fs::write(dir.path().join("credentials.json"), content)?;
        let key = create_renewing_credentials(&platform, dir.path(), SignedDuration::from_secs(-1))?
            .current()
            .await?;
        assert!(key.key_id.starts_with("ASIA"), "{}", key.key_id);
    }
    assert_eq!(platform.request_count(), 3);
    Ok(())
}
