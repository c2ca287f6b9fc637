//! Tests the contract check itself: it accepts a correct response, and detects the defects listed here.

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

fn sample_problem() -> Sample {
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
        "status": 503, "detail": "The database is unreachable or overloaded; try again.", "code": "database_unavailable",
        "requestId": "abc" });
    Sample { path: "/vps/fleet", status: 503, headers, body }
}

fn is_detected(sample: &Sample) -> bool {
    let Sample { path, status, headers, body } = sample;
    let response_body = body.to_string();
    let exchange = Exchange {
        method: &Method::GET,
        path,
        request_body: None,
        status: *status,
        headers,
        response_body: &response_body,
    };
    catch_unwind(AssertUnwindSafe(|| platform().check(&exchange))).is_err()
}

#[test]
fn check_accepts_valid_response_and_detects_defects() {
    assert!(!is_detected(&sample_problem()), "a correct response must pass");
    platform().register_secret("hunter2-in-this-test");
    type AddDefect = fn(&mut Sample);
    let defects: [(&str, AddDefect); 17] = [
        ("a secret", |s| s.body["detail"] = json!("It is hunter2-in-this-test, in fact.")),
        ("SQL", |s| s.body["detail"] = json!("SELECT * FROM user_machines failed.")),
        ("a path", |s| s.body["detail"] = json!("Cannot read /var/lib/svc/tls/key.pem.")),
        ("an address", |s| s.body["detail"] = json!("No response from 10.1.2.3 in time.")),
        ("a panic", |s| s.body["detail"] = json!("thread main panicked at main.rs:5")),
        ("a cause's detail in an extra member", |s| s.body["cause"] = json!("os error 111")),
        ("a detail without content", |s| s.body["detail"] = json!("failed")),
        ("a code that the route does not declare", |s| {
            (s.body["code"], s.body["type"]) = (json!("gone"), json!("urn:svc:problem:gone"));
        }),
        ("a different status in the body", |s| s.body["status"] = json!(500)),
        ("a different request id", |s| s.body["requestId"] = json!("abd")),
        ("no title", |s| _ = s.body.as_object_mut().unwrap().remove("title")),
        ("no Retry-After", |s| _ = s.headers.remove("retry-after")),
        ("no Cache-Control", |s| _ = s.headers.remove("cache-control")),
        ("an undocumented status", |s| {
            s.status = 418;
            s.body["status"] = json!(418);
        }),
        ("an undocumented media type", |s| {
            s.headers.insert("content-type", HeaderValue::from_static("text/plain"));
        }),
        ("an HTML page that is not the product's", |s| {
            s.headers.insert("content-type", HeaderValue::from_static("text/html; charset=utf-8"));
        }),
        ("a success body that violates its schema", |s| {
            s.status = 200;
            s.headers.insert("content-type", HeaderValue::from_static("application/json"));
        }),
    ];
    for (defect, add_defect) in defects {
        let mut sample = sample_problem();
        add_defect(&mut sample);
        assert!(is_detected(&sample), "{defect} is not detected");
    }
}
