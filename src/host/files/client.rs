//! `svc-sync-agent versions`, `list` and `restore`: commands run by hand that call the gateway over its socket.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use http::StatusCode;
use reqwest::RequestBuilder;
use serde::de::DeserializeOwned;
use serde_json::Value;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::quantity::{format_bytes, pluralize};
use svc_base::stdout::{OutputState, print};
use svc_base::untrusted_text::one_line;
use svc_http::client::{self, Timeouts};
use svc_http::request_id;
use svc_wire::files::{
    FileEntry, FileKind, FileListing, FileRestore, FileRestoreAccepted, FileRestoreResponse, FileVersions,
};

use crate::system::layout::Layout;
use crate::system::platform_response::ProblemBody;
use url::Url;

const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum time without progress. The save before a replacement may take up to ten minutes.
const NO_PROGRESS_TIMEOUT: Duration = Duration::from_secs(900);
/// The gateway's own timeouts are shorter.
const TIMEOUTS: Timeouts =
    Timeouts { connect: Duration::from_secs(5), idle: Duration::from_secs(320), total: None };

struct GatewaySocketClient(reqwest::Client);

impl GatewaySocketClient {
    fn new(layout: &Layout) -> Result<Self, Failure> {
        let socket = layout.gateway_sockets().join("gateway.sock");
        Ok(Self(client::build_for_socket(TIMEOUTS, &socket).or_exit(Exit::Internal)?))
    }

    fn get(&self, path: &str, query: &[(&str, &str)]) -> RequestBuilder {
        let mut url = Url::parse("http://gateway/api/files/").expect("the constant URL is valid");
        url.path_segments_mut().expect("the URL has a path").pop_if_empty().push(path);
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        self.0.get(url)
    }

    async fn send<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, Failure> {
        let response = request_id::attach(request).send().await;
        let response = response
            .context("cannot reach the gateway; run `systemctl status svc-gateway` to see its state")
            .or_exit(Exit::Unavailable)?;
        let status = response.status();
        let body = response
            .bytes()
            .await
            .context("incomplete response from the gateway")
            .or_exit(Exit::Unavailable)?;
        if !status.is_success() {
            return Err(to_failure(status, &body));
        }
        serde_json::from_slice(&body).context("invalid response from the gateway").or_exit(Exit::Unavailable)
    }
}

fn to_failure(status: StatusCode, body: &[u8]) -> Failure {
    let problem = ProblemBody::parse(body);
    let errors = serde_json::from_slice::<Value>(body).ok();
    let errors = errors.as_ref().and_then(|body| body["errors"].as_array()).into_iter().flatten();
    let fields: Vec<String> = errors
        .filter_map(|error| {
            let name = error["pointer"].as_str()?.trim_start_matches(['/', '?']);
            Some(format!("{name} {}", error["detail"].as_str()?))
        })
        .collect();
    let text = if fields.is_empty() { problem.detail } else { fields.join("; ") };
    let exit = match status {
        StatusCode::BAD_REQUEST => Exit::Usage,
        StatusCode::NOT_FOUND | StatusCode::CONFLICT => Exit::Refused,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Exit::Permission,
        _ => Exit::Unavailable,
    };
    Failure::new(exit, anyhow!("{text}"))
}

/// Prints the versions of a file or directory.
///
/// # Errors
/// [`Failure`] if the gateway is unreachable, refuses the request or sends an invalid response, or writing to stdout
/// fails.
pub async fn print_versions(layout: &Layout, path: &str, before: Option<&str>) -> Result<(), Failure> {
    let gateway = GatewaySocketClient::new(layout)?;
    let mut query = vec![("path", path), ("limit", "500")];
    query.extend(before.map(|before| ("before", before)));
    let page: FileVersions = gateway.send(gateway.get("versions", &query)).await?;
    print(&format_versions(&page)).map(|_| ())
}

fn format_versions(page: &FileVersions) -> String {
    let mut text = String::new();
    if page.versions.is_empty() {
        text.push_str(&format!("no saved versions of {}\n", one_line(&page.path)));
    }
    for version in &page.versions {
        let state = version.entry.as_ref().map_or_else(|| "did not exist".to_owned(), format_entry);
        text.push_str(&format!("{}  {}  {state}\n", version.first_saved_at, version.last_saved_at));
    }
    if page.damaged_snapshots > 0 {
        let snapshots = pluralize(page.damaged_snapshots, "damaged snapshot");
        text.push_str(&format!("{snapshots} could not be searched\n"));
    }
    if let Some(before) = &page.next_before {
        text.push_str(&format!("earlier versions: repeat the command with `--before {before}`\n"));
    }
    text
}

fn format_entry(entry: &FileEntry) -> String {
    let size = match entry.kind {
        FileKind::File => format_bytes(entry.size_bytes),
        kind => kind.to_string(),
    };
    format!("{size:>10}  {}  {}", entry.mode, entry.modified_at)
}

