//! Tests that a disconnect cancels only the client's own statement, and that other requests are served or refused while
//! a slow statement is running.

use std::time::Duration;

use anyhow::Result;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use super::bridge::TestApp;

/// Returns an app whose inserts with `size = -1` take a minute, longer than any of these tests waits.
async fn app_with_slow_inserts() -> Result<TestApp> {
    let app = TestApp::with_env(&[("BRIDGE_STATEMENT_TIMEOUT_MS", "120000")]).await?;
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

/// Returns the number of the app's sessions whose state matches a `LIKE` pattern.
async fn count_sessions(app: &TestApp, admin: &tokio_postgres::Client, pattern: &str) -> Result<i64> {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE usename = $1 AND state LIKE $2";
    Ok(admin.query_one(sql, &[&app.schema(), &pattern]).await?.get(0))
}

/// Sends a request, waits until it is running, and disconnects.
async fn disconnect_during(app: &TestApp, body: &Value) -> Result<()> {
    let admin = app.database.connect().await?;
    let request = app.host.owner_request(Method::POST, "/api/bridge/query").json(body);
    let request_task = tokio::spawn(request.send());
    app.host
        .wait_until("the request is running", async || Ok(count_sessions(app, &admin, "active").await? == 1))
        .await?;
    request_task.abort();
    let started = std::time::Instant::now();
    app.host
        .wait_until(
            "the request is cancelled",
            async || Ok(count_sessions(app, &admin, "active").await? == 0),
        )
        .await?;
    assert!(started.elapsed() < Duration::from_secs(30), "the request was not cancelled within 30 s");
    let open = count_sessions(app, &admin, "idle in transaction%").await?;
    assert_eq!(open, 0, "a transaction remains open");
    Ok(())
}

#[tokio::test]
async fn disconnect_cancels_the_statement() -> Result<()> {
    let app = app_with_slow_inserts().await?;
    for _ in 0..3 {
        disconnect_during(&app, &app.body("insert", json!({ "data": { "size": -1 } }))).await?;
        app.insert(json!({ "size": 1 })).await?;
    }
    assert_eq!(app.count().await?, 3, "a cancelled insert must have no effect");
    Ok(())
}

#[tokio::test]
async fn disconnect_cancels_the_transaction() -> Result<()> {
    let app = app_with_slow_inserts().await?;
    let insert = |size: i32| json!({ "action": "insert", "table": "things", "data": { "size": size } });
    for _ in 0..3 {
        let operations = json!([insert(1), insert(-1), insert(2)]);
        let body = json!({ "action": "transaction", "app": app.slug, "operations": operations });
        disconnect_during(&app, &body).await?;
    }
    assert_eq!(app.count().await?, 0);
    let good = json!({ "action": "transaction", "app": app.slug, "operations": [insert(1), insert(2)] });
    app.host.query_data(&good).await?;
    assert_eq!(app.count().await?, 2);
    Ok(())
}

#[tokio::test]
async fn failed_find_cancels_its_count() -> Result<()> {
    let app = TestApp::with_env(&[("BRIDGE_STATEMENT_TIMEOUT_MS", "2000")]).await?;
    let (admin, schema) = (app.database.connect().await?, app.schema());
    admin
        .batch_execute(&format!(
            "INSERT INTO {schema}.things (size) VALUES (1);
             CREATE FUNCTION public.wait_for_row() RETURNS boolean LANGUAGE plpgsql AS
                $$ BEGIN PERFORM pg_sleep(60); RETURN true; END $$;
             ALTER TABLE {schema}.things ENABLE ROW LEVEL SECURITY;
             CREATE POLICY wait ON {schema}.things USING (public.wait_for_row())"
        ))
        .await?;
    assert_eq!(app.query("find", json!({ "count": "exact" })).await?.0, 504);
    app.host
        .wait_until("the connection is closed", async || Ok(count_sessions(&app, &admin, "%").await? == 0))
        .await
}

#[tokio::test]
async fn long_statement_does_not_block_other_requests() -> Result<()> {
    let app = app_with_slow_inserts().await?;
    app.insert(json!({ "size": 0 })).await?;
    let admin = app.database.connect().await?;
    let request = app.host.owner_request(Method::POST, "/api/bridge/query");
    let long = tokio::spawn(request.json(&app.body("insert", json!({ "data": { "size": -1 } }))).send());
    app.host
        .wait_until("the request is running", async || Ok(count_sessions(&app, &admin, "active").await? == 1))
        .await?;
    // The only open connection is busy for a minute, so these requests get a new one.
    let others = (0..20).map(|n| app.insert(json!({ "size": n })));
    tokio::time::timeout(Duration::from_secs(20), futures_util::future::try_join_all(others)).await??;
    assert!(!long.is_finished());
    long.abort();
    Ok(())
}

#[tokio::test]
async fn disconnect_cancels_no_other_statement() -> Result<()> {
    let app = app_with_slow_inserts().await?;
    for round in 0..5 {
        let builder = app.host.owner_request(Method::POST, "/api/bridge/query");
        let request =
            tokio::spawn(builder.json(&app.body("insert", json!({ "data": { "size": -1 } }))).send());
        let others = (0..40).map(|n| app.insert(json!({ "size": n })));
        let disconnect = async {
            tokio::time::sleep(Duration::from_millis(20 * round)).await;
            request.abort();
        };
        let (responses, ()) = tokio::join!(futures_util::future::join_all(others), disconnect);
        for response in responses {
            response?;
        }
    }
    assert_eq!(app.count().await?, 200);
    Ok(())
}

/// A transaction may wait for the slow statement's connection, which is abandoned when the client disconnects.
#[tokio::test]
async fn disconnect_cancels_no_waiting_transaction() -> Result<()> {
    let app = app_with_slow_inserts().await?;
    let host = &app.host;
    let insert = |n: i32| json!({ "action": "insert", "table": "things", "data": { "size": n } });
    for round in 0..5 {
        let builder = app.host.owner_request(Method::POST, "/api/bridge/query");
        let request =
            tokio::spawn(builder.json(&app.body("insert", json!({ "data": { "size": -1 } }))).send());
        let others = (0..40).map(|n| {
            let operations = json!([insert(n), insert(n)]);
            let body = json!({ "action": "transaction", "app": app.slug, "operations": operations });
            async move { host.query_data(&body).await }
        });
        let disconnect = async {
            tokio::time::sleep(Duration::from_millis(20 * round)).await;
            request.abort();
        };
        let (responses, ()) = tokio::join!(futures_util::future::join_all(others), disconnect);
        for response in responses {
            response?;
        }
    }
    assert_eq!(app.count().await?, 400);
    Ok(())
}

#[tokio::test]
async fn exhausted_pool_returns_503_with_retry_after() -> Result<()> {
    let app = app_with_slow_inserts().await?;
    let body = app.body("insert", json!({ "data": { "size": -1 } }));
    let send = || tokio::spawn(app.host.owner_request(Method::POST, "/api/bridge/query").json(&body).send());
    // The pool's 16 connections accept at most 8 pipelined statements each, 128 in total, so the other requests must
    // wait.
    let mut requests: Vec<_> = (0..140).map(|_| send()).collect();
    app.host
        .wait_until("a request is refused", async || {
            Ok(requests.iter().any(tokio::task::JoinHandle::is_finished))
        })
        .await?;
    let refused = requests.iter().position(tokio::task::JoinHandle::is_finished).unwrap_or_default();
    let refused = requests.swap_remove(refused).await??;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused.headers().contains_key("retry-after"));
    assert_eq!(refused.json::<Value>().await?["code"], "database_unavailable");
    for request in requests {
        request.abort();
    }
    app.insert(json!({ "size": 1 })).await?;
    let admin = app.database.connect().await?;
    app.host
        .wait_until("all requests are cancelled", async || {
            Ok(count_sessions(&app, &admin, "active").await? == 0)
        })
        .await?;
    assert_eq!(app.count().await?, 1, "a request cancelled while waiting must have no effect");
    Ok(())
}

