//! Derives schemas from Rust types.

use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::transform::{RecursiveTransform, Transform};
use schemars::{JsonSchema, Schema};
use serde_json::Value;

use super::schema::MAX_SAFE_INTEGER;

/// Returns the schema for a type as it is serialized. Nested types without `#[schemars(inline)]` are referenced, and
/// must be in [`super::Api::schemas`].
pub fn schema_of<T: JsonSchema>() -> Value {
    let mut settings = SchemaSettings::draft2020_12().for_serialize();
    settings.definitions_path = "/components/schemas".into();
    let mut schema = T::json_schema(&mut SchemaGenerator::new(settings));
    RecursiveTransform(make_strict).transform(&mut schema);
    schema.to_value()
}

/// Makes a schema as strict as the serialized value: an object has no other members, no number is negative, and every
/// JSON parser represents every integer exactly (RFC 7493). Drops defaults, which apply only when a value is
/// deserialized.
fn make_strict(schema: &mut Schema) {
    schema.remove("default");
    let format = schema.get("format").and_then(Value::as_str).map(str::to_owned);
    match format.as_deref() {
        Some("uint16" | "uint32" | "uint64") => {
            schema.remove("format");
            schema.insert("maximum".to_owned(), MAX_SAFE_INTEGER.into());
        }
        Some("double") => {
            schema.remove("format");
            schema.insert("minimum".to_owned(), 0.into());
        }
        _ => {}
    }
    if schema.get("properties").is_some() && schema.get("additionalProperties").is_none() {
        schema.insert("additionalProperties".to_owned(), false.into());
    }
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};

    use super::*;
    use crate::openapi::{array, count, nullable, number, object, schema_ref, text};

    #[derive(Serialize, Deserialize, JsonSchema)]
    struct Thing {
        size: u64,
    }

    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "camelCase")]
    #[schemars(inline)]
    struct Part {
        name: String,
    }

    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "camelCase")]
    struct Whole {
        first_thing: Thing,
        part: Option<Part>,
        #[serde(default)]
        parts: Vec<Part>,
        cost: f64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(with = "u32")]
        remaining_parts: Option<u32>,
    }

    #[test]
    fn schema_of_describes_the_serialized_type() {
        let part = || object(&[("name", text())], &[]);
        let expected = object(
            &[
                ("firstThing", schema_ref("Thing")),
                ("part", nullable(part())),
                ("parts", array(part())),
                ("cost", number()),
            ],
            &[("remainingParts", count())],
        );
        assert_eq!(schema_of::<Whole>(), expected);
    }
}
