//! An app's role can access only the app's own schema, even if the app could run arbitrary SQL.

use std::time::Duration;

use anyhow::Result;
use kit::pg::test_database;
use reqwest::StatusCode;
use serde_json::json;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, NoTls};

use super::host::{Host, Machine, unique_name};

/// A host with two apps, and a connection that uses the first app's role.
struct AppSession {
    host: Host,
    own_schema: String,
    other_schema: String,
    client: Client,
    admin: Client,
    database: kit::pg::TestDatabase,
}

async fn open_app_session() -> Result<AppSession> {
    let database = test_database().await?;
    let (own_slug, other_slug) = (unique_name("own"), unique_name("other"));
    let machine = Machine::new(&database.url())?;
    for slug in [&own_slug, &other_slug] {
        machine.add_app(slug, &json!({ "t": { "columns": { "a": "text" } } }))?;
    }
    let host = machine.start()?;
    for slug in [&own_slug, &other_slug] {
        host.wait_until_registered(slug).await?;
        host.query_data(&json!({ "action": "insert", "app": slug, "table": "t", "data": { "a": slug } }))
            .await?;
    }
    let admin = database.connect().await?;
    let schema = |slug: &str| format!("app_{}", slug.replace('-', "_"));
    let (own_schema, other_schema) = (schema(&own_slug), schema(&other_slug));
    // The gateway does not reveal the password, so the test sets a known one.
    admin.batch_execute(&format!("ALTER ROLE {own_schema} PASSWORD 'known'")).await?;
    let mut config: tokio_postgres::Config = database.url().parse()?;
    config.user(&own_schema).password("known");
    let (client, connection) = config.connect(NoTls).await?;
    tokio::spawn(connection);
    Ok(AppSession { host, own_schema, other_schema, client, admin, database })
}

#[tokio::test]
async fn app_role_can_access_only_its_own_schema() -> Result<()> {
    let app_session = open_app_session().await?;
    let (own_schema, other_schema) = (&app_session.own_schema, &app_session.other_schema);
    let rows = app_session.client.query(&format!("SELECT a FROM {own_schema}.t"), &[]).await?;
    assert_eq!(rows.len(), 1, "the role must be able to read its own table");
    let forbidden = [
        format!("SELECT * FROM {other_schema}.t"),
        format!("INSERT INTO {other_schema}.t (a) VALUES ('x')"),
        "SELECT * FROM svc.apps".to_owned(),
        "SELECT rolpassword FROM pg_authid".to_owned(),
        format!("CREATE TABLE {own_schema}.mine (a int)"),
        format!("DROP TABLE {own_schema}.t"),
        format!("ALTER TABLE {own_schema}.t ADD COLUMN b int"),
        format!("TRUNCATE {own_schema}.t"),
        "CREATE TABLE public.mine (a int)".to_owned(),
        "CREATE SCHEMA mine".to_owned(),
        "CREATE TEMP TABLE mine (a int)".to_owned(),
        "SELECT lo_create(0)".to_owned(),
        "SELECT lo_from_bytea(0, 'x')".to_owned(),
        "CREATE ROLE mine".to_owned(),
        "CREATE DATABASE mine".to_owned(),
        format!("ALTER ROLE {other_schema} PASSWORD 'x'"),
        format!("SET ROLE {other_schema}"),
        "SET ROLE postgres".to_owned(),
        format!("SELECT set_config('role', '{other_schema}', false)"),
        "SELECT set_config('role', 'postgres', false)".to_owned(),
        format!("SET SESSION AUTHORIZATION {other_schema}"),
        "COPY (SELECT 1) TO PROGRAM 'true'".to_owned(),
        "SELECT pg_read_file('/etc/passwd')".to_owned(),
        "SELECT pg_reload_conf()".to_owned(),
    ];
    for sql in forbidden {
        let refused = app_session.client.batch_execute(&sql).await.expect_err(&sql);
        assert_eq!(refused.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE), "{sql}: {refused}");
    }
    // Without a grant option, PostgreSQL reports only a warning.
    app_session.client.batch_execute(&format!("GRANT ALL ON SCHEMA {own_schema} TO PUBLIC")).await?;
    let public = app_session
        .admin
        .query_one("SELECT has_schema_privilege('public', $1::text, 'USAGE, CREATE')", &[own_schema])
        .await?;
    assert!(!public.get::<_, bool>(0), "the role granted access to its schema");
    Ok(())
}