#[tokio::test]
async fn refused_connections_are_not_retried_in_tight_loop() -> Result<()> {
    let mut app = app_with_slow_inserts().await?;
    let port = app.database.server().port;
    let proxy = kit::net::Proxy::start(([127, 0, 0, 1], port).into())?;
    let url = app.database.url().replace(&format!(":{port}/"), &format!(":{}/", proxy.addr().port()));
    app.host.machine.env.insert("DATABASE_URL".into(), url);
    app.host = app.host.restart()?;
    app.host.wait_until_registered(&app.slug).await?;
    let admin = app.database.connect().await?;
    admin.batch_execute(&format!("ALTER ROLE {} CONNECTION LIMIT 1", app.schema())).await?;
    let send = |body: &Value| {
        tokio::spawn(app.host.owner_request(Method::POST, "/api/bridge/query").json(body).send())
    };
    // A transaction has exclusive use of the only connection.
    let insert = json!({ "action": "insert", "table": "things", "data": { "size": -1 } });
    let long = send(&json!({ "action": "transaction", "app": app.slug, "operations": [insert] }));
    app.host
        .wait_until("the transaction is running", async || {
            Ok(count_sessions(&app, &admin, "active").await? == 1)
        })
        .await?;
    let before = proxy.connection_count();
    let waiting = [0; 2].map(|_| send(&app.body("count", json!({}))));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(waiting.iter().all(|request| !request.is_finished()), "the requests must wait for a connection");
    let attempts = proxy.connection_count() - before;
    assert!((1..30).contains(&attempts), "{attempts} attempts to open a connection");
    long.abort();
    Ok(())
}
