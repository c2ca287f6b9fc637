//! Opens, finds and revokes browser sessions: rows in `sessions`, cached so that a request needs no query.
//!
//! The watcher reports every change within its poll interval, so that a revocation by one process takes effect in all
//! processes. Both the cache and the database contain only hashes of the cookies.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as B64;
use deadpool_postgres::{Object, Pool};
use jiff::Timestamp;
use ring::rand::{SecureRandom, SystemRandom};
use tokio::sync::watch;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::session_token::{self, TokenHash, sha256};
use crate::public_host::PublicHost;
use crate::route_freshness::{RouteFreshness, RoutesState};
use crate::signed_lifetimes::SESSION_SECONDS;
use crate::signing_set::SigningSet;
use svc_base::metrics::SESSIONS_OPENED;
use svc_http::rate_limit::RateLimit;
use svc_machine::name::{IdpUserId, Slot};

const CODE_LIFETIME_SECONDS: i32 = 60;
/// How long a cookie that belongs to no live session is cached as unknown.
const UNKNOWN_TTL: Duration = Duration::from_secs(5);
const MAX_CACHED_SESSIONS: usize = 50_000;
const DATABASE_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum rate of new sessions and codes per user; the burst is one minute's worth.
const OPEN_RATE_PER_SECOND: u32 = 1;
const OPEN_BURST_SECONDS: u32 = 60;
const TOKEN_BYTES: usize = 32;

const COLUMNS: &str = "token_hash, host, idp_user_id, slot, expires_at, revoked_at IS NOT NULL";
/// Records a sign-out of the user `$1`.
const RECORD_SIGN_OUT: &str = "INSERT INTO sign_outs (idp_user_id, generation) \
     VALUES ($1, nextval('sign_out_generations')) \
     ON CONFLICT (idp_user_id) DO UPDATE SET generation = nextval('sign_out_generations') RETURNING generation";

/// A browser's session on one of the two hosts.
#[derive(Debug, Clone)]
pub(super) struct Session {
    pub(super) hash: TokenHash,
    pub(super) host: PublicHost,
    pub(super) user: IdpUserId,
    /// The slot that the user has chosen, if any.
    pub(super) slot: Option<Slot>,
    pub(super) expires_at: Timestamp,
}

