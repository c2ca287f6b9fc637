//! Sessions of browsers: rows of `sessions`, kept in memory so that a request costs no query.
//!
//! The watcher tells every change within its interval, so that a revocation in one process is obeyed by all. Only
//! hashes of the cookies are stored, here and in the database.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as B64;
use deadpool_postgres::{Object, Pool};
use jiff::Timestamp;
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use tokio::sync::watch;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::door::Door;
use super::freshness::{Freshness, Routes};
use super::session_token;
use crate::http::rate::RateLimit;
use crate::machine::name::{IdpUserId, Slot};
use crate::metrics::SESSIONS_OPENED;
use crate::platform::keys::SigningSet;

pub(super) const LIFE_SECONDS: u64 = 12 * 3600;
const CODE_LIFE_SECONDS: i32 = 60;
/// A cookie that is none of ours is not looked up again for a while.
const UNKNOWN_FOR: Duration = Duration::from_secs(5);
const MOST_KEPT: usize = 50_000;
const DEADLINE: Duration = Duration::from_secs(3);
/// Sessions and codes of one user: one each second, and at first as many as a minute's.
const OPENED_PER_SECOND: u32 = 1;
const OPENED_BURST_SECONDS: u32 = 60;

const COLUMNS: &str = "token_hash, host, idp_user_id, slot, expires_at, revoked_at IS NOT NULL";

pub(super) type Hash = [u8; 32];

/// A browser's session on one of the two hosts.
#[derive(Debug, Clone)]
pub(super) struct Session {
    pub(super) hash: Hash,
    pub(super) door: Door,
    pub(super) user: IdpUserId,
    /// The slot that the user chose.
    pub(super) slot: Option<Slot>,
    pub(super) expires_at: Timestamp,
}

/// The database could not be asked, or not in time.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error("no connection to the database")]
    Pool(#[from] deadpool_postgres::PoolError),
    #[error("a statement on sessions failed")]
    Statement(#[from] tokio_postgres::Error),
    #[error("the database did not answer in time")]
    Deadline,
    #[error("the database is unreachable")]
    Unreachable,
    #[error("too many sessions opened; the next one in {} s", .0.as_secs() + 1)]
    TooMany(Duration),
    #[error("the system has no randomness")]
    Randomness,
    #[error("a stored session cannot be read")]
    Unreadable,
    #[error("the session that it is opened in has ended")]
    ParentEnded,
}

pub(super) struct Sessions {
    pool: Pool,
    freshness: Arc<Freshness>,
    keys: watch::Receiver<Arc<SigningSet>>,
    opened: RateLimit<IdpUserId>,
    kept: Mutex<HashMap<Hash, Kept>>,
}

enum Kept {
    Live(Arc<Session>),
    Unknown(Instant),
}

/// What a session comes from, and ends with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Origin {
    /// The session that it was opened in.
    pub(super) opened_by: Option<Hash>,
    /// The user's last sign-out before; a later one prevents that it is opened.
    pub(super) sign_out: i64,
}

impl Origin {
    /// The identity provider's word of now.
    const PROVIDER: Self = Self { opened_by: None, sign_out: i64::MAX };
}

/// What a one-time code was made for.
pub(super) struct Handed {
    pub(super) origin: Origin,
    pub(super) user: IdpUserId,
    pub(super) slot: Option<Slot>,
    pub(super) return_to: String,
}

impl Sessions {
    pub(super) fn new(pool: Pool, freshness: Arc<Freshness>, keys: watch::Receiver<Arc<SigningSet>>) -> Self {
        let opened = RateLimit::new(OPENED_PER_SECOND, OPENED_BURST_SECONDS);
        Self { pool, freshness, keys, opened, kept: Mutex::default() }
    }

