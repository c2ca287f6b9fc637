//! Plans the operations that change rows. Each statement is atomic.

use serde_json::value::RawValue;

use super::{
    FieldErrors, InsertGroup, MutationPlan, MutationTarget, NewRow, Plan, RowQuery, TablePlanner, field_error,
};
use crate::apps::{Column, ColumnOrigin};
use crate::bridge::fields::{Fields, array_elements};
use crate::bridge::filter::{Filter, escape_segment};
use crate::bridge::param::Param;
use crate::bridge::request::{MutationRequest, Resolution, Returning, RowSelector};
use crate::bridge::sql::Sql;
use crate::bridge::value::{bind, expansion_bytes};
use svc_http::problem::FieldError;

const MAX_INSERT_ROWS: usize = 1000;
/// Maximum number of rows that a mutation by filter returns.
const MAX_RETURNED_ROWS: i64 = 1000;
/// Maximum number of bytes that the response to an `insertMany` may add to the values in the request, as estimated from
/// the names of all columns and the digits of expanded numbers.
const MAX_ADDED_BYTES: usize = 4 * 1024 * 1024;
/// Maximum number of errors reported for `data` and `rows`.
const MAX_ERRORS: usize = 20;

/// A row's values in the table's column order, so that requests with a different field order use the same statement.
type RowValues<'t> = Vec<(&'t Column, Param)>;

/// Whether the values belong to a new or an existing row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RowState {
    New,
    Existing,
}

enum MutationKind<'t> {
    Update(RowValues<'t>),
    Delete,
}

