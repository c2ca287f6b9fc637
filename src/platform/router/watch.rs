//! Keeps the directory, the session cache and the sign-outs current: polls the database at an interval, and immediately
//! after a NOTIFY.
//!
//! Each change to a machine's row that affects routing takes a number from a sequence. The numbers are not committed in
//! order, so reading only the rows above the highest number read so far could miss rows. Instead, each poll compares a
//! digest of the numbers of all active machines. Sessions, sign-outs and acknowledged keys change rarely: each poll
//! reads, using an index, the changes within a window that is longer than any transaction that writes such a change.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::sync::Notify;
use tokio_postgres::types::ToSql;
use tokio_postgres::{AsyncMessage, Client, Config, NoTls, Statement};
use tokio_util::sync::CancellationToken;

use super::database::resolve_hosts;
use super::directory::Directory;
use super::machine::{Endpoint, MachineRecord};
use super::session::Sessions;
use super::sign_outs::SignOuts;
use crate::host_trust::HostTrust;
use crate::route_freshness::{RouteFreshness, RoutesState};
use crate::signed_lifetimes::SIGN_OUT_TTL;
use svc_base::metrics::ROUTES_AGE;
use svc_machine::id::MachineId;

const DATABASE_TIMEOUT: Duration = Duration::from_secs(2);
/// Limits the poll rate when many notifications arrive.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// After a longer gap between polls, some changes to sessions may have left the window that a poll reads, so the
/// session cache is cleared and everything else is read again.
const MAX_POLL_GAP: Duration = Duration::from_secs(5);

const FROM_ACTIVE_MACHINES: &str = "FROM user_machines WHERE deleted_at IS NULL AND retired_at IS NULL";
/// Uses `now()`, which is stable within a statement, so that the index can be used. With `clock_timestamp()`, every row
/// would be scanned.
const CHANGED_SESSIONS: &str = "SELECT token_hash, host, idp_user_id, slot, expires_at, revoked_at IS NOT NULL \
     FROM sessions WHERE changed_at > now() - interval '15 seconds'";
/// `$1` is the age in seconds up to which sign-outs are read. The first poll of a connection, and each poll after a
/// gap, reads all sign-outs of the last [`SIGN_OUT_TTL`]; other polls read only recent ones.
const SIGN_OUTS: &str = "SELECT idp_user_id, generation, \
     greatest(extract(epoch FROM now() - changed_at), 0)::float8 FROM sign_outs \
     WHERE changed_at > now() - make_interval(secs => $1)";
const RECENT_SIGN_OUTS_SECONDS: f64 = 15.0;
const CHANGED_KIDS: &str = "SELECT machine_id, proof_kids FROM user_machines \
     WHERE proof_kids_at > now() - interval '15 seconds' AND deleted_at IS NULL AND retired_at IS NULL";

pub(super) struct Watcher {
    pub(super) database: Config,
    pub(super) directory: Arc<Directory>,
    pub(super) sessions: Arc<Sessions>,
    pub(super) sign_outs: Arc<SignOuts>,
    pub(super) freshness: Arc<RouteFreshness>,
    pub(super) interval: Duration,
}

