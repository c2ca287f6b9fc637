//! The routes of the platform and of a machine, from their OpenAPI documents.

use serde_json::{Map, Value};

use super::{GeneratedSection, table};

pub fn generated_sections() -> [GeneratedSection; 2] {
    [
        GeneratedSection::new(
            "api platform",
            Document::new("Platform", svc::platform::openapi::openapi_document()).render(),
        ),
        GeneratedSection::new(
            "api machine",
            Document::new("Machine", svc::gateway::openapi_document()).render(),
        ),
    ]
}

/// Returns an object's members, or none if the value is not an object.
fn members(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flat_map(Map::iter)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Collapses whitespace and escapes `<`, which would start an HTML element.
fn to_inline_text(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('<', "&lt;")
}

struct Document {
    /// The server of this API (`Platform` or `Machine`), used as the prefix of schema headings.
    server: &'static str,
    document: Value,
}

impl Document {
    fn new(server: &'static str, document: Value) -> Self {
        Self { server, document }
    }

    fn render(&self) -> String {
        let mut page = self.render_credentials_table();
        for (path, path_item) in members(&self.document["paths"]) {
            for (method, operation) in
                members(path_item).filter(|(_, operation)| operation["responses"].is_object())
            {
                page.push_str(&self.render_operation(
                    &method.to_ascii_uppercase(),
                    path,
                    operation,
                    path_item,
                ));
            }
        }
        for (name, schema) in members(&self.document["components"]["schemas"]) {
            let fields = self.render_fields(schema);
            let body = if fields.is_empty() { self.describe_type(schema) + "\n" } else { fields };
            page.push_str(&format!("### {} schema `{name}`\n\n{body}\n", self.server));
        }
        page
    }

    fn render_credentials_table(&self) -> String {
        let schemes = members(&self.document["components"]["securitySchemes"]).map(|(name, scheme)| {
            let location = match (text(&scheme["in"]), text(&scheme["name"])) {
                ("", _) => "`Authorization: Bearer`".to_owned(),
                (location, name) => format!("{location} `{name}`"),
            };
            [format!("`{name}`"), location, to_inline_text(text(&scheme["description"]))]
        });
        table(&["credential", "sent as", "meaning"], schemes) + "\n"
    }

    fn render_operation(&self, method: &str, path: &str, operation: &Value, path_item: &Value) -> String {
        let mut section =
            format!("### `{method} {path}`\n\n{}\n\n", to_inline_text(text(&operation["summary"])));
        section.push_str(&format!("- Credential: {}\n", format_security(&operation["security"])));
        let servers = path_item["servers"].as_array().into_iter().flatten();
        let servers: Vec<_> = servers.map(|server| to_inline_text(text(&server["description"]))).collect();
        if !servers.is_empty() {
            section.push_str(&format!("- Served by: {}\n", servers.join("; ")));
        }
        let mut errors = Vec::new();
        for (status, response) in members(&operation["responses"]) {
            let content = &response["content"];
            if content["application/problem+json"].is_object() {
                let codes = text(&response["description"]).split(", ").map(|code| format!("`{code}`"));
                errors.push(format!("{status} {}", codes.collect::<Vec<_>>().join(" ")));
            } else {
                let description = to_inline_text(text(&response["description"]));
                section.push_str(&format!("- **{status}**: {description}{}\n", self.render_content(content)));
            }
        }
        section.push_str(&format!("- Errors: {}\n", errors.join(", ")));
        let parameters = operation["parameters"].as_array().into_iter().flatten().map(|parameter| {
            let is_required = parameter["required"] == true && parameter["in"] != "path";
            let location =
                text(&parameter["in"]).to_owned() + if is_required { ", **required**" } else { "" };
            let name = format!("`{}`", text(&parameter["name"]));
            [
                name,
                location,
                self.describe_type(&parameter["schema"]),
                to_inline_text(text(&parameter["description"])),
            ]
        });
        let parameters: Vec<_> = parameters.collect();
        if !parameters.is_empty() {
            section.push_str(&format!("\n{}", table(&["parameter", "in", "type", "meaning"], parameters)));
        }
        for (titles, fields) in self.render_inline_schemas(operation) {
            section.push_str(&format!("\n{}:\n\n{fields}", titles.join(", ")));
        }
        section.push('\n');
        section
    }

    /// Renders a response's media types, in parentheses; for JSON without fields, its type.
    fn render_content(&self, content: &Value) -> String {
        let types = members(content).map(|(media_type, body)| match self.describe_type(&body["schema"]) {
            _ if media_type != "application/json" => format!("`{media_type}`"),
            description if self.render_fields(&body["schema"]).is_empty() => description,
            _ => "JSON, as below".to_owned(),
        });
        let types: Vec<_> = types.collect();
        if types.is_empty() { String::new() } else { format!(" ({})", types.join(", ")) }
    }

    /// Renders the fields of the body and of the successful responses. Identical tables are merged.
    fn render_inline_schemas(&self, operation: &Value) -> Vec<(Vec<String>, String)> {
        let body = ("Body".to_owned(), &operation["requestBody"]["content"]["application/json"]["schema"]);
        let responses = members(&operation["responses"]).map(|(status, response)| {
            (format!("Response {status}"), &response["content"]["application/json"]["schema"])
        });
        let mut tables: Vec<(Vec<String>, String)> = Vec::new();
        for (title, schema) in std::iter::once(body).chain(responses) {
            let fields = self.render_fields(schema);
            match tables.iter_mut().find(|(_, table)| *table == fields) {
                _ if fields.is_empty() => {}
                Some((titles, _)) => titles.push(title),
                None => tables.push((vec![title], fields)),
            }
        }
        tables
    }

    /// Renders the table of an object's fields, including those of nested objects.
    fn render_fields(&self, schema: &Value) -> String {
        let mut rows = Vec::new();
        self.collect_fields(schema, "", &mut rows);
        if rows.is_empty() {
            return String::new();
        }
        if rows.iter().all(|[_, _, meaning]| meaning.is_empty()) {
            return table(
                &["field", "type"],
                rows.into_iter().map(|[field, field_type, _]| [field, field_type]),
            );
        }
        table(&["field", "type", "meaning"], rows)
    }

    fn collect_fields(&self, schema: &Value, prefix: &str, rows: &mut Vec<[String; 3]>) {
        let required: Vec<_> = schema["required"].as_array().into_iter().flatten().collect();
        for (name, field) in members(&schema["properties"]) {
            let is_required = required.iter().any(|required| *required == name);
            let field_type = self.describe_type(field) + if is_required { ", **required**" } else { "" };
            rows.push([format!("`{prefix}{name}`"), field_type, to_inline_text(text(&field["description"]))]);
            self.collect_fields(field, &format!("{prefix}{name}."), rows);
            self.collect_fields(&field["items"], &format!("{prefix}{name}[]."), rows);
        }
    }

    fn describe_kind(&self, kind: &str, schema: &Value) -> String {
        match kind {
            "array" if !schema["items"].is_null() => match self.describe_type(&schema["items"]) {
                item_type if item_type.contains(", ") => format!("array of ({item_type})"),
                item_type => format!("array of {item_type}"),
            },
            kind => kind.to_owned(),
        }
    }

    /// Describes a value's type and limits in a few words.
    fn describe_type(&self, schema: &Value) -> String {
        let non_empty = |value: &Value| value.as_array().cloned().filter(|items| !items.is_empty());
        let join_types = |all: Vec<Value>, word: &str| {
            all.iter().map(|schema| self.describe_type(schema)).collect::<Vec<_>>().join(word)
        };
        if let Some(name) = text(&schema["$ref"]).strip_prefix("#/components/schemas/") {
            let anchor = format!("{}-schema-{name}", self.server).to_ascii_lowercase();
            return format!("[`{name}`](#{anchor})");
        }
        if let Some(values) = non_empty(&schema["enum"]) {
            return values
                .iter()
                .map(|value| format!("`{}`", json_text(value)))
                .collect::<Vec<_>>()
                .join(", ");
        }
        if !schema["const"].is_null() {
            return format!("`{}`", json_text(&schema["const"]));
        }
        for (key, word) in [("anyOf", " or "), ("oneOf", " or "), ("allOf", " and ")] {
            if let Some(all) = non_empty(&schema[key]) {
                return join_types(all, word);
            }
        }
        let mut description = match &schema["type"] {
            Value::Array(types) => types
                .iter()
                .map(|kind| self.describe_kind(text(kind), schema))
                .collect::<Vec<_>>()
                .join(" or "),
            Value::String(kind) => self.describe_kind(kind, schema),
            _ => "any".to_owned(),
        };
        if let Some(format) = schema["format"].as_str() {
            description.push_str(&format!(" ({format})"));
        }
        for (key, word) in LIMITS {
            if !schema[key].is_null() && schema[key] != MAX_SAFE_INTEGER {
                description.push_str(&format!(", {word} {}", json_text(&schema[key])));
            }
        }
        if let Some(pattern) = schema["pattern"].as_str() {
            description.push_str(&format!(", `{pattern}`"));
        }
        description
    }
}

/// JavaScript's `Number.MAX_SAFE_INTEGER`. A limit with this value is omitted.
const MAX_SAFE_INTEGER: u64 = (1 << 53) - 1;

const LIMITS: [(&str, &str); 6] = [
    ("minimum", "at least"),
    ("maximum", "at most"),
    ("minLength", "min length"),
    ("maxLength", "max length"),
    ("minItems", "min items"),
    ("maxItems", "max items"),
];

fn json_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Renders the accepted credentials, such as "`operator` with scope `read` or `billing`, or `host`".
fn format_security(security: &Value) -> String {
    let alternatives = security.as_array().into_iter().flatten().flat_map(members).map(|(name, scopes)| {
        let scopes: Vec<_> =
            scopes.as_array().into_iter().flatten().map(|scope| format!("`{}`", text(scope))).collect();
        if scopes.is_empty() {
            format!("`{name}`")
        } else {
            format!("`{name}` with scope {}", scopes.join(" or "))
        }
    });
    let alternatives: Vec<_> = alternatives.collect();
    if alternatives.is_empty() { "none".to_owned() } else { alternatives.join(", or ") }
}

#[test]
fn operation_is_rendered_with_fields_and_codes() {
    let document = serde_json::json!({
        "paths": { "/things/{id}": { "post": {
            "summary": "Creates a thing.",
            "security": [{ "operator": ["read", "billing"] }, { "host": [] }],
            "parameters": [{ "name": "id", "in": "path", "required": true, "schema": { "type": "string" } }],
            "requestBody": { "content": { "application/json": { "schema": {
                "type": "object", "required": ["a"],
                "properties": { "a": { "type": "array", "items": { "type": "object", "properties": {
                    "b": { "type": ["string", "null"], "maxLength": 8 } } } } } } } } },
            "responses": {
                "202": { "description": "Accepted.", "content": { "application/json": { "schema": { "$ref": "#/components/schemas/Thing" } } } },
                "409": { "description": "conflict, gone", "content": { "application/problem+json": {} } }
            },
        } } },
        "components": { "schemas": { "Thing": { "enum": ["x", 1] } } },
    });
    let page = Document::new("Demo", document).render();
    for line in [
        "### `POST /things/{id}`",
        "- Credential: `operator` with scope `read` or `billing`, or `host`",
        "- **202**: Accepted. ([`Thing`](#demo-schema-thing))",
        "- Errors: 409 `conflict` `gone`",
        "| `id` | path | string |  |",
        "| `a` | array of object, **required** |",
        "| `a[].b` | string or null, max length 8 |",
        "`x`, `1`",
    ] {
        assert!(page.lines().any(|rendered| rendered == line), "{line}\n{page}");
    }
}
