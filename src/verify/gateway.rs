//! Checks of the gateway's own routes: health, the bridge's schemas, icons, and the removed legacy route.

use std::collections::HashSet;

use http::StatusCode;
use serde_json::{Value, json};

use super::site::Site;
use svc_base::diagnosis::Findings;

const JOURNAL_HINT: &str = "journalctl -u svc-gateway -n 50 on the host";
/// Apps with a problem that one check names.
const MAX_PROBLEMS: usize = 20;

pub async fn check_health(site: &Site) -> Findings {
    let findings = Findings::new("gateway-health");
    let response = match site.get(&site.url("/readyz"), "application/json").await {
        Ok(response) => response,
        Err(why) => return findings.problem(why, JOURNAL_HINT),
    };
    let body = response.json().unwrap_or_default();
    if response.status.is_success() && body["status"] == "ready" && body["database"] == "ok" {
        return findings.ok("ready, and its database responds");
    }
    let what = format!("/readyz: {}: database {}, apps {}", response.status, body["database"], body["apps"]);
    findings.problem(what, JOURNAL_HINT)
}

/// Fetches the database server that the gateway is connected to, which it reports only on the trusted socket.
pub async fn fetch_database_server(site: &Site) -> Option<String> {
    let response = site.get(&site.url("/readyz"), "application/json").await.ok()?;
    response.json()?["server"].as_str().map(str::to_owned)
}

/// Checks that the owner sees the schema of every app that declares tables.
pub async fn check_schemas(site: &Site) -> Findings {
    let findings = Findings::new("bridge-schemas");
    let query = site.post(&site.url("/api/bridge/query"), &json!({"action": "schemas"})).await;
    let apps = site.get(&site.url("/api/apps"), "application/json").await;
    let (query, apps) = match (query, apps) {
        (Ok(query), Ok(apps)) => (query, apps),
        (Err(why), _) | (_, Err(why)) => return findings.problem(why, JOURNAL_HINT),
    };
    if !query.status.is_success() {
        return findings.problem(format!("POST /api/bridge/query: {}", query.status), JOURNAL_HINT);
    }
    let listed = app_names(&query.json().unwrap_or_default()["data"], "app");
    let apps = apps.json().unwrap_or_default();
    let installed = apps["apps"].as_array().cloned().unwrap_or_default();
    let names: HashSet<&str> = listed.iter().map(String::as_str).collect();
    let mut findings = findings;
    let mut problems = 0;
    for app in &installed {
        if problems >= MAX_PROBLEMS {
            break;
        }
        let slug = app["slug"].as_str().unwrap_or("?");
        if app["status"] == "error" {
            let why = app["error"].as_str().unwrap_or("no reason given");
            findings = findings.problem(format!("{slug}: {why}"), "check its svc.json");
            problems += 1;
        } else if app["tables"].as_array().is_some_and(|tables| !tables.is_empty()) && !names.contains(slug) {
            findings =
                findings.problem(format!("{slug} has tables that the bridge does not list"), JOURNAL_HINT);
            problems += 1;
        }
    }
    if listed.is_empty() {
        return findings
            .problem("the bridge lists no schemas", "are apps installed? Check /home/svc/home/apps");
    }
    findings.or_ok(format!("{} apps: {}", listed.len(), listed.join(", ")))
}

/// Returns the names in `data`: an array of objects, or an object keyed by name.
fn app_names(data: &Value, key: &str) -> Vec<String> {
    match data {
        Value::Array(items) => items
            .iter()
            .filter_map(|item| item[key].as_str().or_else(|| item["slug"].as_str()))
            .map(str::to_owned)
            .collect(),
        Value::Object(items) => items.keys().cloned().collect(),
        _ => Vec::new(),
    }
}

pub async fn check_legacy_route(site: &Site) -> Findings {
    let findings = Findings::new("legacy-route");
    match site.get(&site.url("/api/canvas"), "application/json").await {
        Ok(response) if response.status == StatusCode::NOT_FOUND => findings.ok("/api/canvas returned 404"),
        Ok(response) => findings.problem(
            format!("/api/canvas returned {}", response.status),
            "an old gateway, or a proxy in front of it that responds instead",
        ),
        Err(why) => findings.problem(why, JOURNAL_HINT),
    }
}

/// Checks the icons of a missing app and of every app: each must be an image, and the same in two responses.
pub async fn check_icons(site: &Site) -> Findings {
    let mut findings = Findings::new("icons");
    let missing = format!("/icons/none-{}", uuid::Uuid::new_v4().simple());
    let mut paths = vec![missing];
    let apps = match site.get(&site.url("/api/apps"), "application/json").await {
        Ok(response) if response.status.is_success() => response.json().unwrap_or_default(),
        Ok(response) => {
            return findings.problem(format!("/api/apps: {}", response.status), JOURNAL_HINT);
        }
        Err(why) => return findings.problem(why, JOURNAL_HINT),
    };
    let installed = apps["apps"].as_array().into_iter().flatten();
    paths.extend(installed.filter_map(|app| app["icon"].as_str().map(str::to_owned)));
    for path in &paths {
        if let Err(why) = check_icon(site, path).await {
            findings = findings.problem(format!("{path}: {why}"), "the shell would request it repeatedly");
        }
    }
    findings.or_ok(format!("{} icons and the fallback of a missing one, all stable", paths.len() - 1))
}

async fn check_icon(site: &Site, path: &str) -> Result<(), String> {
    let first = site.get(&site.url(path), "image/*").await?;
    let second = site.get(&site.url(path), "image/*").await?;
    if !first.status.is_success() {
        return Err(format!("it returned {}", first.status));
    }
    if !first.kind.starts_with("image/") {
        return Err(format!("it is {:?}, not an image", first.kind));
    }
    if first.body.is_empty() || first.body != second.body {
        return Err("two requests returned different bytes".to_owned());
    }
    Ok(())
}
