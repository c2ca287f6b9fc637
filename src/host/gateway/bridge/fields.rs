//! The fields of a JSON object with unparsed values: the column's type decides how a value is parsed, and numbers keep
//! all digits.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Bounds the quadratic search for duplicate names; no valid object has more fields.
const MAX_FIELDS: usize = 256;

/// The fields of an object in order; a duplicate name is an error.
#[derive(Debug, Default)]
pub struct Fields<'a>(pub Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'a> Fields<'a> {
    /// Reads the fields of an object; their values are not parsed.
    ///
    /// # Errors
    /// If `raw` is not an object, names a field twice, or has more than 256 fields. The message does not quote the
    /// input.
    pub fn parse(raw: &'a RawValue) -> Result<Self, &'static str> {
        if !raw.get().starts_with('{') {
            return Err("must be an object");
        }
        serde_json::from_str(raw.get())
            .map_err(|_| "must be an object of at most 256 fields, without duplicates")
    }
}

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
        let mut fields: Vec<(Cow<'de, str>, &'de RawValue)> = Vec::with_capacity(8);
        while let Some(name) = map.next_key_seed(NameSeed)? {
            if fields.len() == MAX_FIELDS || fields.iter().any(|(earlier, _)| *earlier == name) {
                return Err(serde::de::Error::custom("duplicate name or too many names"));
            }
            fields.push((name, map.next_value()?));
        }
        Ok(Fields(fields))
    }
}

/// A field's name, borrowed if it has no escapes.
struct NameSeed;

impl<'de> DeserializeSeed<'de> for NameSeed {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Cow<'de, str>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for NameSeed {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_borrowed_str<E>(self, name: &'de str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Borrowed(name))
    }

    fn visit_str<E>(self, name: &str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Owned(name.to_owned()))
    }
}

/// The unparsed elements of an array.
#[derive(Debug)]
struct Elements<'a>(Vec<&'a RawValue>);

impl<'de> Deserialize<'de> for Elements<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ElementsVisitor;
        impl<'de> Visitor<'de> for ElementsVisitor {
            type Value = Elements<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Elements<'de>, A::Error> {
                let mut elements = Vec::new();
                while let Some(element) = seq.next_element()? {
                    elements.push(element);
                }
                Ok(Elements(elements))
            }
        }
        deserializer.deserialize_seq(ElementsVisitor)
    }
}

/// The elements of `raw`, if it is an array.
pub fn array_elements(raw: &RawValue) -> Option<Vec<&RawValue>> {
    raw.get().starts_with('[').then(|| serde_json::from_str::<Elements<'_>>(raw.get()).ok())?.map(|e| e.0)
}

/// The text of `raw` if it is a string, borrowed if it has no escapes.
pub fn string_value(raw: &RawValue) -> Option<Cow<'_, str>> {
    let inner = raw.get().strip_prefix('"')?.strip_suffix('"')?;
    if inner.contains('\\') {
        serde_json::from_str(raw.get()).ok().map(Cow::Owned)
    } else {
        Some(Cow::Borrowed(inner))
    }
}

pub fn is_null(raw: &RawValue) -> bool {
    raw.get() == "null"
}

pub fn is_object(raw: &RawValue) -> bool {
    raw.get().starts_with('{')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> &RawValue {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn fields_keep_order_and_digits() {
        let fields =
            Fields::parse(raw(r#"{"b": 12345678901234567890123, "\u0061": [1, {"x": 2}]}"#)).unwrap();
        let entries: Vec<_> = fields.0.iter().map(|(name, value)| (name.as_ref(), value.get())).collect();
        assert_eq!(entries, [("b", "12345678901234567890123"), ("a", r#"[1, {"x": 2}]"#)]);
    }

    #[test]
    fn parse_rejects_arrays_duplicates_and_too_many_fields() {
        assert!(Fields::parse(raw(r#"{"a": 1, "\u0061": 2}"#)).is_err());
        assert!(Fields::parse(raw("[]")).is_err());
        let many = |count: usize| {
            let fields: Vec<String> = (0..count).map(|n| format!("\"f{n}\":0")).collect();
            format!("{{{}}}", fields.join(","))
        };
        assert!(Fields::parse(raw(&many(256))).is_ok());
        assert!(Fields::parse(raw(&many(257))).is_err());
    }

    #[test]
    fn string_value_unescapes_strings() {
        assert_eq!(string_value(raw(r#""a\"b""#)).unwrap(), "a\"b");
        assert!(matches!(string_value(raw(r#""plain""#)), Some(Cow::Borrowed("plain"))));
        assert_eq!(string_value(raw("1")), None);
    }

    #[test]
    fn array_elements_requires_array() {
        assert_eq!(array_elements(raw("[1, [2]]")).unwrap().len(), 2);
        assert!(array_elements(raw("{}")).is_none());
    }
}
