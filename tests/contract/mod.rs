//! What routes say of themselves, held against every answer that a test gets: status, code, media type, schema, the
//! headers that go with a refusal, and that it tells nothing of what lies behind.
//!
//! The rows of the table-driven tests come from the same descriptions, so a new route is tried without a line here; what
//! it needs is a way to provoke each code that it names.

mod broken;
mod leak;
mod probe;
mod readme;
mod walk;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, LazyLock, Mutex};

use http::{HeaderMap, Method};
use jsonschema::Validator;
use serde_json::Value;
use svc::http::openapi::Operation;

pub use probe::variants;
pub use walk::{Reply, Side, Stranger, right_body, right_call, wrong_ways};

/// One side's document with its operations.
pub struct Contract {
    document: Value,
    operations: Vec<&'static Operation>,
    validators: Mutex<HashMap<String, Arc<Validator>>>,
    /// Operation and code of every refusal so far.
    seen: Mutex<BTreeSet<(&'static str, String)>>,
    planted: Mutex<Vec<String>>,
}

/// A request and what came of it.
pub struct Exchange<'a> {
    pub method: &'a Method,
    pub path: &'a str,
    /// The body that was sent as JSON.
    pub sent: Option<&'a [u8]>,
    pub status: u16,
    pub headers: &'a HeaderMap,
    pub text: &'a str,
}

pub fn platform() -> &'static Contract {
    static PLATFORM: LazyLock<Contract> = LazyLock::new(|| {
        let own = svc::platform::api::ENDPOINTS.iter().map(|endpoint| &endpoint.operation);
        let public = svc::platform::router::ROUTES.iter().map(|own| &own.operation);
        Contract::of(svc::platform::api::description(), own.chain(public).collect())
    });
    &PLATFORM
}

pub fn gateway() -> &'static Contract {
    static GATEWAY: LazyLock<Contract> = LazyLock::new(|| {
        let operations = svc::host::gateway::ENDPOINTS.iter().map(|endpoint| &endpoint.operation);
        Contract::of(svc::host::gateway::description(), operations.collect())
    });
    &GATEWAY
}

impl Contract {
    fn of(document: Value, operations: Vec<&'static Operation>) -> Self {
        Self {
            document,
            operations,
            validators: Mutex::default(),
            seen: Mutex::default(),
            planted: Mutex::default(),
        }
    }

    pub fn document(&self) -> &Value {
        &self.document
    }

    /// A secret, or a text of an inner part, that no refusal may hold.
    pub fn plant(&self, secret: &str) {
        self.planted.lock().unwrap().push(secret.to_owned());
    }

    /// Looks at an answer; one of a path that is nobody's is only looked at as a refusal.
    #[track_caller]
    pub fn check(&self, exchange: &Exchange<'_>) {
        let Exchange { status, headers, text, path, .. } = *exchange;
        let media_type = headers.get("content-type").map_or("", |kind| kind.to_str().unwrap());
        let media_type = media_type.split(';').next().unwrap().trim();
        if media_type == "application/problem+json" {
            self.check_problem(exchange);
        }
        let asked = if *exchange.method == Method::HEAD { &Method::GET } else { exchange.method };
        let here: Vec<_> = self.operations.iter().filter(|one| fits(one.path, path)).collect();
        let least = here.iter().map(|one| one.path.matches('{').count()).min().unwrap_or(0);
        let here = here.into_iter().filter(|one| one.path.matches('{').count() == least);
        let first = here.clone().next();
        let Some(operation) = here.clone().find(|one| one.method == *asked).or(first) else {
            return;
        };
        let id = operation.id;
        let shown = || format!("{id}: {} {path} → {status} {headers:?}\n{text}", exchange.method);
        if operation.method != *asked {
            assert_eq!(status, 405, "{}", shown());
        }
        if media_type == "application/problem+json" {
            let code = serde_json::from_str::<Value>(text).unwrap()["code"].as_str().unwrap().to_owned();
            // A method that a path does not take is refused in the name of all that it takes.
            let spoken_for = here.filter(|_| status == 405).map(|one| one.id).chain([id]);
            self.seen.lock().unwrap().extend(spoken_for.map(|id| (id, code.clone())));
        }
        let path = operation.path.replace("{*", "{");
        let said = &self.document["paths"][path][operation.method.as_str().to_ascii_lowercase()];
        let answer = &said["responses"][status.to_string()];
        assert!(answer.is_object(), "this status is not described: {}", shown());
        if *exchange.method == Method::HEAD {
            return;
        }
        let Some(kinds) = answer["content"].as_object() else {
            assert!(text.is_empty(), "a body that is not described: {}", shown());
            return;
        };
        let own = kinds.get(media_type).or_else(|| kinds.get("*/*"));
        // A person gets a page instead, and a file is of its own kind.
        let other = matches!(media_type, "text/html") || kinds.contains_key("application/octet-stream");
        assert!(own.is_some() || other, "this media type is not described: {}", shown());
        if let Some(schema) = own.map(|own| &own["schema"]).filter(|schema| schema.is_object()) {
            let body = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {}", shown()));
            self.assert_fits(schema, &body, &shown());
        }
        let schema = &said["requestBody"]["content"]["application/json"]["schema"];
        if let Some(sent) = exchange.sent.filter(|_| status < 300 && schema.is_object()) {
            let sent = serde_json::from_slice(sent).unwrap();
            self.assert_fits(schema, &sent, &format!("{id} took a request that is not as described: {sent}"));
        }
    }

