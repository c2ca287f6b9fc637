//! Which database this machine serves: the marker of the gate names it, and the database names itself.
//!
//! A server that lost its volume begins with an empty database under a marker that says that all is restored. Its
//! system identifier is another, and it has no id of a restore, so gateway and backup refuse it.
//!
//! The id of a restore is a setting of the database (`svc.restore_id`): a rename keeps it, no dump carries it.

use tokio_postgres::{Client, Error};
use uuid::Uuid;

use super::restore_marker::Marker;
use crate::applet::Exit;
use crate::fsx::FileError;
use crate::host::system::layout::Layout;
use crate::host::system::postgres;
use crate::host::system::postgres::ident;
use crate::store::snapshot::DatabaseIdentity;

/// The database's own setting. A snapshot leaves it out, for it is not the owner's.
pub const SETTING: &str = "svc.restore_id";

const ADOPTION_LOCK: &str = "hashtext('svc-database-identity')";

/// A database as it names itself.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LiveIdentity {
    system_identifier: String,
    database_oid: u32,
    /// `None`: no restore of ours has made or adopted it.
    restore_id: Option<Uuid>,
}

/// Why the database is not known to be this machine's.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error(
        "the database is not the one that was restored on this machine ({difference}): nothing of it is served or backed up\n  \
         next: `svcctl recover` brings the latest snapshot to a new server; `svc-restore replace` restores it here and keeps \
         this database as svc_before_<n>; if this database is the right one, `svc-restore adopt`"
    )]
    Mismatch { difference: String },
    #[error("there is no database {0}")]
    Absent(String),
    #[error("ask the database which one it is")]
    Query(#[from] Error),
    #[error(transparent)]
    File(#[from] FileError),
}

impl IdentityError {
    pub fn exit(&self) -> Exit {
        match self {
            Self::Mismatch { .. } | Self::Absent(_) => Exit::Refused,
            Self::Query(error) => postgres::exit(error),
            Self::File(_) => Exit::Internal,
        }
    }

    /// That the database is another, and not that it could not be asked.
    pub fn is_mismatch(&self) -> bool {
        matches!(self, Self::Mismatch { .. })
    }
}

/// Whether the database that `client` is connected to is the one that the marker names. `None` where there is no
/// marker, or one of an earlier release.
///
/// # Errors
/// [`IdentityError`].
pub async fn check(layout: &Layout, client: &Client) -> Result<Option<DatabaseIdentity>, IdentityError> {
    let Some(expected) = Marker::read(layout)?.and_then(|marker| marker.database_identity) else {
        return Ok(None);
    };
    let found = live(client, &current_database(client).await?).await?;
    match difference(&expected, &found) {
        None => Ok(Some(expected)),
        Some(difference) => Err(IdentityError::Mismatch { difference }),
    }
}

/// The same; a database under a marker of an earlier release is adopted, once.
///
/// # Errors
/// [`IdentityError`].
pub async fn verify(layout: &Layout, client: &Client) -> Result<Option<DatabaseIdentity>, IdentityError> {
    match Marker::read(layout)? {
        None => return Ok(None),
        Some(marker) if marker.database_identity.is_some() => return check(layout, client).await,
        Some(_) => {}
    }
    // Gateway and backup may adopt it at the same time: one of them does.
    client.batch_execute(&format!("SELECT pg_advisory_lock({ADOPTION_LOCK})")).await?;
    let adopted = adopt_under_lock(layout, client).await;
    client.batch_execute(&format!("SELECT pg_advisory_unlock({ADOPTION_LOCK})")).await?;
    adopted
}

async fn adopt_under_lock(
    layout: &Layout,
    client: &Client,
) -> Result<Option<DatabaseIdentity>, IdentityError> {
    let Some(marker) = Marker::read(layout)? else { return Ok(None) };
    if marker.database_identity.is_some() {
        return check(layout, client).await;
    }
    let identity = adopt(client, &current_database(client).await?).await?;
    marker.naming(identity.clone()).write(layout)?;
    tracing::info!(restore_id = %identity.restore_id, "the marker names the database from now on");
    Ok(Some(identity))
}

fn difference(expected: &DatabaseIdentity, found: &LiveIdentity) -> Option<String> {
    if expected.system_identifier != found.system_identifier {
        let (expected, found) = (&expected.system_identifier, &found.system_identifier);
        return Some(format!("its server's system identifier is {found} instead of {expected}"));
    }
    if expected.database_oid != found.database_oid {
        return Some(format!("its oid is {} instead of {}", found.database_oid, expected.database_oid));
    }
    match found.restore_id {
        Some(id) if id == expected.restore_id => None,
        Some(id) => Some(format!("it is of the restore {id} instead of {}", expected.restore_id)),
        None => Some("no restore has made it".to_owned()),
    }
}

/// The identity of a database that is to be this machine's; it gets the id of a restore if it has none.
///
/// # Errors
/// [`IdentityError`].
pub async fn adopt(client: &Client, database: &str) -> Result<DatabaseIdentity, IdentityError> {
    let found = live(client, database).await?;
    let restore_id = match found.restore_id {
        Some(id) => id,
        None => stamp(client, database).await?,
    };
    Ok(DatabaseIdentity {
        system_identifier: found.system_identifier,
        database_oid: found.database_oid,
        restore_id,
    })
}

/// Gives a database a new id of a restore.
///
/// # Errors
/// The database's.
pub async fn stamp(client: &Client, database: &str) -> Result<Uuid, IdentityError> {
    let id = Uuid::now_v7();
    client.batch_execute(&format!("ALTER DATABASE {} SET {SETTING} = '{id}'", ident(database))).await?;
    Ok(live(client, database).await?.restore_id.unwrap_or(id))
}

async fn current_database(client: &Client) -> Result<String, Error> {
    client.query_one("SELECT current_database()::text", &[]).await?.try_get(0)
}

async fn live(client: &Client, database: &str) -> Result<LiveIdentity, IdentityError> {
    let found = client
        .query_opt(
            "SELECT (SELECT system_identifier::text FROM pg_control_system()), d.oid, \
                    (SELECT substr(c, strpos(c, '=') + 1) FROM pg_db_role_setting g, unnest(g.setconfig) c \
                     WHERE g.setdatabase = d.oid AND g.setrole = 0 AND c LIKE 'svc.restore\\_id=%') \
             FROM pg_database d WHERE d.datname = $1",
            &[&database],
        )
        .await?;
    let row = found.ok_or_else(|| IdentityError::Absent(database.to_owned()))?;
    let restore_id: Option<String> = row.try_get(2)?;
    Ok(LiveIdentity {
        system_identifier: row.try_get(0)?,
        database_oid: row.try_get(1)?,
        restore_id: restore_id.and_then(|id| id.parse().ok()),
    })
}