    /// The live session of a cookie's value.
    pub(super) async fn find(
        &self,
        door: Door,
        token: &str,
        now: Timestamp,
    ) -> Result<Option<Arc<Session>>, SessionError> {
        let hash = hash(token.as_bytes());
        let live = |session: &Arc<Session>| session.door == door && session.expires_at > now;
        match self.kept().get(&hash) {
            Some(Kept::Live(session)) => return Ok(Some(session).filter(|it| live(it)).cloned()),
            Some(Kept::Unknown(since)) if since.elapsed() < UNKNOWN_FOR => return Ok(None),
            _ => {}
        }
        if !session_token::is_genuine(&self.keys.borrow().app.public, door, token) {
            return Ok(None);
        }
        let sql = format!("SELECT {COLUMNS} FROM sessions WHERE token_hash = $1");
        // Boxed: this runs once per session and would enlarge every request's future.
        let session = match Box::pin(self.row(&sql, &[&hash.as_slice()])).await? {
            Some(row) => read(&row)?,
            None => None,
        };
        let session = session.map(Arc::new);
        self.keep(hash, session.clone().map_or_else(|| Kept::Unknown(Instant::now()), Kept::Live));
        Ok(session.filter(live))
    }

    /// Opens a session; gives the cookie's value, which is stored nowhere.
    pub(super) async fn open(
        &self,
        door: Door,
        user: &IdpUserId,
        slot: Option<&Slot>,
    ) -> Result<(String, Arc<Session>), SessionError> {
        self.open_within(Origin::PROVIDER, door, user, slot).await
    }

    /// The same, for a session that ends with another one, at the latest when that one does.
    pub(super) async fn open_within(
        &self,
        origin: Origin,
        door: Door,
        user: &IdpUserId,
        slot: Option<&Slot>,
    ) -> Result<(String, Arc<Session>), SessionError> {
        self.opened.check(user).map_err(SessionError::TooMany)?;
        let token = session_token::mint(&self.keys.borrow().app.current, door)?;
        let hash = hash(token.as_bytes());
        let sql = format!(
            "INSERT INTO sessions (token_hash, host, idp_user_id, slot, expires_at, opened_by) \
             SELECT $1, $2, $3, $4, least(now() + make_interval(secs => $5), parent.expires_at), $6 \
             FROM (SELECT $6::bytea AS hash) AS given LEFT JOIN sessions AS parent ON parent.token_hash = given.hash \
             WHERE (given.hash IS NULL OR parent.revoked_at IS NULL AND parent.expires_at > now()) AND NOT EXISTS \
             (SELECT 1 FROM sign_outs WHERE idp_user_id = $3 AND generation > $7) RETURNING {COLUMNS}"
        );
        let life = LIFE_SECONDS as f64;
        let slot = slot.map(Slot::as_str);
        let opened_by = origin.opened_by.as_ref().map(Hash::as_slice);
        let values: [&(dyn ToSql + Sync); 7] =
            [&hash.as_slice(), &door.as_str(), &user.as_str(), &slot, &life, &opened_by, &origin.sign_out];
        let row = self.row_of_user(user, &sql, &values).await?;
        let row = row.ok_or(SessionError::ParentEnded)?;
        let session = Arc::new(read(&row)?.ok_or(SessionError::Unreadable)?);
        self.keep(hash, Kept::Live(Arc::clone(&session)));
        SESSIONS_OPENED.add_one([door.as_str()]);
        Ok((token, session))
    }

    /// Remembers the slot that the user chose; `false` when the session is no more.
    pub(super) async fn choose(&self, session: &Session, slot: &Slot) -> Result<bool, SessionError> {
        let sql = format!(
            "UPDATE sessions SET slot = $2 WHERE token_hash = $1 AND revoked_at IS NULL RETURNING {COLUMNS}"
        );
        let row = self.row(&sql, &[&session.hash.as_slice(), &slot.as_str()]).await?;
        let changed = row.as_ref().map(read).transpose()?.flatten();
        let found = changed.is_some();
        if let Some(changed) = changed {
            self.keep(changed.hash, Kept::Live(Arc::new(changed)));
        }
        Ok(found)
    }

