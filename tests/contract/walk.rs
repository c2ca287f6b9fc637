//! The wrong ways to call a route that follow from its description, and how each has to be answered.
//!
//! A side says how it is called and with what; the rows are its operations' descriptions.

use std::collections::BTreeSet;

use http::{HeaderMap, Method};
use reqwest::RequestBuilder;
use serde_json::{Map, Value, json};
use svc::http::openapi::{Operation, Parameter, Place};
use url::form_urlencoded;

use super::probe::{is_right, levels, probes, right, strings, variants};
use super::{Contract, Exchange};

/// What came back, already held against the document.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Value,
}

/// A call with a credential that this route does not take.
pub struct Stranger {
    pub what: &'static str,
    pub request: RequestBuilder,
    pub status: u16,
    pub code: &'static str,
}

pub trait Side {
    fn contract(&self) -> &'static Contract;
    /// Of the route that the call is right for.
    fn path(&self, operation: &Operation) -> String;
    fn largest_body(&self, operation: &Operation) -> usize;
    /// Without any credential.
    fn bare(&self, operation: &Operation, method: Method, path: &str) -> RequestBuilder;
    /// With a credential that the route takes.
    fn known(&self, operation: &Operation, path: &str) -> RequestBuilder;
    fn strangers(&self, operation: &Operation) -> Vec<Stranger>;
    /// A member's value that has to mean something here.
    fn own(&self, operation: &Operation, name: &str) -> Option<Value>;
    /// Whether the query may hold what nobody asked for, as where a browser is sent by others.
    fn takes_others(&self, _: &Operation) -> bool {
        false
    }
    /// Whether the schema says all that is said of a body without looking at what is stored.
    const SCHEMA_IS_ALL: bool = true;
}

impl Reply {
    #[track_caller]
    pub fn assert_problem(&self, status: u16, code: &str) {
        assert_eq!((self.status, self.body["code"].as_str()), (status, Some(code)), "{self:?}");
    }

    /// The fields that it says are wrong.
    pub fn pointers(&self) -> BTreeSet<String> {
        let errors = self.body["errors"].as_array().cloned().unwrap_or_default();
        errors.iter().map(|error| error["pointer"].as_str().unwrap().to_owned()).collect()
    }

    fn names(&self, pointer: &str) -> bool {
        let inside = format!("{pointer}/");
        self.pointers().iter().any(|named| named == pointer || named.starts_with(&inside))
    }

    /// The names that it says it takes, where it refuses one that it does not know.
    fn takes_instead_of(&self, pointer: &str) -> BTreeSet<String> {
        let errors = self.body["errors"].as_array().cloned().unwrap_or_default();
        let error = errors.iter().find(|error| error["pointer"] == pointer);
        let error = error.unwrap_or_else(|| panic!("{pointer} is not named: {self:?}"));
        let takes = error["detail"].as_str().unwrap().split_once("it takes ").map_or("", |(_, takes)| takes);
        takes.split(", ").filter(|name| !name.is_empty()).map(str::to_owned).collect()
    }
}

impl Contract {
    /// Sends a request and looks at the answer.
    pub async fn send(&self, request: RequestBuilder) -> anyhow::Result<Reply> {
        let (client, request) = request.build_split();
        let request = request?;
        let (method, path) = (request.method().clone(), request.url().path().to_owned());
        let is_json = request.headers().get("content-type").is_some_and(|kind| kind == "application/json");
        let sent = request.body().and_then(reqwest::Body::as_bytes).filter(|_| is_json).map(<[u8]>::to_vec);
        let response = client.execute(request).await?;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        // A stream of events has no end.
        let is_stream = headers.get("content-type").is_some_and(|kind| kind == "text/event-stream");
        let text = if is_stream { String::new() } else { response.text().await? };
        let (sent, headers_of) = (sent.as_deref(), &headers);
        self.check(&Exchange {
            method: &method,
            path: &path,
            sent,
            status,
            headers: headers_of,
            text: &text,
        });
        let body = serde_json::from_str(&text).unwrap_or_default();
        Ok(Reply { status, headers, body })
    }
}

