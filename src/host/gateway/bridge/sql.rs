//! SQL text with its parameters. Only fixed text, validated names and numbered placeholders can be added to it.

use std::fmt::Write;

use super::param::Param;
use crate::gateway::apps::{Column, ColumnType};
use crate::gateway::name::SqlIdentifier;

/// Maximum size of a row's JSON; no response contains a larger row.
pub const MAX_ROW_BYTES: usize = 8 * 1024 * 1024;

/// A statement under construction.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Sql {
    pub text: String,
    pub params: Vec<Param>,
}

impl Sql {
    pub fn new(text: &'static str) -> Self {
        Self { text: text.to_owned(), params: Vec::new() }
    }

    pub fn push(&mut self, text: &'static str) -> &mut Self {
        self.text.push_str(text);
        self
    }

    pub fn push_name(&mut self, name: &SqlIdentifier) -> &mut Self {
        write!(self.text, "{}", name.quoted()).expect("writing to a String cannot fail");
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

    /// Adds a column's value in its wire format.
    pub fn push_wire_value(&mut self, column: &Column) -> &mut Self {
        match column.kind {
            // Beyond 2^53 a number loses digits in JavaScript.
            ColumnType::Bigint => {
                self.push("CASE WHEN ").push_column(column);
                self.push(" BETWEEN -9007199254740991 AND 9007199254740991 THEN to_json(")
                    .push_column(column);
                self.push(") ELSE to_json(").push_column(column).push("::text) END")
            }
            ColumnType::Numeric => self.push_column(column).push("::text"),
            ColumnType::Bytea => {
                self.push("translate(encode(").push_column(column).push(", 'base64'), E'\\n', '')")
            }
            ColumnType::Timestamptz => {
                // Infinity has no RFC 3339 representation; it is sent as PostgreSQL prints it.
                self.push("coalesce(to_char(").push_column(column);
                self.push(" AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'), ");
                self.push_column(column).push("::text)")
            }
            _ => self.push_column(column),
        };
        self.push(" AS ").push_name(&column.name)
    }

    /// Adds a column's value as [`super::cursor::key_text`] reads it. Every row has its order keys, although only those
    /// of the last row become a cursor. Types that are cheap to format here are therefore not converted by the
    /// database.
    pub fn push_order_key(&mut self, column: &Column) -> &mut Self {
        self.push_column(column);
        match column.kind {
            ColumnType::Integer | ColumnType::Bigint | ColumnType::Uuid | ColumnType::Timestamptz => self,
            _ => self.push("::text"),
        }
    }

    /// Adds an expression for the row as one JSON object.
    pub fn push_row_object<'c>(&mut self, columns: impl IntoIterator<Item = &'c Column>) -> &mut Self {
        self.push("(SELECT ").push_row_json().push(" FROM ").push_row_source(columns).push(")")
    }

    /// Adds the JSON of the row from [`Self::push_row_source`]. A row larger than [`MAX_ROW_BYTES`] fails the whole
    /// statement with SQLSTATE 54000, before the row leaves the server.
    pub fn push_row_json(&mut self) -> &mut Self {
        // `repeat` fails, because its result would exceed 1 GB, before PostgreSQL allocates anything. Its argument is a
        // column, so PostgreSQL does not evaluate it during planning, as it would a constant.
        write!(
            self.text,
            "CASE WHEN pg_column_size(\"b\".\"json\") > {MAX_ROW_BYTES} \
             THEN repeat(\"b\".\"json\"::text, 1000)::json ELSE \"b\".\"json\" END"
        )
        .expect("writing to a String cannot fail");
        self
    }

    /// Adds a row source with the columns in wire format as one JSON value. `"#"` cannot be a column name, so it always
    /// means the whole row. Without `OFFSET 0`, the planner would merge the levels and build the JSON twice.
    pub fn push_row_source<'c>(&mut self, columns: impl IntoIterator<Item = &'c Column>) -> &mut Self {
        self.push("(SELECT row_to_json(\"#\") AS \"json\" FROM (SELECT ");
        self.push_list(columns, ", ", |sql, column| {
            sql.push_wire_value(column);
        });
        self.push(") AS \"#\" OFFSET 0) AS \"b\"")
    }
}
