//! Checks every response in a test against its route's description: status, code, media type, schema, and the headers
//! that an error response needs. An error response must also reveal no internal details. The cases of the table-driven
//! tests come from the same descriptions, so a new route is covered without a change to this module; a test need only
//! trigger each code that the route declares.

mod invalid_requests;
mod leak;
mod probe;
mod self_tests;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, LazyLock, Mutex};

use http::{HeaderMap, Method};
use jsonschema::Validator;
use serde_json::Value;
use svc::http::openapi::Operation;

pub use invalid_requests::{
    ApiUnderTest, CheckedResponse, WrongCredential, assert_rejects_invalid_requests, valid_body, valid_call,
    with_required_query,
};
pub use probe::variants;

/// The OpenAPI document of one API, with its operations.
pub struct Contract {
    document: Value,
    operations: Vec<&'static Operation>,
    validators: Mutex<HashMap<String, Arc<Validator>>>,
    /// The operation and code of every error response so far.
    triggered_codes: Mutex<BTreeSet<(&'static str, String)>>,
    secrets: Mutex<Vec<String>>,
}

/// A request and its response.
pub struct Exchange<'a> {
    pub method: &'a Method,
    pub path: &'a str,
    /// The JSON body.
    pub request_body: Option<&'a [u8]>,
    pub status: u16,
    pub headers: &'a HeaderMap,
    pub response_body: &'a str,
}

pub fn platform() -> &'static Contract {
    static PLATFORM: LazyLock<Contract> = LazyLock::new(|| {
        let api = svc::platform::api::ENDPOINTS.iter().map(|endpoint| &endpoint.operation);
        let router = svc::router::ROUTES.iter().map(|route| &route.operation);
        Contract::new(svc::platform::openapi::openapi_document(), api.chain(router).collect())
    });
    &PLATFORM
}

pub fn gateway() -> &'static Contract {
    static GATEWAY: LazyLock<Contract> = LazyLock::new(|| {
        let operations = svc::gateway::endpoints().map(|endpoint| &endpoint.operation);
        Contract::new(svc::gateway::openapi_document(), operations.collect())
    });
    &GATEWAY
}

impl Contract {
    fn new(document: Value, operations: Vec<&'static Operation>) -> Self {
        Self {
            document,
            operations,
            validators: Mutex::default(),
            triggered_codes: Mutex::default(),
            secrets: Mutex::default(),
        }
    }

    pub fn document(&self) -> &Value {
        &self.document
    }

    /// Registers a secret or internal text that no error response may contain.
    pub fn register_secret(&self, secret: &str) {
        self.secrets.lock().unwrap().push(secret.to_owned());
    }

    /// Checks a response. A response for an unknown path is checked only as an error response.
    #[track_caller]
    pub fn check(&self, exchange: &Exchange<'_>) {
        let Exchange { status, headers, response_body, path, .. } = *exchange;
        let media_type = headers.get("content-type").map_or("", |kind| kind.to_str().unwrap());
        let media_type = media_type.split(';').next().unwrap().trim();
        if media_type == "application/problem+json" {
            self.check_problem(exchange);
        }
        let method = if *exchange.method == Method::HEAD { &Method::GET } else { exchange.method };
        let candidates: Vec<_> =
            self.operations.iter().filter(|operation| matches_template(operation.path, path)).collect();
        let fewest_parameters =
            candidates.iter().map(|operation| operation.path.matches('{').count()).min().unwrap_or(0);
        let candidates = candidates
            .into_iter()
            .filter(|operation| operation.path.matches('{').count() == fewest_parameters);
        let first = candidates.clone().next();
        let Some(operation) = candidates.clone().find(|operation| operation.method == *method).or(first)
        else {
            return;
        };
        let id = operation.id;
        let context = || format!("{id}: {} {path} → {status} {headers:?}\n{response_body}", exchange.method);
        if operation.method != *method {
            assert_eq!(status, 405, "{}", context());
        }
        if media_type == "application/problem+json" {
            let code =
                serde_json::from_str::<Value>(response_body).unwrap()["code"].as_str().unwrap().to_owned();
            // A rejected method counts for every operation on the path.
            let operation_ids =
                candidates.filter(|_| status == 405).map(|operation| operation.id).chain([id]);
            self.triggered_codes.lock().unwrap().extend(operation_ids.map(|id| (id, code.clone())));
        }
        let path = operation.path.replace("{*", "{");
        let documented = &self.document["paths"][path][operation.method.as_str().to_ascii_lowercase()];
        let response = &documented["responses"][status.to_string()];
        assert!(response.is_object(), "undocumented status: {}", context());
        if *exchange.method == Method::HEAD {
            return;
        }
        let Some(contents) = response["content"].as_object() else {
            assert!(response_body.is_empty(), "undocumented body: {}", context());
            return;
        };
        let content = contents.get(media_type).or_else(|| contents.get("*/*"));
        // A file is served with its own media type.
        let is_file = contents.contains_key("application/octet-stream");
        if content.is_none() && !is_file {
            // A browser gets a page instead of an error response, and instead of JSON from the router's own routes.
            let has_page =
                contents.contains_key("application/problem+json") || exchange.path.starts_with("/_svc/");
            let is_page = media_type == "text/html" && has_page;
            assert!(is_page, "undocumented media type: {}", context());
            self.check_page(exchange);
        }
        if let Some(schema) = content.map(|content| &content["schema"]).filter(|schema| schema.is_object()) {
            let body =
                serde_json::from_str(response_body).unwrap_or_else(|error| panic!("{error}: {}", context()));
            self.assert_valid(schema, &body, &context());
        }
        let schema = &documented["requestBody"]["content"]["application/json"]["schema"];
        if let Some(request_body) = exchange.request_body.filter(|_| status < 300 && schema.is_object()) {
            let request_body = serde_json::from_slice(request_body).unwrap();
            self.assert_valid(
                schema,
                &request_body,
                &format!("{id} accepted a request that violates its schema: {request_body}"),
            );
        }
    }