impl<'t> TablePlanner<'_, 't> {
    pub(super) fn insert(&self, data: &RawValue) -> Result<Plan<'t>, FieldErrors> {
        Ok(self.insert_row(&self.new_row(data)?))
    }

    /// Rows with the same columns are inserted by one statement, from one array for each column. A column that a row
    /// does not name gets its default, as in a single insert.
    pub(super) fn insert_many(&self, rows: &RawValue) -> Result<Plan<'t>, FieldErrors> {
        let rows = array_elements(rows).filter(|rows| (1..=MAX_INSERT_ROWS).contains(&rows.len()));
        let rows = rows.ok_or_else(|| vec![field_error("/rows", "must be an array of 1 to 1000 objects")])?;
        let mut added_bytes = rows.len() * self.empty_row_bytes();
        let mut groups: Vec<RowGroup<'t>> = Vec::new();
        let mut errors = Vec::new();
        for (index, row) in rows.into_iter().enumerate() {
            match self.parse_values(row, &format!("/rows/{index}"), RowState::New) {
                Ok(values) => {
                    added_bytes += values
                        .iter()
                        .map(|(column, param)| expansion_bytes(column.kind, param))
                        .sum::<usize>();
                    RowGroup::add(&mut groups, index, self.with_id(values));
                }
                Err(row_errors) => errors.extend(row_errors),
            }
            if added_bytes > MAX_ADDED_BYTES {
                errors.push(field_error(
                    "/rows",
                    "would add more than 4 MiB of column names and digits to the response: send fewer rows",
                ));
                break;
            }
            if errors.len() >= MAX_ERRORS {
                break;
            }
        }
        if !errors.is_empty() {
            errors.truncate(MAX_ERRORS);
            return Err(errors);
        }
        let groups = groups
            .into_iter()
            .map(|group| InsertGroup { query: self.insert_lists(group.columns), rows: group.rows });
        Ok(Plan::InsertMany(groups.collect()))
    }

    pub(super) fn new_row(&self, data: &RawValue) -> Result<NewRow, FieldErrors> {
        let row = self.with_id(self.parse_values(data, "/data", RowState::New)?);
        let position =
            |column| self.table.columns.iter().position(|candidate| std::ptr::eq(candidate, column));
        let (columns, values) =
            row.into_iter().filter_map(|(column, value)| Some((position(column)?, value))).unzip();
        Ok(NewRow { columns, values })
    }

    pub(super) fn insert_row(&self, row: &NewRow) -> Plan<'t> {
        let columns = row.columns.iter().filter_map(|position| self.table.columns.get(*position));
        let sql = self.insert_sql(columns.zip(row.values.iter().cloned()).collect());
        Plan::Insert(self.with_returning(sql))
    }

    pub(super) fn insert_rows(&self, rows: &[&NewRow]) -> RowQuery<'t> {
        let positions = rows.first().map_or(&[][..], |row| &row.columns);
        let columns = positions.iter().filter_map(|position| self.table.columns.get(*position));
        let values_at = |index: usize| rows.iter().filter_map(|row| row.values.get(index).cloned()).collect();
        self.insert_lists(columns.enumerate().map(|(index, column)| (column, values_at(index))).collect())
    }

    /// The approximate size of a response row without its values.
    fn empty_row_bytes(&self) -> usize {
        self.table.columns.iter().map(|column| column.name.as_str().len() + "\"\":null,".len()).sum()
    }

    /// Adds the clause that returns the written rows.
    fn with_returning(&self, mut sql: Sql) -> RowQuery<'t> {
        let columns = self.all_columns();
        sql.push(" RETURNING ").push_returned_values(&columns);
        RowQuery { sql, columns }
    }

    /// Inserts rows from one list of values for each column.
    fn insert_lists(&self, lists: Vec<(&'t Column, Vec<Param>)>) -> RowQuery<'t> {
        let mut sql = Sql::new("INSERT INTO ");
        self.push_table(&mut sql);
        sql.push(" (").push_list(&lists, ", ", |sql, (column, _)| {
            sql.push_name(&column.name);
        });
        sql.push(") SELECT * FROM unnest(").push_list(lists, ", ", |sql, (column, values)| {
            sql.bind_many(column.kind, values);
        });
        sql.push(")");
        self.with_returning(sql)
    }

    /// Both resolutions lock an existing row, so that the `fallback` of [`Resolution::Ignore`] finds it in the same
    /// transaction.
    pub(super) fn upsert(
        &self,
        data: &RawValue,
        on_conflict: &RawValue,
        resolution: Resolution,
    ) -> Result<Plan<'t>, FieldErrors> {
        let target = self.parse_columns(on_conflict, "/onConflict").map_err(|error| vec![error])?;
        let values = self.parse_values(data, "/data", RowState::New)?;
        let mut key = Vec::with_capacity(target.len());
        let mut errors = Vec::new();
        for column in &target {
            // NULL never conflicts: each upsert would insert another row.
            match values.iter().find(|(field, param)| field == column && !matches!(param, Param::Null(_))) {
                Some((_, param)) => key.push(Filter::equals(column, param.clone())),
                None => errors.push(field_error(
                    format!("/data/{}", column.name),
                    "is required and must not be null: onConflict names it",
                )),
            }
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        let named_columns: Vec<&Column> = values.iter().map(|(column, _)| *column).collect();
        let mut write = self.insert_sql(self.with_id(values));
        write.push(" ON CONFLICT (").push_list(&target, ", ", |sql, column| {
            sql.push_name(&column.name);
        });
        write.push(") DO UPDATE SET \"updated_at\" = ");
        match resolution {
            Resolution::Merge => {
                write.push("now()");
                let is_updated =
                    |column: &&&Column| column.origin == ColumnOrigin::Declared && !target.contains(column);
                for column in named_columns.iter().filter(is_updated) {
                    write.push(", ").push_name(&column.name).push(" = excluded.").push_name(&column.name);
                }
            }
            Resolution::Ignore => {
                write.push("\"t\".\"updated_at\" WHERE FALSE");
            }
        }
        let fallback = (resolution == Resolution::Ignore).then(|| self.get_sql(&Filter::All(key)));
        Ok(Plan::Upsert { write: self.with_returning(write), fallback })
    }

    pub(super) fn update(
        &self,
        mutation: &MutationRequest<'_>,
        data: &RawValue,
    ) -> Result<Plan<'t>, FieldErrors> {
        let values = self.parse_values(data, "/data", RowState::Existing)?;
        if values.is_empty() {
            return Err(vec![field_error("/data", "must have at least one column")]);
        }
        self.plan_mutation(MutationKind::Update(values), mutation).map_err(|error| vec![error])
    }

    pub(super) fn delete(&self, mutation: &MutationRequest<'_>) -> Result<Plan<'t>, FieldError> {
        self.plan_mutation(MutationKind::Delete, mutation)
    }

    fn plan_mutation(
        &self,
        kind: MutationKind<'t>,
        mutation: &MutationRequest<'_>,
    ) -> Result<Plan<'t>, FieldError> {
        let (filter, target) = match mutation.rows {
            RowSelector::Id(id) => (self.id_filter(id)?, MutationTarget::Id),
            RowSelector::Filter(raw) => (self.parse_filter(Some(raw))?, MutationTarget::Filter),
        };
        if filter.is_empty() {
            return Err(field_error("/filter", "must not be empty"));
        }
        let returning = mutation.returning;
        let max_affected = parse_max_affected(mutation.max_affected, target, returning)
            .map_err(|message| field_error("/maxAffected", message))?;
        let sql = match max_affected {
            None => self.unbounded_sql(kind, &filter, returning),
            Some(max_affected) => self.bounded_sql(kind, &filter, returning, max_affected),
        };
        Ok(Plan::Mutation(MutationPlan { sql, columns: self.all_columns(), target, returning, max_affected }))
    }

    fn unbounded_sql(&self, kind: MutationKind<'t>, filter: &Filter<'_>, returning: Returning) -> Sql {
        let mut sql = Sql::default();
        self.push_mutation_head(&mut sql, kind, None);
        sql.push(" WHERE ");
        filter.write(&mut sql);
        if returning == Returning::Rows {
            sql.push(" RETURNING TRUE, ").push_returned_values(&self.all_columns());
        }
        sql
    }

    /// Locks the matching rows, at most one more than `max_affected`, and changes them only if there are at most
    /// `max_affected`.
    fn bounded_sql(
        &self,
        kind: MutationKind<'t>,
        filter: &Filter<'_>,
        returning: Returning,
        max_affected: i64,
    ) -> Sql {
        let mut sql = Sql::new("WITH \"hit\" AS MATERIALIZED (SELECT \"t\".\"id\" FROM ");
        self.push_table(&mut sql);
        sql.push(" WHERE ");
        filter.write(&mut sql);
        sql.push(" LIMIT ").push_placeholder(Param::Int8(max_affected.saturating_add(1)));
        sql.push(" FOR UPDATE), \"done\" AS (");
        self.push_mutation_head(&mut sql, kind, Some("\"hit\""));
        sql.push(" WHERE \"t\".\"id\" = \"hit\".\"id\" AND (SELECT count(*) FROM \"hit\") <= ");
        sql.push_placeholder(Param::Int8(max_affected)).push(" RETURNING ");
        let hit_count_sql = "SELECT count(*) FROM \"hit\"";
        match returning {
            Returning::Count => {
                sql.push("TRUE) SELECT (").push(hit_count_sql).push("), (SELECT count(*) FROM \"done\")");
            }
            Returning::Rows => {
                sql.push("TRUE, ").push_returned_values(&self.all_columns());
                sql.push(") SELECT \"h\".\"count\", \"d\".* FROM (");
                sql.push(hit_count_sql).push(") AS \"h\" LEFT JOIN \"done\" AS \"d\" ON TRUE");
            }
        }
        sql
    }

    /// Adds an update or delete up to its WHERE clause; `source` is a table to join.
    fn push_mutation_head(&self, sql: &mut Sql, kind: MutationKind<'t>, source: Option<&'static str>) {
        match kind {
            MutationKind::Update(values) => {
                sql.push("UPDATE ");
                self.push_table(sql);
                sql.push(" SET ").push_list(values, ", ", |sql, (column, param)| {
                    sql.push_name(&column.name).push(" = ").bind(column.kind, param);
                });
                sql.push(", \"updated_at\" = now()");
                if let Some(source) = source {
                    sql.push(" FROM ").push(source);
                }
            }
            MutationKind::Delete => {
                sql.push("DELETE FROM ");
                self.push_table(sql);
                if let Some(source) = source {
                    sql.push(" USING ").push(source);
                }
            }
        }
    }

    /// Returns `INSERT INTO … VALUES …`, which the caller extends.
    fn insert_sql(&self, values: RowValues<'t>) -> Sql {
        let mut sql = Sql::new("INSERT INTO ");
        self.push_table(&mut sql);
        sql.push(" (").push_list(&values, ", ", |sql, (column, _)| {
            sql.push_name(&column.name);
        });
        sql.push(") VALUES (").push_list(values, ", ", |sql, (column, param)| {
            sql.bind(column.kind, param);
        });
        sql.push(")");
        sql
    }

    /// Adds a generated id unless the client sent one. UUIDv7 values are time-ordered, so the index grows at one end.
    fn with_id(&self, mut values: RowValues<'t>) -> RowValues<'t> {
        if let Some(id) = self.table.column("id").filter(|id| values.iter().all(|(c, _)| c != id)) {
            values.insert(0, (id, Param::Uuid(uuid::Uuid::now_v7())));
        }
        values
    }

    /// Parses `data`. If it is invalid, returns all errors, up to [`MAX_ERRORS`].
    fn parse_values(
        &self,
        data: &RawValue,
        pointer: &str,
        state: RowState,
    ) -> Result<RowValues<'t>, FieldErrors> {
        let fields = Fields::parse(data).map_err(|message| vec![field_error(pointer, message)])?;
        let mut errors = Vec::new();
        let mut params: Vec<Option<Param>> = vec![None; self.table.columns.len()];
        for (name, raw) in &fields.0 {
            let mut reject = |message: &str| {
                errors.push(field_error(format!("{pointer}/{}", escape_segment(name)), message));
            };
            let position = self.table.columns.iter().position(|column| column.name.as_str() == name);
            let Some(index) = position else {
                reject("is not a column of this table");
                continue;
            };
            let column = &self.table.columns[index];
            if !column.is_insertable() {
                reject("is set by the database");
                continue;
            }
            if state == RowState::Existing && column.origin == ColumnOrigin::BuiltIn {
                reject("cannot be changed");
                continue;
            }
            match bind(column.kind, raw) {
                Ok(Param::Null(_)) if !column.is_nullable() => reject("must not be null"),
                Ok(param) => params[index] = Some(param),
                Err(message) => reject(message),
            }
        }
        if !errors.is_empty() {
            errors.truncate(MAX_ERRORS);
            return Err(errors);
        }
        Ok(self.table.columns.iter().zip(params).filter_map(|(column, p)| Some((column, p?))).collect())
    }
}