/// Lists a directory, or shows a single entry, as of `time`. Without `time`, uses the latest snapshot.
///
/// # Errors
/// [`Failure`] if the gateway is unreachable, refuses the request or sends an invalid response, or writing to stdout
/// fails.
pub async fn print_listing(layout: &Layout, path: &str, time: Option<&str>) -> Result<(), Failure> {
    let gateway = GatewaySocketClient::new(layout)?;
    let mut cursor = 0;
    let mut time = time.map(str::to_owned);
    loop {
        let position = cursor.to_string();
        let mut query = vec![("cursor", position.as_str()), ("path", path)];
        query.extend(time.as_deref().map(|time| ("time", time)));
        let page: FileListing = gateway.send(gateway.get("at", &query)).await?;
        let mut text = String::new();
        if cursor == 0 {
            text.push_str(&format!("{} as of {}\n", one_line(&page.path), page.saved_at));
        }
        let entries = if page.entry.kind == FileKind::Directory { &page.entries } else { &vec![page.entry] };
        for entry in entries {
            let target = entry.target.as_ref().map_or_else(String::new, |target| format!(" -> {target}"));
            let line = format!("{}{target}", entry.name);
            let name = one_line(&line);
            text.push_str(&format!("{}  {name}\n", format_entry(entry)));
        }
        if print(&text)? == OutputState::Closed {
            return Ok(());
        }
        let Some(next) = page.next_cursor else { return Ok(()) };
        // Read the next page from the same snapshot.
        (cursor, time) = (next, Some(page.saved_at.to_string()));
    }
}

/// Requests a restore and waits for it to finish.
///
/// # Errors
/// [`Failure`] if the gateway is unreachable, refuses the request, stays unreachable for `NO_PROGRESS_TIMEOUT` after
/// accepting it, or sends an invalid response; if the restore fails or stalls; or if writing to stdout fails.
pub async fn restore(layout: &Layout, request: &Value) -> Result<(), Failure> {
    let gateway = GatewaySocketClient::new(layout)?;
    let post = gateway.0.post("http://gateway/api/files/restore").json(request);
    let accepted: FileRestoreAccepted = gateway.send(post).await?;
    let (mut last, mut changed_at) = (None, Instant::now());
    loop {
        let is_stalled = changed_at.elapsed() >= NO_PROGRESS_TIMEOUT;
        match gateway.send::<FileRestoreResponse>(gateway.get("restore", &[])).await {
            Ok(response) => {
                let state = response.restore.filter(|state| state.request_id == accepted.request_id);
                if let Some(state) = &state
                    && state.status.has_ended()
                {
                    return print_result(state);
                }
                if state != last {
                    (last, changed_at) = (state, Instant::now());
                } else if is_stalled {
                    let text = "the restore is not making progress; run `systemctl status svc-files-request` \
                                to see its state";
                    return Err(Failure::new(Exit::Unavailable, anyhow!(text)));
                }
            }
            // The gateway may be restarting. The restore doesn't depend on it.
            Err(failure) if failure.exit == Exit::Unavailable && !is_stalled => {}
            Err(Failure { exit, error }) => {
                return Err(Failure::new(
                    exit,
                    error.context("the restore may still be running, but its state is unknown"),
                ));
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn print_result(state: &FileRestore) -> Result<(), Failure> {
    let Some(restored_to) = &state.restored_to else {
        let reason = state.error.as_deref().unwrap_or("the reason is unknown");
        return Err(Failure::new(Exit::Unavailable, anyhow!("the restore failed: {reason}")));
    };
    let at = state.saved_at.as_ref().map_or("an unknown time", |at| at.as_str());
    let mut text = format!("restored to {}, as of {at}\n", one_line(restored_to));
    if let Some(kept_as) = &state.kept_as {
        text.push_str(&format!("the replaced entry is now {}\n", one_line(kept_as)));
    }
    if state.incomplete > 0 {
        let items = pluralize(state.incomplete, "item");
        text.push_str(&format!("the owner, mode, times or attributes of {items} could not be set\n"));
    }
    if let Some(left_out) = &state.error {
        text.push_str(&format!("{}\n", one_line(left_out)));
    }
    print(&text).map(|_| ())
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn restore_keeps_waiting_while_gateway_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        std::fs::create_dir_all(layout.gateway_sockets()).unwrap();
        let listener = UnixListener::bind(layout.gateway_sockets().join("gateway.sock")).unwrap();
        let state = json!({"requestId": "r", "status": "failed", "path": "a", "error": "the disk is full"});
        let responses = [
            ("202 Accepted", json!({"requestId": "r"})),
            ("503 Service Unavailable", json!({})),
            ("200 OK", json!({ "restore": state })),
        ];
        tokio::spawn(async move {
            for (status, body) in responses {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                // The first request ends with a JSON object, the others with their headers.
                let end = if status.starts_with("202") { "}" } else { "\r\n\r\n" };
                while !request.ends_with(end.as_bytes()) {
                    assert!(stream.read_buf(&mut request).await.unwrap() > 0);
                }
                let body = body.to_string();
                let length = body.len();
                let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}");
                stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await.unwrap();
            }
        });
        let failure = restore(&layout, &json!({"path": "a"})).await.unwrap_err();
        assert_eq!(failure.error.to_string(), "the restore failed: the disk is full");
    }
}
