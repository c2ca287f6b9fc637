//! `release.json`: a bundle's components, each with its version and path.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;

use super::manifest::format_time;

#[derive(Debug, Clone, Serialize)]
pub struct Component {
    pub name: String,
    pub version: String,
    pub path: String,
}

impl Component {
    pub fn new(name: &str, version: &str, path: &str) -> Self {
        Self { name: name.to_owned(), version: version.to_owned(), path: path.to_owned() }
    }
}

/// Returns the component for an app's `…/svc.json`, or `None` for other files.
pub fn app_component(path: &str, content: &[u8]) -> Result<Option<Component>> {
    let Some(dir) = path.strip_suffix("/svc.json") else { return Ok(None) };
    let manifest: Value = serde_json::from_slice(content).with_context(|| format!("cannot parse {path}"))?;
    let text_field = |field: &str| manifest[field].as_str().map(str::to_owned);
    let (Some(slug), Some(version)) = (text_field("slug"), text_field("version")) else {
        bail!("{path} lacks a slug or a version");
    };
    Ok(Some(Component { name: slug, version, path: dir.to_owned() }))
}

/// Reads the manifests of built apps, with their paths in the bundle, sorted.
pub fn read_manifests(apps: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let mut manifests = Vec::new();
    for entry in fs::read_dir(apps).with_context(|| format!("cannot read {}", apps.display()))? {
        let dir = entry?.path();
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let manifest = dir.join("svc.json");
        let content = fs::read(&manifest).with_context(|| format!("cannot read {}", manifest.display()))?;
        manifests.push((format!("app/apps/{name}/svc.json"), content));
    }
    manifests.sort();
    Ok(manifests)
}

/// Renders `release.json`.
pub fn render(image_version: &str, created_at: Timestamp, components: &[Component]) -> Result<Vec<u8>> {
    let release = serde_json::json!({
        "version": 1,
        "imageVersion": image_version,
        "createdAt": format_time(created_at),
        "components": components,
    });
    let mut text = serde_json::to_vec_pretty(&release)?;
    text.push(b'\n');
    Ok(text)
}
