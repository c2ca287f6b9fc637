//! The `slots`, `slot_releases` and `handles` tables: subscriptions, machine releases and handle owners.

use std::collections::HashMap;

use deadpool_postgres::GenericClient;
use jiff::{SignedDuration, Timestamp};
use tokio_postgres::Row;

use super::{DbError, execute, query, query_opt};
use svc_machine::id::MachineId;
use svc_machine::name::{Handle, IdpUserId, ImageVersion, Slot};
use svc_machine::plan::Plan;
use svc_wire::slot::SubscriptionStatus;

/// How long a slot stays entitled after its subscription's current period ends.
const SUBSCRIPTION_GRACE: SignedDuration = SignedDuration::from_hours(3 * 24);

#[derive(Debug, Clone)]
pub struct SlotRow {
    pub user: IdpUserId,
    pub slot: Slot,
    pub plan: Plan,
    pub status: SubscriptionStatus,
    pub current_period_end: Option<Timestamp>,
    /// Whether this is a test slot rather than a customer's.
    pub is_test: bool,
}

/// A subscription to store.
pub struct NewSubscription {
    pub user: IdpUserId,
    pub slot: Slot,
    pub plan: Plan,
    pub status: SubscriptionStatus,
    pub current_period_end: Option<Timestamp>,
    /// `None` keeps the stored value: the billing system does not know which slots are test slots.
    pub is_test: Option<bool>,
}

impl SlotRow {
    /// Returns whether the subscription entitles the slot to a machine at `now`.
    pub fn is_entitled(&self, now: Timestamp) -> bool {
        let is_current = |end: Timestamp| end.saturating_add(SUBSCRIPTION_GRACE).is_ok_and(|end| now <= end);
        self.status == SubscriptionStatus::Active && self.current_period_end.is_none_or(is_current)
    }

    fn parse(row: &Row) -> Result<Self, DbError> {
        let unreadable = |what, reason: String| DbError::Unreadable { what, reason };
        let text = |column: &str| row.get::<_, &str>(column);
        Ok(Self {
            user: text("idp_user_id").parse().map_err(|e| unreadable("idp_user_id", format!("{e}")))?,
            slot: text("slot").parse().map_err(|e| unreadable("slot", format!("{e}")))?,
            plan: text("plan").parse().map_err(|e| unreadable("plan", e))?,
            status: text("status").parse().map_err(|e| unreadable("status", format!("{e}")))?,
            current_period_end: row.get("current_period_end"),
            is_test: row.get("is_test"),
        })
    }
}

const COLUMNS: &str = "idp_user_id, slot, plan, status, current_period_end, is_test";

pub async fn find_subscription(
    client: &impl GenericClient,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<Option<SlotRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM slots WHERE idp_user_id = $1 AND slot = $2");
    query_opt(client, &sql, &[&user.as_str(), &slot.as_str()]).await?.as_ref().map(SlotRow::parse).transpose()
}

/// Lists the slots that sort after `after`, for one user or all users.
pub async fn list(
    client: &impl GenericClient,
    user: Option<&IdpUserId>,
    after: Option<&(IdpUserId, Slot)>,
    limit: i64,
) -> Result<Vec<SlotRow>, DbError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM slots WHERE ($1::text IS NULL OR idp_user_id = $1) \
         AND ($2::text IS NULL OR (idp_user_id, slot) > ($2, $3::text)) ORDER BY idp_user_id, slot LIMIT $4"
    );
    let user = user.map(IdpUserId::as_str);
    let (after_user, after_slot) = after.map(|(user, slot)| (user.as_str(), slot.as_str())).unzip();
    query(client, &sql, &[&user, &after_user, &after_slot, &limit])
        .await?
        .iter()
        .map(SlotRow::parse)
        .collect()
}

/// Inserts a slot, or replaces its subscription.
pub async fn upsert_subscription(
    client: &impl GenericClient,
    slot: &NewSubscription,
) -> Result<SlotRow, DbError> {
    let sql = format!(
        "INSERT INTO slots (idp_user_id, slot, plan, status, current_period_end, is_test) \
         VALUES ($1, $2, $3, $4, $5, coalesce($6, false)) ON CONFLICT (idp_user_id, slot) DO UPDATE \
         SET plan = EXCLUDED.plan, status = EXCLUDED.status, current_period_end = EXCLUDED.current_period_end, \
         is_test = coalesce($6, slots.is_test), updated_at = now() RETURNING {COLUMNS}"
    );
    let (user, name) = (slot.user.as_str(), slot.slot.as_str());
    let params: super::Params<'_> =
        &[&user, &name, &slot.plan.as_str(), &slot.status.as_str(), &slot.current_period_end, &slot.is_test];
    let row = query_opt(client, &sql, params).await?;
    let no_row = || DbError::Unreadable { what: "slot", reason: "the upsert returned no row".to_owned() };
    SlotRow::parse(&row.ok_or_else(no_row)?)
}