    #[track_caller]
    fn check_problem(&self, exchange: &Exchange<'_>) {
        let Exchange { status, headers, text, .. } = *exchange;
        let shown = || format!("{} {} → {status} {headers:?}\n{text}", exchange.method, exchange.path);
        let has = |name: &str| headers.contains_key(name);
        let body: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("{}", shown()));
        assert_eq!(body["status"], status, "{}", shown());
        assert_eq!(headers["x-request-id"], body["requestId"].as_str().unwrap(), "{}", shown());
        assert_eq!(body["type"], format!("urn:svc:problem:{}", body["code"].as_str().unwrap()));
        assert_eq!(headers["cache-control"], "no-store", "{}", shown());
        assert_eq!(has("www-authenticate"), status == 401, "{}", shown());
        assert_eq!(has("allow"), status == 405, "{}", shown());
        let again = status == 429 || (status == 503 && body["code"] != "disabled");
        assert!(has("retry-after") || !again, "{}", shown());
        let detail = body["detail"].as_str().unwrap();
        assert!(detail.len() > 10 && detail.is_char_boundary(1), "says nothing: {}", shown());
        let planted = self.planted.lock().unwrap();
        if let Some(leak) = leak::find(text, &planted) {
            panic!("tells {leak:?}: {}", shown());
        }
    }

    #[track_caller]
    fn assert_fits(&self, schema: &Value, value: &Value, what: &str) {
        let validator = self.validator(schema);
        let wrong: Vec<String> =
            validator.iter_errors(value).map(|e| format!("{} {e}", e.instance_path())).collect();
        assert!(wrong.is_empty(), "{wrong:?}\nin {what}");
    }

    /// A schema of this document, ready to be used.
    pub fn validator(&self, schema: &Value) -> Arc<Validator> {
        let mut known = self.validators.lock().unwrap();
        let made = known.entry(schema.to_string()).or_insert_with(|| {
            let mut whole = schema.clone();
            whole["components"] = self.document["components"].clone();
            let options = jsonschema::options().should_validate_formats(true);
            Arc::new(options.build(&whole).unwrap_or_else(|error| panic!("{error}: {schema}")))
        });
        made.clone()
    }

    /// What these operations say that they can answer and has not been seen, but for what `excused` names, by
    /// operation (or `*`) and code, and for what is seen on some days only: `seldom`.
    pub fn unseen(
        &self,
        operations: &[&'static Operation],
        excused: &[(&str, &str)],
        seldom: &[(&str, &str)],
    ) -> Vec<String> {
        let seen = self.seen.lock().unwrap();
        let mut unseen = Vec::new();
        for operation in operations {
            for code in operation.codes() {
                let (id, code) = (operation.id, code.as_str());
                let is_excused = excused.iter().any(|(of, what)| (*of == "*" || *of == id) && *what == code);
                if seldom.contains(&(id, code)) {
                    continue;
                }
                match (seen.contains(&(id, code.to_owned())), is_excused) {
                    (false, false) => unseen.push(format!("{id}: {code} was never seen")),
                    (true, true) if excused.contains(&(id, code)) => {
                        unseen.push(format!("{id}: {code} was seen, and needs no excuse"));
                    }
                    _ => {}
                }
            }
        }
        unseen
    }
}

/// Whether a path is one of a template's.
fn fits(template: &str, path: &str) -> bool {
    let (mut said, mut given) = (template.split('/'), path.split('/'));
    loop {
        match (said.next(), given.next()) {
            (None, None) => return true,
            (Some(part), Some(_)) if part.starts_with("{*") => return true,
            (Some(part), Some(own)) if part.starts_with('{') && !own.is_empty() => {}
            (Some(part), Some(own)) if part == own => {}
            _ => return false,
        }
    }
}

/// The document by itself: whole, and as its standard says.
#[track_caller]
pub fn assert_whole(contract: &Contract) {
    let document = contract.document();
    assert_eq!(document["openapi"], "3.1.0");
    let ids: BTreeSet<&str> = contract.operations.iter().map(|operation| operation.id).collect();
    assert_eq!(ids.len(), contract.operations.len(), "each operation has an id of its own");
    for operation in &contract.operations {
        let place = operation.parameters.iter().filter(|one| one.place == svc::http::openapi::Place::Path);
        let said: BTreeSet<&str> = place.map(|parameter| parameter.name).collect();
        let parts = operation.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        let parts: BTreeSet<&str> = parts.map(|part| part.trim_start_matches('*')).collect();
        assert_eq!(parts, said, "{}", operation.id);
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
fn a_template_takes_its_own_paths_alone() {
    for (template, path, fit) in [
        ("/vps/{id}", "/vps/7", true),
        ("/vps/{id}", "/vps/", false),
        ("/vps/{id}", "/vps/7/x", false),
        ("/apps/{slug}/", "/apps/a/", true),
        ("/apps/{slug}/{*path}", "/apps/a/b/c", true),
        ("/apps/{slug}", "/apps/a/", false),
    ] {
        assert_eq!(fits(template, path), fit, "{template} {path}");
    }
}
