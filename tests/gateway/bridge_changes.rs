//! The change feed reports every writer's changes, in order and without gaps, and resumes where a listener stopped.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use svc::http::proof::Route;

use super::bridge::TestApp;
use super::host::Host;

const EVENT_TIMEOUT: Duration = Duration::from_secs(30);

/// An open stream, read event by event.
struct EventStream {
    response: reqwest::Response,
    text: String,
    /// The id of the last event or heartbeat.
    last_id: String,
}

/// An event's name (`message` by default) and data.
type Event = (String, Value);

impl EventStream {
    async fn open(request: reqwest::RequestBuilder) -> Result<Self> {
        let response = request.send().await?;
        ensure!(response.status() == StatusCode::OK, "{} {}", response.status(), response.text().await?);
        let mut events = Self { response, text: String::new(), last_id: String::new() };
        let (name, _) = events.next().await?;
        ensure!(name == "ready", "the stream begins with {name}");
        Ok(events)
    }

    /// Returns the next block of lines.
    async fn next_block(&mut self) -> Result<String> {
        let deadline = tokio::time::Instant::now() + EVENT_TIMEOUT;
        loop {
            if let Some(length) = self.text.find("\n\n") {
                let block = self.text[..length].to_owned();
                self.text.drain(..length + 2);
                return Ok(block);
            }
            let chunk =
                tokio::time::timeout_at(deadline, self.response.chunk()).await.context("no event")??;
            let Some(chunk) = chunk else { bail!("the stream has ended") };
            self.text.push_str(std::str::from_utf8(&chunk)?);
        }
    }

    async fn next(&mut self) -> Result<Event> {
        loop {
            let block = self.next_block().await?;
            let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name));
            if let Some(id) = field("id: ") {
                self.last_id = id.to_owned();
            }
            if let Some(data) = field("data: ") {
                return Ok((field("event: ").unwrap_or("message").to_owned(), serde_json::from_str(data)?));
            }
        }
    }

    /// Returns the next change event's entries, each as its table, action and number of ids (`?` if it lists no ids).
    async fn next_entries(&mut self) -> Result<Vec<String>> {
        let (_, data) = self.next().await?;
        let entries = data["changes"].as_array().cloned().unwrap_or_default();
        let summary = |entry: &Value| {
            let rows = entry["ids"].as_array().map_or("?".to_owned(), |ids| ids.len().to_string());
            format!(
                "{} {} {rows}",
                entry["table"].as_str().unwrap_or("-"),
                entry["action"].as_str().unwrap_or("-")
            )
        };
        Ok(entries.iter().map(summary).collect())
    }
}

fn changes_request(host: &Host, query: &str, last: Option<&str>) -> reqwest::RequestBuilder {
    let request = host.owner_request(Method::GET, &format!("/api/bridge/changes{query}"));
    match last {
        Some(last) => request.header("last-event-id", last),
        None => request,
    }
}