    /// Ends all sessions of a user, on both hosts, and the codes that would open more; the number of this sign-out.
    pub(super) async fn revoke_all(&self, user: &IdpUserId) -> Result<i64, SessionError> {
        let sql = "WITH ended AS (UPDATE sessions SET revoked_at = now() \
                     WHERE idp_user_id = $1 AND revoked_at IS NULL), \
                   codes AS (UPDATE session_codes SET used_at = now() \
                     WHERE idp_user_id = $1 AND used_at IS NULL) \
                   INSERT INTO sign_outs (idp_user_id, generation) VALUES ($1, nextval('sign_out_generations')) \
                   ON CONFLICT (idp_user_id) DO UPDATE SET generation = nextval('sign_out_generations') \
                   RETURNING generation";
        let row = self.row_of_user(user, sql, &[&user.as_str()]).await?.ok_or(SessionError::Unreadable)?;
        self.kept().retain(|_, kept| !matches!(kept, Kept::Live(session) if session.user == *user));
        Ok(row.try_get(0)?)
    }

    /// Ends one session, those that were opened in it, and the codes that would open more.
    pub(super) async fn revoke(&self, session: &Session) -> Result<(), SessionError> {
        let sql = "WITH codes AS (UPDATE session_codes SET used_at = now() \
                     WHERE opened_by = $1 AND used_at IS NULL) \
                   UPDATE sessions SET revoked_at = now() \
                     WHERE (token_hash = $1 OR opened_by = $1) AND revoked_at IS NULL";
        self.row(sql, &[&session.hash.as_slice()]).await?;
        self.keep(session.hash, Kept::Unknown(Instant::now()));
        Ok(())
    }

    /// Whether it is still open, as far as this process knows.
    pub(super) fn is_open(&self, session: &Session) -> bool {
        matches!(self.kept().get(&session.hash), Some(Kept::Live(_)))
    }

    /// A code that opens a session on the code host once, in the browser that holds `state`.
    pub(super) async fn issue_code(&self, handed: &Handed, state: &str) -> Result<String, SessionError> {
        self.opened.check(&handed.user).map_err(SessionError::TooMany)?;
        let code = random()?;
        let hash = code_hash(&code, state);
        let sql = "INSERT INTO session_codes (code_hash, idp_user_id, slot, return_to, expires_at, opened_by) \
                   VALUES ($1, $2, $3, $4, now() + make_interval(secs => $5), $6)";
        let slot = handed.slot.as_ref().map(Slot::as_str);
        let life = f64::from(CODE_LIFE_SECONDS);
        let opened_by = handed.origin.opened_by.as_ref().map(Hash::as_slice);
        let values: [&(dyn ToSql + Sync); 6] =
            [&hash.as_slice(), &handed.user.as_str(), &slot, &handed.return_to, &life, &opened_by];
        self.row(sql, &values).await?;
        Ok(code)
    }

    /// What the code was made for, the first time and in time.
    pub(super) async fn redeem_code(&self, code: &str, state: &str) -> Result<Option<Handed>, SessionError> {
        let hash = code_hash(code, state);
        let sql = "UPDATE session_codes SET used_at = now() WHERE code_hash = $1 AND used_at IS NULL \
                   AND expires_at > now() RETURNING idp_user_id, slot, return_to, opened_by, coalesce( \
                   (SELECT generation FROM sign_outs WHERE idp_user_id = session_codes.idp_user_id), 0)";
        let Some(row) = self.row(sql, &[&hash.as_slice()]).await? else { return Ok(None) };
        let user: &str = row.try_get(0)?;
        let slot: Option<&str> = row.try_get(1)?;
        Ok(Some(Handed {
            user: user.parse().map_err(|_| SessionError::Unreadable)?,
            slot: slot.map(str::parse).transpose().map_err(|_| SessionError::Unreadable)?,
            return_to: row.try_get(2)?,
            origin: Origin {
                opened_by: row
                    .try_get::<_, Option<&[u8]>>(3)?
                    .map(TryInto::try_into)
                    .transpose()
                    .map_err(|_| SessionError::Unreadable)?,
                sign_out: row.try_get(4)?,
            },
        }))
    }

