//! The SQL statements that copy a table back, built from the catalogs of both databases. This module performs no I/O.

use super::catalog::ForeignKey;
use crate::snapshots::side_database::CopyMode;
use crate::system::postgres::quote_ident;

/// A column of the table, in one of the two databases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    pub name: String,
    /// As formatted by `format_type`.
    pub data_type: String,
    /// Part of the primary key.
    pub is_key: bool,
    /// Computed from other columns.
    pub is_generated: bool,
    /// `GENERATED ALWAYS AS IDENTITY`: an update cannot set it.
    pub is_always_identity: bool,
}

/// Why a table cannot be copied.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error(
        "{table} has no primary key, so its rows cannot be matched\n  next: use mode replace, which replaces all rows with \
         the snapshot's"
    )]
    NoPrimaryKey { table: String },
    #[error(
        "{table}.{column} has the type {current}, but had the type {snapshot} in the snapshot\n  next: copy \
         the column by hand from the database svc_side"
    )]
    TypeChanged { table: String, column: String, current: String, snapshot: String },
    #[error(
        "{table} has a different primary key in the snapshot\n  next: use mode replace, which replaces all rows with the \
         snapshot's"
    )]
    KeyChanged { table: String },
    #[error("{table} has none of the columns that it had in the snapshot")]
    NoCommonColumns { table: String },
}

/// The statements for one table. The snapshot's rows are loaded into a temporary table first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyPlan {
    /// `schema.table`, quoted where needed.
    pub table: String,
    /// The number in the temporary table's name.
    number: usize,
    /// Columns that both databases have.
    columns: Vec<String>,
    /// The primary key's columns; empty if the table has no primary key, had another one in the snapshot, or one of its
    /// columns is not in `columns`. Without a key, all rows are replaced.
    key: Vec<String>,
    /// The columns that an update may set.
    settable: Vec<String>,
    /// Columns that only the snapshot has.
    pub left_out: Vec<String>,
    /// The table has columns that the snapshot lacks. Their values are lost if all rows are replaced.
    pub has_added_columns: bool,
    pub mode: CopyMode,
}

impl CopyPlan {
    pub fn new(
        number: usize,
        table: &str,
        current: &[Column],
        snapshot: &[Column],
        mode: CopyMode,
    ) -> Result<Self, PlanError> {
        let table = table.to_owned();
        let mut columns = Vec::new();
        let mut left_out = Vec::new();
        for old in snapshot.iter().filter(|column| !column.is_generated) {
            match current.iter().find(|column| column.name == old.name) {
                Some(new) if new.is_generated => {}
                Some(new) if new.data_type != old.data_type => {
                    let (current, snapshot) = (new.data_type.clone(), old.data_type.clone());
                    return Err(PlanError::TypeChanged {
                        table,
                        column: old.name.clone(),
                        current,
                        snapshot,
                    });
                }
                Some(new) => columns.push(new.clone()),
                None => left_out.push(old.name.clone()),
            }
        }
        if columns.is_empty() {
            return Err(PlanError::NoCommonColumns { table });
        }
        let is_added =
            |new: &Column| !new.is_generated && !columns.iter().any(|column| column.name == new.name);
        let has_added_columns = current.iter().any(is_added);
        let key: Vec<String> = column_names(current.iter().filter(|column| column.is_key));
        let has_whole_key = key.iter().all(|name| columns.iter().any(|column| column.name == *name));
        let snapshot_key: Vec<String> = column_names(snapshot.iter().filter(|column| column.is_key));
        // The order of a key's columns does not matter, and can differ if the table or a column was recreated.
        let has_same_key = has_whole_key
            && key.len() == snapshot_key.len()
            && key.iter().all(|name| snapshot_key.contains(name));
        if mode != CopyMode::Replace {
            if key.is_empty() {
                return Err(PlanError::NoPrimaryKey { table });
            }
            if !has_same_key {
                return Err(PlanError::KeyChanged { table });
            }
        }
        // The snapshot's rows might not be unique in another key's columns, so they cannot be matched by that key.
        let key = if has_same_key { key } else { Vec::new() };
        let settable = column_names(
            columns.iter().filter(|column| !column.is_always_identity && !key.contains(&column.name)),
        );
        let columns = column_names(columns.iter());
        Ok(Self { table, number, columns, key, settable, left_out, has_added_columns, mode })
    }

