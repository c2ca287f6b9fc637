//! Tests concurrent single-row inserts, which share statements: each request gets its own row or error, and a row that
//! fails or is slow affects no other request.

use std::time::{Duration, Instant};

use anyhow::Result;
use futures_util::future::{join_all, try_join_all};
use reqwest::Method;
use serde_json::{Value, json};

use super::bridge::TestApp;

/// Enough for batches to form.
const CONCURRENT: i64 = 100;

/// Inserts rows with these sizes concurrently; returns the responses in the same order.
async fn insert_all(app: &TestApp, sizes: impl Iterator<Item = i64>) -> Result<Vec<(u16, Value)>> {
    let inserts = sizes.map(|size| app.query("insert", json!({ "data": { "title": "t", "size": size } })));
    try_join_all(inserts).await
}

/// Returns an app with an empty table that batches inserts. Each statement takes 10 ms, so that inserts of a slow debug
/// build meet. Right after the start, inserts wait for connections and are then executed separately.
async fn batching_app(env: &[(&str, &str)]) -> Result<TestApp> {
    let app = TestApp::with_env(env).await?;
    let (admin, schema) = (app.database.connect().await?, app.schema());
    admin
        .batch_execute(&format!(
            "CREATE FUNCTION public.pause() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN PERFORM pg_sleep(0.01); RETURN NULL; END $$;
             CREATE TRIGGER pause BEFORE INSERT ON {schema}.things FOR EACH STATEMENT
                EXECUTE FUNCTION public.pause()"
        ))
        .await?;
    let truncate = format!("TRUNCATE {schema}.things");
    app.host
        .wait_until("inserts are batched", async || {
            admin.batch_execute(&truncate).await?;
            for (status, response) in insert_all(&app, 0..CONCURRENT).await? {
                assert_eq!(status, 201, "{response}");
            }
            Ok(count_transactions(&app).await? < CONCURRENT / 2)
        })
        .await?;
    admin.batch_execute(&truncate).await?;
    Ok(app)
}

/// Inserts rows concurrently, and checks that each request gets its own row and that the table has no others.
async fn assert_all_inserted(app: &TestApp) -> Result<()> {
    for (size, (status, response)) in (0..).zip(insert_all(app, 0..CONCURRENT).await?) {
        assert_eq!((status, &response["data"]["size"]), (201, &json!(size)), "{response}");
    }
    assert_eq!(app.count().await?, CONCURRENT);
    Ok(())
}

/// Number of transactions that inserted the table's rows.
async fn count_transactions(app: &TestApp) -> Result<i64> {
    let admin = app.database.connect().await?;
    let sql = format!("SELECT count(DISTINCT xmin::text) FROM {}.things", app.schema());
    Ok(admin.query_one(&sql, &[]).await?.get(0))
}

async fn create_trigger(app: &TestApp, condition: &str, body: &str) -> Result<()> {
    let schema = app.schema();
    let admin = app.database.connect().await?;
    admin
        .batch_execute(&format!(
            "CREATE FUNCTION public.intervene() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN {body} RETURN new; END $$;
             CREATE TRIGGER intervene BEFORE INSERT ON {schema}.things FOR EACH ROW WHEN ({condition})
                EXECUTE FUNCTION public.intervene()"
        ))
        .await?;
    Ok(())
}

#[tokio::test]
async fn concurrent_inserts_share_transactions() -> Result<()> {
    let app = batching_app(&[]).await?;
    assert_all_inserted(&app).await
}

#[tokio::test]
async fn sequential_inserts_use_separate_transactions() -> Result<()> {
    let app = TestApp::new().await?;
    for size in 0..5 {
        app.query_data("insert", json!({ "data": { "size": size } })).await?;
    }
    assert_eq!(count_transactions(&app).await?, 5);
    Ok(())
}

#[tokio::test]
async fn rejected_row_in_batch_fails_alone() -> Result<()> {
    let app = batching_app(&[]).await?;
    let admin = app.database.connect().await?;
    admin.batch_execute(&format!("ALTER TABLE {}.things ADD CHECK (size % 10 <> 3)", app.schema())).await?;
    for (size, (status, response)) in (0..).zip(insert_all(&app, 0..CONCURRENT).await?) {
        let expected = if size % 10 == 3 { 400 } else { 201 };
        assert_eq!(status, expected, "size {size}: {response}");
    }
    assert_eq!(app.count().await?, CONCURRENT * 9 / 10);
    Ok(())
}

