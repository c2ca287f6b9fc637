//! The SQL statements that copy a table back. Pure: built from the catalogues of both databases.

use crate::snapshots::side_database::Mode;
use crate::system::postgres::ident;

/// A column of one database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    pub name: String,
    /// As written by `format_type`.
    pub kind: String,
    /// Part of the primary key.
    pub key: bool,
    /// A generated column, or an identity that accepts no value.
    pub generated: bool,
    pub always_identity: bool,
}

/// Why a table cannot be copied.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error(
        "{table} has no primary key, so its rows cannot be distinguished\n  next: mode replace puts the snapshot's rows in the \
         place of all that are there"
    )]
    NoPrimaryKey { table: String },
    #[error(
        "{table}.{column} is {now} and was {then} in the snapshot: copy it by hand from the database svc_side"
    )]
    TypeChanged { table: String, column: String, now: String, then: String },
    #[error("{table} has another primary key than in the snapshot: mode replace does not ask for it")]
    KeyChanged { table: String },
    #[error("{table} has none of the columns that it had in the snapshot")]
    NoCommonColumns { table: String },
}

/// The statements for one table. The snapshot's rows are loaded into a temporary table first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// `schema.table`, quoted where needed.
    pub table: String,
    /// The number of its temporary table.
    number: usize,
    /// Columns of both databases.
    columns: Vec<String>,
    key: Vec<String>,
    /// The columns that an update may set.
    settable: Vec<String>,
    /// Columns of the snapshot only.
    pub left_out: Vec<String>,
}

impl Plan {
    pub fn new(
        number: usize,
        table: &str,
        now: &[Column],
        then: &[Column],
        mode: Mode,
    ) -> Result<Self, PlanError> {
        let table = table.to_owned();
        let mut columns = Vec::new();
        let mut left_out = Vec::new();
        for old in then.iter().filter(|column| !column.generated) {
            match now.iter().find(|column| column.name == old.name) {
                Some(new) if new.generated => {}
                Some(new) if new.kind != old.kind => {
                    let (now, then) = (new.kind.clone(), old.kind.clone());
                    return Err(PlanError::TypeChanged { table, column: old.name.clone(), now, then });
                }
                Some(new) => columns.push(new.clone()),
                None => left_out.push(old.name.clone()),
            }
        }
        if columns.is_empty() {
            return Err(PlanError::NoCommonColumns { table });
        }
        let key: Vec<String> = names(now.iter().filter(|column| column.key));
        let is_whole = key.iter().all(|name| columns.iter().any(|column| column.name == *name));
        if mode != Mode::Replace {
            if key.is_empty() {
                return Err(PlanError::NoPrimaryKey { table });
            }
            if !is_whole || key != names(then.iter().filter(|column| column.key)) {
                return Err(PlanError::KeyChanged { table });
            }
        }
        let key = if is_whole { key } else { Vec::new() };
        let settable =
            names(columns.iter().filter(|column| !column.always_identity && !key.contains(&column.name)));
        Ok(Self { table, number, columns: names(columns.iter()), key, settable, left_out })
    }

    fn temporary(&self) -> String {
        format!("pg_temp.svc_side_{}", self.number)
    }

    pub fn create(&self) -> String {
        let (columns, table) = (list(&self.columns, ""), &self.table);
        format!(
            "CREATE TEMPORARY TABLE svc_side_{} ON COMMIT DROP AS SELECT {columns} FROM ONLY {table} WITH NO DATA",
            self.number
        )
    }

    /// Runs in the side database.
    pub fn copy_out(&self) -> String {
        format!("COPY (SELECT {} FROM ONLY {}) TO STDOUT", list(&self.columns, ""), self.table)
    }

    pub fn copy_in(&self) -> String {
        format!("COPY {} ({}) FROM STDIN", self.temporary(), list(&self.columns, ""))
    }

    /// Created once the rows are loaded: the statements that follow look rows up by key.
    pub fn index(&self) -> Vec<String> {
        let mut statements = Vec::new();
        if !self.key.is_empty() {
            statements.push(format!("CREATE INDEX ON {} ({})", self.temporary(), list(&self.key, "")));
        }
        statements.push(format!("ANALYZE {}", self.temporary()));
        statements
    }

    /// Deletes rows that the snapshot does not have; without a key, all rows.
    pub fn delete(&self) -> String {
        let table = &self.table;
        if self.key.is_empty() {
            return format!("DELETE FROM ONLY {table}");
        }
        let (temporary, same) = (self.temporary(), self.same_key());
        format!("DELETE FROM ONLY {table} AS t WHERE NOT EXISTS (SELECT FROM {temporary} AS s WHERE {same})")
    }

    /// Updates existing rows that differ; `None` if no column can differ.
    pub fn update(&self) -> Option<String> {
        if self.settable.is_empty() || self.key.is_empty() {
            return None;
        }
        let sets = self.settable.iter().map(|name| format!("{0} = s.{0}", ident(name)));
        // Compared as text: not every type has an equality operator.
        let rows = |of| format!("ROW({})::text", list(&self.settable, of));
        Some(format!(
            "UPDATE ONLY {} AS t SET {} FROM {} AS s WHERE {} AND {} <> {}",
            self.table,
            sets.collect::<Vec<_>>().join(", "),
            self.temporary(),
            self.same_key(),
            rows("t."),
            rows("s."),
        ))
    }

