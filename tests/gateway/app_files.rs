//! Tests which of an app's files the gateway opens, and how it serves them.

use std::os::unix::fs::symlink;

use anyhow::Result;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use reqwest::{Method, Response, StatusCode};
use serde_json::json;

use super::host::{Host, Machine, UNREACHABLE_DATABASE, manifest};

fn header<'a>(response: &'a Response, name: &str) -> &'a str {
    response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

async fn wait_until_served(host: &Host, slug: &str) -> Result<()> {
    let page = format!("/apps/{slug}/");
    host.wait_until(&page, async || {
        Ok(host.owner_request(Method::GET, &page).send().await?.status() == StatusCode::OK)
    })
    .await
}

#[tokio::test]
async fn symlinks_do_not_escape_app_directory() -> Result<()> {
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    machine.write("opt/svc/env/probe.env", "S3CRET")?;
    machine.write("opt/svc/env/index.html", "S3CRET")?;
    let apps = |path: &str| format!("home/svc/home/apps/{path}");
    // This app's output is a symlink to a directory elsewhere on the machine.
    machine.add_app("output", &json!({}))?;
    symlink(machine.path("opt/svc/env"), machine.path(&apps("output/dist")))?;
    // In this app, a directory, a file and the icon are symlinks.
    let mut inside = manifest("inside", &json!({}));
    inside["icon"] = json!("icon.svg");
    machine.write(&apps("inside/svc.json"), &inside.to_string())?;
    machine.write(&apps("inside/dist/index.html"), "page")?;
    symlink(machine.path("opt/svc/env"), machine.path(&apps("inside/dist/env")))?;
    symlink(machine.path("opt/svc/env/probe.env"), machine.path(&apps("inside/dist/probe.txt")))?;
    symlink(machine.path("opt/svc/env/probe.env"), machine.path(&apps("inside/icon.svg")))?;
    // This app's whole directory is a symlink.
    let elsewhere = manifest("elsewhere", &json!({})).to_string();
    machine.write("opt/svc/env/svc.json", &elsewhere)?;
    symlink(machine.path("opt/svc/env"), machine.path(&apps("elsewhere")))?;
    let host = machine.start()?;
    wait_until_served(&host, "inside").await?;
    for path in [
        "/apps/output/",
        "/apps/output/probe.env",
        "/apps/inside/env/probe.env",
        "/apps/inside/env/",
        "/apps/inside/probe.txt",
        "/apps/elsewhere/",
        "/apps/elsewhere/probe.env",
        "/icons/inside",
    ] {
        let response = host.owner_request(Method::GET, path).send().await?;
        let text = response.text().await?;
        assert!(!text.contains("S3CRET"), "{path}: {text}");
    }
    let (_, apps) = host.get("/api/apps").await?;
    let listed =
        apps["apps"].as_array().into_iter().flatten().find(|app| app["folder"] == "elsewhere").cloned();
    let error = listed.unwrap_or_default()["error"].to_string();
    assert!(error.contains("symbolic links are not followed"), "{error}");
    Ok(())
}

/// Opening a FIFO blocks until a writer opens it; that would block the scan of all apps.
#[tokio::test]
async fn fifo_manifest_does_not_block_other_apps() -> Result<()> {
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    machine.write("home/svc/home/apps/bad/README.md", "")?;
    mkfifo(&machine.path("home/svc/home/apps/bad/svc.json"), Mode::S_IRWXU)?;
    machine.add_app("good", &json!({}))?;
    machine.write("home/svc/home/apps/good/dist/index.html", "page")?;
    let host = machine.start()?;
    wait_until_served(&host, "good").await?;
    let (_, apps) = host.get("/api/apps").await?;
    let bad = apps["apps"].as_array().into_iter().flatten().find(|app| app["folder"] == "bad").cloned();
    assert!(bad.unwrap_or_default()["error"].to_string().contains("not a regular file"), "{apps}");
    Ok(())
}

#[tokio::test]
async fn redirect_to_app_directory_keeps_query() -> Result<()> {
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    machine.add_app("pages", &json!({}))?;
    machine.write("home/svc/home/apps/pages/dist/index.html", "page")?;
    let host = machine.start()?;
    wait_until_served(&host, "pages").await?;
    for query in ["", "?note=5&text=a%20b"] {
        let response = host.owner_request(Method::GET, &format!("/apps/pages{query}")).send().await?;
        assert_eq!(response.status(), StatusCode::PERMANENT_REDIRECT);
        assert_eq!(header(&response, "location"), format!("/apps/pages/{query}"));
    }
    Ok(())
}

#[tokio::test]
async fn ranges_are_served_and_text_is_compressed() -> Result<()> {
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    machine.add_app("media", &json!({}))?;
    let file = |name: &str| format!("home/svc/home/apps/media/dist/{name}");
    machine.write(&file("index.html"), "page")?;
    let film: String =
        (0..400_000).map(|index| char::from(b'a' + u8::try_from(index % 26).unwrap_or(0))).collect();
    machine.write(&file("film.mp4"), &film)?;
    machine.write(&file("app.js"), &"const text = 1;\n".repeat(1000))?;
    let host = machine.start()?;
    wait_until_served(&host, "media").await?;

    let request_film =
        |range: &'static str| host.owner_request(Method::GET, "/apps/media/film.mp4").header("range", range);
    let part = request_film("bytes=200000-349999").send().await?;
    assert_eq!(part.status(), StatusCode::PARTIAL_CONTENT);
    assert_eq!(header(&part, "content-range"), "bytes 200000-349999/400000");
    let etag = header(&part, "etag").to_owned();
    assert!(part.text().await? == film[200_000..350_000]);
    let tail = request_film("bytes=-5").header("if-range", &etag).send().await?;
    assert_eq!(tail.text().await?, film[399_995..]);
    let changed = request_film("bytes=-5").header("if-range", "\"another\"").send().await?;
    assert_eq!((changed.status(), changed.text().await?.len()), (StatusCode::OK, 400_000));
    let out_of_range = request_film("bytes=400000-").send().await?;
    assert_eq!(out_of_range.status(), StatusCode::RANGE_NOT_SATISFIABLE);
    let head = host.owner_request(Method::HEAD, "/apps/media/film.mp4").send().await?;
    assert_eq!(header(&head, "content-length"), "400000");

    let script = async |accepted: &str| {
        host.owner_request(Method::GET, "/apps/media/app.js").header("accept-encoding", accepted).send().await
    };
    let (plain, compressed) = (script("identity").await?, script("gzip").await?);
    assert_eq!((header(&plain, "content-encoding"), header(&compressed, "content-encoding")), ("", "gzip"));
    assert_eq!((header(&plain, "vary"), header(&compressed, "vary")), ("accept-encoding", "accept-encoding"));
    assert_ne!(header(&plain, "etag"), header(&compressed, "etag"));
    assert!(compressed.bytes().await?.len() < 1000);
    // A changed file is compressed again.
    host.machine.write(&file("app.js"), &"const text = 2;\n".repeat(1000))?;
    let compressed = script("gzip").await?.bytes().await?;
    let mut decompressed = String::new();
    std::io::Read::read_to_string(&mut flate2::read::GzDecoder::new(&*compressed), &mut decompressed)?;
    assert!(decompressed.starts_with("const text = 2;"), "{}", &decompressed[..20]);
    Ok(())
}
