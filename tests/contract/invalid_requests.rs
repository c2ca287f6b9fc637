//! Derives invalid requests to a route from its description, and checks the response to each. An [`ApiUnderTest`]
//! defines how its routes are called; the descriptions of its operations are the test cases.

use std::collections::BTreeSet;

use http::{HeaderMap, Method};
use reqwest::RequestBuilder;
use serde_json::{Map, Value, json};
use svc::http::openapi::{Operation, Parameter, ParameterLocation};
use url::form_urlencoded;

use super::probe::{bodies_with_unknown_fields, is_valid, probes, sample_strings, valid_value, variants};
use super::{Contract, Exchange};

/// A response that has already been checked against the OpenAPI document.
#[derive(Debug)]
pub struct CheckedResponse {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Value,
}

/// A request with a credential that this route does not accept.
pub struct WrongCredential {
    pub description: &'static str,
    pub request: RequestBuilder,
    pub status: u16,
    pub code: &'static str,
}

/// An API whose contract is tested.
pub trait ApiUnderTest {
    fn contract(&self) -> &'static Contract;
    /// Returns a path for which a request is valid.
    fn path(&self, operation: &Operation) -> String;
    fn max_body_bytes(&self, operation: &Operation) -> usize;
    /// Builds a request without credentials.
    fn request_without_credentials(
        &self,
        operation: &Operation,
        method: Method,
        path: &str,
    ) -> RequestBuilder;
    /// Builds a request with a credential that the route accepts.
    fn authorized_request(&self, operation: &Operation, path: &str) -> RequestBuilder;
    fn wrong_credentials(&self, operation: &Operation) -> Vec<WrongCredential>;
    /// Returns the value of a field or parameter that needs a specific one, null for a field to omit, or `None` if any
    /// valid sample value will do.
    fn override_value(&self, operation: &Operation, name: &str) -> Option<Value>;
    /// Whether the query may contain unknown parameters, as on a route to which another site redirects the browser.
    fn allows_unknown_query(&self, _: &Operation) -> bool {
        false
    }
    /// Whether the schema covers all rules for a body, except for those that depend on stored state.
    const SCHEMA_IS_COMPLETE: bool = true;
}

impl CheckedResponse {
    #[track_caller]
    pub fn assert_problem(&self, status: u16, code: &str) {
        assert_eq!((self.status, self.body["code"].as_str()), (status, Some(code)), "{self:?}");
    }

    /// Returns the pointers to the fields that the error response names.
    pub fn pointers(&self) -> BTreeSet<String> {
        let errors = self.body["errors"].as_array().cloned().unwrap_or_default();
        errors.iter().map(|error| error["pointer"].as_str().unwrap().to_owned()).collect()
    }

    fn reports(&self, pointer: &str) -> bool {
        let inside = format!("{pointer}/");
        self.pointers().iter().any(|reported| reported == pointer || reported.starts_with(&inside))
    }

    /// Returns the accepted names, as listed in the response to an unknown name.
    fn accepted_names(&self, pointer: &str) -> BTreeSet<String> {
        let errors = self.body["errors"].as_array().cloned().unwrap_or_default();
        let error = errors.iter().find(|error| error["pointer"] == pointer);
        let error = error.unwrap_or_else(|| panic!("{pointer} is not listed: {self:?}"));
        let names = error["detail"].as_str().unwrap().split_once("it takes ").map_or("", |(_, names)| names);
        names.split(", ").filter(|name| !name.is_empty()).map(str::to_owned).collect()
    }
}

impl Contract {
    /// Sends a request and checks the response.
    pub async fn send(&self, request: RequestBuilder) -> anyhow::Result<CheckedResponse> {
        let (client, request) = request.build_split();
        let request = request?;
        let (method, path) = (request.method().clone(), request.url().path().to_owned());
        let is_json = request.headers().get("content-type").is_some_and(|kind| kind == "application/json");
        let request_body =
            request.body().and_then(reqwest::Body::as_bytes).filter(|_| is_json).map(<[u8]>::to_vec);
        let response = client.execute(request).await?;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        // An event stream does not end.
        let is_stream = headers.get("content-type").is_some_and(|kind| kind == "text/event-stream");
        let response_body = if is_stream { String::new() } else { response.text().await? };
        self.check(&Exchange {
            method: &method,
            path: &path,
            request_body: request_body.as_deref(),
            status,
            headers: &headers,
            response_body: &response_body,
        });
        let body = serde_json::from_str(&response_body).unwrap_or_default();
        Ok(CheckedResponse { status, headers, body })
    }
}

