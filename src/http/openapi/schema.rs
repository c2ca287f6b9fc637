//! Builders for JSON schemas (draft 2020-12), which keep descriptions short and uniform.

use serde_json::{Map, Value, json};

/// 2^53 - 1, the highest integer that every JSON parser represents exactly (RFC 7493).
pub const MAX_SAFE_INTEGER: u64 = (1 << 53) - 1;

/// A reference to a schema in [`super::Api::schemas`].
pub fn schema_ref(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

/// An object with exactly these members.
pub fn object(required: &[(&str, Value)], optional: &[(&str, Value)]) -> Value {
    let all = required.iter().chain(optional);
    let properties: Map<String, Value> =
        all.map(|(name, schema)| ((*name).to_owned(), schema.clone())).collect();
    let names: Vec<&str> = required.iter().map(|(name, _)| *name).collect();
    json!({ "type": "object", "properties": properties, "required": names, "additionalProperties": false })
}

pub fn array(items: Value) -> Value {
    let mut array = json!({ "type": "array" });
    array["items"] = items;
    array
}

/// A non-negative number.
pub fn number() -> Value {
    json!({ "type": "number", "minimum": 0 })
}

/// Any string, for responses. Requests use stricter schemas, such as [`text_up_to`].
pub fn text() -> Value {
    json!({ "type": "string" })
}

pub fn boolean() -> Value {
    json!({ "type": "boolean" })
}

/// A non-negative integer of at most [`MAX_SAFE_INTEGER`].
pub fn count() -> Value {
    json!({ "type": "integer", "minimum": 0, "maximum": MAX_SAFE_INTEGER })
}

/// Text of 1 to `max_chars` characters, without NUL.
pub fn text_up_to(max_chars: usize) -> Value {
    json!({ "type": "string", "minLength": 1, "maxLength": max_chars, "pattern": "^[^\\u0000]*$" })
}

/// Any text without NUL, which PostgreSQL cannot store.
pub fn nul_free_text() -> Value {
    json!({ "type": "string", "pattern": "^[^\\u0000]*$" })
}

pub fn text_matching(pattern: &str) -> Value {
    json!({ "type": "string", "pattern": pattern })
}

pub fn uuid() -> Value {
    json!({ "type": "string", "format": "uuid" })
}

/// An RFC 3339 time in UTC, with milliseconds.
pub fn time() -> Value {
    json!({ "type": "string", "format": "date-time" })
}

pub fn string_enum(values: &[&str]) -> Value {
    json!({ "type": "string", "enum": values })
}

/// Makes a schema accept `null` as well.
pub fn nullable(mut schema: Value) -> Value {
    let Some(kind) = schema["type"].as_str().map(str::to_owned) else {
        return json!({ "anyOf": [schema, { "type": "null" }] });
    };
    schema["type"] = json!([kind, "null"]);
    if let Some(values) = schema.get_mut("enum").and_then(Value::as_array_mut) {
        values.push(Value::Null);
    }
    schema
}

/// Allows additional members in an object and its nested objects, because a newer program may send members that this
/// one does not know.
pub fn extensible(mut schema: Value) -> Value {
    match &mut schema {
        Value::Object(members) => {
            members.shift_remove("additionalProperties");
            for member in members.values_mut() {
                *member = extensible(member.take());
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| *item = extensible(item.take())),
        _ => {}
    }
    schema
}

/// An object in a request, with exactly these members; an optional member may be null.
pub fn request_object(required: &[(&str, Value)], optional: &[(&str, Value)]) -> Value {
    let optional: Vec<(&str, Value)> =
        optional.iter().map(|(name, schema)| (*name, nullable(schema.clone()))).collect();
    object(required, &optional)
}
