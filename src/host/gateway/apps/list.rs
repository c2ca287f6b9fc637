//! `GET /api/apps`: all apps, with their errors.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::foreign_origin::ForeignOrigin;
use super::manifest::Manifest;
use super::quota::Quotas;
use super::registry::{AppsSnapshot, Registry};
use svc_host::agents::kernel::Kernel;

pub async fn list_apps(
    State(registry): State<Arc<Registry>>,
    State(quotas): State<Arc<Quotas>>,
    State(kernel): State<Arc<Kernel>>,
) -> Json<Value> {
    let mut apps = apps_json(&registry.snapshot());
    let settings = &kernel.settings().storage;
    for app in &mut apps {
        let Some(slug) = app["slug"].as_str().map(str::to_owned) else { continue };
        app["storage"] = json!({
            "databaseBytes": quotas.measured_bytes(&slug),
            "quotaBytes": quotas.quota_bytes(settings, &slug),
        });
    }
    Json(json!({ "apps": apps }))
}

/// Lists registered apps and those whose directory has a valid manifest, by slug, then the remaining errors, such as
/// directories with an invalid manifest or stored apps that couldn't be registered.
fn apps_json(snapshot: &AppsSnapshot) -> Vec<Value> {
    let slugs: BTreeSet<&String> = snapshot.apps.keys().chain(snapshot.directories.keys()).collect();
    let mut list: Vec<Value> = slugs.iter().map(|slug| app_json(snapshot, slug)).collect();
    let other_errors =
        snapshot.errors().filter(|(_, error)| error.slug.as_ref().is_none_or(|slug| !slugs.contains(slug)));
    list.extend(other_errors.map(|(dir, error)| {
        json!({ "slug": error.slug, "folder": dir, "status": "error", "error": error.message })
    }));
    list
}

fn app_json(snapshot: &AppsSnapshot, slug: &str) -> Value {
    let registered = snapshot.apps.get(slug);
    let dir = snapshot.directories.get(slug);
    let error = snapshot.errors().map(|(_, error)| error).find(|error| error.slug.as_deref() == Some(slug));
    let manifest: Option<&Manifest> =
        dir.map(|(_, manifest)| manifest).or_else(|| registered.map(|app| &app.manifest));
    let status = match (error, registered) {
        (Some(_), _) => "error",
        (None, Some(_)) => "ready",
        (None, None) => "waiting",
    };
    json!({
        "slug": slug,
        "name": manifest.map(|manifest| manifest.name.as_str()),
        "version": manifest.map(|manifest| manifest.version.as_str()),
        "runtime": manifest.map(|manifest| manifest.runtime.name()),
        "folder": dir.and_then(|(path, _)| path.file_name()).map(|name| name.to_string_lossy()),
        "connect": manifest.map_or_else(Vec::new, |manifest| {
            manifest.connect.iter().map(ForeignOrigin::as_str).collect()
        }),
        "url": dir.map(|_| format!("/apps/{slug}/")),
        "icon": format!("/icons/{slug}"),
        "tables": registered.map_or_else(Vec::new, |app| app.tables.keys().collect()),
        "status": status,
        "error": error.map(|error| error.message.as_str()),
        "notDone": registered.map_or(&[][..], |app| app.unapplied_changes.as_slice()),
    })
}
