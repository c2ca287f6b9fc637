//! Generates OpenAPI 3.1 documents from the description next to each route's handler.
//!
//! This module defines the types for these descriptions and converts them; it contains no routes. Problems that a
//! description implies (a body can be too large, a credential can be missing) are derived, so a route declares only
//! additional problems.

use std::collections::BTreeMap;

use http::Method;
use serde_json::{Map, Value, json};

mod derived;
mod schema;

pub use derived::schema_of;
pub use schema::*;

use super::problem::Code;

/// A credential that a route accepts. A route with several credentials accepts any of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Credential {
    pub name: &'static str,
    pub scheme: CredentialScheme,
    pub description: &'static str,
}

/// The location of a credential in a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CredentialScheme {
    /// `Authorization: Bearer` (RFC 6750).
    Bearer,
    /// Like `Bearer`, for callers with scopes: a caller without the route's scope is rejected as forbidden.
    ScopedBearer,
    Header(&'static str),
    Cookie(&'static str),
}

/// One method on one path.
#[derive(Debug, Clone)]
pub struct Operation {
    /// In camelCase; unique in a document.
    pub id: &'static str,
    pub method: Method,
    /// A template with `{name}` for each parameter; `{*name}` is the rest of the path.
    pub path: &'static str,
    pub summary: &'static str,
    /// Empty for a public route.
    pub credentials: &'static [Credential],
    pub parameters: &'static [Parameter],
    pub body: Option<Schema>,
    pub responses: &'static [DocumentedResponse],
    /// Problems in addition to the derived ones.
    pub problems: &'static [Code],
}

/// A JSON schema (draft 2020-12), created on demand.
pub type Schema = fn() -> Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterLocation {
    Path,
    /// An optional query parameter.
    Query,
    /// A required query parameter.
    RequiredQuery,
    Header,
}

#[derive(Debug, Clone, Copy)]
pub struct Parameter {
    pub name: &'static str,
    pub location: ParameterLocation,
    pub schema: Schema,
    pub description: &'static str,
}

impl Parameter {
    /// Describes an optional query parameter.
    pub const fn query(name: &'static str, schema: Schema, description: &'static str) -> Self {
        Self { name, location: ParameterLocation::Query, schema, description }
    }
}

/// A response that is not a problem.
#[derive(Debug, Clone, Copy)]
pub struct DocumentedResponse {
    pub status: u16,
    pub description: &'static str,
    pub content: Content,
}

/// Describes a JSON response.
pub const fn documented_json(
    status: u16,
    description: &'static str,
    schema: fn() -> Value,
) -> DocumentedResponse {
    DocumentedResponse { status, description, content: Content::Json(schema) }
}

#[derive(Debug, Clone, Copy)]
pub enum Content {
    Nothing,
    Json(Schema),
    /// Another media type, without a schema.
    Other(&'static str),
}

/// The part of a document that describes the whole API.
pub struct Api {
    pub title: &'static str,
    pub description: &'static str,
    pub version: &'static str,
    /// Schemas that other schemas reference with [`schema_ref`].
    pub schemas: &'static [(&'static str, Schema)],
}

impl Operation {
    /// Returns all of this operation's problem codes: its own and the derived ones.
    pub fn codes(&self) -> Vec<Code> {
        let mut codes = vec![Code::MethodNotAllowed, Code::Internal];
        if !self.credentials.is_empty() {
            // Authenticated routes also read and limit bodies that they do not use.
            codes.push(Code::RequestTooLarge);
            // A rejected registration token has a different code.
            if !self.problems.contains(&Code::RegistrationRejected) {
                codes.push(Code::Unauthorized);
            }
            if self.credentials.iter().any(|credential| credential.scheme == CredentialScheme::ScopedBearer) {
                codes.extend([Code::Forbidden, Code::RateLimited]);
            }
        }
        if self.body.is_some() {
            codes.push(Code::UnsupportedMediaType);
        }
        let has_checked_parameters =
            self.parameters.iter().any(|parameter| parameter.location != ParameterLocation::Header);
        if self.body.is_some() || has_checked_parameters {
            codes.push(Code::InvalidRequest);
        }
        codes.extend(self.problems);
        codes.sort_by_key(|code| (code.status().as_u16(), code.as_str()));
        codes.dedup();
        codes
    }