/// Rows with the same columns, as a list of values for each column.
struct RowGroup<'t> {
    columns: Vec<(&'t Column, Vec<Param>)>,
    /// Indexes of the rows in the request.
    rows: Vec<usize>,
}

impl<'t> RowGroup<'t> {
    /// Adds a row to the group with its columns, or to a new group.
    fn add(groups: &mut Vec<Self>, row: usize, values: RowValues<'t>) {
        let has_same_columns = |group: &&mut Self| {
            group.columns.len() == values.len()
                && group
                    .columns
                    .iter()
                    .zip(&values)
                    .all(|((group_column, _), (column, _))| group_column == column)
        };
        match groups.iter_mut().find(has_same_columns) {
            Some(group) => {
                group.rows.push(row);
                for ((_, list), (_, param)) in group.columns.iter_mut().zip(values) {
                    list.push(param);
                }
            }
            None => {
                let columns = values.into_iter().map(|(column, param)| (column, vec![param])).collect();
                groups.push(Self { columns, rows: vec![row] });
            }
        }
    }
}

/// Returns the bound on the number of changed rows, if one is needed. A mutation by id changes at most one row, so
/// only the bound 0 matters; a mutation by filter that returns rows always has a bound.
fn parse_max_affected(
    raw: Option<&RawValue>,
    target: MutationTarget,
    returning: Returning,
) -> Result<Option<i64>, &'static str> {
    let requested = match raw {
        None => None,
        Some(raw) => {
            let number =
                raw.get().parse::<i64>().ok().filter(|number| (0..=i64::from(u32::MAX)).contains(number));
            Some(number.ok_or("must be an integer from 0 to 4294967295")?)
        }
    };
    match (target, returning, requested) {
        (MutationTarget::Id, _, None | Some(1..)) => Ok(None),
        (MutationTarget::Filter, Returning::Rows, Some(max_affected)) if max_affected > MAX_RETURNED_ROWS => {
            Err("must be at most 1000 if returning is true")
        }
        (MutationTarget::Filter, Returning::Rows, None) => Ok(Some(MAX_RETURNED_ROWS)),
        (_, _, requested) => Ok(requested),
    }
}
