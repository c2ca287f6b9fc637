//! The dependents that were dropped with a table: other tables' foreign keys, views and extended statistics. They are
//! recreated with the table. Other dependents, such as functions and policies, are only listed.
//!
//! Definitions come from the side database. Views are part of the dump that recreates the table, in the same
//! transaction. Foreign keys and statistics are added in a later transaction, which can be repeated after a kill.

use std::collections::BTreeSet;

use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Error, GenericClient};

use crate::snapshots::side_database::CopiedTable;
use crate::system::postgres::quote_ident;

/// The dependents of recreated tables that the owner's database lacks, and those that an earlier run recreated.
#[derive(Debug, Default)]
pub struct Dependents {
    views: Vec<View>,
    statements: Vec<Statement>,
    /// Dependents that are not recreated.
    not_recreated: Vec<Dependent>,
    /// Dependents that an earlier, interrupted run recreated.
    recreated_earlier: Vec<Dependent>,
}

/// An object and the table that it depended on.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Dependent {
    /// As PostgreSQL describes the object: `view app_shop.totals`.
    name: String,
    table: String,
}

#[derive(Debug)]
struct View {
    dependent: Dependent,
    /// `schema.name`, quoted where needed.
    relation: String,
    /// The relations that the view reads.
    dependencies: Vec<String>,
}

#[derive(Debug)]
struct Statement {
    dependent: Dependent,
    sql: Vec<String>,
    is_foreign_key: bool,
}

const VIEWS: &str = "
    WITH RECURSIVE found (oid, root) AS (
        SELECT to_regclass(name)::oid, name FROM unnest($1::text[]) AS name
        UNION
        SELECT c.oid, found.root FROM found
          JOIN pg_depend d ON d.refclassid = 'pg_class'::regclass AND d.refobjid = found.oid
           AND d.classid = 'pg_rewrite'::regclass
          JOIN pg_rewrite r ON r.oid = d.objid JOIN pg_class c ON c.oid = r.ev_class AND c.relkind IN ('v', 'm'))
    SELECT DISTINCT ON (c.oid) pg_describe_object('pg_class'::regclass, c.oid, 0), found.root,
           format('%I.%I', n.nspname, c.relname),
           ARRAY(SELECT DISTINCT format('%I.%I', m.nspname, o.relname) FROM pg_rewrite r
                   JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
                    AND d.refclassid = 'pg_class'::regclass AND d.refobjid <> c.oid
                   JOIN pg_class o ON o.oid = d.refobjid JOIN pg_namespace m ON m.oid = o.relnamespace
                  WHERE r.ev_class = c.oid)
      FROM found JOIN pg_class c ON c.oid = found.oid AND c.relkind IN ('v', 'm')
      JOIN pg_namespace n ON n.oid = c.relnamespace
     ORDER BY c.oid, found.root";

const FOREIGN_KEYS: &str = "
    SELECT pg_describe_object('pg_constraint'::regclass, k.oid, 0), min(t.name), format('%I.%I', n.nspname, c.relname),
           k.conname::text, pg_get_constraintdef(k.oid)
      FROM unnest($1::text[]) AS t (name)
      JOIN pg_constraint k ON k.confrelid = to_regclass(t.name) AND k.contype = 'f' AND k.conparentid = 0
      JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE NOT k.conrelid = ANY (SELECT to_regclass(name) FROM unnest($1::text[]) AS name)
     GROUP BY k.oid, n.nspname, c.relname, k.conname ORDER BY 1";

const STATISTICS: &str = "
    SELECT pg_describe_object('pg_statistic_ext'::regclass, s.oid, 0), t.name, format('%I.%I', n.nspname, s.stxname),
           pg_get_statisticsobjdef(s.oid), r.rolname::text, s.stxstattarget::int4
      FROM unnest($1::text[]) AS t (name)
      JOIN pg_statistic_ext s ON s.stxrelid = to_regclass(t.name)
      JOIN pg_namespace n ON n.oid = s.stxnamespace JOIN pg_roles r ON r.oid = s.stxowner
     ORDER BY 1";

