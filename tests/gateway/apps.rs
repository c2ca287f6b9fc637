//! Tests how apps are copied, registered, changed, recovered and served.

use anyhow::Result;
use kit::pg::test_database;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use svc::http::proof::Route;

use super::host::{Host, Machine, UNREACHABLE_DATABASE, host_with_app, manifest, send_json, unique_name};

async fn find_app(host: &Host, slug: &str) -> Result<Value> {
    let (_, apps) = host.get("/api/apps").await?;
    let apps = apps["apps"].as_array().cloned().unwrap_or_default();
    Ok(apps.into_iter().find(|app| app["slug"] == slug).unwrap_or_default())
}

async fn list_columns(host: &Host, slug: &str) -> Result<Vec<String>> {
    let data = host.query_data(&json!({ "action": "schemas", "app": slug })).await?;
    let columns = data[0]["tables"][0]["columns"].as_array().cloned().unwrap_or_default();
    Ok(columns
        .iter()
        .map(|c| format!("{} {}", c["column"].as_str().unwrap_or("-"), c["type"].as_str().unwrap_or("-")))
        .collect())
}

#[tokio::test]
async fn bundled_apps_are_copied_registered_and_never_overwritten() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("bundled"));
    let machine = Machine::new(&database.url())?;
    let text = manifest(&slug, &json!({ "t": { "columns": { "a": "text" } } })).to_string();
    machine.write(&format!("opt/svc/current/app/apps/{slug}/svc.json"), &text)?;
    machine.write(&format!("opt/svc/current/app/apps/{slug}/dist/index.html"), "<h1>first</h1>")?;
    let host = machine.start()?;
    host.wait_until_registered(&slug).await?;
    let registered = format!("the app {slug} 1.0.0 is registered");
    super::dispatch::wait_until_logged(&host, &registered).await?;
    let page = |host: &Host| host.owner_request(Method::GET, &format!("/apps/{slug}/"));
    assert_eq!(page(&host).send().await?.text().await?, "<h1>first</h1>");
    host.machine.write(&format!("home/svc/home/apps/{slug}/dist/index.html"), "<h1>mine</h1>")?;
    host.machine.write(&format!("opt/svc/current/app/apps/{slug}/dist/index.html"), "<h1>second</h1>")?;
    let host = host.restart()?;
    host.wait_until_registered(&slug).await?;
    assert_eq!(page(&host).send().await?.text().await?, "<h1>mine</h1>", "the owner's change must be kept");
    Ok(())
}

/// The stored manifest does not preserve the order of its columns, because `jsonb` sorts keys by length.
#[tokio::test]
async fn restart_does_not_register_unchanged_app_again() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("unchanged"));
    let tables = json!({ "t": { "columns": { "title": "text", "a": "date" } } });
    let host = host_with_app(&database, &slug, &tables).await?;
    let registered = |slug: &str| format!("the app {slug} 1.0.0 is registered");
    super::dispatch::wait_until_logged(&host, &registered(&slug)).await?;
    let host = host.restart()?;
    host.wait_until_registered(&slug).await?;
    let expected = ["id uuid", "title text", "a date", "created_at timestamptz", "updated_at timestamptz"];
    assert_eq!(list_columns(&host, &slug).await?, expected);
    // Activity lines are written in order, so a second line for the first app would precede the later app's line.
    let later = unique_name("later");
    host.machine.add_app(&later, &json!({ "t": { "columns": {} } }))?;
    super::dispatch::wait_until_logged(&host, &registered(&later)).await?;
    let activity = std::fs::read_to_string(host.machine.path("home/svc/home/system/logs/activity.log"))?;
    assert_eq!(activity.matches(&registered(&slug)).count(), 1, "{activity}");
    Ok(())
}

#[tokio::test]
async fn app_with_views_is_registered_again_after_restart() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("views"));
    let tables = json!({ "t": { "columns": { "title": "text" } } });
    let host = host_with_app(&database, &slug, &tables).await?;
    let schema = format!("app_{}", slug.replace('-', "_"));
    let views = format!(
        "CREATE VIEW {schema}.recent AS SELECT * FROM {schema}.t; \
         CREATE MATERIALIZED VIEW {schema}.titles AS SELECT title FROM {schema}.t"
    );
    database.connect().await?.batch_execute(&views).await?;
    let host = host.restart()?;
    host.wait_until_registered(&slug).await?;
    let insert = json!({ "action": "insert", "app": slug, "table": "t", "data": { "title": "a" } });
    host.query_data(&insert).await?;
    Ok(())
}

