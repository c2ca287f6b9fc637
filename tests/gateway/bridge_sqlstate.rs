//! Each class of database error has a status and a code, and no response or log contains a value.

use anyhow::Result;
use reqwest::Method;
use serde_json::{Value, json};

use super::bridge::TestApp;

const CANARY: &str = "s3cret-canary";

/// Returns an app whose database rejects inserts with a five-character title. The title becomes the error's SQLSTATE,
/// and the error's messages contain the value of `meta`.
async fn app_with_failing_inserts() -> Result<TestApp> {
    let app = TestApp::with_env(&[("RUST_LOG", "debug")]).await?;
    let admin = app.database.connect().await?;
    admin
        .batch_execute(&format!(
            "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                RAISE NOTICE 'notice of %', new.meta;
                RAISE WARNING 'warning of %', new.meta;
                RAISE EXCEPTION USING ERRCODE = new.title, MESSAGE = 'message ' || new.meta::text,
                    DETAIL = 'detail ' || new.meta::text, HINT = 'hint ' || new.meta::text,
                    CONSTRAINT = 'a_constraint'; END $$;
             CREATE TRIGGER refuse BEFORE INSERT ON {}.things FOR EACH ROW WHEN (length(new.title) = 5)
                EXECUTE FUNCTION public.refuse()",
            app.schema()
        ))
        .await?;
    Ok(app)
}

#[tokio::test]
async fn every_sqlstate_maps_to_status_without_its_message() -> Result<()> {
    let app = app_with_failing_inserts().await?;
    let cases = [
        ("23505", 409, "conflict", Some(false), false),
        ("23503", 409, "conflict", Some(false), false),
        ("23001", 409, "conflict", Some(false), false),
        ("23P01", 409, "conflict", Some(false), false),
        ("40001", 409, "conflict", Some(true), true),
        ("40P01", 409, "conflict", Some(true), true),
        ("55P03", 409, "conflict", Some(true), true),
        ("42P10", 400, "invalid_request", None, false),
        ("21000", 400, "invalid_request", None, false),
        ("23502", 400, "invalid_request", None, false),
        ("23514", 400, "invalid_request", None, false),
        ("22001", 400, "invalid_request", None, false),
        ("22P02", 400, "invalid_request", None, false),
        ("54000", 400, "invalid_request", None, false),
        ("P0001", 400, "invalid_request", None, false),
        ("42501", 403, "forbidden", None, false),
        ("57014", 504, "deadline_exceeded", None, false),
        ("53100", 503, "database_unavailable", None, true),
        ("53300", 503, "database_unavailable", None, true),
        ("08006", 503, "database_unavailable", None, true),
        ("57P03", 503, "database_unavailable", None, true),
        ("42P01", 500, "internal", None, false),
        ("XX000", 500, "internal", None, false),
    ];
    for (sqlstate, status, code, retryable, has_retry_after) in cases {
        let body = app.body("insert", json!({ "data": { "title": sqlstate, "meta": { "v": CANARY } } }));
        let response = app.host.owner_request(Method::POST, "/api/bridge/query").json(&body).send().await?;
        assert_eq!(response.headers().contains_key("retry-after"), has_retry_after, "{sqlstate}");
        assert_eq!(response.status().as_u16(), status, "{sqlstate}");
        let text = response.text().await?;
        let problem: Value = serde_json::from_str(&text)?;
        assert_eq!(problem["code"], code, "{sqlstate} {problem}");
        assert_eq!(problem.get("retryable").and_then(Value::as_bool), retryable, "{sqlstate} {problem}");
        assert!(!text.contains("canary") && problem["requestId"].is_string(), "{text}");
    }
    assert_canary_not_logged(&app).await?;
    Ok(())
}

async fn assert_canary_not_logged(app: &TestApp) -> Result<()> {
    let postgres = kit::pg::process_server().await?.log();
    for (log, text) in [("the gateway's log", app.host.log()), ("PostgreSQL's log", postgres)] {
        let leak = text.lines().find(|line| line.contains("canary"));
        assert_eq!(leak, None, "{log} contains a value");
    }
    Ok(())
}

#[tokio::test]
async fn real_database_errors_quote_no_value() -> Result<()> {
    let app = app_with_failing_inserts().await?;
    let admin = app.database.connect().await?;
    let schema = app.schema();
    admin
        .batch_execute(&format!(
            "ALTER TABLE {schema}.things ADD CONSTRAINT short CHECK (length(title) < 60);
             CREATE UNIQUE INDEX one_title ON {schema}.things (title);
             ALTER TABLE {schema}.things ADD COLUMN required text NOT NULL DEFAULT 'x'"
        ))
        .await?;
    let title = format!("{CANARY}-title");
    let row = app.insert(json!({ "title": title, "size": 1 })).await?;
    let rejected = app.insert(json!({ "title": "other", "size": 2 })).await;
    assert!(rejected.is_err(), "the trigger must reject five-character titles");
    let second_row = app.insert(json!({ "title": "another", "size": 2 })).await?;
    let long = format!("{CANARY}{}", "x".repeat(60));
    let overflow = format!("1{}e140000", "0".repeat(3));
    let forged_cursor = {
        use base64::Engine;
        let keys = json!({ "order": "size,id", "filter": "", "keys": [CANARY, CANARY] }).to_string();
        base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(keys)
    };
    let with_nul = format!("{{\"v\":\"{CANARY}\\u0000\"}}");
    let with_nul: Value = serde_json::from_str(&with_nul)?;
    let cases = [
        (app.body("insert", json!({ "data": { "title": title } })), 409),
        (app.body("insertMany", json!({ "rows": [{ "title": "one" }, { "title": title }] })), 409),
        (app.body("update", json!({ "id": second_row["id"], "data": { "title": title } })), 409),
        (app.body("insert", json!({ "data": { "id": row["id"], "title": CANARY } })), 409),
        (app.body("insert", json!({ "data": { "title": long } })), 400),
        (app.body("insert", json!({ "data": { "title": CANARY, "price": overflow } })), 400),
        (app.body("insert", json!({ "data": { "meta": with_nul } })), 400),
        (app.body("insert", json!({ "data": { "size": CANARY } })), 400),
        (app.body("insert", json!({ "data": { "at": CANARY } })), 400),
        (app.body("find", json!({ "filter": { "size": CANARY } })), 400),
        (app.body("find", json!({ "orderBy": ["size"], "after": forged_cursor })), 400),
        (app.body("upsert", json!({ "data": { "meta": CANARY }, "onConflict": ["meta"] })), 400),
        (app.body("get", json!({ "id": CANARY })), 400),
    ];
    for (body, status) in cases {
        let (actual, problem) = app.host.query(&body).await?;
        assert_eq!(actual.as_u16(), status, "{body} {problem}");
        assert!(!problem.to_string().contains("canary"), "{problem}");
    }
    let operations = json!([{ "action": "insert", "table": "things", "data": { "title": title } }]);
    let body = json!({ "action": "transaction", "app": app.slug, "operations": operations });
    let (status, problem) = app.host.query(&body).await?;
    assert_eq!((status.as_u16(), problem["constraint"].as_str()), (409, Some("one_title")), "{problem}");
    assert_canary_not_logged(&app).await?;
    Ok(())
}