    /// Makes the plan delete all rows and insert the snapshot's, instead of matching them by key.
    pub fn replace_all_rows(&mut self) {
        self.key.clear();
    }

    fn temporary_table(&self) -> String {
        format!("pg_temp.svc_side_{}", self.number)
    }

    pub fn build_create_temporary(&self) -> String {
        let (columns, table) = (join_quoted(&self.columns, ""), &self.table);
        format!(
            "CREATE TEMPORARY TABLE svc_side_{} ON COMMIT DROP AS SELECT {columns} FROM ONLY {table} WITH NO DATA",
            self.number
        )
    }

    /// Builds the statement that exports the rows; it runs in the side database.
    pub fn build_copy_out(&self) -> String {
        format!("COPY (SELECT {} FROM ONLY {}) TO STDOUT", join_quoted(&self.columns, ""), self.table)
    }

    pub fn build_copy_in(&self) -> String {
        format!("COPY {} ({}) FROM STDIN", self.temporary_table(), join_quoted(&self.columns, ""))
    }

    /// Builds statements to execute once the rows are loaded: an index, because later statements look rows up by key,
    /// and statistics for the planner.
    pub fn build_index_and_analyze(&self) -> Vec<String> {
        let mut statements = Vec::new();
        if !self.key.is_empty() {
            statements.push(format!(
                "CREATE INDEX ON {} ({})",
                self.temporary_table(),
                join_quoted(&self.key, "")
            ));
        }
        statements.push(format!("ANALYZE {}", self.temporary_table()));
        statements
    }

    /// Builds a statement that deletes the rows that the snapshot lacks, or all rows if there is no key.
    pub fn build_delete(&self) -> String {
        let table = &self.table;
        if self.key.is_empty() {
            return format!("DELETE FROM ONLY {table}");
        }
        format!("DELETE FROM ONLY {table} AS t WHERE {}", self.deleted_condition())
    }

    /// Builds a query that checks whether rows of another table refer to rows that `build_delete` deletes.
    pub fn build_has_referring_rows(&self, foreign_key: &ForeignKey) -> String {
        let only_deleted = match self.key.is_empty() {
            true => String::new(),
            false => format!(" WHERE {}", self.deleted_condition()),
        };
        format!(
            "SELECT EXISTS (SELECT FROM ONLY {} AS o JOIN ONLY {} AS t ON {}{only_deleted})",
            foreign_key.from, self.table, foreign_key.condition
        )
    }

    pub fn build_count(&self) -> String {
        format!("SELECT count(*) FROM ONLY {}", self.table)
    }

    /// Builds a statement that updates existing rows that differ; `None` if there is no key, or no column can be
    /// updated.
    pub fn build_update(&self) -> Option<String> {
        if self.settable.is_empty() || self.key.is_empty() {
            return None;
        }
        let sets = self.settable.iter().map(|name| format!("{0} = s.{0}", quote_ident(name)));
        // Rows are compared as text, because not every type has an equality operator.
        let rows = |prefix| format!("ROW({})::text", join_quoted(&self.settable, prefix));
        Some(format!(
            "UPDATE ONLY {} AS t SET {} FROM {} AS s WHERE {} AND {} <> {}",
            self.table,
            sets.collect::<Vec<_>>().join(", "),
            self.temporary_table(),
            self.same_key_condition(),
            rows("t."),
            rows("s."),
        ))
    }

    /// Builds a statement that inserts missing rows, or all rows if there is no key. With `skip_conflicts`, rows that
    /// violate a unique constraint are skipped.
    pub fn build_insert(&self, skip_conflicts: bool) -> String {
        let (columns, table, temporary) =
            (join_quoted(&self.columns, ""), &self.table, self.temporary_table());
        let only_missing =
            if self.key.is_empty() { String::new() } else { format!(" WHERE {}", self.absent_condition()) };
        let conflict_clause = if skip_conflicts { " ON CONFLICT DO NOTHING" } else { "" };
        format!(
            "INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE SELECT {} \
             FROM {temporary} AS s{only_missing}{conflict_clause}",
            join_quoted(&self.columns, "s."),
        )
    }

