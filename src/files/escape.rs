//! Escapes file names for JSON. They're bytes on Linux but text in JSON, so `restic` escapes them like Go's
//! `strconv.Quote`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Escapes double quotes, backslashes, ASCII control characters, and invalid UTF-8.
pub(crate) fn escape_name(name: &OsStr) -> String {
    let mut escaped = String::with_capacity(name.len());
    for chunk in name.as_bytes().utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '"' | '\\' => escaped.extend(['\\', c]),
                '\0'..='\x1f' | '\x7f' => push_byte(&mut escaped, c as u8),
                c => escaped.push(c),
            }
        }
        for byte in chunk.invalid() {
            push_byte(&mut escaped, *byte);
        }
    }
    escaped
}

fn push_byte(escaped: &mut String, byte: u8) {
    escaped.push_str("\\x");
    escaped.push_str(&hex::encode([byte]));
}

/// Reverses [`escape_name`], and also accepts Go's other escape sequences. Returns `None` if a sequence is invalid.
pub(crate) fn unescape_name(escaped: &str) -> Option<OsString> {
    let mut bytes = Vec::with_capacity(escaped.len());
    let mut rest = escaped;
    while let Some(index) = rest.find('\\') {
        bytes.extend_from_slice(&rest.as_bytes()[..index]);
        rest = &rest[index + 1..];
        let kind = rest.chars().next()?;
        let digits = match kind {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            '0'..='7' => 3,
            _ => 0,
        };
        let start = if matches!(kind, '0'..='7') { 0 } else { kind.len_utf8() };
        let number = rest.get(start..start + digits)?;
        rest = &rest[start + digits..];
        // `from_str_radix` would accept a sign.
        if number.starts_with('+') {
            return None;
        }
        match kind {
            'x' => bytes.push(u8::from_str_radix(number, 16).ok()?),
            '0'..='7' => bytes.push(u8::from_str_radix(number, 8).ok()?),
            'u' | 'U' => {
                let c = char::from_u32(u32::from_str_radix(number, 16).ok()?)?;
                bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
            }
            'a' => bytes.push(0x07),
            'b' => bytes.push(0x08),
            'f' => bytes.push(0x0c),
            'n' => bytes.push(b'\n'),
            'r' => bytes.push(b'\r'),
            't' => bytes.push(b'\t'),
            'v' => bytes.push(0x0b),
            '\\' | '"' | '\'' => bytes.push(kind as u8),
            _ => return None,
        }
    }
    bytes.extend_from_slice(rest.as_bytes());
    Some(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn unescape_name_reads_all_go_escapes() {
        let read = |text| unescape_name(text).map(OsString::into_vec);
        let all = r#"a\a\b\f\n\r\t\v\\\"\'\x41\101\u00e4\U0001f600z"#;
        let expected = "a\x07\x08\x0c\n\r\t\x0b\\\"'AA\u{e4}\u{1f600}z";
        assert_eq!(read(all).as_deref(), Some(expected.as_bytes()));
        for wrong in [r"\", r"\q", r"\x4", r"\xzz", r"\ud800", r"\8", r"\777", "\\x\u{e4}"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
        for signed in [r"\x+f", r"\u+0e4", r"\U+001f600"] {
            assert_eq!(read(signed), None, "{signed}");
        }
    }

    proptest! {
        #[test]
        fn escaped_names_round_trip(name in prop::collection::vec(any::<u8>(), 0..40)) {
            let name = OsString::from_vec(name);
            prop_assert_eq!(unescape_name(&escape_name(&name)), Some(name));
        }
    }
}
