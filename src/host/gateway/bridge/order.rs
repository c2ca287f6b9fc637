//! The order of a `find`, and the position in it after which a page starts.
//!
//! The order always includes `id`, so that it is total and a cursor denotes one position.

use serde_json::value::RawValue;

use super::fields::{Fields, array_elements, string_value};
use super::sql::Sql;
use crate::apps::{Column, Table};
use svc_http::problem::FieldError;

/// Maximum number of entries in `orderBy`; `id` may be added to them.
const MAX_ENTRIES: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Ascending,
    Descending,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order<'t> {
    pub keys: Vec<(&'t Column, Direction)>,
}

impl<'t> Order<'t> {
    /// Parses `orderBy`: an array of `{"column", "direction"?: "asc"|"desc"}` or of column names; the default is `id`.
    /// A column that is named again is ignored. If `id` is not named, it is added in the direction of the last entry.
    ///
    /// # Errors
    /// If `raw` is not an array of at most `MAX_ENTRIES` valid entries, or if an entry names a column that the table
    /// does not have or that cannot be ordered.
    pub fn parse(table: &'t Table, raw: Option<&RawValue>) -> Result<Self, FieldError> {
        let mut keys: Vec<(&Column, Direction)> = Vec::new();
        let entries = match raw {
            None => Vec::new(),
            Some(raw) => array_elements(raw)
                .filter(|entries| entries.len() <= MAX_ENTRIES)
                .ok_or_else(|| field_error("/orderBy", "must be an array of at most 8 entries"))?,
        };
        for (index, entry) in entries.into_iter().enumerate() {
            let pointer = format!("/orderBy/{index}");
            let (name, direction) = parse_entry(entry, &pointer)?;
            let column =
                table.column(&name).ok_or_else(|| field_error(&pointer, "is not a column of this table"))?;
            if !column.kind.is_ordered() {
                return Err(field_error(&pointer, "is of type jsonb, which cannot be ordered"));
            }
            if keys.iter().all(|(earlier, _)| *earlier != column) {
                keys.push((column, direction));
            }
        }
        if keys.iter().all(|(column, _)| column.name.as_str() != "id")
            && let Some(id) = table.column("id")
        {
            let direction = keys.last().map_or(Direction::Ascending, |(_, direction)| *direction);
            keys.push((id, direction));
        }
        Ok(Self { keys })
    }

    /// The order as text, which a cursor stores to identify the order it belongs to.
    pub fn fingerprint(&self) -> String {
        let key = |(column, direction): &(&Column, Direction)| match direction {
            Direction::Ascending => column.name.to_string(),
            Direction::Descending => format!("-{}", column.name),
        };
        self.keys.iter().map(key).collect::<Vec<_>>().join(",")
    }

    pub fn write(&self, sql: &mut Sql) {
        sql.push_list(&self.keys, ", ", |sql, (column, direction)| {
            sql.push_order_value(column).push(match direction {
                Direction::Ascending => " ASC NULLS LAST",
                Direction::Descending => " DESC NULLS FIRST",
            });
        });
    }

    /// Writes the condition that a row comes after the row with these key values.
    pub fn write_after(&self, values: &[Option<String>], sql: &mut Sql) {
        if self.is_row_comparable() {
            self.write_row_comparison(values, sql);
        } else {
            self.write_key_comparisons(values, sql);
        }
    }

    /// Whether all keys have the same direction and none is nullable. In that case, an index supports comparing whole
    /// rows.
    fn is_row_comparable(&self) -> bool {
        let first = self.keys.first().map(|(_, direction)| *direction);
        self.keys.iter().all(|(column, direction)| !column.is_nullable() && Some(*direction) == first)
    }

    fn write_row_comparison(&self, values: &[Option<String>], sql: &mut Sql) {
        sql.push("(").push_list(&self.keys, ", ", |sql, (column, _)| {
            sql.push_order_value(column);
        });
        let is_descending = self.keys.first().is_some_and(|(_, d)| *d == Direction::Descending);
        sql.push(if is_descending { ") < (" } else { ") > (" });
        sql.push_list(self.keys.iter().zip(values), ", ", |sql, ((column, _), value)| {
            sql.bind_text(column.kind, value.clone().unwrap_or_default());
        });
        sql.push(")");
    }

    /// A row follows if one of its keys comes after the given value and all earlier keys are equal. NULL sorts last in
    /// ascending order and first in descending order.
    fn write_key_comparisons(&self, values: &[Option<String>], sql: &mut Sql) {
        let keys: Vec<_> = self.keys.iter().zip(values).collect();
        sql.push("(");
        sql.push_list(0..keys.len(), " OR ", |sql, last| {
            sql.push("(");
            sql.push_list(0..=last, " AND ", |sql, index| {
                let ((column, direction), value) = &keys[index];
                if index < last {
                    write_equal(column, value.as_deref(), sql);
                } else {
                    write_key_after(column, *direction, value.as_deref(), sql);
                }
            });
            sql.push(")");
        });
        sql.push(")");
    }
}

fn write_equal(column: &Column, value: Option<&str>, sql: &mut Sql) {
    match value {
        Some(value) => sql.push_order_value(column).push(" = ").bind_text(column.kind, value.to_owned()),
        None => sql.push_column(column).push(" IS NULL"),
    };
}

fn write_key_after(column: &Column, direction: Direction, value: Option<&str>, sql: &mut Sql) {
    match (direction, value) {
        (Direction::Ascending, Some(value)) => {
            sql.push("(").push_order_value(column).push(" > ").bind_text(column.kind, value.to_owned());
            sql.push(" OR ").push_column(column).push(" IS NULL)")
        }
        (Direction::Ascending, None) => sql.push("FALSE"),
        (Direction::Descending, Some(value)) => {
            sql.push_order_value(column).push(" < ").bind_text(column.kind, value.to_owned())
        }
        (Direction::Descending, None) => sql.push_column(column).push(" IS NOT NULL"),
    };
}

fn parse_entry(raw: &RawValue, pointer: &str) -> Result<(String, Direction), FieldError> {
    let expected = "must be a column name or {\"column\", \"direction\"?: \"asc\"|\"desc\"}";
    if let Some(name) = string_value(raw) {
        return Ok((name.into_owned(), Direction::Ascending));
    }
    let fields = Fields::parse(raw).map_err(|_| field_error(pointer, expected))?;
    let (mut column, mut direction) = (None, Direction::Ascending);
    for (name, value) in &fields.0 {
        match (name.as_ref(), string_value(value).as_deref()) {
            ("column", Some(name)) => column = Some(name.to_owned()),
            ("direction", Some("asc")) => direction = Direction::Ascending,
            ("direction", Some("desc")) => direction = Direction::Descending,
            _ => return Err(field_error(pointer, expected)),
        }
    }
    Ok((column.ok_or_else(|| field_error(pointer, expected))?, direction))
}

fn field_error(pointer: &str, message: &str) -> FieldError {
    FieldError { pointer: pointer.to_owned(), detail: message.to_owned() }
}