    /// Builds a query that counts the snapshot's rows that the table lacks; `None` if there is no key.
    pub fn build_count_missing(&self) -> Option<String> {
        (!self.key.is_empty()).then(|| {
            format!("SELECT count(*) FROM {} AS s WHERE {}", self.temporary_table(), self.absent_condition())
        })
    }

    fn deleted_condition(&self) -> String {
        let (temporary, same) = (self.temporary_table(), self.same_key_condition());
        format!("NOT EXISTS (SELECT FROM {temporary} AS s WHERE {same})")
    }

    fn absent_condition(&self) -> String {
        format!("NOT EXISTS (SELECT FROM ONLY {} AS t WHERE {})", self.table, self.same_key_condition())
    }

    fn same_key_condition(&self) -> String {
        let equal = self.key.iter().map(|name| format!("t.{0} = s.{0}", quote_ident(name)));
        equal.collect::<Vec<_>>().join(" AND ")
    }
}

fn column_names<'a>(columns: impl Iterator<Item = &'a Column>) -> Vec<String> {
    columns.map(|column| column.name.clone()).collect()
}

fn join_quoted(names: &[String], prefix: &str) -> String {
    names.iter().map(|name| format!("{prefix}{}", quote_ident(name))).collect::<Vec<_>>().join(", ")
}