#[tokio::test]
async fn new_version_adds_columns_and_reports_other_changes() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("grow"));
    let tables = json!({ "t": { "columns": { "a": "text", "old": "integer" } } });
    let host = host_with_app(&database, &slug, &tables).await?;
    for a in ["same", "same"] {
        host.query_data(
            &json!({ "action": "insert", "app": slug, "table": "t", "data": { "a": a, "old": 7 } }),
        )
        .await?;
    }
    let next = json!({
        "t": { "columns": { "a": "bigint", "b": "jsonb" }, "indexes": ["b"], "unique": ["a"] },
        "u": { "columns": { "c": "date" } }
    });
    host.machine.add_app(&slug, &next)?;
    host.wait_until("the new table", async || {
        Ok(find_app(&host, &slug).await?["tables"] == json!(["t", "u"]))
    })
    .await?;
    let not_done = find_app(&host, &slug).await?["notDone"].to_string();
    for part in ["t.a keeps its type text", "t.old", "unique constraint (a)"] {
        assert!(not_done.contains(part), "{part} in {not_done}");
    }
    let expected = ["id uuid", "a text", "b jsonb", "created_at timestamptz", "updated_at timestamptz"];
    assert_eq!(list_columns(&host, &slug).await?, expected);
    let schema = format!("app_{}", slug.replace('-', "_"));
    let admin = database.connect().await?;
    let row = admin.query_one(&format!("SELECT count(*), sum(old) FROM {schema}.t"), &[]).await?;
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (2, 14), "every row and column must be kept");
    let insert = json!({ "action": "insert", "app": slug, "table": "u", "data": { "c": "2026-01-01" } });
    host.query_data(&insert).await?;
    Ok(())
}

#[tokio::test]
async fn tables_altered_by_sql_are_registered() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("other-types"));
    let host = host_with_app(&database, &slug, &json!({ "t": { "columns": {} } })).await?;
    let schema = format!("app_{}", slug.replace('-', "_"));
    let changes = format!(
        "ALTER TABLE {schema}.t ADD COLUMN a json, ADD COLUMN b varchar, ADD COLUMN c json[];
         INSERT INTO {schema}.t (b, c) VALUES ('x', ARRAY['1'::json]), ('y', ARRAY['2'::json]);
         CREATE TABLE {schema}.u (n integer PRIMARY KEY);
         INSERT INTO {schema}.u VALUES (1), (2)"
    );
    database.connect().await?.batch_execute(&changes).await?;
    let next = json!({
        "t": { "columns": { "a": "text", "b": "text", "c": "text" },
            "indexes": ["a", "b", "c"], "unique": ["a", "b"] },
        "u": { "columns": { "n": "integer" } }
    });
    host.machine.add_app(&slug, &next)?;
    host.wait_until("the new table", async || {
        Ok(find_app(&host, &slug).await?["tables"] == json!(["t", "u"]))
    })
    .await?;
    let not_done = find_app(&host, &slug).await?["notDone"].to_string();
    assert_eq!(not_done.matches("is not created").count(), 3, "{not_done}");
    let indexes = "SELECT count(*) FROM pg_indexes WHERE schemaname = $1 AND indexdef LIKE '%(b)'";
    let row = database.connect().await?.query_one(indexes, &[&schema]).await?;
    assert_eq!(row.get::<_, i64>(0), 2, "a varchar column must be indexed");
    let found = host.query_data(&json!({ "action": "find", "app": slug, "table": "u" })).await?;
    assert!(found[0]["id"].is_string() && found[0]["id"] != found[1]["id"], "{found}");
    Ok(())
}