    #[track_caller]
    fn check_problem(&self, exchange: &Exchange<'_>) {
        let Exchange { status, headers, response_body, .. } = *exchange;
        let context =
            || format!("{} {} → {status} {headers:?}\n{response_body}", exchange.method, exchange.path);
        let has = |name: &str| headers.contains_key(name);
        let body: Value = serde_json::from_str(response_body).unwrap_or_else(|_| panic!("{}", context()));
        assert_eq!(body["status"], status, "{}", context());
        assert_eq!(headers["x-request-id"], body["requestId"].as_str().unwrap(), "{}", context());
        assert_eq!(body["type"], format!("urn:svc:problem:{}", body["code"].as_str().unwrap()));
        assert_eq!(headers["cache-control"], "no-store", "{}", context());
        assert_eq!(has("www-authenticate"), status == 401, "{}", context());
        assert_eq!(has("allow"), status == 405, "{}", context());
        let is_retryable = status == 429 || (status == 503 && body["code"] != "disabled");
        assert!(has("retry-after") || !is_retryable, "{}", context());
        let detail = body["detail"].as_str().unwrap();
        assert!(detail.len() > 10, "the detail is too short: {}", context());
        let secrets = self.secrets.lock().unwrap();
        if let Some(leak) = leak::find_leak(response_body, &secrets) {
            panic!("reveals {leak:?}: {}", context());
        }
    }

    /// Checks the page that a browser gets instead of JSON: it is a complete document, must not be stored, and reveals
    /// no internal details.
    #[track_caller]
    fn check_page(&self, exchange: &Exchange<'_>) {
        let Exchange { status, headers, response_body, .. } = *exchange;
        let context =
            || format!("{} {} → {status} {headers:?}\n{response_body}", exchange.method, exchange.path);
        let has = |name: &str, value: &str| headers.get(name).is_some_and(|actual| actual == value);
        assert!(has("content-type", "text/html; charset=utf-8"), "{}", context());
        assert!(
            has("cache-control", "no-store") && has("x-content-type-options", "nosniff"),
            "{}",
            context()
        );
        assert!(headers.contains_key("content-security-policy"), "{}", context());
        assert!(
            response_body.starts_with("<!doctype html>") && response_body.trim_end().ends_with("</html>"),
            "{}",
            context()
        );
        if let Some(leak) = leak::find_leak(response_body, &self.secrets.lock().unwrap()) {
            panic!("reveals {leak:?}: {}", context());
        }
    }

    #[track_caller]
    fn assert_valid(&self, schema: &Value, value: &Value, context: &str) {
        let validator = self.validator(schema);
        let errors: Vec<String> =
            validator.iter_errors(value).map(|e| format!("{} {e}", e.instance_path())).collect();
        assert!(errors.is_empty(), "{errors:?}\nin {context}");
    }

