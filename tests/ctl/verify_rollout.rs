//! `svcctl verify-rollout` against a running host, on the host itself and through the router; and the same checks in a
//! rollout.

use std::fs;
use std::path::PathBuf;

use super::doctor::Fleet;
use super::report::{Report, run_report};

/// The built shell in the machine's release.
struct Shell<'a> {
    fleet: &'a Fleet,
    dir: PathBuf,
}

impl Shell<'_> {
    /// Serves a valid shell with some of its files replaced.
    async fn serve(&self, replacements: &[(&str, &str)]) {
        fs::remove_dir_all(&self.dir).ok();
        fs::create_dir_all(self.dir.join("assets")).unwrap();
        let page = "<!doctype html><meta name=\"svc-canvas-gestures\" content=\"surface\">\
                    <link rel=stylesheet href=\"/assets/main.css\"><script type=module src=\"/assets/main.js\"></script>";
        let valid_files = [
            ("index.html", page),
            ("assets/main.css", "input::placeholder{color:gray}"),
            ("assets/main.js", "import\"./vendor.js\";const lazy=[\"assets/lazy.js\"];fetch(\"/api/apps\")"),
            ("assets/vendor.js", "export const a=\"https://idp.test\";"),
            ("assets/lazy.js", "export const b=1;"),
        ];
        for (path, text) in valid_files.iter().chain(replacements) {
            fs::write(self.dir.join(path), text).unwrap();
        }
        let (provider, server) = (&self.fleet.stack.provider, self.fleet.server_name());
        // `svc-shell` reads its files at startup, so it is restarted. Stopping fails if it is not running.
        provider.stop_service(&server, "svc-shell").await.ok();
        let started = provider.run_unit(&server, "svc-shell", &[]).await.unwrap();
        assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    }
}

impl Fleet {
    async fn verify_on_host(&self, args: &[&str]) -> Report {
        let args: Vec<&str> = ["verify-rollout"].into_iter().chain(args.iter().copied()).collect();
        run_report(&self.stack.svc, &args, &self.host_env()).await
    }

