//! Whether a database holds nothing where the snapshot before held something: then it was lost, and a snapshot of it
//! must not take that one's place.

use crate::store::snapshot::TableCount;

/// The gateway's own tables, which are there from its first start on.
const OURS: &str = "svc.";

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
    let owners = tables.iter().filter(|table| !table.name.starts_with(OURS));
    owners.fold(0, |sum, table| sum.saturating_add(table.rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gateways_own_rows_are_not_the_owners() {
        let table = |name: &str, rows| TableCount { name: name.to_owned(), rows };
        assert_eq!(rows(&[table("svc.apps", 2), table("svcs.t", 3), table("app_notes.notes", 4)]), 7);
    }
}
