//! Text view of the cost of dispatches.

use super::View;
use super::table::{self, Cell};
use svc_http::usage::GroupBy;
use svc_wire::usage::{UsageEntry, UsageReport};

/// Renders one row per entry and the total at the end.
pub fn show(view: &View, by: GroupBy, report: &UsageReport) -> String {
    if report.entries.is_empty() {
        return "no usage\n".to_owned();
    }
    let head = match by {
        GroupBy::Day => "DAY",
        GroupBy::Week => "WEEK OF",
        GroupBy::Month => "MONTH",
        GroupBy::Model => "MODEL",
        GroupBy::User => "USER",
    };
    let row = |entry: &UsageEntry| {
        let key = match by {
            GroupBy::Model => entry.model.as_ref(),
            GroupBy::User => entry.user_id.as_ref(),
            GroupBy::Day | GroupBy::Week | GroupBy::Month => None,
        };
        let name = key.map_or(&*entry.date, String::as_str).to_owned();
        cells(name, entry.cost, [entry.tokens_in, entry.tokens_out, entry.dispatches])
    };
    let mut rows: Vec<_> = report.entries.iter().map(row).collect();
    let totals = [report.total_tokens_in, report.total_tokens_out, report.total_dispatches];
    rows.push(cells("total".to_owned(), report.total_cost, totals));
    table::render(view, &[head, "COST", "TOKENS IN", "TOKENS OUT", "DISPATCHES"], &rows)
}

fn cells(name: String, cost: f64, counts: [u64; 3]) -> Vec<Cell> {
    let counts = counts.map(|count| count.to_string().into());
    [vec![name.into(), format!("${cost:.2}").into()], counts.into()].concat()
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::json;

    use super::*;

    const VIEW: View = View { now: Timestamp::UNIX_EPOCH, has_colors: false, width: None };

    #[test]
    fn usage_shows_each_entry_and_the_total() {
        let entry = |user: &str, cost: f64| json!({"date": "2026-11-01", "userId": user, "cost": cost, "tokensIn": 100, "tokensOut": 20, "dispatches": 1});
        let report = json!({"totalCost": 3.5, "totalTokensIn": 200, "totalTokensOut": 40, "totalDispatches": 2,
            "entries": [entry("telegram:7", 1.25), entry("user_1", 2.25)]});
        let report: UsageReport = serde_json::from_value(report).unwrap();
        assert_eq!(
            show(&VIEW, GroupBy::User, &report),
            "USER        COST   TOKENS IN  TOKENS OUT  DISPATCHES\n\
             telegram:7  $1.25  100        20          1\n\
             user_1      $2.25  100        20          1\n\
             total       $3.50  200        40          2\n"
        );
        assert!(show(&VIEW, GroupBy::Day, &report).starts_with("DAY         COST"));
    }

    #[test]
    fn show_without_entries_says_no_usage() {
        let none = json!({"totalCost": 0, "totalTokensIn": 0, "totalTokensOut": 0, "totalDispatches": 0, "entries": []});
        assert_eq!(show(&VIEW, GroupBy::Day, &serde_json::from_value(none).unwrap()), "no usage\n");
    }
}
