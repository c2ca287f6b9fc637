//! Plans a request: turns an operation and a table into SQL with typed parameters. Pure; the only place that builds
//! statements.

mod write;

use serde_json::value::RawValue;

use super::cursor::{self, Cursor};
use super::fields::{array_elements, string_value};
use super::filter::Filter;
use super::order::Order;
use super::param::Param;
use super::request::{CountMode, FindRequest, Operation, Returning};
use super::sql::Sql;
use super::value::bind;
use crate::gateway::apps::{Column, ColumnType, Table};
use crate::gateway::name::SqlIdentifier;
use svc_http::problem::FieldError;

const DEFAULT_LIMIT: i64 = 100;
const MAX_LIMIT: i64 = 1000;
/// Maximum number of entries in an array of column names.
const MAX_NAMED_COLUMNS: usize = 256;

/// The statements of an operation, and how their rows become the response.
#[derive(Debug, PartialEq)]
pub enum Plan<'t> {
    /// Inserts one row.
    Insert(Sql),
    /// Inserts rows, with one statement for each distinct set of columns.
    InsertMany(Vec<InsertGroup>),
    /// Inserts or updates a row. `fallback` reads the existing row when the conflict leaves it unchanged.
    Upsert {
        write: Sql,
        fallback: Option<Sql>,
    },
    /// Reads at most one row.
    Get(Sql),
    /// Counts rows.
    Count(Sql),
    Find(FindPlan<'t>),
    Change(ChangePlan),
}

/// The rows inserted by one statement, and their indexes in the request.
#[derive(Debug, PartialEq)]
pub struct InsertGroup {
    pub sql: Sql,
    pub rows: Vec<usize>,
}

/// A page of rows. Each result row has the row's JSON and its order columns. The query reads `limit` + 1 rows to detect
/// a next page.
#[derive(Debug, PartialEq)]
pub struct FindPlan<'t> {
    pub rows: Sql,
    pub count: Option<Sql>,
    pub limit: usize,
    pub order: Order<'t>,
    /// [`cursor::fingerprint`].
    pub filter: String,
}

/// An update or delete.
#[derive(Debug, PartialEq)]
pub struct ChangePlan {
    pub sql: Sql,
    pub target: ChangeTarget,
    pub returning: Returning,
    /// With a bound, each result row starts with the number of matched rows, and nothing is changed above the bound.
    pub max_affected: Option<i64>,
}

/// How a change selects its rows, which determines the response if none match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeTarget {
    /// By id: 404 if there is no such row.
    Id,
    /// By filter: success with 0 rows.
    Filter,
}

impl Plan<'_> {
    /// The statements in execution order.
    pub fn statements(&self) -> Vec<&Sql> {
        match self {
            Self::Insert(sql) | Self::Get(sql) | Self::Count(sql) => vec![sql],
            Self::InsertMany(groups) => groups.iter().map(|group| &group.sql).collect(),
            Self::Upsert { write, fallback } => std::iter::once(write).chain(fallback).collect(),
            Self::Find(page) => std::iter::once(&page.rows).chain(&page.count).collect(),
            Self::Change(change) => vec![&change.sql],
        }
    }

    pub fn is_write(&self) -> bool {
        !matches!(self, Self::Get(_) | Self::Count(_) | Self::Find(_))
    }

    /// The number of rows that the plan may insert, whose values are in the request.
    pub fn inserted_rows(&self) -> usize {
        match self {
            Self::Insert(_) | Self::Upsert { .. } => 1,
            Self::InsertMany(groups) => groups.iter().map(|group| group.rows.len()).sum(),
            Self::Get(_) | Self::Count(_) | Self::Find(_) | Self::Change(_) => 0,
        }
    }

    /// Whether a filter selects the rows to change.
    pub fn is_filtered_change(&self) -> bool {
        matches!(self, Self::Change(change) if change.target == ChangeTarget::Filter)
    }

    /// Whether the plan writes with several statements, which are atomic only in a transaction.
    pub fn needs_transaction(&self) -> bool {
        matches!(self, Self::InsertMany(groups) if groups.len() > 1)
    }

    /// JSON pointer to the written values in the request.
    pub fn data_pointer(&self) -> &'static str {
        if matches!(self, Self::InsertMany(_)) { "/rows" } else { "/data" }
    }
}

type FieldErrors = Vec<FieldError>;

/// Plans an operation on `table` in `schema`.
///
/// # Errors
/// The fields that do not match the table.
pub fn plan<'t>(
    schema: &SqlIdentifier,
    table: &'t Table,
    operation: &Operation<'_>,
) -> Result<Plan<'t>, FieldErrors> {
    let planner = TablePlanner { schema, table };
    let single = |error| vec![error];
    match operation {
        Operation::Insert { data } => planner.insert(data),
        Operation::InsertMany { rows } => planner.insert_many(rows),
        Operation::Upsert { data, on_conflict, resolution } => planner.upsert(data, on_conflict, *resolution),
        Operation::Update { change, data } => planner.update(change, data),
        Operation::Delete { change } => planner.delete(change).map_err(single),
        Operation::Get { id } => planner.get(id).map_err(single),
        Operation::Count { filter } => {
            let filter = planner.parse_filter(*filter).map_err(single)?;
            Ok(Plan::Count(planner.count_sql(&filter)))
        }
        Operation::Find(find) => planner.find(find).map_err(single),
    }
}

struct TablePlanner<'s, 't> {
    schema: &'s SqlIdentifier,
    table: &'t Table,
}