    fn generate_openapi(&self) -> Value {
        let mut responses: Map<String, Value> = self
            .responses
            .iter()
            .map(|response| (response.status.to_string(), response.generate_openapi()))
            .collect();
        let mut by_status: BTreeMap<u16, Vec<&str>> = BTreeMap::new();
        for code in self.codes() {
            by_status.entry(code.status().as_u16()).or_default().push(code.as_str());
        }
        for (status, codes) in by_status {
            responses.entry(status.to_string()).or_insert_with(|| problem_response(status, &codes));
        }
        let mut operation = json!({
            "operationId": self.id,
            "summary": self.summary,
            "responses": responses,
            "security": self.credentials.iter().map(|credential| json!({ credential.name: [] })).collect::<Vec<_>>(),
        });
        if !self.parameters.is_empty() {
            operation["parameters"] = self.parameters.iter().map(Parameter::generate_openapi).collect();
        }
        if let Some(body) = self.body {
            operation["requestBody"] =
                json!({ "required": true, "content": { "application/json": { "schema": body() } } });
        }
        operation
    }
}

impl Credential {
    fn generate_openapi(&self) -> Value {
        match self.scheme {
            CredentialScheme::Bearer | CredentialScheme::ScopedBearer => {
                json!({ "type": "http", "scheme": "bearer", "description": self.description })
            }
            CredentialScheme::Header(name) => {
                json!({ "type": "apiKey", "in": "header", "name": name, "description": self.description })
            }
            CredentialScheme::Cookie(name) => {
                json!({ "type": "apiKey", "in": "cookie", "name": name, "description": self.description })
            }
        }
    }
}

impl Parameter {
    fn generate_openapi(&self) -> Value {
        let location = match self.location {
            ParameterLocation::Path => "path",
            ParameterLocation::Query | ParameterLocation::RequiredQuery => "query",
            ParameterLocation::Header => "header",
        };
        json!({
            "name": self.name,
            "in": location,
            "required": matches!(self.location, ParameterLocation::Path | ParameterLocation::RequiredQuery),
            "description": self.description,
            "schema": (self.schema)(),
        })
    }
}

impl DocumentedResponse {
    fn generate_openapi(&self) -> Value {
        let mut response = json!({ "description": self.description });
        match self.content {
            Content::Nothing => {}
            Content::Json(schema) => {
                response["content"] = json!({ "application/json": { "schema": schema() } });
            }
            Content::Other(media_type) => response["content"] = json!({ media_type: {} }),
        }
        response
    }
}

fn problem_response(status: u16, codes: &[&str]) -> Value {
    let schema = json!({
        "allOf": [schema_ref("Problem"), { "type": "object", "properties": { "code": { "enum": codes } } }],
    });
    let header = |name: &str| json!({ "$ref": format!("#/components/headers/{name}") });
    let mut headers = json!({ "x-request-id": header("RequestId") });
    match status {
        401 => headers["WWW-Authenticate"] = header("WwwAuthenticate"),
        405 => headers["Allow"] = header("Allow"),
        429 | 503 => headers["Retry-After"] = header("RetryAfter"),
        _ => {}
    }
    json!({
        "description": codes.join(", "),
        "headers": headers,
        "content": { "application/problem+json": { "schema": schema } },
    })
}

fn header_components() -> Value {
    let header = |description: &str, schema: Value| json!({ "description": description, "schema": schema });
    json!({
        "RequestId": header("The same as the problem's requestId; log lines with this id have the details.", text()),
        "WwwAuthenticate": header("Bearer", text()),
        "Allow": header("The methods of this path.", text()),
        "RetryAfter": header("Seconds after which the same request may succeed.", count()),
    })
}