/// Functions, policies, rules and columns that need the table or its row type, and publications. None of them is
/// recreated.
const UNSUPPORTED_DEPENDENTS: &str = "
    WITH tables AS (SELECT name, to_regclass(name)::oid AS oid FROM unnest($1::text[]) AS name)
    SELECT DISTINCT ON (d.classid, d.objid, d.objsubid) pg_describe_object(d.classid, d.objid, d.objsubid), t.name
      FROM tables t JOIN pg_class c ON c.oid = t.oid
      JOIN pg_depend d ON d.deptype = 'n'
       AND ((d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid)
         OR (d.refclassid = 'pg_type'::regclass AND d.refobjid = c.reltype))
     WHERE (d.classid = 'pg_proc'::regclass
        OR (d.classid = 'pg_class'::regclass AND d.objsubid > 0 AND NOT d.objid IN (SELECT oid FROM tables))
        OR (d.classid = 'pg_policy'::regclass AND EXISTS (
               SELECT FROM pg_policy p WHERE p.oid = d.objid AND NOT p.polrelid IN (SELECT oid FROM tables)))
        OR (d.classid = 'pg_rewrite'::regclass AND EXISTS (
               SELECT FROM pg_rewrite r JOIN pg_class v ON v.oid = r.ev_class
                WHERE r.oid = d.objid AND v.relkind IN ('r', 'p') AND NOT v.oid IN (SELECT oid FROM tables))))
    UNION ALL
    SELECT pg_describe_object('pg_publication_rel'::regclass, p.oid, 0), t.name
      FROM tables t JOIN pg_publication_rel p ON p.prrelid = t.oid
     ORDER BY 1";

impl Dependents {
    /// Finds the dependents, in the side database, of the tables `missing` and `recreated` that the owner's database
    /// lacks. Dependents of a kind that is never recreated are found even if the owner's database has them. An earlier
    /// run of the same request recreated the tables in `recreated`: their existing dependents count as recreated, too.
    ///
    /// # Errors
    /// If a query fails.
    pub async fn find(
        side: &Client,
        live: &Client,
        missing: &[&str],
        recreated: &[&str],
    ) -> Result<Self, Error> {
        let (mut found, tables) = (Self::default(), [missing, recreated].concat());
        let is_from_earlier_run = |dependent: &Dependent| recreated.contains(&dependent.table.as_str());
        if tables.is_empty() {
            return Ok(found);
        }
        for row in side.query(VIEWS, &[&tables]).await? {
            let dependent = Dependent { name: row.try_get(0)?, table: row.try_get(1)? };
            let view = View { dependent, relation: row.try_get(2)?, dependencies: row.try_get(3)? };
            if !is_relation(live, &view.relation).await? {
                found.views.push(view);
            } else if is_from_earlier_run(&view.dependent) {
                found.recreated_earlier.push(view.dependent);
            }
        }
        for row in side.query(FOREIGN_KEYS, &[&tables]).await? {
            let (from, name): (String, String) = (row.try_get(2)?, row.try_get(3)?);
            let definition: String = row.try_get(4)?;
            if !is_relation(live, &from).await? {
                continue;
            }
            let dependent = Dependent { name: row.try_get(0)?, table: row.try_get(1)? };
            if has_constraint(live, &from, &name).await? {
                found.recreated_earlier.extend(Some(dependent).filter(is_from_earlier_run));
                continue;
            }
            found.statements.push(Statement {
                dependent,
                sql: vec![format!("ALTER TABLE {from} ADD CONSTRAINT {} {definition}", quote_ident(&name))],
                is_foreign_key: true,
            });
        }
        for row in side.query(STATISTICS, &[&tables]).await? {
            let (name, create, owner): (String, String, String) =
                (row.try_get(2)?, row.try_get(3)?, row.try_get(4)?);
            let mut sql = vec![create, format!("ALTER STATISTICS {name} OWNER TO {}", quote_ident(&owner))];
            if let target @ 0.. = row.try_get::<_, i32>(5)? {
                sql.push(format!("ALTER STATISTICS {name} SET STATISTICS {target}"));
            }
            let dependent = Dependent { name: row.try_get(0)?, table: row.try_get(1)? };
            if is_from_earlier_run(&dependent) && has_statistics(live, &dependent.table, &name).await? {
                found.recreated_earlier.push(dependent);
                continue;
            }
            found.statements.push(Statement { dependent, sql, is_foreign_key: false });
        }
        for row in side.query(UNSUPPORTED_DEPENDENTS, &[&tables]).await? {
            found.not_recreated.push(Dependent { name: row.try_get(0)?, table: row.try_get(1)? });
        }
        found.set_aside_unresolvable_views(live, &tables).await?;
        Ok(found)
    }

    /// Moves views over missing relations, and views over those views, to `not_recreated`.
    async fn set_aside_unresolvable_views(&mut self, live: &Client, tables: &[&str]) -> Result<(), Error> {
        let mut existing: BTreeSet<String> = tables.iter().map(|table| (*table).to_owned()).collect();
        for dependency in self.views.iter().flat_map(|view| &view.dependencies) {
            if is_relation(live, dependency).await? {
                existing.insert(dependency.clone());
            }
        }
        let (mut resolvable, mut unresolved) = (Vec::new(), std::mem::take(&mut self.views));
        loop {
            let (ready, blocked): (Vec<View>, Vec<View>) = unresolved
                .into_iter()
                .partition(|view| view.dependencies.iter().all(|name| existing.contains(name)));
            unresolved = blocked;
            if ready.is_empty() {
                break;
            }
            existing.extend(ready.iter().map(|view| view.relation.clone()));
            resolvable.extend(ready);
        }
        self.not_recreated.extend(unresolved.into_iter().map(|view| view.dependent));
        self.views = resolvable;
        Ok(())
    }