    /// Applies what the watcher read of sessions that changed; of them only those in memory matter. Gives the users of those
    /// that have ended by it.
    pub(super) fn take_changes(&self, rows: &[Row]) -> Vec<IdpUserId> {
        let (mut kept, mut ended) = (self.kept(), Vec::new());
        for row in rows {
            let Ok(hash) = hash_of(row) else { continue };
            let Some(known) = kept.get_mut(&hash) else { continue };
            let now_is = read(row).ok().flatten();
            if let (Kept::Live(session), None) = (&*known, &now_is) {
                ended.push(session.user.clone());
            }
            *known = now_is.map_or_else(|| Kept::Unknown(Instant::now()), |it| Kept::Live(Arc::new(it)));
        }
        ended
    }

    /// After a time in which changes may have been missed.
    pub(super) fn forget_all(&self) {
        self.kept().clear();
    }

    /// As [`Self::row`], one at a time for a user: a session that is opened while its user signs out is seen by that sign-out,
    /// or sees it.
    async fn row_of_user(
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
            // A statement of its own: the next one's snapshot is taken once the lock is held.
            tx.query(&lock, &[&user.as_str()]).await?;
            let row = tx.query(&statement, params).await?.into_iter().next();
            tx.commit().await?;
            Ok(row)
        };
        tokio::time::timeout(DEADLINE, work).await.map_err(|_| SessionError::Deadline)?
    }

    /// The watcher has been without the database for seconds: nobody waits for the deadline again.
    fn ensure_reachable(&self) -> Result<(), SessionError> {
        match self.freshness.routes() {
            Routes::Stale | Routes::TooOld => Err(SessionError::Unreachable),
            _ => Ok(()),
        }
    }

    async fn row(&self, sql: &str, params: &[&(dyn ToSql + Sync)]) -> Result<Option<Row>, SessionError> {
        self.ensure_reachable()?;
        let work = async {
            let client: Object = self.pool.get().await?;
            let statement = client.prepare_cached(sql).await?;
            Ok(client.query(&statement, params).await?.into_iter().next())
        };
        tokio::time::timeout(DEADLINE, work).await.map_err(|_| SessionError::Deadline)?
    }

    fn keep(&self, hash: Hash, what: Kept) {
        let mut kept = self.kept();
        if kept.len() >= MOST_KEPT {
            let now = Timestamp::now();
            kept.retain(|_, kept| matches!(kept, Kept::Live(session) if session.expires_at > now));
            if kept.len() >= MOST_KEPT {
                kept.clear();
            }
        }
        kept.insert(hash, what);
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<Hash, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `None` for one that is revoked.
fn read(row: &Row) -> Result<Option<Session>, SessionError> {
    if row.try_get(5)? {
        return Ok(None);
    }
    let unreadable = || SessionError::Unreadable;
    let slot: Option<&str> = row.try_get(3)?;
    Ok(Some(Session {
        hash: hash_of(row)?,
        door: Door::from_stored(row.try_get(1)?).ok_or_else(unreadable)?,
        user: row.try_get::<_, &str>(2)?.parse().map_err(|_| unreadable())?,
        slot: slot.map(str::parse).transpose().map_err(|_| unreadable())?,
        expires_at: row.try_get(4)?,
    }))
}

fn hash_of(row: &Row) -> Result<Hash, SessionError> {
    row.try_get::<_, &[u8]>(0)?.try_into().map_err(|_| SessionError::Unreadable)
}

pub(super) fn hash(token: &[u8]) -> Hash {
    digest(&SHA256, token).as_ref().try_into().expect("SHA-256 is 32 bytes")
}

fn code_hash(code: &str, state: &str) -> Hash {
    hash(format!("{code}.{state}").as_bytes())
}

/// 256 random bits as a cookie or URL takes them.
pub(super) fn random() -> Result<String, SessionError> {
    let mut bytes = [0; 32];
    SystemRandom::new().fill(&mut bytes).map_err(|_| SessionError::Randomness)?;
    Ok(B64.encode(bytes))
}