/// Connections cache prepared statements by SQL text, and the text is the same for both types.
#[tokio::test]
async fn changed_column_types_apply_to_open_connections() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("retyped"));
    let tables = |a: &str, b: &str| json!({ "t": { "columns": { "a": a, "b": b } } });
    let host = host_with_app(&database, &slug, &tables("bigint", "integer")).await?;
    let insert = json!({ "action": "insert", "app": slug, "table": "t", "data": { "a": 1 } });
    let id = host.query_data(&insert).await?["id"].clone();
    let check_update = async |data: Value| -> Result<()> {
        let update = json!({ "action": "update", "app": slug, "table": "t", "id": id, "data": data });
        host.query_data(&update).await?;
        let row = host.query_data(&json!({ "action": "get", "app": slug, "table": "t", "id": id })).await?;
        assert_eq!((&row["a"], &row["b"]), (&data["a"], &data["b"]));
        let count = json!({ "action": "count", "app": slug, "table": "t", "filter": data });
        assert_eq!(host.query_data(&count).await?["count"], 1, "{data}");
        Ok(())
    };
    check_update(json!({ "a": 7, "b": 7 })).await?;
    let schema = format!("app_{}", slug.replace('-', "_"));
    let change =
        format!("ALTER TABLE {schema}.t ALTER COLUMN a TYPE double precision, ALTER COLUMN b TYPE bigint");
    database.connect().await?.batch_execute(&change).await?;
    host.machine.add_app(&slug, &tables("double", "bigint"))?;
    let expected = ["id uuid", "a double", "b bigint", "created_at timestamptz", "updated_at timestamptz"];
    host.wait_until("the new types", async || Ok(list_columns(&host, &slug).await? == expected)).await?;
    check_update(json!({ "a": 2.5, "b": 3_000_000_000_i64 })).await
}

#[tokio::test]
async fn unknown_type_is_reported_and_other_apps_still_work() -> Result<()> {
    let (database, good) = (test_database().await?, unique_name("good"));
    let bad = unique_name("bad");
    let machine = Machine::new(&database.url())?;
    machine.add_app(&good, &json!({ "t": { "columns": { "a": "text" } } }))?;
    machine.add_app(&bad, &json!({ "t": { "columns": { "a": "txt" } } }))?;
    machine.write("home/svc/home/apps/broken/svc.json", "{ not json")?;
    let host = machine.start()?;
    host.wait_until_registered(&good).await?;
    let app = find_app(&host, &bad).await?;
    assert_eq!(app["status"], "error");
    assert!(app["error"].as_str().unwrap_or_default().contains("\"txt\""), "{app}");
    assert_eq!(find_app(&host, "broken").await?["status"], "error");
    host.machine.add_app(&bad, &json!({ "t": { "columns": { "a": "text" } } }))?;
    host.wait_until_registered(&bad).await
}

#[tokio::test]
async fn new_app_directory_is_registered_at_run_time() -> Result<()> {
    let (database, first) = (test_database().await?, unique_name("first"));
    let host = host_with_app(&database, &first, &json!({ "t": { "columns": {} } })).await?;
    let later = unique_name("later");
    host.machine.add_app(&later, &json!({ "t": { "columns": { "a": "text" } } }))?;
    host.wait_until_registered(&later).await
}

/// A backup locks every table until its dump has ended.
#[tokio::test]
async fn registration_waiting_for_lock_blocks_no_app() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("locked"));
    let host = host_with_app(&database, &slug, &json!({ "t": { "columns": { "a": "text" } } })).await?;
    let mut admin = database.connect().await?;
    let dump = admin.transaction().await?;
    let schema = format!("app_{}", slug.replace('-', "_"));
    dump.batch_execute(&format!("LOCK TABLE {schema}.t IN ACCESS SHARE MODE")).await?;
    host.machine.add_app(&slug, &json!({ "t": { "columns": { "a": "text", "b": "text" } } }))?;
    // The directories are registered in name order.
    let other = unique_name("other");
    host.machine.add_app(&other, &json!({ "t": { "columns": { "a": "text" } } }))?;
    host.wait_until_registered(&other).await?;
    let insert = json!({ "action": "insert", "app": slug, "table": "t", "data": { "a": "during the dump" } });
    host.query_data(&insert).await?;
    dump.commit().await?;
    host.wait_until("the new column", async || {
        Ok(list_columns(&host, &slug).await?.contains(&"b text".to_owned()))
    })
    .await
}