async fn send(api: &impl ApiUnderTest, request: RequestBuilder) -> CheckedResponse {
    api.contract().send(request).await.unwrap_or_else(|error| panic!("{error:#}"))
}

/// Adds the required query parameters to a path.
pub fn with_required_query(api: &impl ApiUnderTest, operation: &Operation, path: String) -> String {
    let required = operation
        .parameters
        .iter()
        .filter(|parameter| parameter.location == ParameterLocation::RequiredQuery);
    let pairs = required
        .filter_map(|parameter| Some((parameter.name, api.override_value(operation, parameter.name)?)));
    let text = |value: Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let query = form_urlencoded::Serializer::new(String::new())
        .extend_pairs(pairs.map(|(name, value)| (name, text(value))))
        .finish();
    if query.is_empty() { path } else { format!("{path}?{query}") }
}

/// Builds a valid request for an operation.
pub fn valid_call(api: &impl ApiUnderTest, operation: &Operation) -> RequestBuilder {
    let path = with_required_query(api, operation, api.path(operation));
    let call = api.authorized_request(operation, &path);
    match operation.body {
        Some(body) => call.json(&valid_body(api, operation, &variants(&body())[0])),
        None => call,
    }
}

pub fn valid_body(api: &impl ApiUnderTest, operation: &Operation, schema: &Value) -> Value {
    let mut body = valid_value(api.contract(), schema, &|name| api.override_value(operation, name));
    // Keep only the first of mutually exclusive fields.
    for alternative in schema["oneOf"].as_array().into_iter().flatten().skip(1) {
        for name in alternative["required"].as_array().into_iter().flatten() {
            body.as_object_mut().unwrap().shift_remove(name.as_str().unwrap());
        }
    }
    body
}

/// Checks the responses to every kind of invalid request.
pub async fn assert_rejects_invalid_requests(api: &impl ApiUnderTest, operation: &Operation) {
    check_method(api, operation).await;
    check_size_limit(api, operation).await;
    check_credentials(api, operation).await;
    if let Some(body) = operation.body {
        check_malformed_bodies(api, operation).await;
        for schema in variants(&body()) {
            check_fields(api, operation, &schema).await;
        }
    }
    check_query(api, operation).await;
}

/// Asserts that an unsupported method is rejected before any other check.
async fn check_method(api: &impl ApiUnderTest, operation: &Operation) {
    let large = "x".repeat(api.max_body_bytes(operation) + 1);
    let path = api.path(operation);
    let response =
        send(api, api.request_without_credentials(operation, Method::PATCH, &path).body(large)).await;
    response.assert_problem(405, "method_not_allowed");
    let allow = response.headers["allow"].to_str().unwrap();
    assert!(allow.split(',').any(|method| method.trim() == operation.method.as_str()), "{path}: {allow}");
}

/// Asserts that an oversized body is rejected before the credential is checked.
async fn check_size_limit(api: &impl ApiUnderTest, operation: &Operation) {
    if operation.credentials.is_empty() {
        return;
    }
    let large = || "x".repeat(api.max_body_bytes(operation) + 1);
    let (path, method) = (api.path(operation), || operation.method.clone());
    send(api, api.request_without_credentials(operation, method(), &path).body(large()))
        .await
        .assert_problem(413, "request_too_large");
}

/// Asserts that a wrong credential is rejected before the body is parsed.
async fn check_credentials(api: &impl ApiUnderTest, operation: &Operation) {
    if operation.credentials.is_empty() {
        return;
    }
    for WrongCredential { description, request, status, code } in api.wrong_credentials(operation) {
        let response = send(api, request.body("{")).await;
        let actual = (response.status, response.body["code"].as_str());
        assert_eq!(actual, (status, Some(code)), "{} with {description}: {response:?}", operation.id);
    }
}

/// Checks the responses to a body without a media type, and to bodies that are not a JSON object.
async fn check_malformed_bodies(api: &impl ApiUnderTest, operation: &Operation) {
    let call = || api.authorized_request(operation, &api.path(operation));
    send(api, call().body("{}")).await.assert_problem(415, "unsupported_media_type");
    for bad in ["{", "", "[]", "7", "null", "\"{}\"", "{\"a\":1}{", "\u{feff}{}", "{'a':1}", "{\"a\":NaN}"] {
        let call = call().header("content-type", "application/json").body(bad);
        send(api, call).await.assert_problem(400, "invalid_request");
    }
}