#[tokio::test]
async fn conflicting_ids_in_batch_insert_one_row() -> Result<()> {
    let app = batching_app(&[]).await?;
    let row = json!({ "data": { "id": "0192d1f0-0000-7000-8000-000000000001", "title": "t" } });
    let results = join_all((0..CONCURRENT).map(|_| app.query("insert", row.clone()))).await;
    let statuses = results.into_iter().map(|result| Ok(result?.0)).collect::<Result<Vec<_>>>()?;
    assert_eq!(statuses.iter().filter(|status| **status == 201).count(), 1, "{statuses:?}");
    assert!(statuses.iter().all(|status| [201, 409].contains(status)), "{statuses:?}");
    assert_eq!(app.count().await?, 1);
    Ok(())
}

#[tokio::test]
async fn slow_row_in_batch_delays_others_only_briefly() -> Result<()> {
    let app = batching_app(&[("BRIDGE_STATEMENT_TIMEOUT_MS", "120000")]).await?;
    create_trigger(&app, "new.size = -1", "PERFORM pg_sleep(60);").await?;
    let started = Instant::now();
    let slow = insert_all(&app, std::iter::once(-1));
    let others = async {
        // Batches form around the slow row, too.
        let batches = (0..3).map(|_| insert_all(&app, 0..CONCURRENT));
        for (status, response) in try_join_all(batches).await?.into_iter().flatten() {
            assert_eq!(status, 201, "{response}");
        }
        anyhow::Ok(started.elapsed())
    };
    let elapsed = tokio::select! {
        slow = slow => anyhow::bail!("the slow insert ended: {slow:?}"),
        elapsed = others => elapsed?,
    };
    assert!(elapsed < Duration::from_secs(20), "the others took {elapsed:?}");
    assert_eq!(app.count().await?, 3 * CONCURRENT);
    Ok(())
}

#[tokio::test]
async fn batch_with_slow_rows_is_split_up() -> Result<()> {
    let app = batching_app(&[("BRIDGE_STATEMENT_TIMEOUT_MS", "120000")]).await?;
    create_trigger(&app, "new.size % 50 = 7", "PERFORM pg_sleep(1);").await?;
    assert_all_inserted(&app).await
}

#[tokio::test]
async fn disconnecting_clients_do_not_cancel_other_rows() -> Result<()> {
    let app = batching_app(&[]).await?;
    let leaving: Vec<_> = (0..CONCURRENT)
        .map(|_| {
            let body = app.body("insert", json!({ "data": { "size": -1 } }));
            tokio::spawn(app.host.owner_request(Method::POST, "/api/bridge/query").json(&body).send())
        })
        .collect();
    let staying = insert_all(&app, 0..CONCURRENT);
    let leave = async {
        for (index, task) in leaving.into_iter().enumerate() {
            if index % 4 == 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            task.abort();
        }
        anyhow::Ok(())
    };
    let (staying, _) = futures_util::future::try_join(staying, leave).await?;
    for (size, (status, response)) in (0..).zip(staying) {
        assert_eq!((status, &response["data"]["size"]), (201, &json!(size)), "{response}");
    }
    let counted = app.query_data("count", json!({ "filter": { "size": { "gte": 0 } } })).await?;
    assert_eq!(counted["count"], CONCURRENT);
    Ok(())
}

#[tokio::test]
async fn rows_skipped_by_a_trigger_are_not_mixed_up() -> Result<()> {
    let app = batching_app(&[]).await?;
    create_trigger(&app, "new.size % 5 = 2", "RETURN NULL;").await?;
    for (size, (status, response)) in (0..).zip(insert_all(&app, 0..CONCURRENT).await?) {
        if size % 5 == 2 {
            assert_eq!(status, 500, "size {size}: {response}");
        } else {
            assert_eq!((status, &response["data"]["size"]), (201, &json!(size)), "{response}");
        }
    }
    assert_eq!(app.count().await?, CONCURRENT * 4 / 5);
    Ok(())
}
