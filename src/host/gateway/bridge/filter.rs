//! The filter grammar: `{col: value}`, `{col: {op: value}}`, `and`, `or`, `not`.
//!
//! NULL follows SQL: a comparison with a column that is NULL holds for nobody, so `ne` and `not` leave such rows out;
//! `isNull` asks for them. A value `null` is short for `isNull`. `in []` holds for no row. `contains` asks a text for a
//! part of it, letter by letter, and a jsonb for what it contains (`@>`).

use serde_json::value::RawValue;

use super::fields::{Fields, elements, is_null, is_object};
use super::param::Param;
use super::sql::Sql;
use super::value::{bind, bind_bound};
use crate::host::gateway::apps::{Column, ColumnType, Table};
use crate::http::problem::FieldError;

const DEEPEST: usize = 5;
const MOST_TERMS: usize = 50;
const MOST_IN: usize = 1000;
const NOT_NULL: &str = "must not be null; ask with isNull";

/// A checked filter: its columns are the table's, its values have their types.
#[derive(Debug, Clone, PartialEq)]
pub enum Filter<'t> {
    All(Vec<Filter<'t>>),
    Any(Vec<Filter<'t>>),
    Not(Box<Filter<'t>>),
    Term(&'t Column, Test),
}

#[derive(Debug, Clone, PartialEq)]
pub enum Test {
    /// One of ` = `, ` <> `, ` > `, ` >= `, ` < `, ` <= `, ` LIKE `, ` ILIKE `, ` @> `.
    Operator(&'static str, Param),
    In(Vec<Param>),
    /// A text that holds another.
    Holds(String),
    IsNull,
    IsNotNull,
}

impl<'t> Filter<'t> {
    /// # Errors
    /// The place and what is wrong there.
    pub fn parse(table: &'t Table, raw: &RawValue, place: &str) -> Result<Self, FieldError> {
        Parser { table, terms: 0 }.object(raw, place, 1)
    }

    /// That `column` has exactly this value, which is not null.
    pub fn equals(column: &'t Column, value: Param) -> Self {
        Self::Term(column, Test::Operator(" = ", value))
    }

    /// Only the filter as a whole can be empty: no part of one is.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::All(parts) if parts.is_empty())
    }

    pub fn write(&self, sql: &mut Sql) {
        match self {
            Self::All(parts) if parts.is_empty() => {
                sql.push("TRUE");
            }
            Self::All(parts) => Self::write_joined(parts, " AND ", sql),
            Self::Any(parts) => Self::write_joined(parts, " OR ", sql),
            Self::Not(inner) => {
                sql.push("NOT (");
                inner.write(sql);
                sql.push(")");
            }
            Self::Term(column, test) => test.write(column, sql),
        }
    }

    fn write_joined(parts: &[Self], between: &'static str, sql: &mut Sql) {
        sql.push("(");
        sql.list(parts, between, |sql, part| part.write(sql));
        sql.push(")");
    }
}

impl Test {
    fn write(&self, column: &Column, sql: &mut Sql) {
        match self {
            Self::Operator(operator, param) => {
                sql.column(column).push(operator).bind(column.kind, param.clone());
            }
            Self::In(values) => {
                sql.column(column).push(" = ANY (").bind_many(column.kind, values.clone()).push(")");
            }
            Self::Holds(part) => {
                sql.push("strpos(").column(column).push(", ").placeholder(Param::Text(part.clone()));
                sql.push(") > 0");
            }
            Self::IsNull => {
                sql.column(column).push(" IS NULL");
            }
            Self::IsNotNull => {
                sql.column(column).push(" IS NOT NULL");
            }
        }
    }
}

struct Parser<'t> {
    table: &'t Table,
    terms: usize,
}

impl<'t> Parser<'t> {
    fn object(&mut self, raw: &RawValue, place: &str, depth: usize) -> Result<Filter<'t>, FieldError> {
        if depth > DEEPEST {
            return Err(wrong(place, format!("is nested deeper than {DEEPEST}")));
        }
        let fields = Fields::of(raw).map_err(|why| wrong(place, why))?;
        let mut parts = Vec::with_capacity(fields.0.len());
        for (name, value) in &fields.0 {
            let place = format!("{place}/{}", escaped(name));
            match name.as_ref() {
                "and" => parts.push(Filter::All(self.group(value, &place, depth)?)),
                "or" => parts.push(Filter::Any(self.group(value, &place, depth)?)),
                "not" => parts.push(Filter::Not(Box::new(self.part(value, &place, depth + 1)?))),
                name => self.column(name, value, &place, &mut parts)?,
            }
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Filter::All(parts) })
    }

    fn group(&mut self, raw: &RawValue, place: &str, depth: usize) -> Result<Vec<Filter<'t>>, FieldError> {
        let parts = elements(raw).filter(|parts| !parts.is_empty());
        let parts = parts.ok_or_else(|| wrong(place, "must be an array of filters, not empty"))?;
        parts
            .into_iter()
            .enumerate()
            .map(|(index, part)| self.part(part, &format!("{place}/{index}"), depth + 1))
            .collect()
    }

    /// An empty part would hold for every row: in an `or` it would undo the others without a word.
    fn part(&mut self, raw: &RawValue, place: &str, depth: usize) -> Result<Filter<'t>, FieldError> {
        let part = self.object(raw, place, depth)?;
        if part.is_empty() { Err(wrong(place, "must not be empty")) } else { Ok(part) }
    }

    fn column(
        &mut self,
        name: &str,
        raw: &RawValue,
        place: &str,
        parts: &mut Vec<Filter<'t>>,
    ) -> Result<(), FieldError> {
        let column = self.table.column(name).ok_or_else(|| wrong(place, "is not a column of this table"))?;
        if !is_object(raw) {
            parts.push(self.term(column, "eq", raw, place)?);
            return Ok(());
        }
        let operators = Fields::of(raw).map_err(|why| wrong(place, why))?;
        if operators.0.is_empty() {
            return Err(wrong(place, "must name an operator"));
        }
        for (operator, value) in &operators.0 {
            parts.push(self.term(column, operator, value, &format!("{place}/{}", escaped(operator)))?);
        }
        Ok(())
    }

    fn term(
        &mut self,
        column: &'t Column,
        operator: &str,
        raw: &RawValue,
        place: &str,
    ) -> Result<Filter<'t>, FieldError> {
        self.terms += 1;
        if self.terms > MOST_TERMS {
            return Err(wrong(place, format!("is one term too many; a filter has at most {MOST_TERMS}")));
        }
        let test = test(column.kind, operator, raw).map_err(|why| wrong(place, why))?;
        Ok(Filter::Term(column, test))
    }
}