/// Returns the schema for a problem (RFC 9457) with our `code` and `requestId`; some codes have additional members.
fn problem_schema() -> Value {
    let errors = array(object(&[("pointer", text()), ("detail", text())], &[]));
    let codes: Vec<&str> = Code::ALL.iter().map(|code| code.as_str()).collect();
    let standard = [
        ("type", json!({ "type": "string", "pattern": "^urn:svc:problem:[a-z_]+$" })),
        ("title", text()),
        ("status", json!({ "type": "integer", "minimum": 400, "maximum": 599 })),
        ("detail", text()),
        ("code", string_enum(&codes)),
        ("requestId", text()),
    ];
    let mut schema = object(&standard, &[("errors", errors)]);
    schema["additionalProperties"] = true.into();
    schema
}

/// Generates the document for these operations.
pub fn generate_document<'o>(api: &Api, operations: impl IntoIterator<Item = &'o Operation>) -> Value {
    let mut paths: Map<String, Value> = Map::new();
    let mut credentials: BTreeMap<&str, &Credential> = BTreeMap::new();
    for operation in operations {
        credentials.extend(operation.credentials.iter().map(|credential| (credential.name, credential)));
        let path = paths.entry(operation.path.replace("{*", "{")).or_insert_with(|| json!({}));
        path[operation.method.as_str().to_ascii_lowercase()] = operation.generate_openapi();
    }
    let mut schemas: Map<String, Value> =
        api.schemas.iter().map(|(name, schema)| ((*name).to_owned(), schema())).collect();
    schemas.insert("Problem".to_owned(), problem_schema());
    let schemes: Map<String, Value> = credentials
        .into_iter()
        .map(|(name, credential)| (name.to_owned(), credential.generate_openapi()))
        .collect();
    json!({
        "openapi": "3.1.0",
        "info": { "title": api.title, "description": api.description, "version": api.version },
        "paths": paths,
        "components": { "schemas": schemas, "headers": header_components(), "securitySchemes": schemes },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPERATOR: Credential =
        Credential { name: "operator", scheme: CredentialScheme::Bearer, description: "PLATFORM_SECRET" };

    fn rename_thing_operation() -> Operation {
        Operation {
            id: "renameThing",
            method: Method::POST,
            path: "/things/{id}",
            summary: "Renames a thing.",
            credentials: &[OPERATOR],
            parameters: &[Parameter {
                name: "id",
                location: ParameterLocation::Path,
                schema: uuid,
                description: "The thing.",
            }],
            body: Some(|| object(&[("name", text())], &[])),
            responses: &[DocumentedResponse {
                status: 202,
                description: "The thing will be renamed.",
                content: Content::Json(|| schema_ref("Thing")),
            }],
            problems: &[Code::InvalidState, Code::Unauthorized],
        }
    }

    #[test]
    fn document_contains_derived_problems() {
        let api = Api {
            title: "t",
            description: "a",
            version: "1",
            schemas: &[("Thing", || object(&[], &[("x", count())]))],
        };
        let document = generate_document(&api, [&rename_thing_operation()]);
        let operation = &document["paths"]["/things/{id}"]["post"];
        assert_eq!(operation["security"], json!([{ "operator": [] }]));
        assert_eq!(operation["parameters"][0]["required"], true);
        let responses: Vec<&str> =
            operation["responses"].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(responses, ["202", "400", "401", "405", "409", "413", "415", "500"]);
        let codes =
            &operation["responses"]["409"]["content"]["application/problem+json"]["schema"]["allOf"][1];
        assert_eq!(codes["properties"]["code"]["enum"], json!(["invalid_state"]));
        assert_eq!(document["components"]["securitySchemes"]["operator"]["scheme"], "bearer");
        assert!(document["components"]["schemas"]["Thing"].is_object());
    }
}
