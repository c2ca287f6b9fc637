//! A client that goes away in the middle of a long statement takes the statement with it, and nothing else.

use std::time::Duration;

use anyhow::Result;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use super::bridge::App;

/// An app whose inserts with `size = -1` take a minute, far longer than any test waits.
async fn slow() -> Result<App> {
    let app = App::with_env(&[("BRIDGE_STATEMENT_TIMEOUT_MS", "120000")]).await?;
    let admin = app.database.connect().await?;
    admin
        .batch_execute(&format!(
            "CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN PERFORM pg_sleep(60); RETURN new; END $$;
             CREATE TRIGGER wait BEFORE INSERT ON {}.things FOR EACH ROW WHEN (new.size = -1)
                EXECUTE FUNCTION public.wait()",
            app.schema()
        ))
        .await?;
    Ok(app)
}

/// How many of the app's sessions are in a state.
async fn sessions(app: &App, admin: &tokio_postgres::Client, state: &str) -> Result<i64> {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE usename = $1 AND state LIKE $2";
    Ok(admin.query_one(sql, &[&app.schema(), &state]).await?.get(0))
}

/// Sends a request, waits until it runs, and goes away.
async fn go_away(app: &App, body: &Value) -> Result<()> {
    let admin = app.database.connect().await?;
    let request = app.host.owner(Method::POST, "/api/bridge/query").json(body);
    let sent = tokio::spawn(request.send());
    app.host.until("it runs", async || Ok(sessions(app, &admin, "active").await? == 1)).await?;
    sent.abort();
    let began = std::time::Instant::now();
    app.host.until("it is cancelled", async || Ok(sessions(app, &admin, "active").await? == 0)).await?;
    assert!(began.elapsed() < Duration::from_secs(30), "cancelled, not run to its end");
    let open = sessions(app, &admin, "idle in transaction%").await?;
    assert_eq!(open, 0, "no transaction stays open");
    Ok(())
}

#[tokio::test]
async fn a_statement_ends_with_its_client() -> Result<()> {
    let app = slow().await?;
    for _ in 0..3 {
        go_away(&app, &app.body("insert", json!({ "data": { "size": -1 } }))).await?;
        app.insert(json!({ "size": 1 })).await?;
    }
    assert_eq!(app.count().await?, 3, "what was cancelled was not done");
    Ok(())
}

#[tokio::test]
async fn a_transaction_ends_with_its_client() -> Result<()> {
    let app = slow().await?;
    let on = |size: i32| json!({ "action": "insert", "table": "things", "data": { "size": size } });
    for _ in 0..3 {
        let operations = json!([on(1), on(-1), on(2)]);
        let body = json!({ "action": "transaction", "app": app.slug, "operations": operations });
        go_away(&app, &body).await?;
    }
    assert_eq!(app.count().await?, 0);
    let good = json!({ "action": "transaction", "app": app.slug, "operations": [on(1), on(2)] });
    app.host.data(&good).await?;
    assert_eq!(app.count().await?, 2);
    Ok(())
}

#[tokio::test]
async fn a_long_statement_keeps_nobody_waiting() -> Result<()> {
    let app = slow().await?;
    app.insert(json!({ "size": 0 })).await?;
    let admin = app.database.connect().await?;
    let request = app.host.owner(Method::POST, "/api/bridge/query");
    let long = tokio::spawn(request.json(&app.body("insert", json!({ "data": { "size": -1 } }))).send());
    app.host.until("it runs", async || Ok(sessions(&app, &admin, "active").await? == 1)).await?;
    // On the only connection that is open something runs for a minute: these get another one.
    let others = (0..20).map(|n| app.insert(json!({ "size": n })));
    tokio::time::timeout(Duration::from_secs(20), futures_util::future::try_join_all(others)).await??;
    assert!(!long.is_finished());
    long.abort();
    Ok(())
}

#[tokio::test]
async fn nobody_else_is_cancelled_with_it() -> Result<()> {
    let app = slow().await?;
    for round in 0..5 {
        let request = app.host.owner(Method::POST, "/api/bridge/query");
        let gone = tokio::spawn(request.json(&app.body("insert", json!({ "data": { "size": -1 } }))).send());
        let others = (0..40).map(|n| app.insert(json!({ "size": n })));
        let cut = async {
            tokio::time::sleep(Duration::from_millis(20 * round)).await;
            gone.abort();
        };
        let (all, ()) = tokio::join!(futures_util::future::join_all(others), cut);
        for answer in all {
            answer?;
        }
    }
    assert_eq!(app.count().await?, 200);
    Ok(())
}

#[tokio::test]
async fn when_all_places_are_taken_others_are_told_to_come_again() -> Result<()> {
    let app = slow().await?;
    let body = app.body("insert", json!({ "data": { "size": -1 } }));
    let send = || tokio::spawn(app.host.owner(Method::POST, "/api/bridge/query").json(&body).send());
    // All that a pool of 16 connections takes, and some that find no place.
    let mut all: Vec<_> = (0..140).map(|_| send()).collect();
    app.host
        .until("somebody finds no place", async || Ok(all.iter().any(tokio::task::JoinHandle::is_finished)))
        .await?;
    let told = all.iter().position(tokio::task::JoinHandle::is_finished).unwrap_or_default();
    let told = all.swap_remove(told).await??;
    assert_eq!(told.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(told.headers().contains_key("retry-after"));
    assert_eq!(told.json::<Value>().await?["code"], "database_unavailable");
    for one in all {
        one.abort();
    }
    app.insert(json!({ "size": 1 })).await?;
    let admin = app.database.connect().await?;
    app.host.until("all are cancelled", async || Ok(sessions(&app, &admin, "active").await? == 0)).await?;
    assert_eq!(app.count().await?, 1, "also those that had only waited for their turn");
    Ok(())
}