impl Watcher {
    pub(super) async fn run(self, stop: CancellationToken) {
        let mut outage = Outage::default();
        let mut last_poll = None;
        loop {
            let watched = tokio::select! {
                () = stop.cancelled() => return,
                watched = self.watch(&mut last_poll, &mut outage) => watched,
            };
            let Err(error) = watched;
            outage.record_failure(&self.freshness, &error);
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(self.interval) => {}
            }
        }
    }

    /// Polls over one connection until an error occurs. `last_poll` is the start of the last successful poll.
    async fn watch(
        &self,
        last_poll: &mut Option<Instant>,
        outage: &mut Outage,
    ) -> anyhow::Result<std::convert::Infallible> {
        let wake = Arc::new(Notify::new());
        let connection =
            tokio::time::timeout(DATABASE_TIMEOUT, Connection::open(&self.database, Arc::clone(&wake)));
        let mut connection = connection.await.context("connecting to the database timed out")??;
        loop {
            let started_at = Instant::now();
            let has_gap = last_poll.is_none_or(|last| started_at.duration_since(last) > MAX_POLL_GAP);
            if has_gap {
                connection.last_digest = None;
            }
            tokio::time::timeout(DATABASE_TIMEOUT, self.poll(&mut connection, started_at))
                .await
                .context("polling the database timed out")??;
            if has_gap {
                self.sessions.clear_cache();
            }
            *last_poll = Some(started_at);
            outage.record_success(&self.freshness);
            tokio::time::sleep(MIN_POLL_INTERVAL.min(self.interval)).await;
            tokio::select! {
                () = wake.notified() => {}
                () = tokio::time::sleep_until((started_at + self.interval).into()) => {}
            }
        }
    }

    async fn poll(&self, connection: &mut Connection, started_at: Instant) -> anyhow::Result<()> {
        let Connection { client, digest, machines, sessions, sign_outs, kids, last_digest } = connection;
        let max_age =
            if last_digest.is_none() { SIGN_OUT_TTL.as_secs_f64() } else { RECENT_SIGN_OUTS_SECONDS };
        let max_age: [&(dyn ToSql + Sync); 1] = [&max_age];
        let (current_digest, changed, signed_out, acknowledged) = tokio::try_join!(
            client.query_one(&*digest, &[]),
            client.query(&*sessions, &[]),
            client.query(&*sign_outs, &max_age),
            client.query(&*kids, &[])
        )?;
        let acknowledged = acknowledged.iter().map(|row| Ok((MachineId(row.try_get(0)?), row.try_get(1)?)));
        // The acknowledged keys are applied before the machines' rows, which may be newer.
        self.directory.update_acknowledged_keys(acknowledged.collect::<Result<_, tokio_postgres::Error>>()?);
        let current_digest: (i64, i64) = (current_digest.try_get(0)?, current_digest.try_get(1)?);
        if *last_digest == Some(current_digest) {
            self.directory.confirm(started_at);
        } else {
            // The rows are read after the digest: if a row changes between the two queries, the next poll reads all
            // rows again.
            let rows = client.query(&*machines, &[]).await?;
            let trust = self.directory.trust();
            let rows = rows.iter().filter_map(|row| parse_machine(row, trust)).collect();
            self.directory.replace(rows, started_at)?;
            *last_digest = Some(current_digest);
        }
        for user in self.sessions.apply_changes(&changed) {
            self.sign_outs.close_streams(&user);
        }
        // Sessions are updated before sign-outs are recorded: a request that registers a stream after the sign-out has
        // closed the user's streams then finds its session revoked when it checks the session again.
        for row in signed_out {
            let user: &str = row.try_get(0)?;
            match user.parse() {
                Ok(user) => {
                    let age = Duration::try_from_secs_f64(row.try_get(2)?).unwrap_or_default();
                    self.sign_outs.record_sign_out(&user, row.try_get(1)?, age);
                }
                Err(error) => tracing::error!(user, %error, "cannot parse a sign-out row"),
            }
        }
        Ok(())
    }
}

/// The last logged state of a database outage, so that a state is logged only when it changes.
#[derive(Default)]
struct Outage {
    logged: Option<RoutesState>,
}

impl Outage {
    fn record_failure(&mut self, freshness: &RouteFreshness, error: &anyhow::Error) {
        let routes = match freshness.state() {
            // A poll has failed, so the routes are no longer confirmed.
            RoutesState::Current => RoutesState::Stale,
            routes => routes,
        };
        ROUTES_AGE.set([], freshness.age().map_or(f64::NAN, |age| age.as_secs_f64()));
        if self.logged.replace(routes) == Some(routes) {
            return;
        }
        let (error, max_seconds) = (format!("{error:#}"), freshness.max_staleness().as_secs());
        match routes {
            RoutesState::NotLoaded => {
                tracing::error!(error, "database unreachable and no routes loaded yet; requests get 503");
            }
            RoutesState::TooOld => tracing::error!(error, max_seconds, "routes too old; requests get 503"),
            RoutesState::Stale | RoutesState::Current => {
                tracing::warn!(error, max_seconds, "database unreachable; serving stale routes");
            }
        }
    }

