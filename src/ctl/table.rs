//! Columns in plain text, as wide as their widest cell.

/// Rows below a heading; an empty cell shows as `-`.
pub fn render(heading: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row.get(column).map_or(1, |cell| cell.chars().count().max(1)));
        cells.chain([heading[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heading.len()).map(width).collect();
    let mut text = line(heading.iter().map(|cell| (*cell).to_owned()), &widths);
    for row in rows {
        text.push_str(&line(row.iter().cloned(), &widths));
    }
    text
}

fn line(cells: impl Iterator<Item = String>, widths: &[usize]) -> String {
    let padded = cells.zip(widths).map(|(cell, width)| {
        let cell = if cell.is_empty() { "-".to_owned() } else { cell };
        format!("{cell:<width$}")
    });
    format!("{}\n", padded.collect::<Vec<_>>().join("  ").trim_end())
}

/// Names and values below each other.
pub fn pairs(pairs: &[(&str, String)]) -> String {
    let shown = pairs.iter().filter(|(_, value)| !value.is_empty());
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 2;
    shown.map(|(name, value)| format!("{name:<width$}{value}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_nothing_trails() {
        let rows = [vec!["é1".to_owned(), String::new()], vec!["longer".to_owned(), "x".to_owned()]];
        assert_eq!(render(&["ID", "WHAT"], &rows), "ID      WHAT\né1      -\nlonger  x\n");
    }
}
