//! The filter grammar: `{col: value}`, `{col: {op: value}}`, `and`, `or`, `not`.
//!
//! NULL semantics are those of SQL: a comparison with a NULL column is never true, so `ne` and `not` exclude such rows;
//! `isNull` selects them. The value `null` means `isNull: true`; in `ne`, it means `isNull: false`; all other
//! operators reject it. `in []` matches no row. `contains` is a case-sensitive substring test on text, and
//! containment (`@>`) on jsonb.

use serde_json::value::RawValue;

use super::fields::{Fields, array_elements, is_null, is_object};
use super::param::Param;
use super::sql::Sql;
use super::value::{bind, bind_range_operand};
use crate::apps::{Column, ColumnType, Table};
use svc_http::problem::FieldError;

const MAX_DEPTH: usize = 5;
/// Maximum number of comparisons in a whole filter.
const MAX_TERMS: usize = 50;
const MAX_IN_VALUES: usize = 1000;
const NOT_NULL: &str = "must not be null; use isNull";

/// A validated filter: its columns exist in the table, and its values have the columns' types.
#[derive(Debug, Clone, PartialEq)]
pub enum Filter<'t> {
    All(Vec<Filter<'t>>),
    Any(Vec<Filter<'t>>),
    Not(Box<Filter<'t>>),
    Term(&'t Column, Predicate),
}

#[derive(Debug, Clone, PartialEq)]
pub enum Predicate {
    /// One of ` = `, ` <> `, ` > `, ` >= `, ` < `, ` <= `, ` LIKE `, ` ILIKE `, ` @> `.
    Operator(&'static str, Param),
    In(Vec<Param>),
    /// Substring test.
    Contains(String),
    IsNull,
    IsNotNull,
}

impl<'t> Filter<'t> {
    /// Parses the filter at `pointer` in the request.
    ///
    /// # Errors
    /// The first part that is malformed, names an unknown column or operator, has an invalid value, or exceeds a limit.
    pub fn parse(table: &'t Table, raw: &RawValue, pointer: &str) -> Result<Self, FieldError> {
        FilterParser { table, terms: 0 }.parse_object(raw, pointer, 1)
    }

    /// Matches rows whose `column` equals `value`, which must not be null.
    pub fn equals(column: &'t Column, value: Param) -> Self {
        Self::Term(column, Predicate::Operator(" = ", value))
    }

    /// Whether the filter has no conditions and so matches all rows. Only the whole filter can be empty, never a part.
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
            Self::Term(column, predicate) => predicate.write(column, sql),
        }
    }

    fn write_joined(parts: &[Self], separator: &'static str, sql: &mut Sql) {
        sql.push("(");
        sql.push_list(parts, separator, |sql, part| part.write(sql));
        sql.push(")");
    }
}

impl Predicate {
    fn write(&self, column: &Column, sql: &mut Sql) {
        match self {
            Self::Operator(operator, param) => {
                sql.push_column(column).push(operator).bind(column.kind, param.clone());
            }
            Self::In(values) => {
                sql.push_column(column).push(" = ANY (").bind_many(column.kind, values.clone()).push(")");
            }
            Self::Contains(part) => {
                sql.push("strpos(")
                    .push_column(column)
                    .push(", ")
                    .push_placeholder(Param::Text(part.clone()));
                sql.push(") > 0");
            }
            Self::IsNull => {
                sql.push_column(column).push(" IS NULL");
            }
            Self::IsNotNull => {
                sql.push_column(column).push(" IS NOT NULL");
            }
        }
    }
}

struct FilterParser<'t> {
    table: &'t Table,
    terms: usize,
}

impl<'t> FilterParser<'t> {
    fn parse_object(
        &mut self,
        raw: &RawValue,
        pointer: &str,
        depth: usize,
    ) -> Result<Filter<'t>, FieldError> {
        if depth > MAX_DEPTH {
            return Err(field_error(pointer, format!("is nested more than {MAX_DEPTH} levels deep")));
        }
        let fields = Fields::parse(raw).map_err(|message| field_error(pointer, message))?;
        let mut parts = Vec::with_capacity(fields.0.len());
        for (name, value) in &fields.0 {
            let pointer = format!("{pointer}/{}", escape_segment(name));
            match name.as_ref() {
                "and" => parts.push(Filter::All(self.parse_group(value, &pointer, depth)?)),
                "or" => parts.push(Filter::Any(self.parse_group(value, &pointer, depth)?)),
                "not" => parts.push(Filter::Not(Box::new(self.parse_part(value, &pointer, depth + 1)?))),
                name => self.parse_column(name, value, &pointer, &mut parts)?,
            }
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Filter::All(parts) })
    }

    fn parse_group(
        &mut self,
        raw: &RawValue,
        pointer: &str,
        depth: usize,
    ) -> Result<Vec<Filter<'t>>, FieldError> {
        let parts = array_elements(raw).filter(|parts| !parts.is_empty());
        let parts = parts.ok_or_else(|| field_error(pointer, "must be a non-empty array of filters"))?;
        parts
            .into_iter()
            .enumerate()
            .map(|(index, part)| self.parse_part(part, &format!("{pointer}/{index}"), depth + 1))
            .collect()
    }

    /// Parses a part of a filter. An empty part is rejected: it would match every row, and in an `or` it would silently
    /// make the other parts irrelevant.
    fn parse_part(&mut self, raw: &RawValue, pointer: &str, depth: usize) -> Result<Filter<'t>, FieldError> {
        let part = self.parse_object(raw, pointer, depth)?;
        if part.is_empty() { Err(field_error(pointer, "must not be empty")) } else { Ok(part) }
    }

    fn parse_column(
        &mut self,
        name: &str,
        raw: &RawValue,
        pointer: &str,
        parts: &mut Vec<Filter<'t>>,
    ) -> Result<(), FieldError> {
        let column =
            self.table.column(name).ok_or_else(|| field_error(pointer, "is not a column of this table"))?;
        if !is_object(raw) {
            parts.push(self.parse_term(column, "eq", raw, pointer)?);
            return Ok(());
        }
        let operators = Fields::parse(raw).map_err(|message| field_error(pointer, message))?;
        if operators.0.is_empty() {
            return Err(field_error(pointer, "must name an operator"));
        }
        for (operator, value) in &operators.0 {
            parts.push(self.parse_term(
                column,
                operator,
                value,
                &format!("{pointer}/{}", escape_segment(operator)),
            )?);
        }
        Ok(())
    }

    fn parse_term(
        &mut self,
        column: &'t Column,
        operator: &str,
        raw: &RawValue,
        pointer: &str,
    ) -> Result<Filter<'t>, FieldError> {
        self.terms += 1;
        if self.terms > MAX_TERMS {
            return Err(field_error(
                pointer,
                format!("exceeds the limit: a filter has at most {MAX_TERMS} terms"),
            ));
        }
        let predicate =
            parse_predicate(column.kind, operator, raw).map_err(|message| field_error(pointer, message))?;
        Ok(Filter::Term(column, predicate))
    }
}