async fn check_fields<S: ApiUnderTest>(api: &S, operation: &Operation, schema: &Value) {
    let call = |body: &Value| api.authorized_request(operation, &api.path(operation)).json(body);
    let properties = schema["properties"].as_object().unwrap();
    let constants = properties.iter().filter(|(_, schema)| !schema["const"].is_null());
    let constants: Map<String, Value> =
        constants.map(|(name, schema)| (name.clone(), schema["const"].clone())).collect();
    let required = schema["required"].as_array().into_iter().flatten().map(|name| name.as_str().unwrap());
    for name in required.filter(|name| !constants.contains_key(*name)) {
        let response = send(api, call(&constants.clone().into())).await;
        response.assert_problem(400, "invalid_request");
        assert!(
            response.reports(&format!("/{name}")),
            "{}: the missing {name} is not reported",
            operation.id
        );
    }
    let complete_body = valid_body(api, operation, schema);
    // A body sent by a host may have additional fields at every level.
    let is_extensible = schema["additionalProperties"].is_null();
    for unknown in bodies_with_unknown_fields(schema, &complete_body).into_iter().filter(|_| !is_extensible) {
        let response = send(api, call(&unknown.body)).await;
        response.assert_problem(400, "invalid_request");
        assert_eq!(response.accepted_names(&unknown.pointer), unknown.known_fields, "{}", operation.id);
    }
    let mut differences = Vec::new();
    for mut probe in probes(schema, &complete_body) {
        let is_valid = is_valid(api.contract(), &probe.schema, &probe.value);
        if constants.contains_key(probe.pointer.trim_start_matches('/'))
            || (is_valid && (!S::SCHEMA_IS_COMPLETE || is_extensible))
        {
            continue;
        }
        if is_valid {
            // Add another error, so that the request has no effect.
            probe.body["zz"] = json!(1);
        }
        let response = send(api, call(&probe.body)).await;
        if response.status != 400 || response.reports(&probe.pointer) == is_valid {
            let value = probe.value.to_string().chars().take(80).collect::<String>();
            let (pointer, reported) = (probe.pointer, response.pointers());
            differences.push(format!(
                "{pointer} = {value}: valid according to {}: {is_valid}; reported: {reported:?}",
                probe.schema
            ));
        }
    }
    assert!(
        differences.is_empty(),
        "{} differs from its description:\n{}",
        operation.id,
        differences.join("\n")
    );
}

async fn check_query(api: &impl ApiUnderTest, operation: &Operation) {
    let is_in_query = |parameter: &&Parameter| {
        matches!(parameter.location, ParameterLocation::Query | ParameterLocation::RequiredQuery)
    };
    let parameters: Vec<&Parameter> = operation.parameters.iter().filter(is_in_query).collect();
    if parameters.is_empty() {
        return;
    }
    let request_with = |query: &[(&str, &str)]| {
        let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(query).finish();
        api.authorized_request(operation, &format!("{}?{query}", api.path(operation)))
    };
    let response = send(api, request_with(&[("zz", "1")])).await;
    response.assert_problem(400, "invalid_request");
    let allows_unknown = api.allows_unknown_query(operation);
    if allows_unknown {
        assert!(!response.reports("?zz"), "{response:?}");
    } else {
        let declared: BTreeSet<String> =
            parameters.iter().map(|parameter| parameter.name.to_owned()).collect();
        assert_eq!(response.accepted_names("?zz"), declared, "{}", operation.id);
    }
    let mut differences = Vec::new();
    for Parameter { name, location, schema, .. } in parameters {
        let schema = schema();
        assert_eq!(
            response.reports(&format!("?{name}")),
            *location == ParameterLocation::RequiredQuery,
            "{name}: {response:?}"
        );
        send(api, request_with(&[(name, "1"), (name, "1")])).await.assert_problem(400, "invalid_request");
        for text in sample_strings() {
            let value = match schema["type"].as_str() {
                Some("integer") => text.parse::<u64>().map_or(json!(text), Value::from),
                Some("boolean") => text.parse::<bool>().map_or(json!(text), Value::from),
                _ => json!(text),
            };
            let is_valid = is_valid(api.contract(), &schema, &value);
            let response = send(api, request_with(&[(name, &text), ("zz", "1")])).await;
            let is_refused = response.status == 400 && response.reports(&format!("?{name}"));
            if is_refused == is_valid || (response.status != 400 && !allows_unknown) {
                let text = text.chars().take(80).collect::<String>();
                differences.push(format!("?{name}={text:?}: valid according to {schema}: {is_valid}"));
            }
        }
    }
    assert!(
        differences.is_empty(),
        "{} differs from its description:\n{}",
        operation.id,
        differences.join("\n")
    );
}
