//! `GET /icons/<slug>`: the app's own icon, or one made from its name, always the same. Never an error of ours.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};
use sha2::{Digest, Sha256};

use crate::host::gateway::state::Gateway;
use crate::http::files::{self, content_type};
use crate::http::segments::Segments;

const LARGEST: u64 = 1024 * 1024;

pub async fn icon(
    State(gateway): State<Arc<Gateway>>,
    Segments(slug): Segments<String>,
    headers: HeaderMap,
) -> Response {
    let known = gateway.apps.known();
    let file = known
        .folders
        .get(&slug)
        .and_then(|(folder, manifest)| Some((folder.clone(), manifest.icon.clone()?)));
    let own = match file {
        Some((folder, icon)) => {
            tokio::task::spawn_blocking(move || read(&folder, &icon)).await.ok().flatten()
        }
        None => None,
    };
    let (kind, image) = own.unwrap_or_else(|| ("image/svg+xml", Bytes::from(fallback(&slug))));
    let tag = format!("\"{}\"", hex::encode(&Sha256::digest(&image)[..8]));
    if files::is_fresh(&headers, &tag) {
        return files::not_modified(&tag);
    }
    let mut response = image.into_response();
    let answer = response.headers_mut();
    answer.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    files::tagged(answer, &tag);
    // An SVG is a document when it is opened by itself.
    let policy = HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'; sandbox");
    answer.insert(header::CONTENT_SECURITY_POLICY, policy);
    response
}

fn read(folder: &Path, icon: &str) -> Option<(&'static str, Bytes)> {
    let kind = content_type(Path::new(icon));
    let inside: PathBuf = folder.canonicalize().ok()?;
    let file = inside.join(icon).canonicalize().ok().filter(|file| file.starts_with(&inside))?;
    let size = std::fs::metadata(&file).ok().filter(std::fs::Metadata::is_file)?.len();
    if !kind.starts_with("image/") || size > LARGEST {
        return None;
    }
    std::fs::read(file).ok().map(|image| (kind, Bytes::from(image)))
}

/// The first letter on a colour of the name's own.
fn fallback(slug: &str) -> String {
    let hue = u32::from(Sha256::digest(slug.as_bytes())[0]) * 360 / 256;
    let letter = slug.chars().find(char::is_ascii_alphanumeric).unwrap_or('?').to_ascii_uppercase();
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 64 64\" width=\"64\" height=\"64\">\
         <rect width=\"64\" height=\"64\" rx=\"14\" fill=\"hsl({hue} 55% 42%)\"/>\
         <text x=\"32\" y=\"43\" text-anchor=\"middle\" font-family=\"system-ui, sans-serif\" \
         font-size=\"32\" font-weight=\"600\" fill=\"#fff\">{letter}</text></svg>"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fallback_is_stable_and_holds_nothing_of_the_outside() {
        assert_eq!(fallback("notes"), fallback("notes"));
        assert_ne!(fallback("notes"), fallback("tasks"));
        assert!(!fallback("<script>").contains("<script>"));
        assert!(fallback("").contains('?'));
    }

    #[test]
    fn an_icon_outside_of_its_folder_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let app = dir.path().join("app");
        std::fs::create_dir(&app).unwrap();
        std::fs::write(dir.path().join("secret.svg"), "s").unwrap();
        std::os::unix::fs::symlink("../secret.svg", app.join("link.svg")).unwrap();
        std::fs::write(app.join("icon.svg"), "ok").unwrap();
        std::fs::write(app.join("icon.txt"), "no").unwrap();
        assert!(read(&app, "link.svg").is_none());
        assert!(read(&app, "icon.txt").is_none());
        assert_eq!(read(&app, "icon.svg").unwrap().0, "image/svg+xml");
    }
}
