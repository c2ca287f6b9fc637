//! From a request and a table to SQL with typed parameters. Pure; the one place where statements are made.

mod write;

use serde_json::value::RawValue;

use super::cursor::{self, Cursor};
use super::fields::{elements, text};
use super::filter::Filter;
use super::order::Order;
use super::param::Param;
use super::request::{Count, Find, Operation, Returning};
use super::sql::Sql;
use super::value::bind;
use crate::host::gateway::apps::{Column, ColumnType, Name, Table};
use crate::http::problem::FieldError;

const DEFAULT_LIMIT: i64 = 100;
const LARGEST_LIMIT: i64 = 1000;

/// What to run, and how its rows become the answer.
#[derive(Debug, PartialEq)]
pub enum Plan<'t> {
    /// One row was made.
    Made(Sql),
    /// Rows were made: a statement for each set of columns that they name.
    ManyMade(Vec<Group>),
    /// A row was made, or was there: then `otherwise` reads it where it was to be left as it is.
    Upserted {
        write: Sql,
        otherwise: Option<Sql>,
    },
    /// One row, or none.
    One(Sql),
    /// A number.
    Number(Sql),
    Page(Page<'t>),
    Changed(Changed),
}

/// Rows that one statement makes, and which of the request's rows they are.
#[derive(Debug, PartialEq)]
pub struct Group {
    pub sql: Sql,
    pub rows: Vec<usize>,
}

/// A page of rows: each row of the answer is its JSON, then the order's columns. One row more than `limit` is
/// asked for: it tells whether there is a next page.
#[derive(Debug, PartialEq)]
pub struct Page<'t> {
    pub rows: Sql,
    pub count: Option<Sql>,
    pub limit: usize,
    pub order: Order<'t>,
    /// [`cursor::fingerprint`].
    pub filter: String,
}

/// An update or a delete.
#[derive(Debug, PartialEq)]
pub struct Changed {
    pub sql: Sql,
    pub target: Target,
    pub returning: Returning,
    /// With a bound, each row of the answer begins with the number of rows that matched, and above the bound nothing was
    /// changed.
    pub at_most: Option<i64>,
}

/// What a change of no row means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The row is absent.
    Id,
    /// Nothing matched.
    Filter,
}

impl Plan<'_> {
    /// In the order in which they are run.
    pub fn statements(&self) -> Vec<&Sql> {
        match self {
            Self::Made(sql) | Self::One(sql) | Self::Number(sql) => vec![sql],
            Self::ManyMade(groups) => groups.iter().map(|group| &group.sql).collect(),
            Self::Upserted { write, otherwise } => std::iter::once(write).chain(otherwise).collect(),
            Self::Page(page) => std::iter::once(&page.rows).chain(&page.count).collect(),
            Self::Changed(changed) => vec![&changed.sql],
        }
    }

    pub fn is_write(&self) -> bool {
        !matches!(self, Self::One(_) | Self::Number(_) | Self::Page(_))
    }

    /// Rows that it makes of values that the request has.
    pub fn rows_made(&self) -> usize {
        match self {
            Self::Made(_) | Self::Upserted { .. } => 1,
            Self::ManyMade(groups) => groups.iter().map(|group| group.rows.len()).sum(),
            Self::One(_) | Self::Number(_) | Self::Page(_) | Self::Changed(_) => 0,
        }
    }

    /// Whether it changes as many rows as a filter matches.
    pub fn is_by_filter(&self) -> bool {
        matches!(self, Self::Changed(changed) if changed.target == Target::Filter)
    }

    /// Whether one statement does all of it: PostgreSQL then makes all of it true or nothing.
    pub fn is_one_statement(&self) -> bool {
        !matches!(self, Self::ManyMade(groups) if groups.len() > 1)
    }

    /// Where in the request the values stand that this writes.
    pub fn data(&self) -> &'static str {
        if matches!(self, Self::ManyMade(_)) { "/rows" } else { "/data" }
    }
}

type Wrong = Vec<FieldError>;

/// Plans an operation on `table` of `schema`.
///
/// # Errors
/// The fields that do not fit the table.
pub fn plan<'t>(schema: &Name, table: &'t Table, operation: &Operation<'_>) -> Result<Plan<'t>, Wrong> {
    let place = Place { schema, table };
    let one = |wrong| vec![wrong];
    match operation {
        Operation::Insert { data } => place.insert(data),
        Operation::InsertMany { rows } => place.insert_many(rows),
        Operation::Upsert { data, on_conflict, resolution } => place.upsert(data, on_conflict, *resolution),
        Operation::Update { change, data } => place.update(change, data),
        Operation::Delete { change } => place.delete(change).map_err(one),
        Operation::Get { id } => place.get(id).map_err(one),
        Operation::Count { filter } => {
            let filter = place.filter(*filter).map_err(one)?;
            Ok(Plan::Number(place.count(&filter)))
        }
        Operation::Find(find) => place.find(find).map_err(one),
    }
}

struct Place<'s, 't> {
    schema: &'s Name,
    table: &'t Table,
}