async fn send(side: &impl Side, request: RequestBuilder) -> Reply {
    side.contract().send(request).await.unwrap_or_else(|error| panic!("{error:#}"))
}

/// A call of an operation with a right body.
pub fn right_call(side: &impl Side, operation: &Operation) -> RequestBuilder {
    let needed = operation.parameters.iter().filter(|one| one.place == Place::QueryNeeded);
    let known = needed.filter_map(|one| Some((one.name, side.own(operation, one.name)?)));
    let text = |value: Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let query = form_urlencoded::Serializer::new(String::new())
        .extend_pairs(known.map(|(name, value)| (name, text(value))))
        .finish();
    let path = side.path(operation);
    let path = if query.is_empty() { path } else { format!("{path}?{query}") };
    let call = side.known(operation, &path);
    match operation.body {
        Some(body) => call.json(&right_body(side, operation, &variants(&body())[0])),
        None => call,
    }
}

pub fn right_body(side: &impl Side, operation: &Operation, schema: &Value) -> Value {
    let mut body = right(side.contract(), schema, &|name| side.own(operation, name));
    // Of those that exclude each other, the first.
    for other in schema["oneOf"].as_array().into_iter().flatten().skip(1) {
        for name in other["required"].as_array().into_iter().flatten() {
            body.as_object_mut().unwrap().shift_remove(name.as_str().unwrap());
        }
    }
    body
}

/// All of them.
pub async fn wrong_ways(side: &impl Side, operation: &Operation) {
    methods(side, operation).await;
    sizes(side, operation).await;
    credentials(side, operation).await;
    if let Some(body) = operation.body {
        texts(side, operation).await;
        for schema in variants(&body()) {
            fields(side, operation, &schema).await;
        }
    }
    queries(side, operation).await;
}

/// The method is judged before anything else.
async fn methods(side: &impl Side, operation: &Operation) {
    let large = "x".repeat(side.largest_body(operation) + 1);
    let path = side.path(operation);
    let answer = send(side, side.bare(operation, Method::PATCH, &path).body(large)).await;
    answer.assert_problem(405, "method_not_allowed");
    let allow = answer.headers["allow"].to_str().unwrap();
    assert!(allow.split(',').any(|method| method.trim() == operation.method.as_str()), "{path}: {allow}");
}

/// The size is judged before the credential.
async fn sizes(side: &impl Side, operation: &Operation) {
    if operation.credentials.is_empty() {
        return;
    }
    let large = || "x".repeat(side.largest_body(operation) + 1);
    let (path, method) = (side.path(operation), || operation.method.clone());
    send(side, side.bare(operation, method(), &path).body(large()))
        .await
        .assert_problem(413, "request_too_large");
}

/// The credential is judged before the body.
async fn credentials(side: &impl Side, operation: &Operation) {
    if operation.credentials.is_empty() {
        return;
    }
    for Stranger { what, request, status, code } in side.strangers(operation) {
        let answer = send(side, request.body("{")).await;
        let got = (answer.status, answer.body["code"].as_str());
        assert_eq!(got, (status, Some(code)), "{} by {what}: {answer:?}", operation.id);
    }
}

/// What is no JSON object.
async fn texts(side: &impl Side, operation: &Operation) {
    let call = || side.known(operation, &side.path(operation));
    send(side, call().body("{}")).await.assert_problem(415, "unsupported_media_type");
    for bad in ["{", "", "[]", "7", "null", "\"{}\"", "{\"a\":1}{", "\u{feff}{}", "{'a':1}", "{\"a\":NaN}"] {
        let call = call().header("content-type", "application/json").body(bad);
        send(side, call).await.assert_problem(400, "invalid_request");
    }
}