    async fn verify_from_outside(&self, token: &str) -> Report {
        let env = [("SVC_SESSION_TOKEN".to_owned(), token.to_owned())];
        let router_url = self.stack.router_url();
        let port = router_url.rsplit(':').next().unwrap();
        let url = format!("http://{}:{port}", self.stack.transport.app_host());
        run_report(&self.stack.svc, &["verify-rollout", "--app-url", &url], &env).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn release_is_verified_on_the_host_and_from_outside() {
    let fleet = Fleet::start().await;
    let without_shell = fleet.verify_on_host(&[]).await;
    without_shell.expect("shell", "problem", "503");
    for check in ["placeholder-host", "legacy-canvas", "canvas-gestures"] {
        without_shell.expect(check, "skipped", "could not be loaded");
    }
    let shell = Shell { fleet: &fleet, dir: fleet.disk.join("opt/svc/app/shell") };
    shell.serve(&[]).await;
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
    let on_host = fleet.verify_on_host(&["--strict"]).await;
    let outside = fleet.verify_from_outside(&fleet.stack.owner_token()).await;
    for check in checks {
        on_host.expect(check, "ok", "");
        outside.expect(check, "ok", "");
    }
    on_host.expect("vps-database", "ok", "this machine's own");
    on_host.expect("shell", "ok", "4 files");
    on_host.expect("bridge-schemas", "ok", "notes");
    outside.expect("vps-database", "skipped", "only on the host");
    assert_eq!((on_host.exit_code, outside.exit_code), (Some(0), Some(0)));

    shell.serve(&[("assets/lazy.js", "fetch(\"https://placeholder-idp.invalid/v1/client\")")]).await;
    expect_problem(&fleet, "placeholder-host", "/assets/lazy.js contains placeholder-idp.invalid").await;
    let key = format!("export const k=\"{}\"", kit::bundle::apps::test_key("idp.example.com"));
    shell.serve(&[("assets/lazy.js", &key)]).await;
    expect_problem(&fleet, "placeholder-host", "/assets/lazy.js contains idp.example.com").await;
    let key = format!("export const k=\"{}\"", kit::bundle::apps::test_key("idp.svc.test"));
    shell.serve(&[("assets/lazy.js", &key)]).await;
    fleet.verify_on_host(&[]).await.expect("placeholder-host", "ok", "neither the page nor its chunks");
    shell.serve(&[("assets/vendor.js", "fetch(new URL('api/canvas?fresh=1',base))")]).await;
    expect_problem(&fleet, "legacy-canvas", "/assets/vendor.js contains api/canvas").await;
    let script = "<script src=\"/assets/main.js\"></script>";
    let window_gestures = format!("<meta name=\"svc-canvas-gestures\" content=\"window\">{script}");
    shell.serve(&[("index.html", &window_gestures)]).await;
    expect_problem(&fleet, "canvas-gestures", "window").await;
    shell.serve(&[("index.html", script)]).await;
    let unmarked = fleet.verify_on_host(&[]).await;
    unmarked.expect("canvas-gestures", "skipped", "verify it in a browser");
    assert_eq!(unmarked.exit_code, Some(0));
    assert_eq!(
        fleet.verify_on_host(&["--strict"]).await.exit_code,
        Some(65),
        "with --strict, a skipped check is a failure"
    );
    let styles = "<link rel=\"stylesheet\" href=\"/assets/main.css\">";
    shell.serve(&[("index.html", styles), ("assets/main.css", "p{}")]).await;
    expect_problem(&fleet, "shell", "the page refers to no script").await;
    shell.serve(&[("index.html", "<script src=\"/assets/gone.js\"></script>")]).await;
    expect_problem(&fleet, "shell", "/assets/gone.js returned 404").await;
    shell.serve(&[]).await;

    // The settings name a different database than the one that the running gateway uses.
    let settings = fleet.disk.join("opt/svc/env/host.env");
    let before = fs::read_to_string(&settings).unwrap();
    let other_database = svc::config::format_env_line("DATABASE_URL", "postgres://svc:pw@127.0.0.1:1/svc");
    let other_lines = before.lines().filter(|line| !line.starts_with("DATABASE_URL="));
    fs::write(&settings, other_lines.fold(other_database, |text, line| text + line + "\n")).unwrap();
    let elsewhere = fleet.verify_on_host(&[]).await;
    elsewhere.expect("vps-database", "problem", "this machine's own database is on 127.0.0.1:1");
    fs::write(&settings, before).unwrap();

    let other_user = fleet.verify_from_outside(&fleet.stack.session_token("user_other")).await;
    other_user.expect("shell", "problem", "503");
    let forged = fleet.verify_from_outside("not.a.token").await;
    forged.expect("gateway-health", "problem", "401");

    fleet.stack.provider.stop_service(&fleet.server_name(), "svc-gateway").await.unwrap();
    let stopped = fleet.verify_on_host(&[]).await;
    stopped.expect("gateway-health", "problem", "");
    stopped.expect("vps-database", "problem", "does not report which server");
    stopped.expect("icons", "problem", "");
    fleet.stack.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rollout_waits_for_operator_if_release_fails_checks() {
    let fleet = Fleet::start().await;
    // The release has no shell.
    kit::scenario::publish_signed(&fleet.stack, "demo-2", fleet.stack.svc.clone()).await.unwrap();
    let svcctl = async |exit_code: i32, args: &[&str]| {
        let run = fleet.stack.svcctl(args).await.unwrap();
        let text = format!("{}{}", run.stderr, run.stdout);
        assert_eq!(run.exit_code, Some(exit_code), "{args:?}: {text}");
        text
    };
    let assert_contains = |text: &str, parts: &[&str]| {
        for part in parts {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
    };
    let text = svcctl(75, &["deploy", "start", "demo-2", "--yes", "--wait=200"]).await;
    assert_contains(
        &text,
        &["is waiting for your decision: the verification failed: ada: shell: ", "`svcctl deploy resume`"],
    );
    let text = svcctl(0, &["deploy", "status"]).await;
    assert_contains(
        &text,
        &["paused (the verification failed", "failed", "on ada", "ada: shell: the page returned 503"],
    );
    assert!(!text.contains("icons"), "a passed check is listed: {text}");
    assert_contains(
        &svcctl(0, &["fleet"]).await,
        &["alarm: rollout_halted", "demo-2", "svcctl deploy abort"],
    );

    let shell = Shell { fleet: &fleet, dir: fleet.disk.join("opt/svc/app/shell") };
    shell.serve(&[("assets/vendor.js", "fetch(new URL('api/canvas?fresh=1',base))")]).await;
    svcctl(0, &["deploy", "resume"]).await;
    let text = svcctl(75, &["deploy", "status", "--wait=100"]).await;
    assert_contains(&text, &["ada: legacy-canvas: /assets/vendor.js contains api/canvas"]);

    shell.serve(&[]).await;
    svcctl(0, &["deploy", "resume"]).await;
    let text = svcctl(0, &["deploy", "status", "--wait=100"]).await;
    assert_contains(&text, &["succeeded", "passed", "on ada"]);
    assert!(!svcctl(0, &["fleet"]).await.contains("alarm:"));
    fleet.stack.stop().await;
}

/// Expects a problem both on the host and from outside.
async fn expect_problem(fleet: &Fleet, check: &str, part: &str) {
    fleet.verify_on_host(&[]).await.expect(check, "problem", part);
    fleet.verify_from_outside(&fleet.stack.owner_token()).await.expect(check, "problem", part);
}

#[tokio::test]
async fn app_url_requires_https_and_a_session_token() {
    let env = [("SVC_SESSION_TOKEN", "a.b.c")];
    let output = super::svcctl(&["verify-rollout", "--app-url", "http://app.example.com"], &env).await;
    assert_eq!(output.status.code(), Some(78), "{}", super::stderr(&output));
    assert!(super::stderr(&output).contains("must be https"), "{}", super::stderr(&output));
    let output = super::svcctl(&["verify-rollout", "--app-url", "https://app.example.com"], &[]).await;
    assert_eq!(output.status.code(), Some(78));
    assert!(super::stderr(&output).contains("SVC_SESSION_TOKEN"), "{}", super::stderr(&output));
}
