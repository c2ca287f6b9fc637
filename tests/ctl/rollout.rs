//! `svcctl verify-rollout` against a host that runs, from the host itself and through the router.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{StatusCode, Uri, header};
use tokio::net::UnixListener;

use super::doctor::{Fleet, Report, report};

type Files = Arc<Mutex<BTreeMap<String, String>>>;

/// Files on the shell's socket, as `svc-shell` serves a build.
fn serve_shell(socket: &Path) -> Files {
    let files = Files::default();
    let listener = UnixListener::bind(socket).unwrap();
    let router = Router::new().fallback(file).with_state(Arc::clone(&files));
    tokio::spawn(async move { axum::serve(listener, router).await });
    files
}

async fn file(State(files): State<Files>, uri: Uri) -> Response {
    let found = files.lock().unwrap().get(uri.path()).cloned();
    let kind = match uri.path().rsplit('.').next() {
        Some("js") => "text/javascript",
        Some("css") => "text/css",
        _ => "text/html; charset=utf-8",
    };
    match found {
        Some(text) => ([(header::CONTENT_TYPE, kind)], text).into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

fn put(files: &Files, path: &str, text: &str) {
    files.lock().unwrap().insert(path.to_owned(), text.to_owned());
}

fn a_good_shell(files: &Files) {
    files.lock().unwrap().clear();
    let page = "<!doctype html><meta name=\"svc-canvas-gestures\" content=\"surface\">\
                <link rel=stylesheet href=\"/assets/main.css\"><script type=module src=\"/assets/main.js\"></script>";
    put(files, "/", page);
    put(files, "/assets/main.css", "input::placeholder{color:gray}");
    put(
        files,
        "/assets/main.js",
        "import\"./vendor.js\";const lazy=[\"assets/lazy.js\"];fetch(\"/api/apps\")",
    );
    put(files, "/assets/vendor.js", "export const a=\"https://idp.example\";");
    put(files, "/assets/lazy.js", "export const b=1;");
}

impl Fleet {
    async fn verify_here(&self, args: &[&str]) -> Report {
        let args: Vec<&str> = ["verify-rollout"].into_iter().chain(args.iter().copied()).collect();
        report(&self.stack.svc, &args, &self.host_env()).await
    }

    async fn verify_outside(&self, token: &str) -> Report {
        let env = [("SVC_SESSION_TOKEN".to_owned(), token.to_owned())];
        let port = self.stack.router_url();
        let port = port.rsplit(':').next().unwrap();
        let url = format!("http://{}:{port}", self.stack.front.app_host());
        report(&self.stack.svc, &["verify-rollout", "--app-url", &url], &env).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_is_verified_on_the_host_and_from_outside() {
    let fleet = Fleet::up().await;
    let without = fleet.verify_here(&[]).await;
    without.has("shell", "problem", "503");
    for check in ["placeholder-host", "legacy-canvas", "canvas-gestures"] {
        without.has(check, "skipped", "could not be read");
    }
    let files = serve_shell(&fleet.disk.join("run/svc/shell.sock"));
    a_good_shell(&files);
    let checks = [
        "shell",
        "placeholder-host",
        "legacy-canvas",
        "canvas-gestures",
        "gateway-health",
        "bridge-schemas",
        "legacy-route",
        "icons",
    ];
    let here = fleet.verify_here(&["--strict"]).await;
    let outside = fleet.verify_outside(&fleet.stack.owner()).await;
    for check in checks {
        here.has(check, "ok", "");
        outside.has(check, "ok", "");
    }
    here.has("vps-database", "ok", "this machine's own");
    here.has("shell", "ok", "4 files");
    here.has("bridge-schemas", "ok", "notes");
    outside.has("vps-database", "skipped", "on the host alone");
    assert_eq!((here.code, outside.code), (Some(0), Some(0)));

    put(&files, "/assets/lazy.js", "fetch(\"https://placeholder.idp.example/v1/client\")");
    here_and_outside(&fleet, "placeholder-host", "/assets/lazy.js names placeholder.idp.example").await;
    a_good_shell(&files);
    put(&files, "/assets/vendor.js", "fetch(`/api/canvas?fresh=1`)");
    here_and_outside(&fleet, "legacy-canvas", "/assets/vendor.js calls /api/canvas").await;
    a_good_shell(&files);
    put(
        &files,
        "/",
        "<meta name=\"svc-canvas-gestures\" content=\"window\"><script src=\"/assets/main.js\"></script>",
    );
    here_and_outside(&fleet, "canvas-gestures", "window").await;
    put(&files, "/", "<script src=\"/assets/main.js\"></script>");
    let unmarked = fleet.verify_here(&[]).await;
    unmarked.has("canvas-gestures", "skipped", "only a browser can tell");
    assert_eq!(unmarked.code, Some(0));
    assert_eq!(fleet.verify_here(&["--strict"]).await.code, Some(65), "strict: not checked is not verified");
    put(&files, "/", "<script src=\"/assets/gone.js\"></script>");
    here_and_outside(&fleet, "shell", "/assets/gone.js answers 404").await;
    a_good_shell(&files);

    let stranger = fleet.verify_outside(&fleet.stack.session("user_other")).await;
    stranger.has("shell", "problem", "503");
    let forged = fleet.verify_outside("not.a.token").await;
    forged.has("gateway-health", "problem", "401");

    fleet.stack.provider.stop_service(&fleet.server(), "svc-gateway").await.unwrap();
    let stopped = fleet.verify_here(&[]).await;
    stopped.has("gateway-health", "problem", "");
    stopped.has("icons", "problem", "");
    fleet.stack.down().await;
}

async fn here_and_outside(fleet: &Fleet, check: &str, part: &str) {
    fleet.verify_here(&[]).await.has(check, "problem", part);
    fleet.verify_outside(&fleet.stack.owner()).await.has(check, "problem", part);
}

#[tokio::test]
async fn a_session_goes_to_nobody_in_the_clear_and_is_no_argument() {
    let env = [("SVC_SESSION_TOKEN", "a.b.c")];
    let output = super::svcctl(&["verify-rollout", "--app-url", "http://app.example.com"], &env).await;
    assert_eq!(output.status.code(), Some(78), "{}", super::stderr(&output));
    let output = super::svcctl(&["verify-rollout", "--app-url", "https://app.example.com"], &[]).await;
    assert_eq!(output.status.code(), Some(78));
    assert!(super::stderr(&output).contains("SVC_SESSION_TOKEN"), "{}", super::stderr(&output));
}