/// Sorts tables so that each follows the tables to which it refers, except within a cycle of references.
pub fn sort_parents_first<'a>(tables: &[&'a str], references: &[(String, String)]) -> Vec<&'a str> {
    let mut remaining: Vec<&str> = tables.to_vec();
    let mut ordered = Vec::with_capacity(remaining.len());
    while !remaining.is_empty() {
        let has_remaining_parent = |child: &str| {
            let is_parent = |to: &String| to != child && remaining.contains(&to.as_str());
            references.iter().any(|(from, to)| from == child && is_parent(to))
        };
        let next = remaining.iter().position(|table| !has_remaining_parent(table)).unwrap_or(0);
        ordered.push(remaining.remove(next));
    }
    ordered
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn column(name: &str, data_type: &str, is_key: bool) -> Column {
        let (name, data_type) = (name.into(), data_type.into());
        Column { name, data_type, is_key, is_generated: false, is_always_identity: false }
    }

    #[test]
    fn new_copies_common_columns_and_lists_others() {
        let snapshot =
            [column("id", "integer", true), column("old", "text", false), column("a", "text", false)];
        let current =
            [column("id", "integer", true), column("a", "text", false), column("new", "text", false)];
        let plan = CopyPlan::new(0, "public.t", &current, &snapshot, CopyMode::Overwrite).unwrap();
        assert_eq!(plan.left_out, ["old"]);
        assert!(plan.has_added_columns);
        assert_eq!(plan.build_copy_out(), r#"COPY (SELECT "id", "a" FROM ONLY public.t) TO STDOUT"#);
        assert_eq!(
            plan.build_update().unwrap(),
            r#"UPDATE ONLY public.t AS t SET "a" = s."a" FROM pg_temp.svc_side_0 AS s WHERE t."id" = s."id" AND ROW(t."a")::text <> ROW(s."a")::text"#
        );
    }

    #[test]
    fn new_refuses_missing_key_and_changed_type() {
        let (id, text) = (column("id", "integer", true), column("a", "text", false));
        let plan = |current: &[Column], snapshot: &[Column], mode| {
            CopyPlan::new(0, "t", current, snapshot, mode).map(|_| ())
        };
        let keyless = [column("id", "integer", false), text.clone()];
        assert!(matches!(plan(&keyless, &keyless, CopyMode::Missing), Err(PlanError::NoPrimaryKey { .. })));
        assert_eq!(plan(&keyless, &keyless, CopyMode::Replace), Ok(()));
        let original = [id.clone(), text.clone()];
        let retyped = [id, column("a", "integer", false)];
        assert!(matches!(plan(&retyped, &original, CopyMode::Replace), Err(PlanError::TypeChanged { .. })));
        let rekeyed = [column("id", "integer", true), column("a", "text", true)];
        assert!(matches!(plan(&rekeyed, &original, CopyMode::Missing), Err(PlanError::KeyChanged { .. })));
        assert!(matches!(plan(&[], &original, CopyMode::Replace), Err(PlanError::NoCommonColumns { .. })));
    }

    #[test]
    fn new_replaces_all_rows_if_key_changed() {
        let columns = |is_tenant_key, is_id_key| {
            [column("tenant", "text", is_tenant_key), column("id", "integer", is_id_key)]
        };
        let (both, only_id, none) = (columns(true, true), columns(false, true), columns(false, false));
        for (current, snapshot) in
            [(&only_id, &both), (&both, &only_id), (&only_id, &none), (&none, &only_id)]
        {
            let plan = CopyPlan::new(0, "t", current, snapshot, CopyMode::Replace).unwrap();
            assert_eq!(plan.build_delete(), "DELETE FROM ONLY t");
            assert_eq!(plan.build_update(), None);
            assert!(plan.build_insert(false).ends_with("FROM pg_temp.svc_side_0 AS s"));
        }
        let mut plan = CopyPlan::new(0, "t", &both, &both, CopyMode::Replace).unwrap();
        assert_ne!(plan.build_delete(), "DELETE FROM ONLY t");
        assert!(!plan.has_added_columns);
        plan.replace_all_rows();
        assert_eq!(plan.build_delete(), "DELETE FROM ONLY t");
    }

    #[test]
    fn build_has_referring_rows_checks_only_deleted_rows() {
        let foreign_key = ForeignKey {
            from: "app.notes".into(),
            to: "t".into(),
            is_cascading: true,
            condition: "t.id OPERATOR(pg_catalog.=) o.about".into(),
        };
        let columns = [column("id", "integer", true)];
        let mut plan = CopyPlan::new(0, "t", &columns, &columns, CopyMode::Replace).unwrap();
        let all = "SELECT FROM ONLY app.notes AS o JOIN ONLY t AS t ON t.id OPERATOR(pg_catalog.=) o.about";
        let deleted = r#"NOT EXISTS (SELECT FROM pg_temp.svc_side_0 AS s WHERE t."id" = s."id")"#;
        assert_eq!(plan.build_delete(), format!("DELETE FROM ONLY t AS t WHERE {deleted}"));
        assert_eq!(
            plan.build_has_referring_rows(&foreign_key),
            format!("SELECT EXISTS ({all} WHERE {deleted})")
        );
        plan.replace_all_rows();
        assert_eq!(plan.build_has_referring_rows(&foreign_key), format!("SELECT EXISTS ({all})"));
    }

    #[test]
    fn new_accepts_key_columns_in_another_order() {
        let (a, b) = (column("a", "integer", true), column("b", "integer", true));
        let (current, snapshot) = ([b.clone(), a.clone()], [a, b]);
        for mode in [CopyMode::Missing, CopyMode::Overwrite, CopyMode::Replace] {
            let plan = CopyPlan::new(0, "t", &current, &snapshot, mode).unwrap();
            assert!(plan.build_delete().ends_with(r#"WHERE t."b" = s."b" AND t."a" = s."a")"#));
        }
    }

    proptest! {
        #[test]
        fn sort_parents_first_puts_parents_first(edges in proptest::collection::vec((0_usize..8, 0_usize..8), 0..12)) {
            let names: Vec<String> = (0..8).map(|n| format!("t{n}")).collect();
            let tables: Vec<&str> = names.iter().map(String::as_str).collect();
            // No edge points to a higher number, so there is no cycle except from a table to itself.
            let references: Vec<(String, String)> = edges.iter().filter(|(a, b)| a >= b)
                .map(|(a, b)| (names[*a].clone(), names[*b].clone())).collect();
            let ordered = sort_parents_first(&tables, &references);
            let mut sorted = ordered.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, tables);
            let position = |name: &str| ordered.iter().position(|table| *table == name);
            for (child, parent) in references.iter().filter(|(child, parent)| child != parent) {
                prop_assert!(position(parent) < position(child), "{parent} must come before {child}");
            }
        }

        #[test]
        fn sort_parents_first_terminates_on_cycles(
            edges in proptest::collection::vec((0_usize..5, 0_usize..5), 0..20),
        ) {
            let names: Vec<String> = (0..5).map(|n| format!("t{n}")).collect();
            let tables: Vec<&str> = names.iter().map(String::as_str).collect();
            let references: Vec<(String, String)> =
                edges.iter().map(|(a, b)| (names[*a].clone(), names[*b].clone())).collect();
            prop_assert_eq!(sort_parents_first(&tables, &references).len(), 5);
        }
    }
}
