//! The issuer's HTTP endpoints.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::extract::{Query, State as StateExtractor};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::get;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::{Alg, MintOptions, State, mint};

pub(super) const JWKS_PATH: &str = "/.well-known/jwks.json";

pub(super) async fn serve(state: Arc<State>, stream: TcpStream) {
    let router = Router::new()
        .route("/.well-known/openid-configuration", get(discovery))
        .route(JWKS_PATH, get(jwks))
        .route("/mint", get(mint_by_query))
        .with_state(state);
    let service = TowerToHyperService::new(router);
    // A connection's errors affect only its client.
    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await.ok();
}

async fn discovery(headers: HeaderMap) -> Json<Value> {
    let issuer = issuer(&headers);
    Json(json!({
        "issuer": issuer,
        "jwks_uri": format!("{issuer}{JWKS_PATH}"),
        "response_types_supported": ["code"],
        "subject_types_supported": ["public"],
        "id_token_signing_alg_values_supported": Alg::ALL.map(Alg::name),
    }))
}

async fn jwks(StateExtractor(state): StateExtractor<Arc<State>>) -> Response {
    state.jwks_fetches.fetch_add(1, Ordering::SeqCst);
    let status = *state.jwks_status.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    match StatusCode::from_u16(status) {
        Ok(StatusCode::OK) => Json(state.keys().jwks()).into_response(),
        status => status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR).into_response(),
    }
}

#[derive(Deserialize)]
struct MintQuery {
    sub: String,
    ttl: Option<i64>,
    aud: Option<String>,
    azp: Option<String>,
    alg: Option<String>,
}

async fn mint_by_query(
    StateExtractor(state): StateExtractor<Arc<State>>,
    headers: HeaderMap,
    Query(query): Query<MintQuery>,
) -> Result<String, (StatusCode, &'static str)> {
    let mut options = MintOptions { azp: query.azp, ..MintOptions::default() };
    options.ttl_seconds = query.ttl.unwrap_or(options.ttl_seconds);
    options.aud = query.aud.map(Value::from).or(options.aud);
    if let Some(name) = query.alg {
        options.alg =
            Alg::from_name(&name).ok_or((StatusCode::BAD_REQUEST, "alg must be EdDSA, ES256 or RS256"))?;
    }
    Ok(mint::mint(&state.keys(), &issuer(&headers), &query.sub, &options))
}

// Derives the issuer's URL from the `Host` header: the issuer listens on a single address, so all clients send the same
// header.
fn issuer(headers: &HeaderMap) -> String {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    format!("http://{host}")
}