#[tokio::test]
async fn locked_table_at_start_blocks_no_other_app() -> Result<()> {
    let (database, locked, other) = (test_database().await?, unique_name("a"), unique_name("b"));
    let tables = json!({ "t": { "columns": { "a": "text" }, "indexes": ["a"] } });
    let host = host_with_app(&database, &locked, &tables).await?;
    host.machine.add_app(&other, &tables)?;
    host.wait_until_registered(&other).await?;
    let mut admin = database.connect().await?;
    let schema = format!("app_{}", locked.replace('-', "_"));
    admin.batch_execute(&format!("DROP INDEX {schema}.ix_t_a_ca978112")).await?;
    let write = admin.transaction().await?;
    write.batch_execute(&format!("LOCK TABLE {schema}.t IN ROW EXCLUSIVE MODE")).await?;
    // The stored apps are registered in name order. Re-creating the first one's index waits for the lock.
    let host = host.restart()?;
    host.wait_until_registered(&other).await?;
    write.commit().await?;
    host.wait_until_registered(&locked).await
}

#[tokio::test]
async fn two_apps_never_share_a_schema() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("one"));
    let machine = Machine::new(&database.url())?;
    let text = manifest(&slug, &json!({ "t": { "columns": { "a": "text" } } })).to_string();
    machine.write("home/svc/home/apps/copy/svc.json", &text)?;
    machine.write(&format!("home/svc/home/apps/{slug}/svc.json"), &text)?;
    let host = machine.start()?;
    host.wait_until_registered(&slug).await?;
    let (_, apps) = host.get("/api/apps").await?;
    let refused = apps["apps"].as_array().into_iter().flatten().find(|app| app["folder"] == "copy").cloned();
    assert!(refused.is_some_and(|app| app["status"] == "error"), "{apps}");
    Ok(())
}

#[tokio::test]
async fn bridge_works_after_recovery_without_the_app_directory() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("restored"));
    let tables = json!({ "t": { "columns": { "a": "text" } } });
    let host = host_with_app(&database, &slug, &tables).await?;
    host.query_data(&json!({ "action": "insert", "app": slug, "table": "t", "data": { "a": "before" } }))
        .await?;
    drop(host);
    // The state after a restore: the same data, but roles that cannot log in. A drill may have created the role.
    let role = format!("app_{}", slug.replace('-', "_"));
    let restored = format!(
        "ALTER ROLE {role} NOLOGIN PASSWORD NULL; \
         COMMENT ON ROLE {role} IS 'made for a drill of svc-db-backup'"
    );
    database.connect().await?.batch_execute(&restored).await?;
    let host = Machine::new(&database.url())?.start()?;
    host.wait_until_registered(&slug).await?;
    let found = host.query_data(&json!({ "action": "find", "app": slug, "table": "t" })).await?;
    assert_eq!(found[0]["a"], "before");
    assert_eq!(find_app(&host, &slug).await?["folder"], Value::Null);
    let comment = "SELECT shobj_description(oid, 'pg_authid') FROM pg_roles WHERE rolname = $1";
    let comment = database.connect().await?.query_one(comment, &[&role]).await?.get::<_, Option<String>>(0);
    assert_eq!(comment, None, "a registered app's role must not keep the drill's comment");
    Ok(())
}

#[tokio::test]
async fn app_works_if_the_apps_directory_cannot_be_opened() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("linked"));
    let host = host_with_app(&database, &slug, &json!({ "t": { "columns": { "a": "text" } } })).await?;
    let apps = host.machine.path("home/svc/home/apps");
    std::fs::rename(&apps, apps.with_file_name("elsewhere"))?;
    std::os::unix::fs::symlink("elsewhere", &apps)?;
    let host = host.restart()?;
    host.wait_until_registered(&slug).await?;
    let insert = json!({ "action": "insert", "app": slug, "table": "t", "data": { "a": "x" } });
    host.query_data(&insert).await?;
    assert_eq!(host.get("/readyz").await?.0, StatusCode::OK);
    Ok(())
}

