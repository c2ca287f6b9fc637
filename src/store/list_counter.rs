//! An HTTP layer below object_store: counts each request that lists keys. A listing of many keys needs several
//! requests, and the store bills each request.

use std::time::Instant;

use async_trait::async_trait;
use http::{Method, StatusCode};
use object_store::client::{HttpClient, HttpError, HttpRequest, HttpResponse, HttpService};

use svc_base::metrics::{STORE_CALLS, STORE_DURATION};

const CALL_LABEL: &str = "list";

#[derive(Debug)]
pub(super) struct ListCounter {
    pub(super) inner: HttpClient,
}

#[async_trait]
impl HttpService for ListCounter {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if !lists_keys(&request) {
            return self.inner.execute(request).await;
        }
        let start = Instant::now();
        let response = self.inner.execute(request).await;
        STORE_DURATION.record([CALL_LABEL], start.elapsed());
        STORE_CALLS.add_one([CALL_LABEL, outcome_label(response.as_ref().ok().map(HttpResponse::status))]);
        response
    }
}

pub(super) fn lists_keys(request: &HttpRequest) -> bool {
    let query = request.uri().query().unwrap_or_default();
    request.method() == Method::GET && query.split('&').any(|pair| pair == "list-type=2")
}

/// Returns the metric label for a response status; `status` is `None` if there was no response.
fn outcome_label(status: Option<StatusCode>) -> &'static str {
    match status {
        Some(status) if status.is_success() => "ok",
        Some(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => "denied",
        Some(StatusCode::NOT_FOUND) => "not_found",
        Some(_) | None => "unavailable",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write_once::tests::empty_request;

    #[test]
    fn lists_keys_matches_only_listings() {
        let listing = "http://store/b?list-type=2&prefix=user_1%2F";
        assert!(lists_keys(&empty_request(Method::GET, listing)));
        assert!(!lists_keys(&empty_request(Method::GET, "http://store/b/user_1/primary/system/db/latest")));
        assert!(!lists_keys(&empty_request(Method::POST, "http://store/b/x?uploads")));
    }

    #[test]
    fn outcome_label_matches_the_labels_of_other_calls() {
        for (status, expected) in
            [(Some(200), "ok"), (Some(403), "denied"), (Some(503), "unavailable"), (None, "unavailable")]
        {
            let status = status.map(|status| StatusCode::from_u16(status).unwrap());
            assert_eq!(outcome_label(status), expected);
        }
    }
}