/// Permanently assigns the handle to the user if it is free. Returns its owner, who may be another user.
pub async fn claim_handle(
    client: &impl GenericClient,
    handle: &Handle,
    user: &IdpUserId,
) -> Result<String, DbError> {
    let sql = "INSERT INTO handles (handle, idp_user_id) VALUES ($1, $2) ON CONFLICT (handle) DO NOTHING";
    execute(client, sql, &[&handle.as_str(), &user.as_str()]).await?;
    let sql = "SELECT idp_user_id FROM handles WHERE handle = $1";
    let owner = query_opt(client, sql, &[&handle.as_str()]).await?;
    Ok(owner.map(|row| row.get(0)).unwrap_or_default())
}

/// Finds the handle's owner, if any.
pub async fn find_handle_owner(
    client: &impl GenericClient,
    handle: &Handle,
) -> Result<Option<String>, DbError> {
    let sql = "SELECT idp_user_id FROM handles WHERE handle = $1";
    Ok(query_opt(client, sql, &[&handle.as_str()]).await?.map(|row| row.get(0)))
}

/// Finds the release for the slot's next machine; `None` if none is recorded.
pub async fn find_release(
    client: &impl GenericClient,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<Option<ImageVersion>, DbError> {
    let sql = "SELECT image_version FROM slot_releases WHERE idp_user_id = $1 AND slot = $2";
    let Some(row) = query_opt(client, sql, &[&user.as_str(), &slot.as_str()]).await? else {
        return Ok(None);
    };
    let version: &str = row.get(0);
    let parsed = version.parse();
    parsed
        .map(Some)
        .map_err(|error| DbError::Unreadable { what: "slot_releases", reason: format!("{error}") })
}

/// Records the release running on the slot's machine. The slot's next machine starts with it.
pub async fn set_release(
    client: &impl GenericClient,
    user: &IdpUserId,
    slot: &Slot,
    version: &ImageVersion,
) -> Result<(), DbError> {
    // `set_at` is the time of the last change, so an unchanged release does not update it.
    let sql = "INSERT INTO slot_releases (idp_user_id, slot, image_version) VALUES ($1, $2, $3) \
               ON CONFLICT (idp_user_id, slot) DO UPDATE SET image_version = $3, set_at = clock_timestamp() \
               WHERE slot_releases.image_version <> $3";
    execute(client, sql, &[&user.as_str(), &slot.as_str(), &version.as_str()]).await.map(drop)
}

/// Like [`set_release`], but finds the slot by its machine. In the common case of an unchanged release, this locks no
/// row.
pub async fn set_release_for_machine(
    client: &impl GenericClient,
    machine: MachineId,
    version: &ImageVersion,
) -> Result<(), DbError> {
    let sql = "INSERT INTO slot_releases (idp_user_id, slot, image_version) \
               SELECT idp_user_id, slot, $2 FROM user_machines m WHERE machine_id = $1 \
               AND NOT EXISTS (SELECT 1 FROM slot_releases r WHERE r.idp_user_id = m.idp_user_id AND r.slot = m.slot \
                 AND r.image_version = $2) \
               ON CONFLICT (idp_user_id, slot) DO UPDATE SET image_version = $2, set_at = clock_timestamp() \
               WHERE slot_releases.image_version <> $2";
    execute(client, sql, &[&machine.0, &version.as_str()]).await.map(drop)
}

/// Maps server labels to slots, as `user/slot`. Scans every slot: call it only for the few servers named in an alarm.
pub async fn find_slots_by_label(
    client: &impl GenericClient,
    labels: &[String],
) -> Result<HashMap<String, String>, DbError> {
    let sql = "WITH slot_names AS (SELECT idp_user_id || '/' || slot AS name FROM slots \
                 UNION SELECT idp_user_id || '/' || slot FROM user_machines), \
               labeled AS (SELECT left(encode(sha256(convert_to(name, 'UTF8')), 'hex'), 32) AS label, name \
                 FROM slot_names) \
               SELECT label, name FROM labeled WHERE label = ANY($1)";
    Ok(query(client, sql, &[&labels]).await?.iter().map(|row| (row.get(0), row.get(1))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_is_entitled_until_grace_period_ends() {
        let now: Timestamp = "2026-01-10T00:00:00Z".parse().unwrap();
        let slot = |status, end: Option<&str>| SlotRow {
            user: "user_1".parse().unwrap(),
            slot: Slot::primary(),
            plan: Plan::Starter,
            status,
            current_period_end: end.map(|end| end.parse().unwrap()),
            is_test: false,
        };
        assert!(slot(SubscriptionStatus::Active, None).is_entitled(now));
        assert!(slot(SubscriptionStatus::Active, Some("2026-01-07T00:00:00Z")).is_entitled(now));
        assert!(!slot(SubscriptionStatus::Active, Some("2026-01-06T23:59:59Z")).is_entitled(now));
        assert!(!slot(SubscriptionStatus::Inactive, Some("2027-01-01T00:00:00Z")).is_entitled(now));
    }
}
