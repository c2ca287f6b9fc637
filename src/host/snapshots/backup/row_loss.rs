//! What a database has lost since the snapshot before. An emptied one is not backed up; one that has shrunk by half, or
//! lost a table, is backed up, and does not become the latest by itself.

use crate::host::snapshots::row_counts;
use crate::quantity::counted;
use crate::store::snapshot::TableCount;

/// What was in the database, and is not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the database holds no rows, and the snapshot before, {before}, holds {rows}: it is not replaced\n  next: `svcctl recover` \
     brings it back; if nothing is missed, `svc-db-backup run --allow-empty`"
)]
pub struct Lost {
    /// Its key.
    pub before: String,
    pub rows: u64,
}

/// The owner's rows. A record from the store may say more than there is a sum of.
pub fn rows(tables: &[TableCount]) -> u64 {
    owners(tables).fold(0, |sum, table| sum.saturating_add(table.rows))
}

fn owners(tables: &[TableCount]) -> impl Iterator<Item = &TableCount> {
    tables.iter().filter(|table| row_counts::is_owners(&table.name))
}

/// A sentence that names what is missing, where that is at least half of the rows, or a table that held rows.
pub fn shrunk(before: &[TableCount], now: &[TableCount]) -> Option<String> {
    let gone: Vec<&TableCount> = owners(before)
        .filter(|table| table.rows > 0 && !now.iter().any(|other| other.name == table.name))
        .collect();
    if let Some(first) = gone.first() {
        let others = gone.len() - 1;
        let others = if others > 0 { format!(" and {others} more") } else { String::new() };
        return Some(format!("the table {} with {}{others} is gone", first.name, counted(first.rows, "row")));
    }
    let (before, now) = (rows(before), rows(now));
    (before > 0 && now <= before / 2)
        .then(|| format!("the database holds {} instead of {before}", counted(now, "row")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(name: &str, rows: u64) -> TableCount {
        TableCount { name: name.to_owned(), rows }
    }

    #[test]
    fn the_gateways_own_rows_are_not_the_owners() {
        assert_eq!(rows(&[table("svc.apps", 2), table("svcs.t", 3), table("app_notes.notes", 4)]), 7);
    }

    #[test]
    fn shrunk_names_half_of_the_rows_or_a_table() {
        let before = [table("a.t", 60), table("a.u", 41), table("a.empty", 0), table("svc.apps", 500)];
        let now = |t, u| [table("a.t", t), table("a.u", u), table("a.empty", 0), table("svc.apps", 0)];
        assert_eq!(shrunk(&before, &now(60, 41)), None);
        assert_eq!(shrunk(&before, &now(51, 0)), None, "all rows of a table, and less than half of all");
        assert!(shrunk(&before, &now(50, 0)).is_some_and(|loss| loss.contains("50 rows instead of 101")));
        let gone = shrunk(&before, &[table("a.t", 6000), table("a.empty", 0)]);
        assert!(gone.is_some_and(|loss| loss.contains("a.u") && loss.contains("41")));
        assert_eq!(shrunk(&before, &before[..2]), None, "a table without rows lost none");
        assert_eq!(shrunk(&[], &now(1, 1)), None);
    }
}