fn parse_predicate(kind: ColumnType, operator: &str, raw: &RawValue) -> Result<Predicate, &'static str> {
    match operator {
        "eq" if is_null(raw) => Ok(Predicate::IsNull),
        "ne" if is_null(raw) => Ok(Predicate::IsNotNull),
        "eq" => bind_comparison(" = ", kind, raw),
        "ne" => bind_comparison(" <> ", kind, raw),
        "gt" => bind_ordering(" > ", kind, raw),
        "gte" => bind_ordering(" >= ", kind, raw),
        "lt" => bind_ordering(" < ", kind, raw),
        "lte" => bind_ordering(" <= ", kind, raw),
        "like" => bind_pattern(" LIKE ", kind, raw),
        "ilike" => bind_pattern(" ILIKE ", kind, raw),
        "in" => bind_list(kind, raw),
        "isNull" => match raw.get() {
            "true" => Ok(Predicate::IsNull),
            "false" => Ok(Predicate::IsNotNull),
            _ => Err("must be true or false"),
        },
        "contains" => match (kind, bind_non_null(kind, raw)?) {
            (ColumnType::Text, Param::Text(part)) => Ok(Predicate::Contains(part)),
            (ColumnType::Jsonb, part) => Ok(Predicate::Operator(" @> ", part)),
            _ => Err("requires a column of type text or jsonb"),
        },
        _ => Err("is not an operator; use eq, ne, gt, gte, lt, lte, in, like, ilike, isNull or contains"),
    }
}

/// Binds a value that must not be null.
fn bind_non_null(kind: ColumnType, raw: &RawValue) -> Result<Param, &'static str> {
    if is_null(raw) { Err(NOT_NULL) } else { bind(kind, raw) }
}

fn bind_comparison(
    operator: &'static str,
    kind: ColumnType,
    raw: &RawValue,
) -> Result<Predicate, &'static str> {
    Ok(Predicate::Operator(operator, bind_non_null(kind, raw)?))
}

fn bind_ordering(
    operator: &'static str,
    kind: ColumnType,
    raw: &RawValue,
) -> Result<Predicate, &'static str> {
    if !kind.is_ordered() {
        return Err("cannot be used with a column of type jsonb");
    }
    if is_null(raw) {
        return Err(NOT_NULL);
    }
    Ok(Predicate::Operator(operator, bind_range_operand(kind, operator.trim(), raw)?))
}

fn bind_pattern(operator: &'static str, kind: ColumnType, raw: &RawValue) -> Result<Predicate, &'static str> {
    if kind != ColumnType::Text {
        return Err("requires a column of type text");
    }
    match bind_non_null(kind, raw)? {
        // PostgreSQL rejects a pattern that ends with its escape character, but only when it applies the pattern to a
        // row.
        Param::Text(text) if (text.len() - text.trim_end_matches('\\').len()) % 2 == 1 => {
            Err("must not end with an unescaped backslash")
        }
        pattern => Ok(Predicate::Operator(operator, pattern)),
    }
}

fn bind_list(kind: ColumnType, raw: &RawValue) -> Result<Predicate, &'static str> {
    let values = array_elements(raw).filter(|values| values.len() <= MAX_IN_VALUES);
    let values = values.ok_or("must be an array of at most 1000 values")?;
    Ok(Predicate::In(values.into_iter().map(|value| bind_non_null(kind, value)).collect::<Result<_, _>>()?))
}

fn field_error(pointer: &str, message: impl Into<String>) -> FieldError {
    FieldError { pointer: pointer.to_owned(), detail: message.into() }
}

/// Truncates a name to 64 characters and escapes it for a JSON pointer (RFC 6901).
pub fn escape_segment(name: &str) -> String {
    let mut name: String = name.chars().take(64).collect();
    name = name.replace('~', "~0").replace('/', "~1");
    name
}

#[cfg(test)]
mod tests;
