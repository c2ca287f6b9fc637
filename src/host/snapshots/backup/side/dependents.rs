//! The dependents that were dropped with a table: views, extended statistics and other tables' foreign keys. They are
//! recreated after the table. Other dependents, such as functions and policies, are only listed.
//!
//! Definitions come from the side database. If recreating the views together fails, each is recreated separately. A
//! view that the current database rejects then affects only the tables whose policies or rules read it. Foreign keys
//! and statistics are added in one transaction. A run that was killed can be repeated.

use std::collections::BTreeSet;

use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Error, GenericClient};

use super::recreate;
use crate::snapshots::backup::settings::BackupSettings;
use crate::snapshots::side_database::CopiedTable;
use crate::system::postgres::quote_ident;
use svc_http::problem::format_chain;

const NOT_VALID: &str = " (NOT VALID: existing rows refer to missing rows)";

/// The dependents of recreated tables that the owner's database lacks, and those that an earlier run recreated.
#[derive(Debug, Default)]
pub struct Dependents {
    views: Vec<View>,
    statements: Vec<Statement>,
    /// Oids, in the side database, of the tables' foreign keys to other tables.
    outgoing_keys: Vec<u32>,
    /// Dependents that are only listed: those of other kinds, and views over missing relations.
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
    kind: StatementKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StatementKind {
    /// Adds another table's foreign key.
    ForeignKey,
    /// Validates a foreign key that was recreated as part of its table.
    Validation,
    Statistics,
}

const VIEWS_QUERY: &str = "
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

const FOREIGN_KEYS_QUERY: &str = "
    SELECT pg_describe_object('pg_constraint'::regclass, k.oid, 0), min(t.name), format('%I.%I', n.nspname, c.relname),
           k.conname::text, pg_get_constraintdef(k.oid)
      FROM unnest($1::text[]) AS t (name)
      JOIN pg_constraint k ON k.confrelid = to_regclass(t.name) AND k.contype = 'f' AND k.conparentid = 0
      JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE NOT k.conrelid = ANY (SELECT to_regclass(name) FROM unnest($1::text[]) AS name)
     GROUP BY k.oid, n.nspname, c.relname, k.conname ORDER BY 1";

/// The tables' foreign keys to other tables.
const OUTGOING_KEYS_QUERY: &str = "
    SELECT pg_describe_object('pg_constraint'::regclass, k.oid, 0), t.name,
           format('ALTER TABLE %s VALIDATE CONSTRAINT %I', t.name, k.conname), k.oid
      FROM unnest($1::text[]) AS t (name)
      JOIN pg_constraint k ON k.conrelid = to_regclass(t.name) AND k.contype = 'f' AND k.conparentid = 0
     WHERE NOT k.confrelid = ANY (SELECT to_regclass(name) FROM unnest($1::text[]) AS name)
     ORDER BY 1";

const STATISTICS_QUERY: &str = "
    SELECT pg_describe_object('pg_statistic_ext'::regclass, s.oid, 0), t.name, format('%I.%I', n.nspname, s.stxname),
           pg_get_statisticsobjdef(s.oid), r.rolname::text, s.stxstattarget::int4
      FROM unnest($1::text[]) AS t (name)
      JOIN pg_statistic_ext s ON s.stxrelid = to_regclass(t.name)
      JOIN pg_namespace n ON n.oid = s.stxnamespace JOIN pg_roles r ON r.oid = s.stxowner
     ORDER BY 1";

/// All objects that `DROP … CASCADE` drops with the tables, and the tables' entries in publications. Like PostgreSQL,
/// the query follows dependencies transitively: to dependents, and from an internal part, such as a view's rule, to the
/// object that contains it. The tables' own parts, and the parts of other dropped objects, are left out.
const DROPPED_OBJECTS_QUERY: &str = "
    WITH RECURSIVE tables AS (SELECT name, to_regclass(name)::oid AS oid FROM unnest($1::text[]) AS name),
    dropped (class, obj, sub, root) AS (
        SELECT 'pg_class'::regclass::oid, oid, 0, name FROM tables
        UNION
        SELECT next.* FROM dropped o CROSS JOIN LATERAL (
            SELECT d.classid, d.objid, d.objsubid, o.root FROM pg_depend d
             WHERE d.refclassid = o.class AND d.refobjid = o.obj AND o.sub IN (0, d.refobjsubid) AND d.deptype <> 'e'
            UNION ALL
            SELECT d.refclassid, d.refobjid, d.refobjsubid, o.root FROM pg_depend d
             WHERE d.classid = o.class AND d.objid = o.obj AND d.objsubid = o.sub AND d.deptype = 'i') AS next)
    SELECT DISTINCT ON (o.class, o.obj, o.sub) pg_describe_object(o.class, o.obj, o.sub), o.root,
           a.type, a.object_names, a.object_args
      FROM dropped o CROSS JOIN LATERAL pg_identify_object_as_address(o.class, o.obj, o.sub) AS a
     WHERE NOT (o.class = 'pg_class'::regclass AND o.obj IN (SELECT oid FROM tables))
       AND (o.class = 'pg_publication_rel'::regclass OR NOT EXISTS (
               SELECT FROM pg_depend d JOIN dropped p ON p.class = d.refclassid AND p.obj = d.refobjid
                  AND p.sub IN (0, d.refobjsubid)
                WHERE d.classid = o.class AND d.objid = o.obj AND d.objsubid = o.sub AND d.deptype <> 'n'))
       AND NOT EXISTS (SELECT FROM dropped p WHERE o.sub <> 0 AND p.class = o.class AND p.obj = o.obj AND p.sub = 0)
     ORDER BY o.class, o.obj, o.sub, o.root";

impl Dependents {
    /// Finds those dependents of the tables `missing` and `recreated` that the side database has and the owner's
    /// database lacks. An earlier run of the same request recreated the tables in `recreated`, so their existing
    /// dependents count as recreated, too.
    ///
    /// # Errors
    /// If a query fails.
    pub async fn find(
        side: &Client,
        live: &Client,
        missing: &[&str],
        recreated: &[&str],
    ) -> Result<Self, Error> {
        let (mut dependents, tables) = (Self::default(), [missing, recreated].concat());
        let is_from_earlier_run = |dependent: &Dependent| recreated.contains(&dependent.table.as_str());
        if tables.is_empty() {
            return Ok(dependents);
        }
        let mut examined = BTreeSet::new();
        for row in side.query(VIEWS_QUERY, &[&tables]).await? {
            let dependent = Dependent { name: row.try_get(0)?, table: row.try_get(1)? };
            examined.insert(dependent.name.clone());
            let view = View { dependent, relation: row.try_get(2)?, dependencies: row.try_get(3)? };
            if !is_relation(live, &view.relation).await? {
                dependents.views.push(view);
            } else if is_from_earlier_run(&view.dependent) {
                dependents.recreated_earlier.push(view.dependent);
            }
        }
        for row in side.query(FOREIGN_KEYS_QUERY, &[&tables]).await? {
            let (from, name): (String, String) = (row.try_get(2)?, row.try_get(3)?);
            let definition: String = row.try_get(4)?;
            let dependent = Dependent { name: row.try_get(0)?, table: row.try_get(1)? };
            examined.insert(dependent.name.clone());
            if !is_relation(live, &from).await? {
                continue;
            }
            if has_constraint(live, &from, &name).await? {
                dependents.recreated_earlier.extend(Some(dependent).filter(is_from_earlier_run));
                continue;
            }
            // An earlier request may have deferred the foreign key's validation in the side database.
            let definition = definition.trim_end_matches(" NOT VALID");
            dependents.statements.push(Statement {
                dependent,
                sql: vec![format!("ALTER TABLE {from} ADD CONSTRAINT {} {definition}", quote_ident(&name))],
                kind: StatementKind::ForeignKey,
            });
        }
        for row in side.query(OUTGOING_KEYS_QUERY, &[&tables]).await? {
            let dependent = Dependent { name: row.try_get(0)?, table: row.try_get(1)? };
            let kind = StatementKind::Validation;
            dependents.statements.push(Statement { dependent, sql: vec![row.try_get(2)?], kind });
            dependents.outgoing_keys.push(row.try_get(3)?);
        }
        for row in side.query(STATISTICS_QUERY, &[&tables]).await? {
            let (name, create, owner): (String, String, String) =
                (row.try_get(2)?, row.try_get(3)?, row.try_get(4)?);
            let mut sql = vec![create, format!("ALTER STATISTICS {name} OWNER TO {}", quote_ident(&owner))];
            if let target @ 0.. = row.try_get::<_, i32>(5)? {
                sql.push(format!("ALTER STATISTICS {name} SET STATISTICS {target}"));
            }
            let dependent = Dependent { name: row.try_get(0)?, table: row.try_get(1)? };
            if is_from_earlier_run(&dependent) && has_statistics(live, &dependent.table, &name).await? {
                dependents.recreated_earlier.push(dependent);
                continue;
            }
            dependents.statements.push(Statement { dependent, sql, kind: StatementKind::Statistics });
        }
        for row in side.query(DROPPED_OBJECTS_QUERY, &[&tables]).await? {
            let dependent = Dependent { name: row.try_get(0)?, table: row.try_get(1)? };
            let (kind, names, args): (String, Vec<String>, Vec<String>) =
                (row.try_get(2)?, row.try_get(3)?, row.try_get(4)?);
            if !examined.contains(&dependent.name) && !has_object(live, &kind, &names, &args).await? {
                dependents.not_recreated.push(dependent);
            }
        }
        dependents.set_aside_unresolvable_views(live, &tables).await?;
        Ok(dependents)
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

    /// Returns the views that can be recreated.
    pub fn views(&self) -> impl Iterator<Item = &str> {
        self.views.iter().map(|view| view.relation.as_str())
    }

    /// Marks the tables' foreign keys to other tables as `NOT VALID` in the side database, so that the tables' dump
    /// adds them without a check: the rows to which they refer may be copied later. [`Self::recreate`] validates them.
    ///
    /// # Errors
    /// If the statement fails.
    pub async fn defer_validation(&self, side: &Client) -> Result<(), Error> {
        let update = "UPDATE pg_constraint SET convalidated = false WHERE oid = ANY ($1)";
        side.execute(update, &[&self.outgoing_keys]).await?;
        Ok(())
    }

    /// Adds the dependents that a copy would recreate, and those that it would not, to the results of their tables.
    pub fn record_planned(&self, results: &mut [CopiedTable]) {
        self.record_known_outcomes(results);
        let views = self.views.iter().map(|view| &view.dependent);
        let added = self.statements.iter().filter(|statement| statement.kind != StatementKind::Validation);
        for dependent in views.chain(added.map(|statement| &statement.dependent)) {
            record_result(results, dependent, true, "");
        }
    }

    fn record_known_outcomes(&self, results: &mut [CopiedTable]) {
        for dependent in &self.recreated_earlier {
            record_result(results, dependent, true, "");
        }
        for dependent in &self.not_recreated {
            record_result(results, dependent, false, "");
        }
    }

    /// Recreates the views, the foreign keys that refer to the recreated tables, and the tables' extended statistics,
    /// and validates the tables' own foreign keys. Lists all dependents in the results of their tables.
    ///
    /// A foreign key that existing rows violate is `NOT VALID`, so that it applies to new rows only. Dependents that
    /// the current database does not allow are listed with the reason.
    ///
    /// # Errors
    /// If the transaction that adds foreign keys and statistics cannot start or commit, or the connection fails. Those
    /// foreign keys and statistics are then listed as not recreated. A statement that the server rejects is not an
    /// error: its dependent is listed with the reason.
    pub async fn recreate(
        &self,
        settings: &BackupSettings,
        side: &Client,
        live: &mut Client,
        results: &mut [CopiedTable],
    ) -> Result<(), Error> {
        self.record_known_outcomes(results);
        let mut missing = Vec::new();
        for view in &self.views {
            // A view that a table's policy or rule reads has been recreated with the table.
            if !is_relation(live, &view.relation).await.is_ok_and(|exists| exists) {
                missing.push(view.relation.as_str());
            }
        }
        if missing.len() > 1 {
            // Faster than one dump per view. If it fails, no view was recreated, and each is retried separately.
            let _ = recreate::recreate_relations(settings, side, live, &missing).await;
        }
        for view in &self.views {
            if is_relation(live, &view.relation).await.is_ok_and(|exists| exists) {
                record_result(results, &view.dependent, true, "");
                continue;
            }
            match recreate::recreate_relations(settings, side, live, &[view.relation.as_str()]).await {
                Ok(()) => record_result(results, &view.dependent, true, ""),
                Err(error) => {
                    record_result(results, &view.dependent, false, &format!(": {}", format_chain(&error)));
                }
            }
        }
        match self.execute_statements(live).await {
            Ok(outcomes) => {
                for (dependent, is_recreated, remark) in outcomes {
                    record_result(results, dependent, is_recreated, &remark);
                }
                Ok(())
            }
            Err(error) => {
                let reason = format_chain(&error);
                for statement in &self.statements {
                    let (is_recreated, remark) = match statement.kind {
                        StatementKind::Validation => (true, format!(" (NOT VALID: {reason})")),
                        _ => (false, format!(": {reason}")),
                    };
                    record_result(results, &statement.dependent, is_recreated, &remark);
                }
                Err(error)
            }
        }
    }

    /// Executes the statements in one transaction. Returns the dependents to list, whether each was recreated, and a
    /// remark. A foreign key that was validated is not listed: it is a part of its table.
    async fn execute_statements(&self, live: &mut Client) -> Result<Vec<(&Dependent, bool, String)>, Error> {
        let mut outcomes = Vec::with_capacity(self.statements.len());
        let mut transaction = live.transaction().await?;
        transaction.batch_execute("SET LOCAL lock_timeout = '60s'").await?;
        for Statement { dependent, sql, kind } in &self.statements {
            let mut result = execute_in_savepoint(&mut transaction, sql).await;
            let mut remark = "";
            if *kind == StatementKind::ForeignKey && result.as_ref().is_err_and(is_foreign_key_violation) {
                remark = NOT_VALID;
                let unvalidated: Vec<String> = sql.iter().map(|sql| format!("{sql} NOT VALID")).collect();
                result = execute_in_savepoint(&mut transaction, &unvalidated).await;
            }
            let Err(error) = result else {
                if *kind != StatementKind::Validation {
                    outcomes.push((dependent, true, remark.to_owned()));
                }
                continue;
            };
            // List only the message, because the error's detail quotes the owner's rows.
            let Some(reason) = error.as_db_error().map(|error| error.message().to_owned()) else {
                return Err(error);
            };
            outcomes.push(match kind {
                StatementKind::Validation if is_foreign_key_violation(&error) => {
                    (dependent, true, NOT_VALID.to_owned())
                }
                StatementKind::Validation => (dependent, true, format!(" (NOT VALID: {reason})")),
                StatementKind::ForeignKey | StatementKind::Statistics => {
                    (dependent, false, format!(": {reason}"))
                }
            });
        }
        // Only a committed statement may be listed as recreated.
        transaction.commit().await?;
        Ok(outcomes)
    }
}

fn is_foreign_key_violation(error: &Error) -> bool {
    error.code() == Some(&SqlState::FOREIGN_KEY_VIOLATION)
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

/// Returns whether an object exists. The arguments are as returned by `pg_identify_object_as_address`.
async fn has_object(client: &Client, kind: &str, names: &[String], args: &[String]) -> Result<bool, Error> {
    let query = "SELECT FROM pg_get_object_address($1, $2, $3)";
    match client.query_opt(query, &[&kind, &names, &args]).await {
        // A missing object is reported as an error.
        Err(error) if error.as_db_error().is_none() => Err(error),
        result => Ok(result.is_ok()),
    }
}