#[tokio::test]
async fn every_writers_changes_are_reported() -> Result<()> {
    let app = TestApp::new().await?;
    app.insert(json!({ "title": "before the first listener" })).await?;
    let mut events = EventStream::open(changes_request(&app.host, "", None)).await?;
    let row = app.insert(json!({ "title": "a" })).await?;
    let (name, data) = events.next().await?;
    assert_eq!(name, "message");
    let entry = json!({ "app": app.slug, "table": "things", "action": "insert", "ids": [row["id"]] });
    assert_eq!(data["changes"], json!([entry]), "{data}");
    assert!(events.last_id.starts_with("1-"), "{}", events.last_id);

    app.query_data("insertMany", json!({ "rows": [{ "title": "b" }, { "title": "b" }, { "title": "c" }] }))
        .await?;
    assert_eq!(events.next_entries().await?, ["things insert 3"]);
    app.query_data("update", json!({ "filter": { "title": "b" }, "data": { "size": 1 } })).await?;
    assert_eq!(events.next_entries().await?, ["things update 2"]);
    app.query_data("update", json!({ "filter": { "title": "none" }, "data": { "size": 1 } })).await?;
    let insert_op =
        |title: &str| json!({ "action": "insert", "table": "things", "data": { "title": title } });
    let operations =
        json!([insert_op("d"), insert_op("e"), { "action": "delete", "table": "things", "id": row["id"] }]);
    app.host
        .query_data(&json!({ "action": "transaction", "app": app.slug, "operations": operations }))
        .await?;
    let expected = ["things insert 1", "things insert 1", "things delete 1"];
    assert_eq!(
        events.next_entries().await?,
        expected,
        "there must be one event per transaction, and none for an update of no rows"
    );
    let failing = json!([insert_op("x"), { "action": "get", "table": "things", "id": row["id"] }]);
    let body = json!({ "action": "transaction", "app": app.slug, "operations": failing });
    assert_eq!(app.host.query(&body).await?.0, StatusCode::NOT_FOUND);

    let admin = app.database.connect().await?;
    let table = format!("{}.things", app.schema());
    admin.batch_execute(&format!("INSERT INTO {table} (title) VALUES ('psql'), ('psql')")).await?;
    assert_eq!(events.next_entries().await?, ["things insert 2"], "a rolled-back change must cause no event");
    admin
        .batch_execute(&format!("INSERT INTO {table} (size) SELECT n FROM generate_series(1, 1001) n"))
        .await?;
    assert_eq!(
        events.next_entries().await?,
        ["things insert ?"],
        "more than 1000 row ids must not be listed"
    );
    admin.batch_execute(&format!("TRUNCATE {table}")).await?;
    assert_eq!(events.next_entries().await?, ["things truncate ?"]);
    Ok(())
}

#[tokio::test]
async fn late_commit_is_not_skipped() -> Result<()> {
    let app = TestApp::new().await?;
    let mut events = EventStream::open(changes_request(&app.host, "", None)).await?;
    let mut admin = app.database.connect().await?;
    let slow = admin.transaction().await?;
    // This transaction gets its position in the order first, and commits last.
    let sql = format!("INSERT INTO {}.things (title) VALUES ('slow'), ('slow')", app.schema());
    slow.batch_execute(&sql).await?;
    for _ in 0..3 {
        app.insert(json!({ "title": "quick" })).await?;
    }
    let early = tokio::time::timeout(Duration::from_millis(1500), events.next_entries()).await;
    assert!(early.is_err(), "an event must wait for earlier open transactions: {early:?}");
    slow.commit().await?;
    assert_eq!(events.next_entries().await?, ["things insert 2"]);
    for _ in 0..3 {
        assert_eq!(events.next_entries().await?, ["things insert 1"]);
    }
    Ok(())
}

#[tokio::test]
async fn listener_resumes_where_it_stopped() -> Result<()> {
    let app = TestApp::new().await?;
    let mut events = EventStream::open(changes_request(&app.host, "", None)).await?;
    let start = events.last_id.clone();
    app.insert(json!({ "title": "seen" })).await?;
    assert_eq!(events.next_entries().await?, ["things insert 1"]);
    let last = events.last_id.clone();
    drop(events);
    for n in 1..=45 {
        let rows = vec![json!({ "title": "missed" }); n];
        app.query_data("insertMany", json!({ "rows": rows })).await?;
    }
    let mut late = EventStream::open(changes_request(&app.host, "", Some(&last))).await?;
    let mut early = EventStream::open(changes_request(&app.host, "", Some(&start))).await?;
    assert_eq!(early.next_entries().await?, ["things insert 1"]);
    app.insert(json!({ "title": "now" })).await?;
    for events in [&mut late, &mut early] {
        for n in (1..=45).chain([1]) {
            assert_eq!(events.next_entries().await?, [format!("things insert {n}")]);
        }
    }
    let try_resume = async |id: &str| -> Result<(u16, Value)> {
        let response = changes_request(&app.host, "", Some(id)).send().await?;
        Ok((response.status().as_u16(), response.json::<Value>().await?["code"].take()))
    };
    let position = last.split_once('-').map(|(_, position)| position).unwrap_or_default();
    assert_eq!(
        try_resume(&format!("2-{position}")).await?,
        (410, json!("gone")),
        "a position in a different epoch must be gone"
    );
    assert_eq!(
        try_resume("1-1").await?,
        (410, json!("gone")),
        "a position before the first listener must be gone"
    );
    assert_eq!(try_resume("1-9999999999").await?, (410, json!("gone")), "an unknown position must be gone");
    for bad in ["x", "1", "1-", "1-x"] {
        assert_eq!(try_resume(bad).await?, (400, json!("invalid_request")), "{bad}");
    }
    Ok(())
}

