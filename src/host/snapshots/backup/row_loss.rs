//! Detects rows lost since the previous snapshot. An emptied database is not backed up. If at least half of the rows,
//! or a table that had rows, is lost, the database is backed up, but the snapshot is held back.

use crate::snapshots::row_counts;
use svc_base::quantity::pluralize;
use svc_store::snapshot::TableCount;

/// The database was emptied: it has no rows, but the previous snapshot has some.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the database holds no rows, but the previous snapshot, {previous_key}, holds {previous_rows} and stays the \
     latest\n  next: restore it with `svcctl recover USER`; if the loss is intended, run \
     `svc-db-backup run --allow-empty`"
)]
pub struct EmptiedDatabaseError {
    /// Key of the previous snapshot.
    pub previous_key: String,
    /// Number of rows in the previous snapshot.
    pub previous_rows: u64,
}

/// Returns the total number of rows in the owner's tables. Saturates, because a sidecar from the store may be wrong.
pub fn count_owner_rows(tables: &[TableCount]) -> u64 {
    owner_tables(tables).fold(0, |sum, table| sum.saturating_add(table.rows))
}

fn owner_tables(tables: &[TableCount]) -> impl Iterator<Item = &TableCount> {
    tables.iter().filter(|table| row_counts::is_owner_table(&table.name))
}

/// Describes the loss if at least half of the rows, or a table that had rows, is missing; otherwise returns `None`.
pub fn describe_loss(previous: &[TableCount], current: &[TableCount]) -> Option<String> {
    let missing: Vec<&TableCount> = owner_tables(previous)
        .filter(|table| table.rows > 0 && !current.iter().any(|other| other.name == table.name))
        .collect();
    if let Some(first) = missing.first() {
        let others = match missing.len() as u64 - 1 {
            0 => String::new(),
            count => format!(", along with {}", pluralize(count, "other table")),
        };
        return Some(format!(
            "the table {} with {} is missing{others}",
            first.name,
            pluralize(first.rows, "row")
        ));
    }
    let (previous, current) = (count_owner_rows(previous), count_owner_rows(current));
    (previous > 0 && current <= previous / 2)
        .then(|| format!("the database holds {} instead of {previous}", pluralize(current, "row")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(name: &str, rows: u64) -> TableCount {
        TableCount { name: name.to_owned(), rows }
    }

    #[test]
    fn count_owner_rows_ignores_gateway_tables() {
        assert_eq!(
            count_owner_rows(&[table("svc.apps", 2), table("svcs.t", 3), table("app_notes.notes", 4)]),
            7
        );
    }

    #[test]
    fn describe_loss_reports_half_of_rows_or_missing_table() {
        let before = [table("a.t", 60), table("a.u", 41), table("a.empty", 0), table("svc.apps", 500)];
        let now = |t, u| [table("a.t", t), table("a.u", u), table("a.empty", 0), table("svc.apps", 0)];
        assert_eq!(describe_loss(&before, &now(60, 41)), None);
        assert_eq!(
            describe_loss(&before, &now(51, 0)),
            None,
            "a table lost all of its rows, but the database lost less than half"
        );
        assert!(
            describe_loss(&before, &now(50, 0)).is_some_and(|loss| loss.contains("50 rows instead of 101"))
        );
        let missing = describe_loss(&before, &[table("a.t", 6000), table("a.empty", 0)]);
        assert!(missing.is_some_and(|loss| loss.contains("a.u") && loss.contains("41")));
        assert_eq!(describe_loss(&before, &before[..2]), None, "the missing table was empty");
        assert_eq!(describe_loss(&[], &now(1, 1)), None);
    }
}
