//! Converts operator rows to operators in the API.

use crate::db::operators::OperatorRow;
use svc_wire::operator::{Operator, OperatorState};

impl From<&OperatorRow> for Operator {
    fn from(row: &OperatorRow) -> Self {
        let state = match (row.revoked_at, row.is_expired) {
            (Some(_), _) => OperatorState::Revoked,
            (None, true) => OperatorState::Expired,
            (None, false) => OperatorState::Active,
        };
        Self {
            name: row.name.to_string(),
            scopes: row.scopes.to_wire(),
            state: state.into(),
            expires_at: row.expires_at.into(),
            last_used_at: row.last_used_at.map(Into::into),
            previous_token_expires_at: row.previous_expires_at.map(Into::into),
            previous_token_last_used_at: row.previous_used_at.map(Into::into),
            created_at: row.created_at.into(),
            created_by: row.created_by.clone(),
            rotated_at: row.rotated_at.map(Into::into),
            revoked_at: row.revoked_at.map(Into::into),
        }
    }
}
