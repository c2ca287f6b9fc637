//! `GET /api/apps`: every app the gateway knows, with what is wrong with it.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::foreign_origin::ForeignOrigin;
use super::manifest::Manifest;
use super::registry::Known;
use crate::host::gateway::state::Gateway;

pub async fn list(State(gateway): State<Arc<Gateway>>) -> Json<Value> {
    let mut apps = told(&gateway.apps.known());
    let quotas = &gateway.kernel.settings().storage;
    for app in &mut apps {
        let Some(slug) = app["slug"].as_str().map(str::to_owned) else { continue };
        app["storage"] = json!({
            "databaseBytes": gateway.quotas.measured(&slug),
            "quotaBytes": gateway.quotas.of(quotas, &slug),
        });
    }
    Json(json!({ "apps": apps }))
}

/// By slug: what is registered or lies in a folder; then the folders whose app has not even a slug.
fn told(known: &Known) -> Vec<Value> {
    let slugs: BTreeSet<&String> = known.apps.keys().chain(known.folders.keys()).collect();
    let mut told: Vec<Value> = slugs.iter().map(|slug| app(known, slug)).collect();
    let nameless = known
        .troubles
        .iter()
        .filter(|(_, trouble)| trouble.slug.as_ref().is_none_or(|slug| !slugs.contains(slug)));
    told.extend(nameless.map(|(folder, trouble)| {
        json!({ "slug": trouble.slug, "folder": folder, "status": "error", "error": trouble.why })
    }));
    told
}

fn app(known: &Known, slug: &str) -> Value {
    let registered = known.apps.get(slug);
    let folder = known.folders.get(slug);
    let trouble = known.troubles.values().find(|trouble| trouble.slug.as_deref() == Some(slug));
    let manifest: Option<&Manifest> =
        folder.map(|(_, manifest)| manifest).or_else(|| registered.map(|app| &app.manifest));
    let status = match (trouble, registered) {
        (Some(_), _) => "error",
        (None, Some(_)) => "ready",
        (None, None) => "waiting",
    };
    json!({
        "slug": slug,
        "name": manifest.map(|manifest| manifest.name.as_str()),
        "version": manifest.map(|manifest| manifest.version.as_str()),
        "runtime": manifest.map(|manifest| manifest.runtime.name()),
        "folder": folder.and_then(|(path, _)| path.file_name()).map(|name| name.to_string_lossy()),
        "connect": manifest.map_or_else(Vec::new, |manifest| {
            manifest.connect.iter().map(ForeignOrigin::as_str).collect()
        }),
        "url": folder.map(|_| format!("/apps/{slug}/")),
        "icon": format!("/icons/{slug}"),
        "tables": registered.map_or_else(Vec::new, |app| app.tables.keys().collect()),
        "status": status,
        "error": trouble.map(|trouble| trouble.why.as_str()),
        "notDone": registered.map_or(&[][..], |app| app.not_done.as_slice()),
    })
}