#[tokio::test]
async fn expired_position_is_rejected_as_gone() -> Result<()> {
    let app = TestApp::with_env(&[("BRIDGE_CHANGES_KEEP_SECONDS", "1")]).await?;
    let mut events = EventStream::open(changes_request(&app.host, "", None)).await?;
    let start = events.last_id.clone();
    app.insert(json!({ "title": "a" })).await?;
    events.next_entries().await?;
    let admin = app.database.connect().await?;
    let count_outbox_rows = async || -> Result<i64> {
        Ok(admin.query_one("SELECT count(*) FROM svc.changes", &[]).await?.get(0))
    };
    app.host.wait_until("the outbox is empty", async || Ok(count_outbox_rows().await? == 0)).await?;
    let response = changes_request(&app.host, "", Some(&start)).send().await?;
    assert_eq!(response.status(), StatusCode::GONE);
    let last = events.last_id.clone();
    EventStream::open(changes_request(&app.host, "", Some(&last))).await?;
    app.insert(json!({ "title": "b" })).await?;
    assert_eq!(events.next_entries().await?, ["things insert 1"], "an active listener must miss nothing");
    Ok(())
}

#[tokio::test]
async fn cleanup_keeps_events_after_a_recent_one() -> Result<()> {
    let app = TestApp::with_env(&[("BRIDGE_CHANGES_KEEP_SECONDS", "1")]).await?;
    let admin = app.database.connect().await?;
    // The transaction of the row `recent` wrote long after it got its id, so the row `old` has a higher id.
    let insert = "INSERT INTO svc.changes (xid, at, schema_name, table_name, action) VALUES
                      ('4', now() - interval '1 hour', 'app', 'expired', 'insert'),
                      ('5', now() + interval '1 hour', 'app', 'recent', 'insert'),
                      ('6', now() - interval '1 hour', 'app', 'old', 'insert')";
    admin.execute(insert, &[]).await?;
    let list_tables = async || -> Result<Vec<String>> {
        let rows = admin.query("SELECT table_name FROM svc.changes ORDER BY xid", &[]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    };
    app.host.wait_until("expired events are deleted", async || Ok(list_tables().await?.len() < 3)).await?;
    assert_eq!(list_tables().await?, ["recent", "old"]);
    Ok(())
}

#[tokio::test]
async fn changes_to_partitioned_tables_are_reported_once() -> Result<()> {
    let app = TestApp::new().await?;
    let (admin, table) = (app.database.connect().await?, format!("{}.parts", app.schema()));
    admin
        .batch_execute(&format!(
            "CREATE TABLE {table} (id uuid NOT NULL DEFAULT gen_random_uuid(), n int) PARTITION BY LIST (n);
             CREATE TABLE {table}_1 PARTITION OF {table} FOR VALUES IN (1);
             CREATE TABLE {table}_2 PARTITION OF {table} FOR VALUES IN (2)"
        ))
        .await?;
    let mut events = EventStream::open(changes_request(&app.host, "", None)).await?;
    for (sql, expected) in [
        (format!("INSERT INTO {table} (n) VALUES (1), (2), (2)"), "parts insert 3"),
        (format!("UPDATE {table} SET n = 2 WHERE n = 1"), "parts update 1"),
        (format!("INSERT INTO {table}_1 (n) VALUES (1)"), "parts_1 insert 1"),
        (format!("DELETE FROM {table}"), "parts delete 4"),
    ] {
        admin.batch_execute(&sql).await?;
        assert_eq!(events.next_entries().await?, [expected], "{sql}");
    }
    Ok(())
}

#[tokio::test]
async fn triggers_ignore_the_writers_search_path() -> Result<()> {
    let app = TestApp::new().await?;
    let mut events = EventStream::open(changes_request(&app.host, "", None)).await?;
    let mut admin = app.database.connect().await?;
    admin
        .batch_execute(
            "CREATE SCHEMA trap;
             CREATE FUNCTION trap.spring(name, name) RETURNS boolean LANGUAGE plpgsql
                 AS $$ BEGIN RAISE 'the trigger calls the writer''s operator'; END $$;
             CREATE OPERATOR trap.<> (LEFTARG = name, RIGHTARG = name, FUNCTION = trap.spring);
             SET search_path = trap, pg_catalog",
        )
        .await?;
    let write = admin.transaction().await?;
    write.batch_execute("SELECT pg_sleep(0.1)").await?;
    let table = format!("{}.things", app.schema());
    write.batch_execute(&format!("INSERT INTO {table} (title) VALUES ('a'); TRUNCATE {table}")).await?;
    let is_time_of_write: bool =
        write.query_one("SELECT bool_and(at > now()) FROM svc.changes", &[]).await?.get(0);
    assert!(is_time_of_write, "an event's time must not be the start of its transaction");
    write.commit().await?;
    assert_eq!(events.next_entries().await?, ["things insert 1", "things truncate ?"]);
    Ok(())
}

#[tokio::test]
async fn stream_ends_when_unread_changes_were_deleted() -> Result<()> {
    let app = TestApp::new().await?;
    let mut events = EventStream::open(changes_request(&app.host, "", None)).await?;
    app.insert(json!({ "title": "seen" })).await?;
    events.next_entries().await?;
    let admin = app.database.connect().await?;
    admin.execute("UPDATE svc.feed SET floor = floor + 1000000", &[]).await?;
    app.insert(json!({ "title": "deleted" })).await?;
    let ended = events.next_entries().await;
    assert!(ended.as_ref().is_err_and(|error| error.to_string() == "the stream has ended"), "{ended:?}");
    let resumed = changes_request(&app.host, "", Some(&events.last_id)).send().await?;
    assert_eq!(resumed.status(), StatusCode::GONE);
    Ok(())
}

/// A new app's triggers are created only when the stream starts to follow the app.
#[tokio::test]
async fn stream_ends_if_new_apps_changes_were_not_recorded() -> Result<()> {
    let app = TestApp::new().await?;
    let mut events = EventStream::open(changes_request(&app.host, "", None)).await?;
    let new = super::host::unique_name("new");
    app.host.machine.add_app(&new, &json!({ "t": { "columns": { "a": "text" } } }))?;
    app.host.wait_until_registered(&new).await?;
    let insert = json!({ "action": "insert", "app": new, "table": "t", "data": { "a": "x" } });
    app.host.query_data(&insert).await?;
    app.insert(json!({ "title": "after it" })).await?;
    let ended = events.next_entries().await;
    assert!(ended.as_ref().is_err_and(|error| error.to_string() == "the stream has ended"), "{ended:?}");
    let resumed = changes_request(&app.host, "", Some(&events.last_id)).send().await?;
    assert_eq!(resumed.status(), StatusCode::GONE);
    let mut events = EventStream::open(changes_request(&app.host, "", None)).await?;
    app.host.query_data(&insert).await?;
    assert_eq!(events.next_entries().await?, ["t insert 1"]);
    Ok(())
}

#[tokio::test]
async fn app_receives_only_its_own_changes_even_to_new_tables() -> Result<()> {
    let app = TestApp::new().await?;
    let other = super::host::unique_name("other");
    app.host.machine.add_app(&other, &json!({ "t": { "columns": { "a": "text" } } }))?;
    app.host.wait_until_registered(&other).await?;
    let as_app = |slug: &str, query: &str| {
        let mut claims = app.host.machine.claims(Route::App);
        claims.app = Some(slug.to_owned());
        let path = format!("/api/bridge/changes{query}");
        app.host
            .unsigned_request(Method::GET, &path)
            .header("x-svc-proof", app.host.machine.signer.sign(&claims))
    };
    let mut app_events = EventStream::open(as_app(&other, "")).await?;
    let mut filtered = EventStream::open(changes_request(&app.host, &format!("?app={other}"), None)).await?;
    let mut all = EventStream::open(changes_request(&app.host, "", None)).await?;
    app.insert(json!({ "title": "not for the other" })).await?;
    let insert =
        |table: &str| json!({ "action": "insert", "app": other, "table": table, "data": { "a": "x" } });
    app.host.query_data(&insert("t")).await?;
    assert_eq!(app_events.next_entries().await?, ["t insert 1"]);
    assert_eq!(filtered.next_entries().await?, ["t insert 1"]);
    assert_eq!(all.next_entries().await?, ["things insert 1"]);
    assert_eq!(all.next_entries().await?, ["t insert 1"]);
    // The app's event ids reveal nothing about other writers, and are valid only for this app.
    let position = filtered.last_id.trim_start_matches("1-");
    assert!(
        position.parse::<u64>().is_ok() && !app_events.last_id.contains(position),
        "{} {}",
        filtered.last_id,
        app_events.last_id
    );
    let resumed = as_app(&other, "").header("last-event-id", &app_events.last_id).send().await?;
    assert_eq!(resumed.status(), StatusCode::OK);
    for (slug, id, status) in [
        (&other, &filtered.last_id, StatusCode::BAD_REQUEST),
        (&app.slug, &app_events.last_id, StatusCode::BAD_REQUEST),
        (&other, &app_events.last_id.replacen("1-", "2-", 1), StatusCode::GONE),
    ] {
        assert_eq!(as_app(slug, "").header("last-event-id", id).send().await?.status(), status, "{id}");
    }
    assert_eq!(as_app(&other, &format!("?app={}", app.slug)).send().await?.status(), StatusCode::FORBIDDEN);
    assert_eq!(changes_request(&app.host, "?app=none", None).send().await?.status(), StatusCode::NOT_FOUND);
    assert_eq!(changes_request(&app.host, "?nope=1", None).send().await?.status(), StatusCode::BAD_REQUEST);
    assert_eq!(
        app.host.unsigned_request(Method::GET, "/api/bridge/changes").send().await?.status(),
        StatusCode::UNAUTHORIZED
    );

    let tables = json!({ "t": { "columns": { "a": "text" } }, "late": { "columns": { "a": "text" } } });
    app.host.machine.add_app(&other, &tables)?;
    let insert_succeeds = async || Ok(app.host.query(&insert("late")).await?.0.is_success());
    app.host.wait_until("the new table is registered", insert_succeeds).await?;
    assert_eq!(app_events.next_entries().await?, ["late insert 1"]);
    assert_eq!(all.next_entries().await?, ["late insert 1"]);
    Ok(())
}

#[tokio::test]
async fn outbox_is_discarded_after_restore() -> Result<()> {
    let mut app = TestApp::new().await?;
    let mut events = EventStream::open(changes_request(&app.host, "", None)).await?;
    app.insert(json!({ "title": "a" })).await?;
    events.next_entries().await?;
    let last = events.last_id.clone();
    drop(events);
    app.insert(json!({ "title": "from the old epoch" })).await?;
    // A dump from a server with far higher transaction ids contains such a floor.
    let admin = app.database.connect().await?;
    admin.execute("UPDATE svc.watched SET floor = 1000000000000", &[]).await?;
    app.host.machine.env.insert("SVC_EPOCH".into(), "2".into());
    app.host = app.host.restart()?;
    app.host.wait_until_registered(&app.slug).await?;
    let remaining: i64 = admin.query_one("SELECT count(*) FROM svc.changes", &[]).await?.get(0);
    assert_eq!(remaining, 0);
    assert_eq!(changes_request(&app.host, "", Some(&last)).send().await?.status(), StatusCode::GONE);
    let same_position = last.replacen("1-", "2-", 1);
    let response = changes_request(&app.host, "", Some(&same_position)).send().await?;
    assert_eq!(response.status(), StatusCode::GONE, "an old position must be gone under the new epoch");
    let mut events = EventStream::open(changes_request(&app.host, "", None)).await?;
    assert!(events.last_id.starts_with("2-"), "{}", events.last_id);
    app.insert(json!({ "title": "b" })).await?;
    assert_eq!(events.next_entries().await?, ["things insert 1"]);
    let last = events.last_id.clone();
    EventStream::open(changes_request(&app.host, "", Some(&last))).await?;
    // An earlier version may have left the floors of another server in place.
    admin.execute("UPDATE svc.watched SET floor = 1000000000000", &[]).await?;
    app.host = app.host.restart()?;
    app.host.wait_until_registered(&app.slug).await?;
    let floor: i64 = admin.query_one("SELECT max(floor) FROM svc.watched", &[]).await?.get(0);
    assert!(floor < 1_000_000_000_000, "{floor}");
    Ok(())
}

#[tokio::test]
async fn idle_stream_has_heartbeats_and_ends_with_the_gateway() -> Result<()> {
    let mut app = TestApp::new().await?;
    let mut events = EventStream::open(changes_request(&app.host, "", None)).await?;
    let started = std::time::Instant::now();
    let block = events.next_block().await?;
    assert!(block.starts_with(": heartbeat\nid: 1-") && !block.contains("data:"), "{block}");
    assert!(started.elapsed() > Duration::from_secs(10));
    app.host.terminate()?;
    assert!(app.host.wait_for_exit().await?.success(), "an open stream must not delay the shutdown");
    Ok(())
}

#[tokio::test]
async fn triggers_are_created_when_first_listener_connects() -> Result<()> {
    let app = TestApp::new().await?;
    let admin = app.database.connect().await?;
    let count_triggers = async || -> Result<i64> {
        let sql = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'svc_changes_%'";
        Ok(admin.query_one(sql, &[]).await?.get(0))
    };
    assert_eq!(count_triggers().await?, 0);
    drop(EventStream::open(changes_request(&app.host, "", None)).await?);
    assert_eq!(count_triggers().await?, 4);
    Ok(())
}

#[tokio::test]
async fn cleanup_keeps_triggers_of_new_listener() -> Result<()> {
    let app = TestApp::with_env(&[("BRIDGE_CHANGES_KEEP_SECONDS", "1")]).await?;
    drop(EventStream::open(changes_request(&app.host, "", None)).await?);
    let (mut locker, admin) = (app.database.connect().await?, app.database.connect().await?);
    let age_listener = "UPDATE svc.watched SET listened_at = now() - interval '8 days'";
    let count_triggers = async || -> Result<i64> {
        let sql = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'svc_changes_%'";
        Ok(admin.query_one(sql, &[]).await?.get(0))
    };
    let lock = locker.transaction().await?;
    lock.batch_execute("SELECT pg_advisory_xact_lock(hashtext('svc-gateway'))").await?;
    app.host
        .wait_until("the cleanup is waiting for the lock", async || {
            admin.execute(age_listener, &[]).await?;
            let sql = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
                          AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))";
            Ok(admin.query_one(sql, &[]).await?.get(0))
        })
        .await?;
    // A listener connects before the cleanup gets the lock.
    admin.execute("UPDATE svc.watched SET listened_at = now()", &[]).await?;
    lock.commit().await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(count_triggers().await?, 4);
    app.host
        .wait_until("the app is no longer watched", async || {
            admin.execute(age_listener, &[]).await?;
            Ok(count_triggers().await? == 0)
        })
        .await
}