impl<'t> Place<'_, 't> {
    fn name(&self, sql: &mut Sql) {
        sql.name(self.schema).push(".").name(&self.table.name).push(" AS \"t\"");
    }

    fn get(&self, id: &RawValue) -> Result<Plan<'t>, FieldError> {
        let filter = self.by_id(id)?;
        let mut sql = Sql::new("SELECT ");
        sql.row_object(&self.table.columns).push(" FROM ");
        self.name(&mut sql);
        sql.push(" WHERE ");
        filter.write(&mut sql);
        Ok(Plan::One(sql))
    }

    fn by_id(&self, id: &RawValue) -> Result<Filter<'t>, FieldError> {
        let column = self.table.column("id").ok_or_else(|| wrong("/id", "is not a column of this table"))?;
        match bind(ColumnType::Uuid, id).map_err(|why| wrong("/id", why))? {
            Param::Null(_) => Err(wrong("/id", "must be a UUID")),
            id => Ok(Filter::equals(column, id)),
        }
    }

    fn filter(&self, raw: Option<&RawValue>) -> Result<Filter<'t>, FieldError> {
        raw.map_or(Ok(Filter::All(Vec::new())), |raw| Filter::parse(self.table, raw, "/filter"))
    }

    fn count(&self, filter: &Filter<'_>) -> Sql {
        let mut sql = Sql::new("SELECT count(*) FROM ");
        self.name(&mut sql);
        if !filter.is_empty() {
            sql.push(" WHERE ");
            filter.write(&mut sql);
        }
        sql
    }

    fn find(&self, find: &Find<'_>) -> Result<Plan<'t>, FieldError> {
        let filter = self.filter(find.filter)?;
        let order = Order::parse(self.table, find.order_by)?;
        let columns = self.columns(find.columns)?;
        let limit = limit(find.limit).map_err(|why| wrong("/limit", why))?;
        let fingerprint = cursor::fingerprint(&filter);
        let after = find.after.as_deref().map(|text| Cursor::decode(text, &order, &fingerprint)).transpose();
        let after = after.map_err(|why| wrong("/after", why))?;
        let count = (find.count == Count::Exact).then(|| self.count(&filter));
        let rows = self.rows(&columns, &filter, &order, after.as_ref(), limit);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Ok(Plan::Page(Page { rows, count, limit, order, filter: fingerprint }))
    }

    /// The page is cut out first, and only its rows are made into JSON.
    fn rows(
        &self,
        columns: &[&Column],
        filter: &Filter<'_>,
        order: &Order<'_>,
        after: Option<&Cursor>,
        limit: i64,
    ) -> Sql {
        let mut sql = Sql::new("SELECT ");
        sql.row_json();
        for (column, _) in &order.keys {
            sql.push(", ").key(column);
        }
        sql.push(" FROM (SELECT ");
        let keys = order.keys.iter().map(|(column, _)| *column);
        let needed: Vec<&Column> = self
            .table
            .columns
            .iter()
            .filter(|column| columns.contains(column) || keys.clone().any(|key| key == *column))
            .collect();
        sql.list(needed, ", ", |sql, column| {
            sql.column(column);
        });
        sql.push(" FROM ");
        self.name(&mut sql);
        if !filter.is_empty() || after.is_some() {
            sql.push(" WHERE ");
            filter.write(&mut sql);
        }
        if let Some(cursor) = after {
            sql.push(" AND ");
            order.write_after(cursor, &mut sql);
        }
        sql.push(" ORDER BY ");
        order.write(&mut sql);
        sql.push(" LIMIT ").placeholder(Param::Int8(limit + 1)).push(") AS \"t\"");
        // A lateral row costs PostgreSQL less than a sub-select for each row.
        sql.push(" CROSS JOIN LATERAL ").row_source(columns.iter().copied());
        sql
    }

    fn columns(&self, raw: Option<&RawValue>) -> Result<Vec<&'t Column>, FieldError> {
        match raw {
            None => Ok(self.table.columns.iter().collect()),
            Some(raw) => self.named(raw, "/columns"),
        }
    }

    /// The columns that an array names, each once.
    fn named(&self, raw: &RawValue, place: &str) -> Result<Vec<&'t Column>, FieldError> {
        let names = elements(raw).filter(|names| !names.is_empty() && names.len() <= 256);
        let names = names.ok_or_else(|| wrong(place, "must be an array of columns"))?;
        let mut columns: Vec<&Column> = Vec::with_capacity(names.len());
        for (index, name) in names.into_iter().enumerate() {
            let column = text(name).and_then(|name| self.table.column(&name));
            let column =
                column.ok_or_else(|| wrong(format!("{place}/{index}"), "is not a column of this table"))?;
            if !columns.contains(&column) {
                columns.push(column);
            }
        }
        Ok(columns)
    }
}

fn wrong(pointer: impl Into<String>, detail: &str) -> FieldError {
    FieldError { pointer: pointer.into(), detail: detail.to_owned() }
}

fn limit(raw: Option<&RawValue>) -> Result<i64, &'static str> {
    let Some(raw) = raw else { return Ok(DEFAULT_LIMIT) };
    let limit = raw.get().parse().ok().filter(|limit| (1..=LARGEST_LIMIT).contains(limit));
    limit.ok_or("must be an integer from 1 to 1000")
}

#[cfg(test)]
mod tests;
