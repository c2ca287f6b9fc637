//! The look at an answer is itself tried: a good one passes, and each way of spoiling it is noticed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use http::{HeaderMap, HeaderName, HeaderValue, Method};
use serde_json::{Value, json};

use super::{Exchange, platform};

struct Sample {
    path: &'static str,
    status: u16,
    headers: HeaderMap,
    body: Value,
}

fn refusal() -> Sample {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("content-type", "application/problem+json"),
        ("cache-control", "no-store"),
        ("x-request-id", "abc"),
        ("retry-after", "5"),
    ] {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    let body = json!({ "type": "urn:svc:problem:database_unavailable", "title": "Database unavailable",
        "status": 503, "detail": "The database cannot take this now.", "code": "database_unavailable",
        "requestId": "abc" });
    Sample { path: "/vps/fleet", status: 503, headers, body }
}

fn is_noticed(sample: &Sample) -> bool {
    let Sample { path, status, headers, body } = sample;
    let text = body.to_string();
    let exchange = Exchange { method: &Method::GET, path, sent: None, status: *status, headers, text: &text };
    catch_unwind(AssertUnwindSafe(|| platform().check(&exchange))).is_err()
}

#[test]
fn a_spoiled_answer_is_noticed() {
    assert!(!is_noticed(&refusal()), "a good one passes");
    platform().plant("hunter2-in-this-test");
    type Spoil = fn(&mut Sample);
    let spoil: [(&str, Spoil); 16] = [
        ("a secret", |s| s.body["detail"] = json!("It is hunter2-in-this-test, in fact.")),
        ("SQL", |s| s.body["detail"] = json!("SELECT * FROM user_machines failed.")),
        ("a path", |s| s.body["detail"] = json!("Cannot read /var/lib/svc/tls/key.pem.")),
        ("an address", |s| s.body["detail"] = json!("No answer from 10.1.2.3 in time.")),
        ("a panic", |s| s.body["detail"] = json!("thread main panicked at main.rs:5")),
        ("the detail of a cause beside", |s| s.body["cause"] = json!("os error 111")),
        ("nothing to read", |s| s.body["detail"] = json!("failed")),
        ("a code that the route does not name", |s| {
            (s.body["code"], s.body["type"]) = (json!("gone"), json!("urn:svc:problem:gone"));
        }),
        ("another status inside", |s| s.body["status"] = json!(500)),
        ("another id", |s| s.body["requestId"] = json!("abd")),
        ("no title", |s| _ = s.body.as_object_mut().unwrap().remove("title")),
        ("no time to come back", |s| _ = s.headers.remove("retry-after")),
        ("a cache", |s| _ = s.headers.remove("cache-control")),
        ("a status that is not described", |s| {
            s.status = 418;
            s.body["status"] = json!(418);
        }),
        ("another media type", |s| {
            s.headers.insert("content-type", HeaderValue::from_static("text/plain"));
        }),
        ("a success that is not as described", |s| {
            s.status = 200;
            s.headers.insert("content-type", HeaderValue::from_static("application/json"));
        }),
    ];
    for (what, spoil) in spoil {
        let mut sample = refusal();
        spoil(&mut sample);
        assert!(is_noticed(&sample), "{what} is not noticed");
    }
}