#[tokio::test]
async fn rejected_app_without_directory_stays_listed() -> Result<()> {
    let (database, slug, other) = (test_database().await?, unique_name("rejected"), unique_name("other"));
    let tables = json!({ "t": { "columns": { "a": "text" } } });
    drop(host_with_app(&database, &slug, &tables).await?);
    let schema = format!("app_{}", slug.replace('-', "_"));
    let replace_table = format!("DROP TABLE {schema}.t; CREATE VIEW {schema}.t AS SELECT 1 AS a");
    database.connect().await?.batch_execute(&replace_table).await?;
    let host = Machine::new(&database.url())?.start()?;
    host.wait_until("the error", async || Ok(find_app(&host, &slug).await?["status"] == "error")).await?;
    // Adding an app causes another scan of the directories.
    host.machine.add_app(&other, &tables)?;
    host.wait_until_registered(&other).await?;
    let app = find_app(&host, &slug).await?;
    assert_eq!((&app["status"], &app["folder"]), (&json!("error"), &Value::Null), "{app}");
    assert!(app["error"].as_str().unwrap_or_default().contains("is not a table"), "{app}");
    Ok(())
}

#[tokio::test]
async fn pages_are_sandboxed_and_stay_in_their_directory() -> Result<()> {
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    machine.add_app("site", &json!({}))?;
    let file = |name: &str| format!("home/svc/home/apps/site/{name}");
    machine.write(&file("dist/index.html"), "<h1>hello</h1>")?;
    machine.write(&file("dist/app.js"), "1")?;
    machine.write(&file("secret.txt"), "s3cret")?;
    machine.write("home/svc/home/secret.txt", "s3cret")?;
    std::os::unix::fs::symlink("../secret.txt", machine.path(&file("dist/link.txt")))?;
    let host = machine.start()?;
    host.wait_until("the page", async || {
        Ok(host.owner_request(Method::GET, "/apps/site/").send().await?.status() == StatusCode::OK)
    })
    .await?;
    let page = host.owner_request(Method::GET, "/apps/site/").send().await?;
    let header = |response: &reqwest::Response, name: &str| {
        response.headers().get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned()
    };
    let policy = header(&page, "content-security-policy");
    assert!(policy.starts_with("sandbox") && !policy.contains("allow-same-origin"), "{policy}");
    assert_eq!(header(&page, "content-type"), "text/html; charset=utf-8");
    let etag = header(&page, "etag");
    let revalidated =
        host.owner_request(Method::GET, "/apps/site/").header("if-none-match", &etag).send().await?;
    assert_eq!(revalidated.status(), StatusCode::NOT_MODIFIED);
    let deep = host.owner_request(Method::GET, "/apps/site/some/route").send().await?;
    assert_eq!((deep.status(), deep.text().await?.as_str()), (StatusCode::OK, "<h1>hello</h1>"));
    let script = host.owner_request(Method::GET, "/apps/site/app.js").send().await?;
    assert_eq!(header(&script, "content-type"), "text/javascript; charset=utf-8");
    for path in [
        "/apps/site/link.txt",
        "/apps/site/%2e%2e/secret.txt",
        "/apps/site/..%2fsecret.txt",
        "/apps/site/missing.js",
        "/apps/none/",
    ] {
        let response = raw_get(&host, path)?;
        assert!(response.starts_with("HTTP/1.1 404") && !response.contains("s3cret"), "{path}: {response}");
    }
    let response = raw_get(&host, "/apps/site/../../../secret.txt")?;
    assert!(!response.contains("s3cret"), "{response}");
    let without_slash = host.owner_request(Method::GET, "/apps/site").send().await?;
    assert_eq!(header(&without_slash, "location"), "/apps/site/");
    Ok(())
}

/// Sends the path unchanged; a client library would normalize it.
fn raw_get(host: &Host, path: &str) -> Result<String> {
    host.send_over_socket(&format!("GET {path} HTTP/1.1\nhost: h\nconnection: close\n\n"))
}