    fn record_success(&mut self, freshness: &RouteFreshness) {
        ROUTES_AGE.set([], freshness.age().map_or(f64::NAN, |age| age.as_secs_f64()));
        if self.logged.take().is_some() {
            tracing::info!("database reachable; routes are current");
        }
    }
}

/// The watcher's dedicated connection and its statements; `last_digest` is the digest of the directory's rows.
struct Connection {
    client: Client,
    digest: Statement,
    machines: Statement,
    sessions: Statement,
    sign_outs: Statement,
    kids: Statement,
    last_digest: Option<(i64, i64)>,
}

impl Connection {
    async fn open(config: &Config, wake: Arc<Notify>) -> anyhow::Result<Self> {
        let mut config = resolve_hosts(config).await?;
        config.application_name("svc-platform router").connect_timeout(DATABASE_TIMEOUT);
        let (client, mut connection) =
            config.connect(NoTls).await.context("cannot connect to the database")?;
        tokio::spawn(async move {
            // Ends when the client is dropped or the connection fails.
            while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
                if matches!(message, AsyncMessage::Notification(_)) {
                    wake.notify_one();
                }
            }
        });
        client.batch_execute("LISTEN machine_changed; LISTEN session_changed").await?;
        let machines = format!(
            "SELECT machine_id, idp_user_id, slot, handle, status, public_ipv4, https_port, tls_spki_sha256, \
             proof_kids, created_at, powered_off_at IS NOT NULL, registered_at {FROM_ACTIVE_MACHINES}"
        );
        Ok(Self {
            digest: client.prepare(&digest_query()).await?,
            machines: client.prepare(&machines).await?,
            sessions: client.prepare(CHANGED_SESSIONS).await?,
            sign_outs: client.prepare(SIGN_OUTS).await?,
            kids: client.prepare(CHANGED_KIDS).await?,
            client,
            last_digest: None,
        })
    }
}

/// Returns the query whose result changes when an active machine's row changes in a way that affects routing. Each poll
/// runs it.
pub fn digest_query() -> String {
    format!("SELECT count(*), coalesce(bit_xor(hashint8extended(change_seq, 0)), 0) {FROM_ACTIVE_MACHINES}")
}

/// Parses a machine's row. A row that cannot be parsed is logged, and its machine receives no requests.
fn parse_machine(row: &tokio_postgres::Row, trust: &HostTrust) -> Option<MachineRecord> {
    let parse = || -> anyhow::Result<MachineRecord> {
        let id = MachineId(row.try_get(0)?);
        let (ip, pin): (Option<&str>, Option<&str>) = (row.try_get(5)?, row.try_get(7)?);
        let endpoint = match (ip, pin) {
            (Some(ip), Some(pin)) => Some(Endpoint {
                ip: ip.parse().context("public_ipv4")?,
                port: u16::try_from(row.try_get::<_, i32>(6)?).context("https_port")?,
                pin: pin.parse().map_err(|reason| anyhow::anyhow!("tls_spki_sha256 {reason}"))?,
                chain_required_from: trust.chain_required_from(id, row.try_get(11)?),
            }),
            _ => None,
        };
        Ok(MachineRecord {
            id,
            user: row.try_get::<_, &str>(1)?.parse()?,
            slot: row.try_get::<_, &str>(2)?.parse()?,
            handle: row.try_get::<_, &str>(3)?.parse()?,
            status: row.try_get::<_, &str>(4)?.parse().map_err(anyhow::Error::msg)?,
            is_powered_off: row.try_get(10)?,
            endpoint,
            proof_kids: row.try_get(8)?,
            created_at: row.try_get(9)?,
        })
    };
    parse()
        .inspect_err(|error| {
            let id = row.try_get(0).map_or_else(|_| "unknown".to_owned(), |id| MachineId(id).to_string());
            tracing::error!(svc_machine_id = id, error = format!("{error:#}"), "cannot parse a machine row");
        })
        .ok()
}