impl<'t> TablePlanner<'_, 't> {
    fn push_table(&self, sql: &mut Sql) {
        sql.push_name(self.schema).push(".").push_name(&self.table.name).push(" AS \"t\"");
    }

    fn get(&self, id: &RawValue) -> Result<Plan<'t>, FieldError> {
        let filter = self.id_filter(id)?;
        let mut sql = Sql::new("SELECT ");
        sql.push_row_object(&self.table.columns).push(" FROM ");
        self.push_table(&mut sql);
        sql.push(" WHERE ");
        filter.write(&mut sql);
        Ok(Plan::Get(sql))
    }

    fn id_filter(&self, id: &RawValue) -> Result<Filter<'t>, FieldError> {
        let column =
            self.table.column("id").ok_or_else(|| field_error("/id", "is not a column of this table"))?;
        match bind(ColumnType::Uuid, id).map_err(|message| field_error("/id", message))? {
            Param::Null(_) => Err(field_error("/id", "must be a UUID")),
            id => Ok(Filter::equals(column, id)),
        }
    }

    fn parse_filter(&self, raw: Option<&RawValue>) -> Result<Filter<'t>, FieldError> {
        raw.map_or(Ok(Filter::All(Vec::new())), |raw| Filter::parse(self.table, raw, "/filter"))
    }

    fn count_sql(&self, filter: &Filter<'_>) -> Sql {
        let mut sql = Sql::new("SELECT count(*) FROM ");
        self.push_table(&mut sql);
        if !filter.is_empty() {
            sql.push(" WHERE ");
            filter.write(&mut sql);
        }
        sql
    }

    fn find(&self, find: &FindRequest<'_>) -> Result<Plan<'t>, FieldError> {
        let filter = self.parse_filter(find.filter)?;
        let order = Order::parse(self.table, find.order_by)?;
        let columns = self.parse_selected_columns(find.columns)?;
        let limit = parse_limit(find.limit).map_err(|message| field_error("/limit", message))?;
        let fingerprint = cursor::fingerprint(&filter);
        let after = find.after.as_deref().map(|text| Cursor::decode(text, &order, &fingerprint)).transpose();
        let after = after.map_err(|message| field_error("/after", message))?;
        let count = (find.count == CountMode::Exact).then(|| self.count_sql(&filter));
        let rows = self.page_sql(&columns, &filter, &order, after.as_ref(), limit);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Ok(Plan::Find(FindPlan { rows, count, limit, order, filter: fingerprint }))
    }

    /// The inner query selects the page, and only its rows are converted to JSON.
    fn page_sql(
        &self,
        columns: &[&Column],
        filter: &Filter<'_>,
        order: &Order<'_>,
        after: Option<&Cursor>,
        limit: i64,
    ) -> Sql {
        let mut sql = Sql::new("SELECT ");
        sql.push_row_json();
        for (column, _) in &order.keys {
            sql.push(", ").push_order_key(column);
        }
        sql.push(" FROM (SELECT ");
        let keys = order.keys.iter().map(|(column, _)| *column);
        let needed: Vec<&Column> = self
            .table
            .columns
            .iter()
            .filter(|column| columns.contains(column) || keys.clone().any(|key| key == *column))
            .collect();
        sql.push_list(needed, ", ", |sql, column| {
            sql.push_column(column);
        });
        sql.push(" FROM ");
        self.push_table(&mut sql);
        if !filter.is_empty() || after.is_some() {
            sql.push(" WHERE ");
            filter.write(&mut sql);
        }
        if let Some(cursor) = after {
            sql.push(" AND ");
            order.write_after(&cursor.keys, &mut sql);
        }
        sql.push(" ORDER BY ");
        order.write(&mut sql);
        sql.push(" LIMIT ").push_placeholder(Param::Int8(limit + 1)).push(") AS \"t\"");
        // A lateral join is cheaper in PostgreSQL than a sub-select for each row.
        sql.push(" CROSS JOIN LATERAL ").push_row_source(columns.iter().copied());
        sql
    }

    fn parse_selected_columns(&self, raw: Option<&RawValue>) -> Result<Vec<&'t Column>, FieldError> {
        match raw {
            None => Ok(self.table.columns.iter().collect()),
            Some(raw) => self.parse_columns(raw, "/columns"),
        }
    }

    /// Parses an array of column names and drops duplicates.
    fn parse_columns(&self, raw: &RawValue, pointer: &str) -> Result<Vec<&'t Column>, FieldError> {
        let names = array_elements(raw).filter(|names| !names.is_empty() && names.len() <= MAX_NAMED_COLUMNS);
        let names = names.ok_or_else(|| field_error(pointer, "must be an array of 1 to 256 column names"))?;
        let mut columns: Vec<&Column> = Vec::with_capacity(names.len());
        for (index, name) in names.into_iter().enumerate() {
            let column = string_value(name).and_then(|name| self.table.column(&name));
            let column = column
                .ok_or_else(|| field_error(format!("{pointer}/{index}"), "is not a column of this table"))?;
            if !columns.contains(&column) {
                columns.push(column);
            }
        }
        Ok(columns)
    }
}

fn field_error(pointer: impl Into<String>, detail: &str) -> FieldError {
    FieldError { pointer: pointer.into(), detail: detail.to_owned() }
}

fn parse_limit(raw: Option<&RawValue>) -> Result<i64, &'static str> {
    let Some(raw) = raw else { return Ok(DEFAULT_LIMIT) };
    let limit = raw.get().parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
    limit.ok_or("must be an integer from 1 to 1000")
}

#[cfg(test)]
mod tests;
