//! Plans a request: turns an operation and a table into SQL with typed parameters, without I/O. All statements on the
//! apps' tables are built here.

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
use crate::apps::{Column, ColumnType, Table};
use crate::name::SqlIdentifier;
use svc_http::problem::FieldError;

const DEFAULT_LIMIT: i64 = 100;
const MAX_LIMIT: i64 = 1000;
/// Maximum number of entries in an array of column names.
const MAX_NAMED_COLUMNS: usize = 256;

/// The statements of an operation, and how their rows become the response.
#[derive(Debug, PartialEq)]
pub enum Plan<'t> {
    /// Inserts one row.
    Insert(RowQuery<'t>),
    /// Inserts rows, with one statement for each distinct set of columns.
    InsertMany(Vec<InsertGroup<'t>>),
    /// Inserts or updates a row. `fallback` reads the existing row when the conflict leaves it unchanged.
    Upsert {
        write: RowQuery<'t>,
        fallback: Option<RowQuery<'t>>,
    },
    /// Reads at most one row.
    Get(RowQuery<'t>),
    /// Counts rows.
    Count(Sql),
    Find(FindPlan<'t>),
    Mutation(MutationPlan<'t>),
}

/// A statement whose result rows have the values of all columns.
#[derive(Debug, PartialEq)]
pub struct RowQuery<'t> {
    pub sql: Sql,
    pub columns: Vec<&'t Column>,
}

/// The rows inserted by one statement, and their indexes in the request.
#[derive(Debug, PartialEq)]
pub struct InsertGroup<'t> {
    pub query: RowQuery<'t>,
    pub rows: Vec<usize>,
}

/// A page of rows. Each result row has the values of `columns` and then of the order columns. The query reads `limit` +
/// 1 rows to detect a next page.
#[derive(Debug, PartialEq)]
pub struct FindPlan<'t> {
    pub rows: Sql,
    pub columns: Vec<&'t Column>,
    pub count: Option<Sql>,
    pub limit: usize,
    pub order: Order<'t>,
    /// [`cursor::fingerprint`] of the filter.
    pub filter: String,
}

/// An update or delete.
#[derive(Debug, PartialEq)]
pub struct MutationPlan<'t> {
    pub sql: Sql,
    /// With [`Returning::Rows`], a changed row's result row has `TRUE`, followed by the values of these columns.
    pub columns: Vec<&'t Column>,
    pub target: MutationTarget,
    pub returning: Returning,
    /// If set, each result row starts with the number of matched rows, which are counted up to one above this bound. If
    /// the number exceeds the bound, nothing is changed.
    pub max_affected: Option<i64>,
}

/// How a mutation selects its rows, which determines the response if none match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MutationTarget {
    /// Selects by id; the response is 404 if there is no such row.
    Id,
    /// Selects by filter; the response is a success with 0 rows if none match.
    Filter,
}

impl Plan<'_> {
    /// The statements in execution order.
    pub fn statements(&self) -> impl Iterator<Item = &Sql> {
        let (first, second, groups): (Option<&Sql>, Option<&Sql>, &[InsertGroup<'_>]) = match self {
            Self::Insert(query) | Self::Get(query) => (Some(&query.sql), None, &[]),
            Self::Count(sql) => (Some(sql), None, &[]),
            Self::InsertMany(groups) => (None, None, groups),
            Self::Upsert { write, fallback } => {
                (Some(&write.sql), fallback.as_ref().map(|query| &query.sql), &[])
            }
            Self::Find(page) => (Some(&page.rows), page.count.as_ref(), &[]),
            Self::Mutation(mutation) => (Some(&mutation.sql), None, &[]),
        };
        first.into_iter().chain(second).chain(groups.iter().map(|group| &group.query.sql))
    }

    pub fn is_write(&self) -> bool {
        !matches!(self, Self::Get(_) | Self::Count(_) | Self::Find(_))
    }

    /// Whether the response contains rows that the request does not, and so may be much larger than the request.
    pub fn returns_stored_rows(&self) -> bool {
        match self {
            Self::Get(_) | Self::Find(_) | Self::Upsert { .. } => true,
            Self::Mutation(mutation) => mutation.returning == Returning::Rows,
            Self::Insert(_) | Self::InsertMany(_) | Self::Count(_) => false,
        }
    }

    /// The number of rows that the plan may insert; their values are in the request.
    pub fn inserted_rows(&self) -> usize {
        match self {
            Self::Insert(_) | Self::Upsert { .. } => 1,
            Self::InsertMany(groups) => groups.iter().map(|group| group.rows.len()).sum(),
            Self::Get(_) | Self::Count(_) | Self::Find(_) | Self::Mutation(_) => 0,
        }
    }

    /// Whether a filter selects the rows to change.
    pub fn is_filtered_mutation(&self) -> bool {
        matches!(self, Self::Mutation(mutation) if mutation.target == MutationTarget::Filter)
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
/// The invalid fields: for `data` and `rows`, several at once; otherwise the first one.
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
        Operation::Update { mutation, data } => planner.update(mutation, data),
        Operation::Delete { mutation } => planner.delete(mutation).map_err(single),
        Operation::Get { id } => planner.get(id).map_err(single),
        Operation::Count { filter } => {
            let filter = planner.parse_filter(*filter).map_err(single)?;
            Ok(Plan::Count(planner.count_sql(&filter)))
        }
        Operation::Find(find) => planner.find(find).map_err(single),
    }
}

