//! SQL text with its parameters. Only fixed text, validated names and numbered placeholders can be added to it.

use std::fmt::Write;

use super::param::Param;
use crate::apps::{Column, ColumnType};
use crate::name::SqlIdentifier;

/// Maximum size of a row: of its JSON when it is read, and of its values when a write returns it.
pub const MAX_ROW_BYTES: usize = 8 * 1024 * 1024;

/// The initial capacity of a statement's text, which most statements do not exceed.
const TYPICAL_TEXT_BYTES: usize = 1024;

/// A statement under construction.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Sql {
    pub text: String,
    pub params: Vec<Param>,
}

impl Sql {
    pub fn new(text: &'static str) -> Self {
        let mut sql = Self { text: String::with_capacity(TYPICAL_TEXT_BYTES), params: Vec::new() };
        sql.push(text);
        sql
    }

    pub fn push(&mut self, text: &'static str) -> &mut Self {
        self.text.push_str(text);
        self
    }

    pub fn push_name(&mut self, name: &SqlIdentifier) -> &mut Self {
        self.text.push('"');
        self.text.push_str(name.as_str());
        self.text.push('"');
        self
    }

    /// Adds `"t"."column"`; every statement aliases its table as `t`.
    pub fn push_column(&mut self, column: &Column) -> &mut Self {
        self.push("\"t\".").push_name(&column.name)
    }

    /// Adds the type without its precision: a cast never rounds a column's value.
    fn push_type_name(&mut self, kind: ColumnType) -> &mut Self {
        self.push(if kind == ColumnType::Timestamptz { "timestamptz" } else { kind.sql() })
    }

    /// Adds a placeholder for a value of a column's type.
    pub fn bind(&mut self, kind: ColumnType, param: Param) -> &mut Self {
        self.push_placeholder(param);
        if kind == ColumnType::Numeric {
            self.push("::text::numeric");
        }
        self
    }

    /// Adds a placeholder for a value that is sent as text and parsed by PostgreSQL as `kind`.
    pub fn bind_text(&mut self, kind: ColumnType, text: String) -> &mut Self {
        self.push_placeholder(Param::Text(text)).push("::text::").push_type_name(kind)
    }

    /// Adds a placeholder for an array of values of a column's type.
    pub fn bind_many(&mut self, kind: ColumnType, values: Vec<Param>) -> &mut Self {
        self.push_placeholder(Param::Array(kind, values));
        if kind == ColumnType::Numeric {
            self.push("::text[]::numeric[]");
        }
        self
    }

    pub fn push_placeholder(&mut self, param: Param) -> &mut Self {
        self.params.push(param);
        write!(self.text, "${}", self.params.len()).expect("writing to a String cannot fail");
        self
    }

