//! Text view of slots and their subscriptions.

use super::View;
use super::human::format_time;
use super::table::{self, Cell};
use svc_wire::slot::{Subscription, SubscriptionPage};

pub fn page(view: &View, page: &SubscriptionPage) -> String {
    let mut text = list(view, &page.slots);
    if let Some(cursor) = &page.next_cursor {
        text.push_str(&format!("more slots: repeat the command with `--cursor {cursor}`\n"));
    }
    text
}

pub fn list(view: &View, slots: &[Subscription]) -> String {
    if slots.is_empty() {
        return "no slots\n".to_owned();
    }
    let row = |s: &Subscription| {
        let end = s.current_period_end.as_deref().map(|end| format_time(view.now, end)).unwrap_or_default();
        let (user, slot) = (s.idp_user_id.clone(), s.slot.clone());
        let purpose = if s.test { "test" } else { "" };
        vec![
            user.into(),
            slot.into(),
            s.plan.clone().into(),
            Cell::state(&s.status),
            end.into(),
            purpose.into(),
        ]
    };
    let rows: Vec<_> = slots.iter().map(row).collect();
    table::render(view, &["USER", "SLOT", "PLAN", "STATUS", "PERIOD END", "PURPOSE"], &rows)
}