    /// Returns the compiled validator for one of this document's schemas.
    pub fn validator(&self, schema: &Value) -> Arc<Validator> {
        let mut validators = self.validators.lock().unwrap();
        let validator = validators.entry(schema.to_string()).or_insert_with(|| {
            let mut full_schema = schema.clone();
            full_schema["components"] = self.document["components"].clone();
            let options = jsonschema::options().should_validate_formats(true);
            Arc::new(options.build(&full_schema).unwrap_or_else(|error| panic!("{error}: {schema}")))
        });
        validator.clone()
    }

    /// Lists the codes that these operations declare but that no test has triggered, and the `exceptions` (operation or
    /// `*`, and code) that are no longer needed, except those for `*`. `rare` lists codes that only some runs trigger.
    pub fn list_untriggered_codes(
        &self,
        operations: &[&'static Operation],
        exceptions: &[(&str, &str)],
        rare: &[(&str, &str)],
    ) -> Vec<String> {
        let triggered_codes = self.triggered_codes.lock().unwrap();
        let mut findings = Vec::new();
        for operation in operations {
            for code in operation.codes() {
                let (id, code) = (operation.id, code.as_str());
                let is_exception = exceptions
                    .iter()
                    .any(|(for_id, exempt)| (*for_id == "*" || *for_id == id) && *exempt == code);
                if rare.contains(&(id, code)) {
                    continue;
                }
                match (triggered_codes.contains(&(id, code.to_owned())), is_exception) {
                    (false, false) => findings.push(format!("{id}: no test has triggered {code}")),
                    (true, true) if exceptions.contains(&(id, code)) => {
                        findings.push(format!(
                            "{id}: a test has triggered {code}: remove it from the exceptions"
                        ));
                    }
                    _ => {}
                }
            }
        }
        findings
    }
}

/// In a template, `{name}` matches one non-empty segment, and `{*name}` matches the rest of the path.
fn matches_template(template: &str, path: &str) -> bool {
    let (mut parts, mut segments) = (template.split('/'), path.split('/'));
    loop {
        match (parts.next(), segments.next()) {
            (None, None) => return true,
            (Some(part), Some(_)) if part.starts_with("{*") => return true,
            (Some(part), Some(segment)) if part.starts_with('{') && !segment.is_empty() => {}
            (Some(part), Some(segment)) if part == segment => {}
            _ => return false,
        }
    }
}

/// Checks the document itself: that operation ids are unique, references resolve, schemas are valid, and parameters
/// match the paths.
#[track_caller]
pub fn assert_document_is_valid(contract: &Contract) {
    let document = contract.document();
    assert_eq!(document["openapi"], "3.1.0");
    let ids: BTreeSet<&str> = contract.operations.iter().map(|operation| operation.id).collect();
    assert_eq!(ids.len(), contract.operations.len(), "operation ids must be unique");
    for operation in &contract.operations {
        let in_path = operation
            .parameters
            .iter()
            .filter(|parameter| parameter.location == svc::http::openapi::ParameterLocation::Path);
        let documented: BTreeSet<&str> = in_path.map(|parameter| parameter.name).collect();
        let parts = operation.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        let parts: BTreeSet<&str> = parts.map(|part| part.trim_start_matches('*')).collect();
        assert_eq!(parts, documented, "{}", operation.id);
    }
    let text = document.to_string();
    for reference in text.split("\"$ref\":\"#/").skip(1) {
        let pointer = format!("/{}", reference.split('"').next().unwrap());
        assert!(document.pointer(&pointer).is_some(), "{pointer} is not in the document");
    }
    for schema in document["components"]["schemas"].as_object().unwrap().values() {
        jsonschema::meta::validate(schema).unwrap_or_else(|error| panic!("{error}: {schema}"));
        contract.validator(schema);
    }
}

#[test]
fn matches_template_accepts_only_its_paths() {
    for (template, path, matches) in [
        ("/vps/{id}", "/vps/7", true),
        ("/vps/{id}", "/vps/", false),
        ("/vps/{id}", "/vps/7/x", false),
        ("/apps/{slug}/", "/apps/a/", true),
        ("/apps/{slug}/{*path}", "/apps/a/b/c", true),
        ("/apps/{slug}", "/apps/a/", false),
    ] {
        assert_eq!(matches_template(template, path), matches, "{template} {path}");
    }
}