#[tokio::test]
async fn reset_role_gains_no_privileges() -> Result<()> {
    let app_session = open_app_session().await?;
    let (own_schema, other_schema) = (&app_session.own_schema, &app_session.other_schema);
    for sql in [
        "RESET ROLE",
        "SELECT set_config('role', 'none', false)",
        "SET SESSION AUTHORIZATION DEFAULT",
        "DISCARD ALL",
    ] {
        app_session.client.batch_execute(sql).await?;
        let row = app_session.client.query_one("SELECT current_user::text, session_user::text", &[]).await?;
        assert_eq!(
            (row.get::<_, &str>(0), row.get::<_, &str>(1)),
            (own_schema.as_str(), own_schema.as_str()),
            "{sql}"
        );
        let refused = app_session.client.batch_execute(&format!("SELECT * FROM {other_schema}.t")).await;
        let refused = refused.expect_err(sql);
        assert_eq!(refused.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE), "{sql}: {refused}");
    }
    let usage = app_session
        .admin
        .query_one(
            "SELECT has_schema_privilege($1, $2, 'USAGE')",
            &[&other_schema.as_str(), &own_schema.as_str()],
        )
        .await?;
    assert!(!usage.get::<_, bool>(0), "the other role has access to this schema");
    Ok(())
}

#[tokio::test]
async fn role_cannot_connect_to_another_database() -> Result<()> {
    let app_session = open_app_session().await?;
    let mut config: tokio_postgres::Config = app_session.database.server().url("postgres").parse()?;
    config.user(&app_session.own_schema).password("known");
    let refused =
        config.connect(NoTls).await.map(|_| ()).expect_err("the role must have no CONNECT privilege");
    assert_eq!(refused.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE), "{refused}");
    Ok(())
}

#[tokio::test]
async fn externally_changed_password_is_reset() -> Result<()> {
    let app_session = open_app_session().await?;
    let slug = app_session.own_schema.trim_start_matches("app_").replace('_', "-");
    let count = json!({ "action": "count", "app": slug, "table": "t" });
    // Apps cannot be loaded while this lock is held.
    app_session.admin.batch_execute("SELECT pg_advisory_lock(hashtext('svc-gateway'))").await?;
    // Closes the role's connections, so that new ones need the password.
    app_session
        .admin
        .query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1",
            &[&app_session.own_schema],
        )
        .await?;
    for _ in 0..8 {
        assert!(!app_session.host.query(&count).await?.0.is_success(), "the role can log in");
        tokio::time::sleep(Duration::from_millis(500)).await;
        let (status, ready) = app_session.host.get("/readyz").await?;
        assert_eq!(status, StatusCode::OK, "the apps must remain loaded: {ready}");
    }
    app_session.admin.batch_execute("SELECT pg_advisory_unlock(hashtext('svc-gateway'))").await?;
    app_session
        .host
        .wait_until("the app can log in", async || Ok(app_session.host.query(&count).await?.0.is_success()))
        .await
}

#[tokio::test]
async fn password_is_stored_as_scram_and_not_logged() -> Result<()> {
    let app_session = open_app_session().await?;
    let stored = app_session
        .admin
        .query_one("SELECT rolpassword FROM pg_authid WHERE rolname = $1", &[&app_session.other_schema])
        .await?;
    assert!(stored.get::<_, &str>(0).starts_with("SCRAM-SHA-256$"));
    assert!(!app_session.host.log().contains("SCRAM-SHA-256$"));
    Ok(())
}