fn test(kind: ColumnType, operator: &str, raw: &RawValue) -> Result<Test, &'static str> {
    match operator {
        "eq" if is_null(raw) => Ok(Test::IsNull),
        "ne" if is_null(raw) => Ok(Test::IsNotNull),
        "eq" => compare(" = ", kind, raw),
        "ne" => compare(" <> ", kind, raw),
        "gt" => ordered(" > ", kind, raw),
        "gte" => ordered(" >= ", kind, raw),
        "lt" => ordered(" < ", kind, raw),
        "lte" => ordered(" <= ", kind, raw),
        "like" => pattern(" LIKE ", kind, raw),
        "ilike" => pattern(" ILIKE ", kind, raw),
        "in" => list(kind, raw),
        "isNull" => match raw.get() {
            "true" => Ok(Test::IsNull),
            "false" => Ok(Test::IsNotNull),
            _ => Err("must be true or false"),
        },
        "contains" => match (kind, present(kind, raw)?) {
            (ColumnType::Text, Param::Text(part)) => Ok(Test::Holds(part)),
            (ColumnType::Jsonb, part) => Ok(Test::Operator(" @> ", part)),
            _ => Err("is for columns of type text and jsonb"),
        },
        _ => Err("is not an operator; known are eq ne gt gte lt lte in like ilike isNull contains"),
    }
}

/// A value that is not null.
fn present(kind: ColumnType, raw: &RawValue) -> Result<Param, &'static str> {
    if is_null(raw) { Err(NOT_NULL) } else { bind(kind, raw) }
}

fn compare(operator: &'static str, kind: ColumnType, raw: &RawValue) -> Result<Test, &'static str> {
    Ok(Test::Operator(operator, present(kind, raw)?))
}

fn ordered(operator: &'static str, kind: ColumnType, raw: &RawValue) -> Result<Test, &'static str> {
    if !kind.is_ordered() {
        return Err("is not for columns of type jsonb");
    }
    if is_null(raw) {
        return Err(NOT_NULL);
    }
    Ok(Test::Operator(operator, bind_bound(kind, operator.trim(), raw)?))
}

fn pattern(operator: &'static str, kind: ColumnType, raw: &RawValue) -> Result<Test, &'static str> {
    if kind != ColumnType::Text {
        return Err("is for columns of type text");
    }
    match present(kind, raw)? {
        // PostgreSQL refuses a pattern that ends in its escape; that is a mistake of the client's, said here.
        Param::Text(text) if (text.len() - text.trim_end_matches('\\').len()) % 2 == 1 => {
            Err("must not end with a single backslash")
        }
        pattern => Ok(Test::Operator(operator, pattern)),
    }
}

fn list(kind: ColumnType, raw: &RawValue) -> Result<Test, &'static str> {
    let values = elements(raw).filter(|values| values.len() <= MOST_IN);
    let values = values.ok_or("must be an array of at most 1000 values")?;
    Ok(Test::In(values.into_iter().map(|value| present(kind, value)).collect::<Result<_, _>>()?))
}

fn wrong(place: &str, why: impl Into<String>) -> FieldError {
    FieldError { pointer: place.to_owned(), detail: why.into() }
}

/// A name as a segment of a JSON pointer (RFC 6901), cut to what an answer may carry.
pub fn escaped(name: &str) -> String {
    let mut name: String = name.chars().take(64).collect();
    name = name.replace('~', "~0").replace('/', "~1");
    name
}

#[cfg(test)]
mod tests;
