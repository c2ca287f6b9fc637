//! Renders tables and name-value lists.

use std::borrow::Cow;

use comfy_table::{Attribute, Cell as TableCell, Color as TableColor, ContentArrangement, Table, presets};

use super::{Color, View};
use svc_base::untrusted_text::one_line;

#[derive(Debug, Clone)]
pub struct Cell {
    text: String,
    color: Option<Color>,
}

impl Cell {
    /// Creates a single-line cell. The text may come from a host or the provider, so line breaks and unprintable
    /// characters are replaced.
    pub fn colored(color: Option<Color>, text: impl Into<String>) -> Self {
        let text = text.into();
        let text = match one_line(&text) {
            Cow::Borrowed(_) => text,
            Cow::Owned(flat) => flat,
        };
        Self { text, color }
    }

    /// Creates a cell for a state, in the state's color.
    pub fn state(state: &str) -> Self {
        Self::colored(Color::for_state(state), state)
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::colored(None, text)
    }
}

/// Renders a table wrapped to the view's width. Empty cells are shown as `-`.
pub fn render(view: &View, heading: &[&str], rows: &[Vec<Cell>]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_content_arrangement(match view.width {
        Some(_) => ContentArrangement::Dynamic,
        None => ContentArrangement::Disabled,
    });
    if let Some(width) = view.width {
        table.set_width(width);
    }
    if view.has_colors {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    table.set_header(heading.iter().map(|name| TableCell::new(name).add_attribute(Attribute::Bold)));
    for row in rows {
        table.add_row(row.iter().map(styled_cell));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let lines = table.lines().map(|line| line.trim_end().to_owned() + "\n");
    lines.collect()
}

fn styled_cell(cell: &Cell) -> TableCell {
    let text = if cell.text.is_empty() { "-" } else { &cell.text };
    let styled = TableCell::new(text);
    match cell.color {
        None => styled,
        Some(Color::Good) => styled.fg(TableColor::DarkGreen),
        Some(Color::Warning) => styled.fg(TableColor::DarkYellow),
        Some(Color::Bad) => styled.fg(TableColor::DarkRed),
        Some(Color::Faint) => styled.add_attribute(Attribute::Dim),
        Some(Color::Strong) => styled.add_attribute(Attribute::Bold),
    }
}

/// Renders one name and value per line, omitting empty values.
pub fn render_pairs(view: &View, pairs: &[(&str, Cell)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 2;
    let present = pairs.iter().filter(|(_, value)| !value.text.is_empty());
    present
        .map(|(name, value)| {
            let name = view.paint(Some(Color::Faint), &format!("{name:<width$}"));
            format!("{name}{}\n", view.paint(value.color, &value.text))
        })
        .collect()
}