#[tokio::test]
async fn every_app_has_an_icon() -> Result<()> {
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    let mut own_manifest = manifest("own", &json!({}));
    own_manifest["icon"] = json!("icon.svg");
    machine.write("home/svc/home/apps/own/svc.json", &own_manifest.to_string())?;
    machine.write("home/svc/home/apps/own/icon.svg", "<svg/>")?;
    let host = machine.start()?;
    let icon = async |slug: &str| -> Result<(StatusCode, String)> {
        let response = host.owner_request(Method::GET, &format!("/icons/{slug}")).send().await?;
        Ok((response.status(), response.text().await?))
    };
    host.wait_until("the app's own icon", async || Ok(icon("own").await?.1 == "<svg/>")).await?;
    let (status, first) = icon("unknown-app").await?;
    assert!(status == StatusCode::OK && first.starts_with("<svg"), "{status} {first}");
    assert_eq!(icon("unknown-app").await?.1, first, "the generated icon must be stable");
    assert_eq!(icon("%3Cscript%3E").await?.0, StatusCode::OK);
    Ok(())
}

/// A removed app's tables remain, and its token would otherwise be valid for up to an hour.
#[tokio::test]
async fn token_for_removed_app_is_rejected() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("removed"));
    let host = host_with_app(&database, &slug, &json!({ "t": { "columns": { "a": "text" } } })).await?;
    let status_as_app = async || -> Result<StatusCode> {
        let mut claims = host.machine.claims(Route::App);
        claims.app = Some(slug.clone());
        let proof = host.machine.signer.sign(&claims);
        let body = json!({ "action": "count", "app": slug, "table": "t" });
        let request = host.unsigned_request(Method::POST, "/api/bridge/query").json(&body);
        Ok(send_json(request.header("x-svc-proof", proof)).await?.0)
    };
    assert_eq!(status_as_app().await?, StatusCode::OK);
    std::fs::remove_dir_all(host.machine.path(&format!("home/svc/home/apps/{slug}")))?;
    host.wait_until("the token is refused", async || Ok(status_as_app().await? == StatusCode::FORBIDDEN))
        .await?;
    let count = json!({ "action": "count", "app": slug, "table": "t" });
    assert_eq!(host.query_data(&count).await?["count"], 0, "the owner must still be able to read the tables");
    Ok(())
}

/// The owner may be editing `svc.json`.
#[tokio::test]
async fn app_with_invalid_manifest_stays_installed() -> Result<()> {
    let (database, slug) = (test_database().await?, unique_name("edited"));
    let machine = Machine::new(&database.url())?;
    let file = "home/svc/home/apps/another-name/svc.json";
    machine.write(file, &manifest(&slug, &json!({ "t": { "columns": { "a": "text" } } })).to_string())?;
    let host = machine.start()?;
    host.wait_until_registered(&slug).await?;
    host.machine.write(file, "{ not json")?;
    host.wait_until("the error", async || Ok(find_app(&host, &slug).await?["status"] == "error")).await?;
    let mut claims = host.machine.claims(Route::App);
    claims.app = Some(slug.clone());
    let proof = host.machine.signer.sign(&claims);
    let body = json!({ "action": "count", "app": slug, "table": "t" });
    let request = host.unsigned_request(Method::POST, "/api/bridge/query").json(&body);
    assert_eq!(send_json(request.header("x-svc-proof", proof)).await?.0, StatusCode::OK);
    Ok(())
}

#[tokio::test]
async fn app_token_opens_only_its_own_pages() -> Result<()> {
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    machine.add_app("site", &json!({}))?;
    machine.write("home/svc/home/apps/site/dist/index.html", "x")?;
    let host = machine.start()?;
    let status_as_app = async |slug: &str| -> Result<StatusCode> {
        let mut claims = host.machine.claims(Route::App);
        claims.app = Some(slug.to_owned());
        let proof = host.machine.signer.sign(&claims);
        Ok(send_json(host.unsigned_request(Method::GET, "/apps/site/").header("x-svc-proof", proof)).await?.0)
    };
    host.wait_until("its own page", async || Ok(status_as_app("site").await? == StatusCode::OK)).await?;
    assert_eq!(status_as_app("other").await?, StatusCode::FORBIDDEN);
    Ok(())
}
