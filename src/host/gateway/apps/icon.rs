//! `GET /icons/<slug>`: the app's icon, or a stable one generated from its slug. Missing and invalid icons aren't
//! errors.

use std::path::Path;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use http::{HeaderValue, header};
use sha2::{Digest, Sha256};

use super::pages::AppFiles;
use crate::endpoint::PathParameter;
use svc_base::beneath::DirFd;
use svc_http::files::{Caching, StaticFile, media_type, respond};

const MAX_ICON_BYTES: u64 = 1024 * 1024;

pub async fn serve_icon(
    State(files): State<Arc<AppFiles>>,
    PathParameter(slug): PathParameter,
    request: Request,
) -> Response {
    let snapshot = files.registry.snapshot();
    let icon =
        snapshot.directories.get(&slug).and_then(|(dir, manifest)| Some(dir.join(manifest.icon.as_ref()?)));
    let app_icon = match icon {
        Some(icon) => {
            let home = files.home.clone();
            tokio::task::spawn_blocking(move || read_icon(&home, &icon)).await.ok().flatten()
        }
        None => None,
    };
    let icon = app_icon.unwrap_or_else(|| StaticFile::in_memory(generate_icon(&slug), "image/svg+xml"));
    let mut response = respond(&request.into_parts().0, icon, None, Caching::Revalidate);
    // Browsers treat a directly opened SVG as a document. Without this policy, its scripts would run in the owner's
    // origin.
    let policy = HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'; sandbox");
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    response
}

/// Reads an icon by its path relative to the home directory.
fn read_icon(home: &Path, icon: &Path) -> Option<StaticFile> {
    let kind = media_type(icon);
    if !kind.starts_with("image/") {
        return None;
    }
    // Open the icon's directory first: `DirFd` opens a file that isn't world-readable only if the directory has the
    // same owner, and root owns the home directory.
    let dir = DirFd::open(home).ok()?.open_dir(icon.parent()?).ok()?;
    let content = dir.read(Path::new(icon.file_name()?), MAX_ICON_BYTES).ok()?;
    Some(StaticFile::in_memory(content, kind))
}

/// Draws the slug's first letter or digit on a color derived from the slug.
fn generate_icon(slug: &str) -> String {
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
    fn generated_icon_is_stable_and_omits_markup_in_slug() {
        assert_eq!(generate_icon("notes"), generate_icon("notes"));
        assert_ne!(generate_icon("notes"), generate_icon("tasks"));
        assert!(!generate_icon("<script>").contains("<script>"));
        assert!(generate_icon("").contains('?'));
    }

    #[test]
    fn read_icon_rejects_unusable_files() {
        let home = tempfile::tempdir().unwrap();
        let app = home.path().join("apps/app");
        std::fs::create_dir_all(&app).unwrap();
        std::fs::write(home.path().join("secret.svg"), "s").unwrap();
        std::os::unix::fs::symlink("../../secret.svg", app.join("link.svg")).unwrap();
        std::fs::write(app.join("icon.svg"), "ok").unwrap();
        std::fs::write(app.join("icon.txt"), "no").unwrap();
        std::fs::write(app.join("large.png"), vec![0; 1024 * 1024 + 1]).unwrap();
        let read = |name: &str| read_icon(home.path(), &Path::new("apps/app").join(name));
        for refused in ["link.svg", "icon.txt", "large.png", "../../secret.svg", "none.svg"] {
            assert!(read(refused).is_none(), "{refused}");
        }
        assert_eq!(read("icon.svg").unwrap().media_type(), "image/svg+xml");
    }
}