    /// Adds items with a separator.
    pub fn push_list<T>(
        &mut self,
        items: impl IntoIterator<Item = T>,
        separator: &'static str,
        mut write_item: impl FnMut(&mut Self, T),
    ) -> &mut Self {
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                self.push(separator);
            }
            write_item(self, item);
        }
        self
    }

    /// Adds a column's value for ordering rows and for comparing them with a cursor: in the registered type, like the
    /// cursor's values. Otherwise, if the owner has changed an integer column to numeric, the cursor would contain a
    /// rounded value, and rows would be skipped or repeated.
    pub fn push_order_value(&mut self, column: &Column) -> &mut Self {
        match column.kind {
            // These types can have a precision, and no index supports the order of a value without its precision.
            ColumnType::Numeric | ColumnType::Timestamptz => self.push_column(column),
            _ => self.push_cast_column(column),
        }
    }

    /// Adds a column's value as [`super::cursor::key_text`] reads it. The order keys are read for every row, although
    /// only those of the last row become a cursor. The types that are cheap to format in the gateway are therefore not
    /// converted to text by the database.
    pub fn push_order_key(&mut self, column: &Column) -> &mut Self {
        match column.kind {
            ColumnType::Integer | ColumnType::Bigint | ColumnType::Uuid | ColumnType::Timestamptz => {
                self.push_cast_column(column)
            }
            _ => self.push_order_value(column).push("::text"),
        }
    }

    /// Adds the columns' values as [`super::row::write_row`] reads them, from a source whose jsonb columns are text.
    pub fn push_raw_values(&mut self, columns: &[&Column]) -> &mut Self {
        self.push_list(columns, ", ", |sql, column| match column.kind {
            ColumnType::Jsonb => {
                sql.push_column(column);
            }
            _ => sql.push_raw_value(column),
        })
    }

    /// Adds a column's value in the form that [`super::row::write_row`] reads. The value is first cast to the column's
    /// registered type. This cast has no effect unless the owner has changed the type since the app was registered.
    fn push_raw_value(&mut self, column: &Column) {
        match column.kind {
            ColumnType::Numeric | ColumnType::Jsonb => self.push_cast_column(column).push("::text"),
            ColumnType::Double | ColumnType::Date => self.push("to_json(").push_cast_column(column).push(")"),
            _ => self.push_cast_column(column),
        };
    }

    fn push_cast_column(&mut self, column: &Column) -> &mut Self {
        self.push_column(column).push("::").push_type_name(column.kind)
    }

    /// Adds the expressions that a write returns for each row: the columns' values, and a column for the size check.
    pub fn push_returned_values(&mut self, columns: &[&Column]) -> &mut Self {
        self.push_list(columns, ", ", |sql, column| sql.push_raw_value(column)).push(", ");
        self.push_size_check(columns, "NULL", Self::push_raw_value)
    }

    /// Wraps a query that selects `columns`: the result is a source `"t"` with the same columns, with jsonb columns
    /// converted to text, and with the size check as its condition.
    pub fn push_checked_source(&mut self, columns: &[&Column], query: Self) -> &mut Self {
        let Self { text: query, params } = query;
        // The query's placeholders are already numbered, so its parameters are kept unchanged.
        self.params = params;
        self.push("(");
        let has_jsonb = columns.iter().any(|column| column.kind == ColumnType::Jsonb);
        if has_jsonb {
            self.push("SELECT ").push_list(columns, ", ", |sql, column| {
                match column.kind {
                    ColumnType::Jsonb => sql.push_raw_value(column),
                    _ => {
                        sql.push_column(column);
                    }
                }
                sql.push(" AS ").push_name(&column.name);
            });
            self.push(" FROM (");
        }
        self.text.push_str(&query);
        if has_jsonb {
            // Without `OFFSET 0`, PostgreSQL's planner would merge the levels and build the text twice.
            self.push(") AS \"t\" OFFSET 0");
        }
        self.push(") AS \"t\" WHERE ").push_size_check(columns, "TRUE", |sql, column| {
            sql.push_column(column);
            if column.kind != ColumnType::Jsonb {
                sql.push("::").push_type_name(column.kind);
            }
        })
    }

    /// Adds an expression that evaluates to `value`. If a row's text, jsonb and bytea values together exceed
    /// [`MAX_ROW_BYTES`], the whole statement instead fails with SQLSTATE 54000 before that row leaves the server.
    /// Values of other types are short, except for a numeric, which can have up to 147,000 characters. `push_value`
    /// adds a column's value.
    fn push_size_check(
        &mut self,
        columns: &[&Column],
        value: &'static str,
        push_value: impl Fn(&mut Self, &Column),
    ) -> &mut Self {
        let has_size = |column: &&&Column| {
            matches!(column.kind, ColumnType::Text | ColumnType::Bytea | ColumnType::Jsonb)
        };
        let mut size = Self::new("");
        size.push_list(columns.iter().filter(has_size), " + ", |sql, column| {
            sql.push("coalesce(octet_length(");
            push_value(sql, column);
            sql.push("), 0)::bigint");
        });
        if size.text.is_empty() {
            return self.push(value);
        }
        // `repeat` fails, because its result would exceed 1 GB, before PostgreSQL allocates anything. The repeat count
        // depends on a column, so PostgreSQL does not evaluate the call during planning, as it would a constant.
        let size = size.text;
        write!(
            self.text,
            "CASE WHEN {size} > {MAX_ROW_BYTES} \
             THEN repeat('abcdefgh', least({size}, {MAX_ROW_BYTES} + 1)::integer * 20) IS NULL ELSE {value} END"
        )
        .expect("writing to a String cannot fail");
        self
    }
}
