//! Human-readable counts and sizes.

/// Formats a count with its noun: `1 row`, `2 rows`.
pub fn pluralize(count: u64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// Formats a size with a binary unit, such as `1.2 MiB`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let (mut value, mut unit) = (bytes as f64 / 1024.0, 0);
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pluralize_uses_singular_only_for_one() {
        assert_eq!([0, 1, 2].map(|count| pluralize(count, "row")), ["0 rows", "1 row", "2 rows"]);
    }

    #[test]
    fn format_bytes_has_one_decimal_and_binary_units() {
        for (bytes, expected) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1_048_575, "1.0 MiB"), (5 << 30, "5.0 GiB")]
        {
            assert_eq!(format_bytes(bytes), expected);
        }
    }
}