/// A row to insert. Its statement is built only once it's known whether other rows share it.
#[derive(Debug, Clone)]
pub struct NewRow {
    /// Positions of the columns that get a value, in the table.
    pub columns: Vec<usize>,
    pub values: Vec<Param>,
}

impl NewRow {
    /// Parses the `data` of an insert.
    ///
    /// # Errors
    /// The invalid fields.
    pub fn parse(schema: &SqlIdentifier, table: &Table, data: &RawValue) -> Result<Self, FieldErrors> {
        TablePlanner { schema, table }.new_row(data)
    }

    pub fn plan<'t>(&self, schema: &SqlIdentifier, table: &'t Table) -> Plan<'t> {
        TablePlanner { schema, table }.insert_row(self)
    }
}

/// Plans one statement for rows with the same columns. The result rows have the same order.
pub fn insert_rows<'t>(schema: &SqlIdentifier, table: &'t Table, rows: &[&NewRow]) -> RowQuery<'t> {
    TablePlanner { schema, table }.insert_rows(rows)
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
        Ok(Plan::Get(self.get_sql(&filter)))
    }

    /// Returns the query for the row that a filter selects.
    fn get_sql(&self, filter: &Filter<'_>) -> RowQuery<'t> {
        let columns = self.all_columns();
        let mut query = self.select(&columns);
        query.push(" WHERE ");
        filter.write(&mut query);
        // Without `OFFSET 0`, PostgreSQL's planner could check the sizes of rows that the filter excludes.
        query.push(" OFFSET 0");
        let mut sql = Sql::new("SELECT ");
        sql.push_raw_values(&columns).push(" FROM ");
        sql.push_checked_source(&columns, query);
        RowQuery { sql, columns }
    }

    fn all_columns(&self) -> Vec<&'t Column> {
        self.table.columns.iter().collect()
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
        Ok(Plan::Find(FindPlan { rows, columns, count, limit, order, filter: fingerprint }))
    }

    /// Returns the query for a page. Its inner query selects the rows, so that only these are converted and checked.
    fn page_sql(
        &self,
        columns: &[&Column],
        filter: &Filter<'_>,
        order: &Order<'_>,
        after: Option<&Cursor>,
        limit: i64,
    ) -> Sql {
        let keys = order.keys.iter().map(|(column, _)| *column);
        let needed: Vec<&Column> = self
            .table
            .columns
            .iter()
            .filter(|column| columns.contains(column) || keys.clone().any(|key| key == *column))
            .collect();
        let mut query = self.select(&needed);
        if !filter.is_empty() || after.is_some() {
            query.push(" WHERE ");
            filter.write(&mut query);
        }
        if let Some(cursor) = after {
            query.push(" AND ");
            order.write_after(&cursor.keys, &mut query);
        }
        query.push(" ORDER BY ");
        order.write(&mut query);
        query.push(" LIMIT ").push_placeholder(Param::Int8(limit + 1));
        let mut sql = Sql::new("SELECT ");
        sql.push_raw_values(columns);
        for key in keys {
            sql.push(", ").push_order_key(key);
        }
        sql.push(" FROM ").push_checked_source(&needed, query);
        sql
    }

    /// Starts a query that selects these columns.
    fn select(&self, columns: &[&Column]) -> Sql {
        let mut sql = Sql::new("SELECT ");
        sql.push_list(columns, ", ", |sql, column| {
            sql.push_column(column);
        });
        sql.push(" FROM ");
        self.push_table(&mut sql);
        sql
    }

    fn parse_selected_columns(&self, raw: Option<&RawValue>) -> Result<Vec<&'t Column>, FieldError> {
        match raw {
            None => Ok(self.all_columns()),
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