async fn fields<S: Side>(side: &S, operation: &Operation, schema: &Value) {
    let call = |body: &Value| side.known(operation, &side.path(operation)).json(body);
    let properties = schema["properties"].as_object().unwrap();
    let constants = properties.iter().filter(|(_, of)| !of["const"].is_null());
    let constants: Map<String, Value> =
        constants.map(|(name, of)| (name.clone(), of["const"].clone())).collect();
    let required = schema["required"].as_array().into_iter().flatten().map(|name| name.as_str().unwrap());
    for name in required.filter(|name| !constants.contains_key(*name)) {
        let answer = send(side, call(&constants.clone().into())).await;
        answer.assert_problem(400, "invalid_request");
        assert!(answer.names(&format!("/{name}")), "{}: {name} is missed by nobody", operation.id);
    }
    let whole = right_body(side, operation, schema);
    // A host's body may say more than is described, at every level.
    let is_extensible = schema["additionalProperties"].is_null();
    for level in levels(schema, &whole).into_iter().filter(|_| !is_extensible) {
        let answer = send(side, call(&level.body)).await;
        answer.assert_problem(400, "invalid_request");
        assert_eq!(answer.takes_instead_of(&level.pointer), level.known, "{}", operation.id);
    }
    let mut differ = Vec::new();
    for mut probe in probes(schema, &whole) {
        let is_right = is_right(side.contract(), &probe.schema, &probe.value);
        if constants.contains_key(probe.pointer.trim_start_matches('/'))
            || (is_right && (!S::SCHEMA_IS_ALL || is_extensible))
        {
            continue;
        }
        if is_right {
            // One thing is wrong in any case, so that nothing is done.
            probe.body["zz"] = json!(1);
        }
        let answer = send(side, call(&probe.body)).await;
        if answer.status != 400 || answer.names(&probe.pointer) == is_right {
            let value = probe.value.to_string().chars().take(80).collect::<String>();
            let at = probe.pointer;
            let named = answer.pointers();
            differ.push(format!("{at} = {value}: right by {} is {is_right}; named {named:?}", probe.schema));
        }
    }
    assert!(differ.is_empty(), "{} is not as described:\n{}", operation.id, differ.join("\n"));
}

async fn queries(side: &impl Side, operation: &Operation) {
    let of_query = |one: &&Parameter| matches!(one.place, Place::Query | Place::QueryNeeded);
    let parameters: Vec<&Parameter> = operation.parameters.iter().filter(of_query).collect();
    if parameters.is_empty() {
        return;
    }
    let ask = |query: &[(&str, &str)]| {
        let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(query).finish();
        side.known(operation, &format!("{}?{query}", side.path(operation)))
    };
    let answer = send(side, ask(&[("zz", "1")])).await;
    answer.assert_problem(400, "invalid_request");
    let others = side.takes_others(operation);
    if others {
        assert!(!answer.names("?zz"), "{answer:?}");
    } else {
        let said: BTreeSet<String> = parameters.iter().map(|one| one.name.to_owned()).collect();
        assert_eq!(answer.takes_instead_of("?zz"), said, "{}", operation.id);
    }
    let mut differ = Vec::new();
    for Parameter { name, place, schema, .. } in parameters {
        let schema = schema();
        assert_eq!(answer.names(&format!("?{name}")), *place == Place::QueryNeeded, "{name}: {answer:?}");
        send(side, ask(&[(name, "1"), (name, "1")])).await.assert_problem(400, "invalid_request");
        for text in strings() {
            let value = match schema["type"].as_str() {
                Some("integer") => text.parse::<u64>().map_or(json!(text), Value::from),
                Some("boolean") => text.parse::<bool>().map_or(json!(text), Value::from),
                _ => json!(text),
            };
            let is_right = is_right(side.contract(), &schema, &value);
            let answer = send(side, ask(&[(name, &text), ("zz", "1")])).await;
            let refused = answer.status == 400 && answer.names(&format!("?{name}"));
            if refused == is_right || (answer.status != 400 && !others) {
                let text = text.chars().take(80).collect::<String>();
                differ.push(format!("?{name}={text:?}: right by {schema} is {is_right}"));
            }
        }
    }
    assert!(differ.is_empty(), "{} is not as described:\n{}", operation.id, differ.join("\n"));
}
