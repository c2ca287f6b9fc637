//! Database identity, recorded in the restore marker and compared with the live database.
//!
//! A server that lost its volume starts with an empty database, even though the marker says the restore is complete.
//! The empty database has a different system identifier and no restore id, so the gateway and backups refuse it.
//!
//! The restore id is a database setting (`svc.restore_id`). It survives renaming the database and isn't included in
//! dumps.

use tokio_postgres::{Client, Error};
use uuid::Uuid;

use super::restore_marker::RestoreMarker;
use crate::system::layout::Layout;
use crate::system::postgres;
use crate::system::postgres::quote_ident;
use svc_base::applet::Exit;
use svc_base::fsx::FileError;
use svc_store::snapshot::DatabaseIdentity;

/// Database setting that holds the restore id.
pub const RESTORE_ID_SETTING: &str = "svc.restore_id";

/// SQL expression for the advisory lock key that serializes adoption.
const ADOPTION_LOCK: &str = "hashtext('svc-database-identity')";

/// Identity reported by a live database.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LiveIdentity {
    system_identifier: String,
    database_oid: u32,
    /// `None` if the database was neither created by a restore nor adopted.
    restore_id: Option<Uuid>,
}

/// Errors from checking or setting the database identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error(
        "the database is not the one that was restored on this machine ({difference}): it is neither served nor backed up\n  \
         next: `svcctl recover USER` restores the latest snapshot on a new server; `svc-restore replace` restores it here and \
         keeps this database as svc_before_<n>; if this database is the right one, run `svc-restore adopt`"
    )]
    Mismatch { difference: String },
    #[error("database {0} does not exist")]
    Absent(String),
    #[error("cannot read or set the database identity")]
    Query(#[from] Error),
    #[error(transparent)]
    File(#[from] FileError),
}

impl IdentityError {
    pub fn exit(&self) -> Exit {
        match self {
            Self::Mismatch { .. } | Self::Absent(_) => Exit::Refused,
            Self::Query(error) => postgres::to_exit(error),
            Self::File(_) => Exit::Internal,
        }
    }

    /// Returns whether this is known to be a different database. Otherwise, its identity couldn't be determined.
    pub fn is_mismatch(&self) -> bool {
        matches!(self, Self::Mismatch { .. })
    }
}

/// Checks that `client` is connected to the database recorded in the marker. Returns `None` if there's no marker or it
/// doesn't record a database.
pub async fn check(layout: &Layout, client: &Client) -> Result<Option<DatabaseIdentity>, IdentityError> {
    let Some(expected) = RestoreMarker::read(layout)?.and_then(|marker| marker.database_identity) else {
        return Ok(None);
    };
    let live = read_identity(client, &read_current_database(client).await?).await?;
    match find_difference(&expected, &live) {
        None => Ok(Some(expected)),
        Some(difference) => Err(IdentityError::Mismatch { difference }),
    }
}

/// Like [`check`], but adopts the database if the marker doesn't record one, for example because an earlier release
/// wrote it.
pub async fn check_or_adopt(
    layout: &Layout,
    client: &Client,
) -> Result<Option<DatabaseIdentity>, IdentityError> {
    match RestoreMarker::read(layout)? {
        None => return Ok(None),
        Some(marker) if marker.database_identity.is_some() => return check(layout, client).await,
        Some(_) => {}
    }
    // The gateway and a backup may get here concurrently. The lock lets only one of them adopt the database.
    client.batch_execute(&format!("SELECT pg_advisory_lock({ADOPTION_LOCK})")).await?;
    let adopted = adopt_under_lock(layout, client).await;
    client.batch_execute(&format!("SELECT pg_advisory_unlock({ADOPTION_LOCK})")).await?;
    adopted
}

async fn adopt_under_lock(
    layout: &Layout,
    client: &Client,
) -> Result<Option<DatabaseIdentity>, IdentityError> {
    let Some(marker) = RestoreMarker::read(layout)? else { return Ok(None) };
    if marker.database_identity.is_some() {
        return check(layout, client).await;
    }
    let identity = adopt(client, &read_current_database(client).await?).await?;
    marker.with_identity(identity.clone()).write(layout)?;
    tracing::info!(restore_id = %identity.restore_id, "recorded the database identity in the marker");
    Ok(Some(identity))
}

fn find_difference(expected: &DatabaseIdentity, live: &LiveIdentity) -> Option<String> {
    if expected.system_identifier != live.system_identifier {
        let (expected, live) = (&expected.system_identifier, &live.system_identifier);
        return Some(format!("system identifier is {live} instead of {expected}"));
    }
    if expected.database_oid != live.database_oid {
        return Some(format!("oid is {} instead of {}", live.database_oid, expected.database_oid));
    }
    match live.restore_id {
        Some(id) if id == expected.restore_id => None,
        Some(id) => Some(format!("restore id is {id} instead of {}", expected.restore_id)),
        None => Some("no restore id".to_owned()),
    }
}

/// Returns the identity of a database to adopt, assigning a restore id if it has none.
pub async fn adopt(client: &Client, database: &str) -> Result<DatabaseIdentity, IdentityError> {
    let live = read_identity(client, database).await?;
    let restore_id = match live.restore_id {
        Some(id) => id,
        None => assign_restore_id(client, database).await?,
    };
    Ok(DatabaseIdentity {
        system_identifier: live.system_identifier,
        database_oid: live.database_oid,
        restore_id,
    })
}

/// Assigns a new restore id to a database.
///
/// # Errors
/// If a query fails.
pub async fn assign_restore_id(client: &Client, database: &str) -> Result<Uuid, IdentityError> {
    let id = Uuid::now_v7();
    client
        .batch_execute(&format!("ALTER DATABASE {} SET {RESTORE_ID_SETTING} = '{id}'", quote_ident(database)))
        .await?;
    Ok(read_identity(client, database).await?.restore_id.unwrap_or(id))
}

async fn read_current_database(client: &Client) -> Result<String, Error> {
    client.query_one("SELECT current_database()::text", &[]).await?.try_get(0)
}

async fn read_identity(client: &Client, database: &str) -> Result<LiveIdentity, IdentityError> {
    let row = client
        .query_opt(
            "SELECT (SELECT system_identifier::text FROM pg_control_system()), d.oid, \
                    (SELECT substr(c, strpos(c, '=') + 1) FROM pg_db_role_setting g, unnest(g.setconfig) c \
                     WHERE g.setdatabase = d.oid AND g.setrole = 0 AND c LIKE 'svc.restore\\_id=%') \
             FROM pg_database d WHERE d.datname = $1",
            &[&database],
        )
        .await?;
    let row = row.ok_or_else(|| IdentityError::Absent(database.to_owned()))?;
    let restore_id: Option<String> = row.try_get(2)?;
    Ok(LiveIdentity {
        system_identifier: row.try_get(0)?,
        database_oid: row.try_get(1)?,
        restore_id: restore_id.and_then(|id| id.parse().ok()),
    })
}
