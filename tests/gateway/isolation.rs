//! What an app could reach by SQL of its own, if it ever got to speak it: its schema, and nothing else.

use anyhow::{Context, Result};
use kit::pg::test_database;
use serde_json::json;
use tokio_postgres::{Client, NoTls};

use super::host::{Host, Machine, unique};

/// The host with two apps, and a connection as the role of the first.
struct Prisoner {
    host: Host,
    own: String,
    other: String,
    client: Client,
    admin: Client,
    _database: kit::pg::TestDatabase,
}

async fn prisoner() -> Result<Prisoner> {
    let database = test_database().await?;
    let (own, other) = (unique("own"), unique("other"));
    let machine = Machine::new(&database.url())?;
    for slug in [&own, &other] {
        machine.app(slug, &json!({ "t": { "columns": { "a": "text" } } }))?;
    }
    let host = machine.start()?;
    for slug in [&own, &other] {
        host.until_registered(slug).await?;
        host.data(&json!({ "action": "insert", "app": slug, "table": "t", "data": { "a": slug } })).await?;
    }
    let admin = database.connect().await?;
    let schema = |slug: &str| format!("app_{}", slug.replace('-', "_"));
    let (own, other) = (schema(&own), schema(&other));
    // The gateway keeps the password to itself: the test sets one that it knows.
    admin.batch_execute(&format!("ALTER ROLE {own} PASSWORD 'known'")).await?;
    let mut config: tokio_postgres::Config = database.url().parse()?;
    config.user(&own).password("known");
    let (client, connection) = config.connect(NoTls).await?;
    tokio::spawn(connection);
    Ok(Prisoner { host, own, other, client, admin, _database: database })
}

#[tokio::test]
async fn a_role_reaches_its_own_schema_and_nothing_else() -> Result<()> {
    let prisoner = prisoner().await?;
    let (own, other) = (&prisoner.own, &prisoner.other);
    let rows = prisoner.client.query(&format!("SELECT a FROM {own}.t"), &[]).await?;
    assert_eq!(rows.len(), 1, "its own table it may read");
    let forbidden = [
        format!("SELECT * FROM {other}.t"),
        format!("INSERT INTO {other}.t (a) VALUES ('x')"),
        "SELECT * FROM svc.apps".to_owned(),
        "SELECT rolpassword FROM pg_authid".to_owned(),
        format!("CREATE TABLE {own}.mine (a int)"),
        format!("DROP TABLE {own}.t"),
        format!("ALTER TABLE {own}.t ADD COLUMN b int"),
        format!("TRUNCATE {own}.t"),
        "CREATE TABLE public.mine (a int)".to_owned(),
        "CREATE SCHEMA mine".to_owned(),
        "CREATE TEMP TABLE mine (a int)".to_owned(),
        "SELECT lo_create(0)".to_owned(),
        "SELECT lo_from_bytea(0, 'x')".to_owned(),
        "CREATE ROLE mine".to_owned(),
        "CREATE DATABASE mine".to_owned(),
        format!("ALTER ROLE {other} PASSWORD 'x'"),
        format!("SET ROLE {other}"),
        "SET ROLE postgres".to_owned(),
        format!("SELECT set_config('role', '{other}', false)"),
        "SELECT set_config('role', 'postgres', false)".to_owned(),
        format!("SET SESSION AUTHORIZATION {other}"),
        "COPY (SELECT 1) TO PROGRAM 'true'".to_owned(),
        "SELECT pg_read_file('/etc/passwd')".to_owned(),
        format!("GRANT ALL ON SCHEMA {own} TO PUBLIC"),
        "SELECT pg_reload_conf()".to_owned(),
    ];
    for sql in forbidden {
        // A GRANT without the right to it is only a warning: what counts is that nothing changed.
        if sql.starts_with("GRANT") {
            prisoner.client.batch_execute(&sql).await.ok();
            continue;
        }
        let refused = prisoner.client.batch_execute(&sql).await.expect_err(&sql);
        let code = refused.code().context("a refusal of the database")?;
        assert_eq!(code.code(), "42501", "{sql}: {refused}");
    }
    Ok(())
}

#[tokio::test]
async fn resetting_the_role_gains_nothing() -> Result<()> {
    let prisoner = prisoner().await?;
    let (own, other) = (&prisoner.own, &prisoner.other);
    for sql in [
        "RESET ROLE",
        "SELECT set_config('role', 'none', false)",
        "SET SESSION AUTHORIZATION DEFAULT",
        "DISCARD ALL",
    ] {
        prisoner.client.batch_execute(sql).await?;
        let row = prisoner.client.query_one("SELECT current_user::text, session_user::text", &[]).await?;
        assert_eq!((row.get::<_, &str>(0), row.get::<_, &str>(1)), (own.as_str(), own.as_str()), "{sql}");
        assert!(prisoner.client.batch_execute(&format!("SELECT * FROM {other}.t")).await.is_err(), "{sql}");
    }
    let usage = prisoner
        .admin
        .query_one("SELECT has_schema_privilege($1, $2, 'USAGE')", &[&other.as_str(), &own.as_str()])
        .await?;
    assert!(!usage.get::<_, bool>(0), "the other role sees this schema neither");
    Ok(())
}

#[tokio::test]
async fn another_database_is_no_way_round() -> Result<()> {
    let prisoner = prisoner().await?;
    let mut config: tokio_postgres::Config = prisoner._database.server().url("postgres").parse()?;
    config.user(&prisoner.own).password("known");
    let refused = config.connect(NoTls).await.map(|_| ()).expect_err("no CONNECT");
    assert_eq!(refused.code().map(|code| code.code().to_owned()).as_deref(), Some("42501"));
    Ok(())
}

#[tokio::test]
async fn a_password_changed_behind_the_gateway_is_set_again() -> Result<()> {
    let prisoner = prisoner().await?;
    let slug = prisoner.own.trim_start_matches("app_").replace('_', "-");
    let count = json!({ "action": "count", "app": slug, "table": "t" });
    // Its open connections go, and new ones need the password.
    prisoner
        .admin
        .query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", &[&prisoner.own])
        .await?;
    prisoner.host.until("a login", async || Ok(prisoner.host.query(&count).await?.0.is_success())).await
}

#[tokio::test]
async fn no_password_is_written_anywhere() -> Result<()> {
    let prisoner = prisoner().await?;
    let stored = prisoner
        .admin
        .query_one("SELECT rolpassword FROM pg_authid WHERE rolname = $1", &[&prisoner.other])
        .await?;
    assert!(stored.get::<_, &str>(0).starts_with("SCRAM-SHA-256$"));
    let log = prisoner._database.server().log();
    assert!(!prisoner.host.log().contains("SCRAM-SHA-256$") && !log.contains("PASSWORD 'SCRAM"));
    Ok(())
}
