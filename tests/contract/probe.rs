//! Request bodies derived from a schema: a valid body, and copies of it in which one value is replaced by a valid or
//! invalid one, or an unknown field is added.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::Contract;

/// A body with one replaced value, and the pointer to that value.
pub struct Probe {
    pub pointer: String,
    pub schema: Value,
    pub value: Value,
    pub body: Value,
}

/// A body with an unknown field in one of its objects, and the names of that object's known fields.
pub struct UnknownField {
    pub pointer: String,
    pub known_fields: BTreeSet<String>,
    pub body: Value,
}

/// Returns the alternative schemas for a body.
pub fn variants(schema: &Value) -> Vec<Value> {
    match schema["oneOf"].as_array() {
        Some(all) if schema["properties"].is_null() => all.clone(),
        _ => vec![schema.clone()],
    }
}

pub fn sample_strings() -> Vec<String> {
    let mut all: Vec<String> = [
        "",
        " ",
        "x",
        "7",
        "v1",
        "ok",
        "true",
        "active",
        "starter",
        "customer",
        "running",
        "user_1",
        "Zz9",
        "a b",
        "../etc",
        "a\0b",
        "é",
        "-",
        "cpx32",
        "bundle",
        "success",
        "notes",
        "0192d1f0-0000-7000-8000-000000000000",
        "0192d1f000007000800000000000000",
        "2026-01-02T03:04:05Z",
        "2026-01-02",
        "2026-01-02 03:04:05Z",
        "1-1",
    ]
    .map(str::to_owned)
    .into();
    all.extend(["A".repeat(43), "ab".repeat(32), "AB".repeat(32), "x".repeat(5000)]);
    all
}

fn sample_values() -> Vec<Value> {
    let mut all: Vec<Value> = sample_strings().into_iter().map(Value::from).collect();
    all.extend([
        Value::Null,
        json!(true),
        json!(false),
        json!(0),
        json!(1),
        json!(-1),
        json!(7.5),
        json!(1.0),
        json!(300),
        json!((1_u64 << 53) - 1),
        json!(1_u64 << 53),
        json!(1e300),
        json!({}),
        json!({"zz": 1}),
        json!([]),
        json!([1]),
        json!(["x"]),
        json!(["a\0"]),
        json!(vec!["x"; 2000]),
    ]);
    all
}

pub fn is_valid(contract: &Contract, schema: &Value, value: &Value) -> bool {
    contract.validator(schema).is_valid(value)
}

/// Returns a body with every field in the schema. `override_value` supplies values for fields that need a specific one,
/// and null for a field to omit.
pub fn valid_value(
    contract: &Contract,
    schema: &Value,
    override_value: &dyn Fn(&str) -> Option<Value>,
) -> Value {
    let members = schema["properties"].as_object().cloned().unwrap_or_default();
    let member = |(name, field_schema): (String, Value)| {
        let value = override_value(&name).unwrap_or_else(|| match field_schema["properties"].is_object() {
            true => valid_value(contract, &field_schema, override_value),
            false => {
                let first = field_schema["enum"]
                    .as_array()
                    .and_then(|all| all.first())
                    .unwrap_or(&field_schema["const"])
                    .clone();
                let mut all = std::iter::once(first).chain(sample_values()).filter(|value| !value.is_null());
                let valid = all.find(|value| is_valid(contract, &field_schema, value));
                valid.unwrap_or_else(|| panic!("no value satisfies {name}: {field_schema}"))
            }
        });
        (name, value)
    };
    members.into_iter().map(member).filter(|(_, value)| !value.is_null()).collect::<Map<_, _>>().into()
}

/// Returns one probe for each combination of property and sample value.
pub fn probes(schema: &Value, body: &Value) -> Vec<Probe> {
    let mut all = Vec::new();
    walk_properties(schema, "", &mut |pointer, field_schema| {
        for value in sample_values() {
            let mut body = body.clone();
            set_value(&mut body, pointer, value.clone());
            all.push(Probe { pointer: pointer.to_owned(), schema: field_schema.clone(), value, body });
        }
    });
    all
}

fn set_value(body: &mut Value, pointer: &str, value: Value) {
    let (outer, name) = pointer.rsplit_once('/').unwrap();
    body.pointer_mut(outer).unwrap()[name] = value;
}

/// For each object in the body, returns a copy of the body with an unknown field in that object.
pub fn bodies_with_unknown_fields(schema: &Value, body: &Value) -> Vec<UnknownField> {
    let mut all = vec![add_unknown_field(schema, "", body)];
    walk_properties(schema, "", &mut |pointer, field_schema| {
        if field_schema["properties"].is_object() {
            all.push(add_unknown_field(field_schema, pointer, body));
        }
    });
    all
}

fn add_unknown_field(schema: &Value, pointer: &str, body: &Value) -> UnknownField {
    let mut body = body.clone();
    body.pointer_mut(pointer).unwrap()["zz"] = json!(1);
    let known_fields = schema["properties"].as_object().into_iter().flat_map(Map::keys).cloned().collect();
    UnknownField { pointer: format!("{pointer}/zz"), known_fields, body }
}

fn walk_properties(schema: &Value, parent: &str, visit: &mut dyn FnMut(&str, &Value)) {
    for (name, field_schema) in schema["properties"].as_object().into_iter().flatten() {
        let pointer = format!("{parent}/{name}");
        visit(&pointer, field_schema);
        walk_properties(field_schema, &pointer, visit);
    }
}
