//! Text view of slots and their subscriptions.

use serde::Deserialize;

use super::View;
use super::human::when;
use super::table::{self, Cell};

#[derive(Debug, Deserialize)]
pub struct Slots {
    pub slots: Vec<SlotRow>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SlotRow {
    pub idp_user_id: String,
    pub slot: String,
    pub plan: String,
    pub status: String,
    pub current_period_end: Option<String>,
}

pub fn list(view: &View, slots: &[SlotRow]) -> String {
    if slots.is_empty() {
        return "no slots\n".to_owned();
    }
    let row = |s: &SlotRow| {
        let end = s.current_period_end.as_deref().map(|end| when(view.now, end)).unwrap_or_default();
        let (user, slot) = (s.idp_user_id.clone(), s.slot.clone());
        vec![user.into(), slot.into(), s.plan.clone().into(), Cell::state(&s.status), end.into()]
    };
    let rows: Vec<_> = slots.iter().map(row).collect();
    table::render(view, &["USER", "SLOT", "PLAN", "STATUS", "PERIOD END"], &rows)
}
