//! Detects rows lost since the previous snapshot. An emptied database is not backed up. One that lost half of its rows,
//! or a table, is backed up, but its snapshot is held back.

use crate::snapshots::row_counts;
use svc_base::quantity::pluralize;
use svc_store::snapshot::TableCount;

/// An emptied database.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the database holds no rows, and the snapshot before, {before}, holds {rows}: it is not replaced\n  next: `svcctl recover` \
     brings it back; if nothing is missed, `svc-db-backup run --allow-empty`"
)]
pub struct EmptiedDatabase {
    /// Key of the previous snapshot.
    pub before: String,
    pub rows: u64,
}

/// Total rows of the owner's tables. Saturates: a record from the store may be wrong.
pub fn rows(tables: &[TableCount]) -> u64 {
    owners(tables).fold(0, |sum, table| sum.saturating_add(table.rows))
}

fn owners(tables: &[TableCount]) -> impl Iterator<Item = &TableCount> {
    tables.iter().filter(|table| row_counts::is_owners(&table.name))
}

/// Describes the loss, if it is at least half of the rows, or a table that had rows.
pub fn describe_loss(before: &[TableCount], now: &[TableCount]) -> Option<String> {
    let missing: Vec<&TableCount> = owners(before)
        .filter(|table| table.rows > 0 && !now.iter().any(|other| other.name == table.name))
        .collect();
    if let Some(first) = missing.first() {
        let others = missing.len() - 1;
        let others = if others > 0 { format!(" and {others} more") } else { String::new() };
        return Some(format!(
            "the table {} with {}{others} is gone",
            first.name,
            pluralize(first.rows, "row")
        ));
    }
    let (before, now) = (rows(before), rows(now));
    (before > 0 && now <= before / 2)
        .then(|| format!("the database holds {} instead of {before}", pluralize(now, "row")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(name: &str, rows: u64) -> TableCount {
        TableCount { name: name.to_owned(), rows }
    }

    #[test]
    fn rows_ignores_the_gateways_tables() {
        assert_eq!(rows(&[table("svc.apps", 2), table("svcs.t", 3), table("app_notes.notes", 4)]), 7);
    }

    #[test]
    fn describe_loss_reports_half_of_rows_or_a_table() {
        let before = [table("a.t", 60), table("a.u", 41), table("a.empty", 0), table("svc.apps", 500)];
        let now = |t, u| [table("a.t", t), table("a.u", u), table("a.empty", 0), table("svc.apps", 0)];
        assert_eq!(describe_loss(&before, &now(60, 41)), None);
        assert_eq!(
            describe_loss(&before, &now(51, 0)),
            None,
            "all rows of a table, and less than half of all"
        );
        assert!(
            describe_loss(&before, &now(50, 0)).is_some_and(|loss| loss.contains("50 rows instead of 101"))
        );
        let missing = describe_loss(&before, &[table("a.t", 6000), table("a.empty", 0)]);
        assert!(missing.is_some_and(|loss| loss.contains("a.u") && loss.contains("41")));
        assert_eq!(describe_loss(&before, &before[..2]), None, "a table without rows lost none");
        assert_eq!(describe_loss(&[], &now(1, 1)), None);
    }
}