    /// Returns the views to create with the tables.
    pub fn views(&self) -> impl Iterator<Item = &str> {
        self.views.iter().map(|view| view.relation.as_str())
    }

    /// Adds the dependents that a copy would recreate, and those that it would not, to the results of their tables.
    pub fn record_planned(&self, results: &mut [CopiedTable]) {
        self.record_recreated(results);
        for statement in &self.statements {
            record_result(results, &statement.dependent, true, "");
        }
        for dependent in &self.not_recreated {
            record_result(results, dependent, false, "");
        }
    }

    fn record_recreated(&self, results: &mut [CopiedTable]) {
        for dependent in self.views.iter().map(|view| &view.dependent).chain(&self.recreated_earlier) {
            record_result(results, dependent, true, "");
        }
    }

    /// Adds the foreign keys that refer to the recreated tables, and the tables' extended statistics. Lists all
    /// dependents in the results of their tables.
    ///
    /// A foreign key that existing rows violate is added as `NOT VALID`, so that it applies to new rows only.
    /// Dependents that the current tables do not allow are listed with the reason.
    ///
    /// # Errors
    /// If the transaction cannot be begun or committed, or the connection fails. A statement that the server rejects is
    /// listed instead.
    pub async fn add(&self, live: &mut Client, results: &mut [CopiedTable]) -> Result<(), Error> {
        let mut transaction = live.transaction().await?;
        transaction.batch_execute("SET LOCAL lock_timeout = '60s'").await?;
        self.record_recreated(results);
        for statement in &self.statements {
            let mut result = execute_in_savepoint(&mut transaction, &statement.sql).await;
            let mut remark = "";
            if statement.is_foreign_key
                && let Err(error) = &result
                && error.code() == Some(&SqlState::FOREIGN_KEY_VIOLATION)
            {
                remark = " (NOT VALID: existing rows refer to missing rows)";
                let unvalidated: Vec<String> =
                    statement.sql.iter().map(|sql| format!("{sql} NOT VALID")).collect();
                result = execute_in_savepoint(&mut transaction, &unvalidated).await;
            }
            match result {
                Ok(()) => record_result(results, &statement.dependent, true, remark),
                Err(error) => match error.as_db_error() {
                    // List only the message, because the error's detail quotes the owner's rows.
                    Some(why) => {
                        record_result(results, &statement.dependent, false, &format!(": {}", why.message()));
                    }
                    None => return Err(error),
                },
            }
        }
        for dependent in &self.not_recreated {
            record_result(results, dependent, false, "");
        }
        transaction.commit().await
    }
}

/// Executes the statements in a savepoint, so that a failure does not abort the transaction.
async fn execute_in_savepoint(
    transaction: &mut tokio_postgres::Transaction<'_>,
    sql: &[String],
) -> Result<(), Error> {
    let savepoint = transaction.savepoint("dependent").await?;
    for statement in sql {
        // On failure, dropping the savepoint rolls it back.
        savepoint.batch_execute(statement).await?;
    }
    savepoint.commit().await
}

fn record_result(results: &mut [CopiedTable], dependent: &Dependent, is_recreated: bool, remark: &str) {
    let Some(table) = results.iter_mut().find(|table| table.name == dependent.table) else { return };
    let list = if is_recreated { &mut table.recreated } else { &mut table.not_recreated };
    list.push(format!("{}{remark}", dependent.name));
}

async fn is_relation(client: &impl GenericClient, name: &str) -> Result<bool, Error> {
    client.query_one("SELECT to_regclass($1) IS NOT NULL", &[&name]).await?.try_get(0)
}

async fn has_constraint(client: &impl GenericClient, table: &str, name: &str) -> Result<bool, Error> {
    let query = "SELECT EXISTS (SELECT FROM pg_constraint WHERE conrelid = to_regclass($1) AND conname = $2)";
    client.query_one(query, &[&table, &name]).await?.try_get(0)
}

async fn has_statistics(client: &impl GenericClient, table: &str, name: &str) -> Result<bool, Error> {
    let query = "SELECT EXISTS (SELECT FROM pg_statistic_ext s JOIN pg_namespace n ON n.oid = s.stxnamespace \
                  WHERE s.stxrelid = to_regclass($1) AND format('%I.%I', n.nspname, s.stxname) = $2)";
    client.query_one(query, &[&table, &name]).await?.try_get(0)
}
