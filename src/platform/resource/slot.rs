//! Converts slot rows to subscriptions in the API.

use crate::db::slots::SlotRow;
use svc_wire::slot::Subscription;

impl From<&SlotRow> for Subscription {
    fn from(row: &SlotRow) -> Self {
        Self {
            idp_user_id: (&row.user).into(),
            slot: (&row.slot).into(),
            plan: row.plan.into(),
            status: row.status.into(),
            current_period_end: row.current_period_end.map(Into::into),
            test: row.is_test,
        }
    }
}
