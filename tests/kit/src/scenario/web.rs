//! HTTP requests with and without an owner's identity: through the router like a browser, or directly to a host.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use reqwest::{Certificate, Client, StatusCode};
use serde_json::{Value, json};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);

/// A client for one of the router's hosts. It resolves the host's name to the router and trusts the test CA.
pub struct WebClient {
    client: Client,
    base: String,
}

/// A complete response.
#[derive(Debug)]
pub struct WebResponse {
    pub status: StatusCode,
    pub content_type: String,
    pub retry_after: Option<String>,
    pub body: String,
}

impl WebClient {
    pub fn new(root_pem: &str, scheme: &str, host: &str, router: SocketAddr) -> Result<Self> {
        let root = Certificate::from_pem(root_pem.as_bytes())?;
        let client = Client::builder()
            .tls_certs_only([root])
            .resolve(host, router)
            .redirect(reqwest::redirect::Policy::none())
            .timeout(REQUEST_TIMEOUT)
            .no_proxy()
            .build()?;
        Ok(Self { client, base: format!("{scheme}://{host}:{}", router.port()) })
    }

    /// Builds a request without sending it.
    pub fn request(&self, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
        self.client.request(method, format!("{}{path}", self.base))
    }

    pub async fn get(&self, path: &str, bearer: Option<&str>, accept: &str) -> Result<WebResponse> {
        let mut request = self.client.get(format!("{}{path}", self.base)).header("accept", accept);
        if let Some(bearer) = bearer {
            request = request.bearer_auth(bearer);
        }
        send(request).await
    }

    /// Requests a WebSocket upgrade, and returns the response status.
    pub async fn request_web_socket(&self, path: &str, bearer: &str) -> Result<StatusCode> {
        let request = self
            .client
            .get(format!("{}{path}", self.base))
            .bearer_auth(bearer)
            .header("connection", "upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
            .header("origin", &self.base);
        Ok(request.send().await.context("cannot request a WebSocket")?.status())
    }

    /// Calls the bridge as the owner through the router, and returns the response's `data`.
    pub async fn call_bridge(&self, bearer: &str, call: &Value) -> Result<Value> {
        let request =
            self.client.post(format!("{}/api/bridge/query", self.base)).bearer_auth(bearer).json(call);
        let response = send(request).await?;
        ensure!(
            response.status.is_success(),
            "POST /api/bridge/query through the app host: {}: {}",
            response.status,
            response.excerpt()
        );
        let mut body: Value = response.json()?;
        Ok(body["data"].take())
    }

    /// Inserts a note; returns its row.
    pub async fn insert_note(&self, bearer: &str, title: &str) -> Result<Value> {
        let data = json!({"title": title, "body": "from the demo", "pinned": false, "rank": 7});
        self.call_bridge(bearer, &json!({"action": "insert", "app": "notes", "table": "notes", "data": data}))
            .await
    }

    /// Returns the titles of all notes, sorted.
    pub async fn list_titles(&self, bearer: &str) -> Result<Vec<String>> {
        let rows =
            self.call_bridge(bearer, &json!({"action": "find", "app": "notes", "table": "notes"})).await?;
        let rows = rows.as_array().with_context(|| format!("find did not return rows: {rows}"))?;
        let mut titles: Vec<String> =
            rows.iter().filter_map(|row| Some(row["title"].as_str()?.to_owned())).collect();
        titles.sort();
        Ok(titles)
    }
}

impl WebResponse {
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.body).with_context(|| format!("not JSON: {}", self.excerpt()))
    }

    pub fn excerpt(&self) -> String {
        self.body.chars().take(300).collect()
    }
}

/// Sends a GET request directly to a host, with or without a credential. Accepts any certificate.
pub async fn get_from_host(ip: Ipv4Addr, port: u16, path: &str, bearer: Option<&str>) -> Result<WebResponse> {
    let client = Client::builder()
        .tls_danger_accept_invalid_certs(true)
        .timeout(REQUEST_TIMEOUT)
        .no_proxy()
        .build()?;
    let host = SocketAddr::new(IpAddr::V4(ip), port);
    let mut request = client.get(format!("https://{host}{path}"));
    if let Some(bearer) = bearer {
        request = request.bearer_auth(bearer);
    }
    send(request).await
}

async fn send(request: reqwest::RequestBuilder) -> Result<WebResponse> {
    let response = request.send().await?;
    let header = |name: &str| Some(response.headers().get(name)?.to_str().ok()?.to_owned());
    let (status, content_type, retry_after) =
        (response.status(), header("content-type").unwrap_or_default(), header("retry-after"));
    Ok(WebResponse { status, content_type, retry_after, body: response.text().await? })
}
