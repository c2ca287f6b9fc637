//! Checks the gateway's own routes: health, the bridge's schemas, icons, and the removed legacy route.

use std::collections::HashSet;

use http::StatusCode;
use serde_json::json;

use super::host_client::HostClient;
use super::responses::{AppList, Readiness, SchemaList};
use svc_base::diagnosis::Findings;
use svc_base::quantity::pluralize;

const JOURNAL_HINT: &str = "run `journalctl -u svc-gateway -n 50` on the host";
/// Maximum number of problems that one check reports.
const MAX_PROBLEMS: usize = 20;

/// Checks that the gateway is ready and that its database responds.
pub async fn check_health(host: &HostClient) -> Findings {
    let findings = Findings::new("gateway-health");
    let response = match host.get(&host.url("/readyz"), "application/json").await {
        Ok(response) => response,
        Err(reason) => return findings.problem(reason, JOURNAL_HINT),
    };
    let Readiness { status, database, apps, .. } = response.json().unwrap_or_default();
    if response.status.is_success() && status == "ready" && database == "ok" {
        return findings.ok("ready, and its database responds");
    }
    let what = format!("/readyz: {}: database {database:?}, apps {apps:?}", response.status);
    findings.problem(what, JOURNAL_HINT)
}

/// Fetches the address of the database server to which the gateway is connected. The gateway reports it only on the
/// trusted socket. `None` if the request fails or the response lacks the address.
pub async fn fetch_database_server(host: &HostClient) -> Option<String> {
    let response = host.get(&host.url("/readyz"), "application/json").await.ok()?;
    response.json::<Readiness>().ok()?.server
}

/// Checks that the bridge lists the schema of every app that declares tables, and that no app has an error.
pub async fn check_schemas(host: &HostClient) -> Findings {
    let findings = Findings::new("bridge-schemas");
    let (schemas, apps) = match (fetch_schemas(host).await, fetch_apps(host).await) {
        (Ok(schemas), Ok(apps)) => (schemas.data.0, apps.apps.0),
        (Err(reason), _) | (_, Err(reason)) => return findings.problem(reason, JOURNAL_HINT),
    };
    let names: HashSet<&str> = schemas.iter().map(String::as_str).collect();
    let problems = apps.iter().filter_map(|app| {
        let slug = app.slug.as_deref().unwrap_or("?");
        if app.status == "error" {
            let reason = app.error.as_deref().unwrap_or("no reason given");
            return Some((format!("{slug}: {reason}"), "check its svc.json"));
        }
        let is_missing = !app.tables.is_empty() && !names.contains(slug);
        is_missing.then(|| (format!("{slug} has tables that the bridge does not list"), JOURNAL_HINT))
    });
    let findings =
        problems.take(MAX_PROBLEMS).fold(findings, |findings, (what, next)| findings.problem(what, next));
    if findings.is_empty() && schemas.is_empty() {
        return findings.skipped("no app declares tables");
    }
    findings.or_ok(format!("{}: {}", pluralize(schemas.len() as u64, "app"), schemas.join(", ")))
}

async fn fetch_schemas(host: &HostClient) -> Result<SchemaList, String> {
    let path = "/api/bridge/query";
    let response = host.post(&host.url(path), &json!({"action": "schemas"})).await?;
    if !response.status.is_success() {
        return Err(format!("POST {path}: {}", response.status));
    }
    response.json().map_err(|reason| format!("POST {path}: {reason}"))
}

async fn fetch_apps(host: &HostClient) -> Result<AppList, String> {
    let path = "/api/apps";
    let response = host.get(&host.url(path), "application/json").await?;
    if !response.status.is_success() {
        return Err(format!("{path}: {}", response.status));
    }
    response.json().map_err(|reason| format!("{path}: {reason}"))
}

/// Checks that the removed legacy route returns 404.
pub async fn check_legacy_route(host: &HostClient) -> Findings {
    let findings = Findings::new("legacy-route");
    match host.get(&host.url("/api/canvas"), "application/json").await {
        Ok(response) if response.status == StatusCode::NOT_FOUND => findings.ok("/api/canvas returned 404"),
        Ok(response) => findings.problem(
            format!("/api/canvas returned {}", response.status),
            "update the gateway, or remove the proxy that responds in its place",
        ),
        Err(reason) => findings.problem(reason, JOURNAL_HINT),
    }
}

/// Checks the icon of every app, and the fallback icon that the gateway returns for a missing app: each must be an
/// image, and identical in two responses.
pub async fn check_icons(host: &HostClient) -> Findings {
    let mut findings = Findings::new("icons");
    let missing_icon = format!("/icons/none-{}", uuid::Uuid::new_v4().simple());
    let apps = match fetch_apps(host).await {
        Ok(apps) => apps.apps.0,
        Err(reason) => return findings.problem(reason, JOURNAL_HINT),
    };
    let mut paths = vec![missing_icon];
    paths.extend(apps.into_iter().filter_map(|app| app.icon));
    let mut problems = 0;
    for path in &paths {
        if let Err(reason) = check_icon(host, path).await {
            let next = "fix the app's icon: without a stable image the shell requests it repeatedly";
            findings = findings.problem(format!("{path}: {reason}"), next);
            problems += 1;
            if problems == MAX_PROBLEMS {
                break;
            }
        }
    }
    let icons = pluralize(paths.len() as u64 - 1, "icon");
    findings.or_ok(format!("{icons} and the fallback icon, all stable"))
}

async fn check_icon(host: &HostClient, path: &str) -> Result<(), String> {
    let first = host.get(&host.url(path), "image/*").await?;
    let second = host.get(&host.url(path), "image/*").await?;
    if !first.status.is_success() {
        return Err(format!("it returned {}", first.status));
    }
    if !first.content_type.starts_with("image/") {
        return Err(format!("it is {:?}, not an image", first.content_type));
    }
    if first.body.is_empty() {
        return Err("it returned an empty image".to_owned());
    }
    if first.body != second.body {
        return Err("two requests returned different bytes".to_owned());
    }
    Ok(())
}