    /// Inserts missing rows. With `skip_conflicts`, rows that violate a unique constraint are skipped.
    pub fn insert(&self, skip_conflicts: bool) -> String {
        let (columns, table, temporary) = (list(&self.columns, ""), &self.table, self.temporary());
        let only_missing =
            if self.key.is_empty() { String::new() } else { format!(" WHERE {}", self.absent()) };
        let end = if skip_conflicts { " ON CONFLICT DO NOTHING" } else { "" };
        format!(
            "INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE SELECT {} FROM {temporary} AS s{only_missing}{end}",
            list(&self.columns, "s."),
        )
    }

    /// Counts the rows of the snapshot that are missing.
    pub fn missing(&self) -> Option<String> {
        (!self.key.is_empty())
            .then(|| format!("SELECT count(*) FROM {} AS s WHERE {}", self.temporary(), self.absent()))
    }

    fn absent(&self) -> String {
        format!("NOT EXISTS (SELECT FROM ONLY {} AS t WHERE {})", self.table, self.same_key())
    }

    fn same_key(&self) -> String {
        let equal = self.key.iter().map(|name| format!("t.{0} = s.{0}", ident(name)));
        equal.collect::<Vec<_>>().join(" AND ")
    }
}

fn names<'a>(columns: impl Iterator<Item = &'a Column>) -> Vec<String> {
    columns.map(|column| column.name.clone()).collect()
}

fn list(names: &[String], of: &str) -> String {
    names.iter().map(|name| format!("{of}{}", ident(name))).collect::<Vec<_>>().join(", ")
}

/// Sorts tables after those that they refer to. Tables in a cycle keep the given order.
pub fn parents_first<'a>(tables: &[&'a str], references: &[(String, String)]) -> Vec<&'a str> {
    let mut left: Vec<&str> = tables.to_vec();
    let mut ordered = Vec::with_capacity(left.len());
    while !left.is_empty() {
        let waits = |child: &str| {
            references.iter().any(|(from, to)| from == child && to != child && left.contains(&to.as_str()))
        };
        let next = left.iter().position(|table| !waits(table)).unwrap_or(0);
        ordered.push(left.remove(next));
    }
    ordered
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn column(name: &str, kind: &str, key: bool) -> Column {
        Column { name: name.into(), kind: kind.into(), key, generated: false, always_identity: false }
    }

    #[test]
    fn copies_common_columns_and_lists_the_others() {
        let then = [column("id", "integer", true), column("old", "text", false), column("a", "text", false)];
        let now = [column("id", "integer", true), column("a", "text", false), column("new", "text", false)];
        let plan = Plan::new(0, "public.t", &now, &then, Mode::Overwrite).unwrap();
        assert_eq!(plan.left_out, ["old"]);
        assert_eq!(plan.copy_out(), r#"COPY (SELECT "id", "a" FROM ONLY public.t) TO STDOUT"#);
        assert_eq!(
            plan.update().unwrap(),
            r#"UPDATE ONLY public.t AS t SET "a" = s."a" FROM pg_temp.svc_side_0 AS s WHERE t."id" = s."id" AND ROW(t."a")::text <> ROW(s."a")::text"#
        );
    }

    #[test]
    fn refuses_missing_key_and_changed_type() {
        let (id, text) = (column("id", "integer", true), column("a", "text", false));
        let of = |now: &[Column], then: &[Column], mode| Plan::new(0, "t", now, then, mode).map(|_| ());
        let none = [column("id", "integer", false), text.clone()];
        assert!(matches!(of(&none, &none, Mode::Missing), Err(PlanError::NoPrimaryKey { .. })));
        assert_eq!(of(&none, &none, Mode::Replace), Ok(()));
        let both = [id.clone(), text.clone()];
        let other = [id, column("a", "integer", false)];
        assert!(matches!(of(&other, &both, Mode::Replace), Err(PlanError::TypeChanged { .. })));
        let key = [column("id", "integer", true), column("a", "text", true)];
        assert!(matches!(of(&key, &both, Mode::Missing), Err(PlanError::KeyChanged { .. })));
        assert!(matches!(of(&[], &both, Mode::Replace), Err(PlanError::NoCommonColumns { .. })));
    }

    proptest! {
        #[test]
        fn parents_first_lists_each_table_once(edges in proptest::collection::vec((0_usize..8, 0_usize..8), 0..12)) {
            let names: Vec<String> = (0..8).map(|n| format!("t{n}")).collect();
            let tables: Vec<&str> = names.iter().map(String::as_str).collect();
            // Edges only point downwards: no cycle.
            let references: Vec<(String, String)> = edges.iter().filter(|(a, b)| a >= b)
                .map(|(a, b)| (names[*a].clone(), names[*b].clone())).collect();
            let ordered = parents_first(&tables, &references);
            let mut sorted = ordered.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, tables);
            let place = |name: &str| ordered.iter().position(|table| *table == name);
            for (child, parent) in references.iter().filter(|(child, parent)| child != parent) {
                prop_assert!(place(parent) < place(child), "{} before {}", parent, child);
            }
        }

        #[test]
        fn parents_first_terminates_on_cycles(edges in proptest::collection::vec((0_usize..5, 0_usize..5), 0..20)) {
            let names: Vec<String> = (0..5).map(|n| format!("t{n}")).collect();
            let tables: Vec<&str> = names.iter().map(String::as_str).collect();
            let references: Vec<(String, String)> =
                edges.iter().map(|(a, b)| (names[*a].clone(), names[*b].clone())).collect();
            prop_assert_eq!(parents_first(&tables, &references).len(), 5);
        }
    }
}
