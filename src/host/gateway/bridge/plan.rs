//! From a request and a table to SQL with typed parameters. Pure; the one place where statements are made.

use serde_json::value::RawValue;

use super::cursor::Cursor;
use super::fields::{Fields, elements, text};
use super::filter::{Filter, escaped};
use super::order::Order;
use super::param::Param;
use super::request::{Count, Find, Operation};
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
    /// One row, or none.
    One(Sql),
    /// A number.
    Number(Sql),
    Page(Page<'t>),
}

/// A page of rows: each row of the answer is its JSON, then the order's columns as text. One row more than `limit` is
/// asked for: it tells whether there is a next page.
#[derive(Debug, PartialEq)]
pub struct Page<'t> {
    pub rows: Sql,
    pub count: Option<Sql>,
    pub limit: usize,
    pub order: Order<'t>,
}

type Wrong = Vec<FieldError>;

/// Plans an operation on `table` of `schema`.
///
/// # Errors
/// The fields that do not fit the table.
pub fn plan<'t>(schema: &Name, table: &'t Table, operation: &Operation<'_>) -> Result<Plan<'t>, Wrong> {
    let place = Place { schema, table };
    match operation {
        Operation::Insert { data } => place.insert(data),
        Operation::Get { id } => place.get(id).map_err(|wrong| vec![wrong]),
        Operation::Count { filter } => {
            let filter = place.filter(*filter).map_err(|wrong| vec![wrong])?;
            Ok(Plan::Number(place.count(&filter)))
        }
        Operation::Find(find) => place.find(find).map_err(|wrong| vec![wrong]),
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

    /// The id comes from here unless the client chose one: in time order, so that the index grows at one end.
    fn insert(&self, data: &RawValue) -> Result<Plan<'t>, Wrong> {
        let mut values = self.values(data)?;
        if let Some(id) = self.table.column("id").filter(|id| values.iter().all(|(c, _)| c != id)) {
            values.insert(0, (id, Param::Uuid(uuid::Uuid::now_v7())));
        }
        let mut sql = Sql::new("INSERT INTO ");
        self.name(&mut sql);
        sql.push(" (").list(&values, ", ", |sql, (column, _)| {
            sql.name(&column.name);
        });
        sql.push(") VALUES (").list(values, ", ", |sql, (column, param)| {
            sql.bind(column.kind, param);
        });
        sql.push(") RETURNING ").row_object(&self.table.columns);
        Ok(Plan::Made(sql))
    }

    /// Data's fields in the table's order, so that the order in which a client writes them makes no new statement.
    fn values(&self, data: &RawValue) -> Result<Vec<(&'t Column, Param)>, Wrong> {
        let wrong = |pointer: String, detail: &str| FieldError { pointer, detail: detail.to_owned() };
        let fields = Fields::of(data).map_err(|why| vec![wrong("/data".to_owned(), why)])?;
        let mut mistakes = Vec::new();
        let mut given: Vec<Option<Param>> = vec![None; self.table.columns.len()];
        for (name, raw) in &fields.0 {
            let pointer = format!("/data/{}", escaped(name));
            let found = self.table.columns.iter().position(|column| column.name.as_str() == name);
            let Some(index) = found else {
                mistakes.push(wrong(pointer, "is not a column of this table"));
                continue;
            };
            let column = &self.table.columns[index];
            if !column.is_insertable() {
                mistakes.push(wrong(pointer, "is set by the database"));
                continue;
            }
            match bind(column.kind, raw) {
                Ok(Param::Null(_)) if !column.is_nullable() => {
                    mistakes.push(wrong(pointer, "must not be null"));
                }
                Ok(param) => given[index] = Some(param),
                Err(why) => mistakes.push(wrong(pointer, why)),
            }
        }
        if !mistakes.is_empty() {
            return Err(mistakes);
        }
        Ok(self.table.columns.iter().zip(given).filter_map(|(column, p)| Some((column, p?))).collect())
    }

    fn get(&self, id: &RawValue) -> Result<Plan<'t>, FieldError> {
        let wrong = |why: &str| FieldError { pointer: "/id".to_owned(), detail: why.to_owned() };
        let id = match bind(ColumnType::Uuid, id).map_err(wrong)? {
            Param::Null(_) => return Err(wrong("must be a UUID")),
            id => id,
        };
        let mut sql = Sql::new("SELECT ");
        sql.row_object(&self.table.columns).push(" FROM ");
        self.name(&mut sql);
        sql.push(" WHERE \"t\".\"id\" = ").bind(ColumnType::Uuid, id);
        Ok(Plan::One(sql))
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
        let wrong = |pointer: &str, why: &str| FieldError { pointer: pointer.into(), detail: why.into() };
        let filter = self.filter(find.filter)?;
        let order = Order::parse(self.table, find.order_by)?;
        let columns = self.columns(find.columns)?;
        let limit = limit(find.limit).map_err(|why| wrong("/limit", why))?;
        let after = find.after.as_deref().map(|text| Cursor::decode(text, &order)).transpose();
        let after = after.map_err(|why| wrong("/after", why))?;
        let count = (find.count == Count::Exact).then(|| self.count(&filter));
        let rows = self.rows(&columns, &filter, &order, after.as_ref(), limit);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Ok(Plan::Page(Page { rows, count, limit, order }))
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
        sql.row_of_wire();
        for (column, _) in &order.keys {
            sql.push(", ").column(column).push("::text");
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
        sql.push(" CROSS JOIN LATERAL ").wire_row(columns.iter().copied());
        sql
    }

    fn columns(&self, raw: Option<&RawValue>) -> Result<Vec<&'t Column>, FieldError> {
        let wrong = |pointer: String, detail: &str| FieldError { pointer, detail: detail.to_owned() };
        let Some(raw) = raw else { return Ok(self.table.columns.iter().collect()) };
        let names = elements(raw).filter(|names| !names.is_empty() && names.len() <= 256);
        let names = names.ok_or_else(|| wrong("/columns".to_owned(), "must be an array of columns"))?;
        let mut columns: Vec<&Column> = Vec::with_capacity(names.len());
        for (index, name) in names.into_iter().enumerate() {
            let column = text(name).and_then(|name| self.table.column(&name));
            let column =
                column.ok_or_else(|| wrong(format!("/columns/{index}"), "is not a column of this table"))?;
            if !columns.contains(&column) {
                columns.push(column);
            }
        }
        Ok(columns)
    }
}

fn limit(raw: Option<&RawValue>) -> Result<i64, &'static str> {
    let Some(raw) = raw else { return Ok(DEFAULT_LIMIT) };
    let limit = raw.get().parse().ok().filter(|limit| (1..=LARGEST_LIMIT).contains(limit));
    limit.ok_or("must be an integer from 1 to 1000")
}

#[cfg(test)]
mod tests;
