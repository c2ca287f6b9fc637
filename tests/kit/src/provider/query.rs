//! Parses the API's query strings and renders list pages.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::HeaderValue;
use http::header::LINK;
use serde_json::{Map, Value, json};
use url::form_urlencoded;

use super::error_response::ErrorResponse;

const DEFAULT_PAGE_SIZE: usize = 25;
const MAX_PAGE_SIZE: usize = 50;

/// Query parameters; some can have several values.
pub(super) struct Query {
    pairs: Vec<(String, String)>,
}

impl Query {
    pub(super) fn parse(raw: Option<&str>) -> Self {
        let pairs = form_urlencoded::parse(raw.unwrap_or_default().as_bytes());
        Self { pairs: pairs.map(|(name, value)| (name.into_owned(), value.into_owned())).collect() }
    }

    pub(super) fn first(&self, name: &str) -> Option<&str> {
        self.all(name).next()
    }

    pub(super) fn all<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a str> {
        self.pairs.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Whether the parameter is absent or has this value among its values.
    pub(super) fn allows(&self, name: &str, value: &str) -> bool {
        self.first(name).is_none() || self.all(name).any(|allowed| allowed == value)
    }

    fn number(&self, name: &'static str, default: usize) -> Result<usize, ErrorResponse> {
        let Some(text) = self.first(name) else { return Ok(default) };
        text.parse().map_err(|_| ErrorResponse::invalid(name, "is not a number"))
    }

    /// Renders the requested page of a list, with its `meta.pagination` and `Link` header.
    pub(super) fn render_page(
        &self,
        path: &str,
        list_name: &str,
        entries: Vec<Value>,
    ) -> Result<Response, ErrorResponse> {
        let page = self.number("page", 1)?.max(1);
        let per_page = self.number("per_page", DEFAULT_PAGE_SIZE)?.clamp(1, MAX_PAGE_SIZE);
        let total = entries.len();
        let last = total.div_ceil(per_page).max(1);
        let (previous, next) = ((page > 1).then(|| page - 1), (page < last).then(|| page + 1));
        let items: Vec<Value> = entries.into_iter().skip((page - 1) * per_page).take(per_page).collect();
        let pagination = json!({
            "page": page, "per_page": per_page, "previous_page": previous, "next_page": next,
            "last_page": last, "total_entries": total,
        });
        let body: Map<String, Value> = [
            (list_name.to_owned(), Value::from(items)),
            ("meta".to_owned(), json!({"pagination": pagination})),
        ]
        .into_iter()
        .collect();
        let links = [(previous, "prev"), (next, "next"), (Some(last), "last")];
        let links = links.into_iter().filter_map(|(page, relation)| {
            Some(format!("<{}>; rel=\"{relation}\"", self.link(path, page?, per_page)))
        });
        let links = links.collect::<Vec<_>>().join(", ");
        let mut response = Json(body).into_response();
        if let Ok(links) = HeaderValue::try_from(links) {
            response.headers_mut().insert(LINK, links);
        }
        Ok(response)
    }

    fn link(&self, path: &str, page: usize, per_page: usize) -> String {
        let mut query = form_urlencoded::Serializer::new(String::new());
        for (name, value) in self.pairs.iter().filter(|(name, _)| name != "page" && name != "per_page") {
            query.append_pair(name, value);
        }
        query.append_pair("page", &page.to_string()).append_pair("per_page", &per_page.to_string());
        format!("{path}?{}", query.finish())
    }
}