/// The reason an operation on a session or a code failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error("cannot connect to the database")]
    Pool(#[from] deadpool_postgres::PoolError),
    #[error("session query failed")]
    Statement(#[from] tokio_postgres::Error),
    #[error("database timeout")]
    Timeout,
    #[error("database unreachable")]
    Unreachable,
    #[error("too many sessions or codes requested; retry in {} s", .0.as_secs() + 1)]
    RateLimited(Duration),
    #[error("the system's random number generator failed")]
    Randomness,
    #[error("cannot parse a stored session")]
    Unreadable,
    #[error("the parent session has ended, or the user has signed out")]
    ParentEnded,
}

pub(super) struct Sessions {
    pool: Pool,
    freshness: Arc<RouteFreshness>,
    keys: watch::Receiver<Arc<SigningSet>>,
    open_rate: RateLimit<IdpUserId>,
    cache: Mutex<HashMap<TokenHash, CachedSession>>,
}

enum CachedSession {
    Live(Arc<Session>),
    /// No live session had this cookie at that time.
    Unknown(Instant),
}

/// The conditions for opening a session: its parent session is live, and the user has not signed out since the
/// session's code was redeemed.
#[derive(Debug, Clone, Copy)]
pub(super) struct SessionOrigin {
    /// The parent session, with which the new session ends.
    pub(super) parent: Option<TokenHash>,
    /// Generation of the user's last known sign-out. A later sign-out prevents the session from being opened.
    pub(super) sign_out_generation: i64,
}

impl SessionOrigin {
    /// The origin of a session that is opened with the identity provider's token: it has no conditions.
    const PROVIDER: Self = Self { parent: None, sign_out_generation: i64::MAX };
}

/// The session that a single-use code can open.
pub(super) struct CodeGrant {
    pub(super) origin: SessionOrigin,
    pub(super) user: IdpUserId,
    pub(super) slot: Option<Slot>,
    pub(super) return_to: String,
}

impl Sessions {
    pub(super) fn new(
        pool: Pool,
        freshness: Arc<RouteFreshness>,
        keys: watch::Receiver<Arc<SigningSet>>,
    ) -> Self {
        let open_rate = RateLimit::new(OPEN_RATE_PER_SECOND, OPEN_BURST_SECONDS);
        Self { pool, freshness, keys, open_rate, cache: Mutex::default() }
    }

    /// Finds the live session with this cookie value.
    pub(super) async fn find(
        &self,
        host: PublicHost,
        token: &str,
        now: Timestamp,
    ) -> Result<Option<Arc<Session>>, SessionError> {
        let hash = sha256(token.as_bytes());
        let is_live = |session: &Arc<Session>| session.host == host && session.expires_at > now;
        match self.lock_cache().get(&hash) {
            Some(CachedSession::Live(session)) => {
                return Ok(Some(session).filter(|session| is_live(session)).cloned());
            }
            Some(CachedSession::Unknown(since)) if since.elapsed() < UNKNOWN_TTL => return Ok(None),
            _ => {}
        }
        if !session_token::is_genuine(&self.keys.borrow().app.public, host, token) {
            return Ok(None);
        }
        // Boxed: most requests hit the cache, but the unboxed future would enlarge every request's future.
        let session = Box::pin(self.load(hash)).await?;
        Ok(session.filter(is_live))
    }

    /// Whether a router issued this cookie value to `user`. Needs no query, so the session may have ended.
    pub(super) fn is_issued_to(&self, host: PublicHost, token: &str, user: &IdpUserId) -> bool {
        session_token::is_issued_to(&self.keys.borrow().app.public, host, token, user)
    }

    /// Loads a session into the cache; `None` if there is none with this hash, or if it has been revoked.
    async fn load(&self, hash: TokenHash) -> Result<Option<Arc<Session>>, SessionError> {
        let sql = format!("SELECT {COLUMNS} FROM sessions WHERE token_hash = $1");
        let session = match self.query_row(&sql, &[&hash.as_slice()]).await? {
            Some(row) => parse_session(&row)?.map(Arc::new),
            None => None,
        };
        self.insert_cached(
            hash,
            session.clone().map_or_else(|| CachedSession::Unknown(Instant::now()), CachedSession::Live),
        );
        Ok(session)
    }

    /// Opens a session and returns it with its cookie value, which is not stored.
    pub(super) async fn open(
        &self,
        host: PublicHost,
        user: &IdpUserId,
        slot: Option<&Slot>,
    ) -> Result<(String, Arc<Session>), SessionError> {
        self.open_with_origin(SessionOrigin::PROVIDER, host, user, slot).await
    }

    /// Opens a session that ends together with its parent session, if it has one, and does not expire after it.
    pub(super) async fn open_with_origin(
        &self,
        origin: SessionOrigin,
        host: PublicHost,
        user: &IdpUserId,
        slot: Option<&Slot>,
    ) -> Result<(String, Arc<Session>), SessionError> {
        self.open_rate.check(user).map_err(SessionError::RateLimited)?;
        let token = session_token::mint(&self.keys.borrow().app.current, host, random_token()?, user);
        let hash = sha256(token.as_bytes());
        let sql = format!(
            "INSERT INTO sessions (token_hash, host, idp_user_id, slot, expires_at, opened_by) \
             SELECT $1, $2, $3, $4, least(now() + make_interval(secs => $5), parent.expires_at), $6 \
             FROM (SELECT $6::bytea AS hash) AS origin LEFT JOIN sessions AS parent ON parent.token_hash = origin.hash \
             WHERE (origin.hash IS NULL OR parent.revoked_at IS NULL AND parent.expires_at > now()) AND NOT EXISTS \
             (SELECT 1 FROM sign_outs WHERE idp_user_id = $3 AND generation > $7) RETURNING {COLUMNS}"
        );
        let lifetime = SESSION_SECONDS as f64;
        let slot = slot.map(Slot::as_str);
        let parent = origin.parent.as_ref().map(TokenHash::as_slice);
        let values: [&(dyn ToSql + Sync); 7] = [
            &hash.as_slice(),
            &host.as_str(),
            &user.as_str(),
            &slot,
            &lifetime,
            &parent,
            &origin.sign_out_generation,
        ];
        let row = self.query_row_serialized(user, &sql, &values).await?;
        let row = row.ok_or(SessionError::ParentEnded)?;
        let session = Arc::new(parse_session(&row)?.ok_or(SessionError::Unreadable)?);
        self.insert_cached(hash, CachedSession::Live(Arc::clone(&session)));
        SESSIONS_OPENED.add_one([host.as_str()]);
        Ok((token, session))
    }

    /// Stores the slot that the user has chosen. Returns `false` if the session has been revoked or deleted.
    pub(super) async fn choose_slot(&self, session: &Session, slot: &Slot) -> Result<bool, SessionError> {
        let sql = format!(
            "UPDATE sessions SET slot = $2 WHERE token_hash = $1 AND revoked_at IS NULL RETURNING {COLUMNS}"
        );
        let row = self.query_row(&sql, &[&session.hash.as_slice(), &slot.as_str()]).await?;
        let changed = row.as_ref().map(parse_session).transpose()?.flatten();
        let is_open = changed.is_some();
        if let Some(changed) = changed {
            self.insert_cached(changed.hash, CachedSession::Live(Arc::new(changed)));
        }
        Ok(is_open)
    }

    /// Revokes all of a user's sessions and unused codes on both hosts, and returns the generation of this sign-out.
    pub(super) async fn revoke_all(&self, user: &IdpUserId) -> Result<i64, SessionError> {
        let sql = format!(
            "WITH ended AS (UPDATE sessions SET revoked_at = now() \
               WHERE idp_user_id = $1 AND revoked_at IS NULL), \
             codes AS (UPDATE session_codes SET used_at = now() \
               WHERE idp_user_id = $1 AND used_at IS NULL) \
             {RECORD_SIGN_OUT}"
        );
        let row = self.query_row_serialized(user, &sql, &[&user.as_str()]).await?;
        let row = row.ok_or(SessionError::Unreadable)?;
        self.lock_cache()
            .retain(|_, entry| !matches!(entry, CachedSession::Live(session) if session.user == *user));
        Ok(row.try_get(0)?)
    }

    /// Revokes a session, its child sessions and its unused codes, and returns the generation of this sign-out. The
    /// sign-out ends all of the user's app tokens, because a token does not name the session for which it was issued.
    pub(super) async fn revoke(&self, session: &Session) -> Result<i64, SessionError> {
        let sql = format!(
            "WITH ended AS (UPDATE sessions SET revoked_at = now() \
               WHERE (token_hash = $2 OR opened_by = $2) AND revoked_at IS NULL), \
             codes AS (UPDATE session_codes SET used_at = now() \
               WHERE opened_by = $2 AND used_at IS NULL) \
             {RECORD_SIGN_OUT}"
        );
        let values: [&(dyn ToSql + Sync); 2] = [&session.user.as_str(), &session.hash.as_slice()];
        let row = self.query_row_serialized(&session.user, &sql, &values).await?;
        let row = row.ok_or(SessionError::Unreadable)?;
        self.insert_cached(session.hash, CachedSession::Unknown(Instant::now()));
        Ok(row.try_get(0)?)
    }

    /// Whether the session, which was live when it was found, has been revoked since then. Looks it up if it is no
    /// longer cached: clearing the cache revokes no session.
    pub(super) async fn is_revoked(&self, session: &Session) -> Result<bool, SessionError> {
        match self.lock_cache().get(&session.hash) {
            Some(CachedSession::Live(_)) => return Ok(false),
            Some(CachedSession::Unknown(_)) => return Ok(true),
            None => {}
        }
        Ok(Box::pin(self.load(session.hash)).await?.is_none())
    }

    /// Issues a single-use code that opens a session on `CODE_HOST` in the browser that holds `state`.
    pub(super) async fn issue_code(&self, grant: &CodeGrant, state: &str) -> Result<String, SessionError> {
        self.open_rate.check(&grant.user).map_err(SessionError::RateLimited)?;
        let code = random_token()?;
        let hash = hash_code(&code, state);
        let sql = "INSERT INTO session_codes (code_hash, idp_user_id, slot, return_to, expires_at, opened_by) \
                   VALUES ($1, $2, $3, $4, now() + make_interval(secs => $5), $6)";
        let slot = grant.slot.as_ref().map(Slot::as_str);
        let lifetime = f64::from(CODE_LIFETIME_SECONDS);
        let parent = grant.origin.parent.as_ref().map(TokenHash::as_slice);
        let values: [&(dyn ToSql + Sync); 6] =
            [&hash.as_slice(), &grant.user.as_str(), &slot, &grant.return_to, &lifetime, &parent];
        self.query_row(sql, &values).await?;
        Ok(code)
    }

    /// Redeems a code; `None` if it is unknown, used or expired, or was issued for a different `state`.
    pub(super) async fn redeem_code(
        &self,
        code: &str,
        state: &str,
    ) -> Result<Option<CodeGrant>, SessionError> {
        let hash = hash_code(code, state);
        let sql = "UPDATE session_codes SET used_at = now() WHERE code_hash = $1 AND used_at IS NULL \
                   AND expires_at > now() RETURNING idp_user_id, slot, return_to, opened_by, coalesce( \
                   (SELECT generation FROM sign_outs WHERE idp_user_id = session_codes.idp_user_id), 0)";
        let Some(row) = self.query_row(sql, &[&hash.as_slice()]).await? else { return Ok(None) };
        let user: &str = row.try_get(0)?;
        let slot: Option<&str> = row.try_get(1)?;
        Ok(Some(CodeGrant {
            user: user.parse().map_err(|_| SessionError::Unreadable)?,
            slot: slot.map(str::parse).transpose().map_err(|_| SessionError::Unreadable)?,
            return_to: row.try_get(2)?,
            origin: SessionOrigin {
                parent: row
                    .try_get::<_, Option<&[u8]>>(3)?
                    .map(TryInto::try_into)
                    .transpose()
                    .map_err(|_| SessionError::Unreadable)?,
                sign_out_generation: row.try_get(4)?,
            },
        }))
    }

    /// Updates cached sessions from changed rows, and ignores rows of sessions that are not cached. Returns the users
    /// whose sessions have ended.
    pub(super) fn apply_changes(&self, rows: &[Row]) -> Vec<IdpUserId> {
        let (mut cache, mut affected_users) = (self.lock_cache(), Vec::new());
        for row in rows {
            let Ok(hash) = parse_hash(row) else { continue };
            let Some(cached) = cache.get_mut(&hash) else { continue };
            let current = parse_session(row).ok().flatten();
            if let (CachedSession::Live(session), None) = (&*cached, &current) {
                affected_users.push(session.user.clone());
            }
            *cached = current.map_or_else(
                || CachedSession::Unknown(Instant::now()),
                |session| CachedSession::Live(Arc::new(session)),
            );
        }
        affected_users
    }

    /// Clears the cache after a period in which changes may have been missed.
    pub(super) fn clear_cache(&self) {
        self.lock_cache().clear();
    }

    /// Like [`Self::query_row`], but serialized per user: a concurrent sign-out either revokes the session that is
    /// being opened, or prevents it from being opened.
    async fn query_row_serialized(
        &self,
        user: &IdpUserId,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Option<Row>, SessionError> {
        self.ensure_reachable()?;
        let work = async {
            let mut client: Object = self.pool.get().await?;
            let lock = "SELECT pg_advisory_xact_lock(hashtextextended('sessions of ' || $1, 0))";
            let (lock, statement) = (client.prepare_cached(lock).await?, client.prepare_cached(sql).await?);
            let tx = client.transaction().await?;
            // The lock is a separate statement, so that the next statement's snapshot is taken while it is held.
            tx.query(&lock, &[&user.as_str()]).await?;
            let row = tx.query(&statement, params).await?.into_iter().next();
            tx.commit().await?;
            Ok(row)
        };
        tokio::time::timeout(DATABASE_TIMEOUT, work).await.map_err(|_| SessionError::Timeout)?
    }

    /// Fails immediately if the watcher cannot reach the database, so that requests do not wait for the timeout.
    fn ensure_reachable(&self) -> Result<(), SessionError> {
        match self.freshness.state() {
            RoutesState::Stale | RoutesState::TooOld => Err(SessionError::Unreachable),
            _ => Ok(()),
        }
    }

    async fn query_row(
        &self,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Option<Row>, SessionError> {
        self.ensure_reachable()?;
        let work = async {
            let client: Object = self.pool.get().await?;
            let statement = client.prepare_cached(sql).await?;
            Ok(client.query(&statement, params).await?.into_iter().next())
        };
        tokio::time::timeout(DATABASE_TIMEOUT, work).await.map_err(|_| SessionError::Timeout)?
    }

    fn insert_cached(&self, hash: TokenHash, entry: CachedSession) {
        let mut cache = self.lock_cache();
        if cache.len() >= MAX_CACHED_SESSIONS {
            let now = Timestamp::now();
            cache
                .retain(|_, entry| matches!(entry, CachedSession::Live(session) if session.expires_at > now));
            if cache.len() >= MAX_CACHED_SESSIONS {
                cache.clear();
            }
        }
        cache.insert(hash, entry);
    }

    fn lock_cache(&self) -> MutexGuard<'_, HashMap<TokenHash, CachedSession>> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Parses a row; `None` for a revoked session.
fn parse_session(row: &Row) -> Result<Option<Session>, SessionError> {
    if row.try_get(5)? {
        return Ok(None);
    }
    let unreadable = || SessionError::Unreadable;
    let slot: Option<&str> = row.try_get(3)?;
    Ok(Some(Session {
        hash: parse_hash(row)?,
        host: PublicHost::parse_stored(row.try_get(1)?).ok_or_else(unreadable)?,
        user: row.try_get::<_, &str>(2)?.parse().map_err(|_| unreadable())?,
        slot: slot.map(str::parse).transpose().map_err(|_| unreadable())?,
        expires_at: row.try_get(4)?,
    }))
}

fn parse_hash(row: &Row) -> Result<TokenHash, SessionError> {
    row.try_get::<_, &[u8]>(0)?.try_into().map_err(|_| SessionError::Unreadable)
}

fn hash_code(code: &str, state: &str) -> TokenHash {
    sha256(format!("{code}.{state}").as_bytes())
}

/// Creates a token of 256 random bits that is safe in cookies and URLs.
pub(super) fn random_token() -> Result<String, SessionError> {
    let mut bytes = [0; TOKEN_BYTES];
    SystemRandom::new().fill(&mut bytes).map_err(|_| SessionError::Randomness)?;
    Ok(B64.encode(bytes))
}

/// Whether `text` has the format of a random token.
pub(super) fn has_token_format(text: &str) -> bool {
    B64.decode(text).is_ok_and(|bytes| bytes.len() == TOKEN_BYTES)
}

#[cfg(test)]
mod tests {
    use deadpool_postgres::Manager;
    use svc_http::proof::{ProofKeys, Signer};
    use tokio_postgres::{Config, NoTls};

    use super::*;
    use crate::signing_set::AppKeys;

    /// Returns [`Sessions`] whose database is unreachable.
    fn sessions_without_database() -> Sessions {
        let signer = || Arc::new(Signer::from_pkcs8("k1", &Signer::generate_pkcs8().unwrap()).unwrap());
        let public = || ProofKeys { keys: Vec::new() };
        let app = AppKeys { current: signer(), public: public() };
        let set = SigningSet { current: signer(), next: None, retired: Vec::new(), public: public(), app };
        let (_, keys) = watch::channel(Arc::new(set));
        let config: Config = "postgres://nobody@127.0.0.1:1/none".parse().unwrap();
        let pool = Pool::builder(Manager::new(config, NoTls)).build().unwrap();
        Sessions::new(pool, Arc::new(RouteFreshness::new(Duration::ZERO)), keys)
    }

    #[tokio::test]
    async fn is_revoked_looks_up_uncached_session() {
        let sessions = sessions_without_database();
        let session = Session {
            hash: [1; 32],
            host: PublicHost::App,
            user: "user_1".parse().unwrap(),
            slot: None,
            expires_at: Timestamp::MAX,
        };
        sessions.insert_cached(session.hash, CachedSession::Live(Arc::new(session.clone())));
        assert!(!sessions.is_revoked(&session).await.unwrap());
        sessions.clear_cache();
        assert!(sessions.is_revoked(&session).await.is_err(), "an uncached session requires a query");
        sessions.insert_cached(session.hash, CachedSession::Unknown(Instant::now()));
        assert!(sessions.is_revoked(&session).await.unwrap());
    }
}
