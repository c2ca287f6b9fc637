//! Tests of the server: databases, passwords, termination.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::*;

async fn start_server(options: PgOptions) -> Result<PgServer> {
    let binaries = PgBinaries::locate_or_fetch(&crate::fetch::target_dir())?;
    PgServer::start(&binaries, options).await
}

async fn count_items(server: &PgServer, database: &str) -> Result<i64> {
    Ok(server.connect(database).await?.query_one("SELECT count(*) FROM items", &[]).await?.get(0))
}

#[tokio::test]
async fn server_is_version_16_and_requires_password() -> Result<()> {
    let server = start_server(PgOptions::default()).await?;
    let version: String =
        server.connect("postgres").await?.query_one("SHOW server_version", &[]).await?.get(0);
    assert!(version.starts_with("16."), "{version}");

    let socket = server.socket_dir().to_str().expect("the path is UTF-8");
    for host in ["127.0.0.1", socket] {
        let connect_with = |password: &str| {
            let mut psql = server.binaries().client_command("psql");
            psql.args(["-h", host, "-p", &server.port().to_string(), "-U", "postgres", "-Atc", "SELECT 1"]);
            psql.arg("-w").env("PGPASSWORD", password);
            crate::child::run(psql, Duration::from_secs(30))
        };
        assert_eq!(connect_with(server.password())?, "1\n");
        assert!(
            format!("{:#}", connect_with("wrong").expect_err("a wrong password is rejected"))
                .contains("password authentication failed")
        );
    }
    Ok(())
}

#[tokio::test]
async fn committed_rows_survive_stop_and_kill() -> Result<()> {
    let server = start_server(PgOptions::default()).await?;
    server.create_database("svc").await?;
    let client = server.connect("svc").await?;
    client.batch_execute("CREATE TABLE items (id int); INSERT INTO items VALUES (1)").await?;
    let port = server.port();

    server.stop().await?;
    assert!(!server.is_running());
    assert!(server.connect("svc").await.is_err());
    server.restart().await?;
    assert_eq!((server.port(), count_items(&server, "svc").await?), (port, 1));

    for round in 2..5 {
        let client = server.connect("svc").await?;
        client.batch_execute(&format!("INSERT INTO items VALUES ({round})")).await?;
        server.kill9().await?;
        server.restart().await?;
        assert_eq!(count_items(&server, "svc").await?, round);
    }
    Ok(())
}

#[tokio::test]
async fn kill9_kills_all_processes() -> Result<()> {
    let server = start_server(PgOptions::default()).await?;
    let client = server.connect("postgres").await?;
    let backend: i32 = client.query_one("SELECT pg_backend_pid()", &[]).await?.get(0);
    // A busy backend does not notice that its postmaster has died.
    tokio::spawn(
        async move { client.batch_execute("SELECT count(*) FROM generate_series(1, 300000000)").await },
    );
    let watcher = server.connect("postgres").await?;
    let busy_query = "SELECT 1 FROM pg_stat_activity WHERE pid = $1 AND state = 'active'";
    while watcher.query(busy_query, &[&backend]).await?.is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    server.kill9().await?;
    let deadline = Instant::now() + Duration::from_secs(5);
    while crate::child::is_running(u32::try_from(backend)?) {
        assert!(Instant::now() < deadline, "backend {backend} outlived kill -9");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

#[tokio::test]
async fn open_reuses_data_with_port_and_password() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let data_dir = dir.path().join("var/lib/postgresql");
    let first = start_server(PgOptions { data_dir: Some(data_dir.clone()), ..PgOptions::default() }).await?;
    first.create_database("svc").await?;
    first.connect("svc").await?.batch_execute("CREATE TABLE items (id int)").await?;
    let (binaries, port, password) = (first.binaries().clone(), first.port(), first.password().to_owned());
    drop(first);

    let reopened = PgServer::open(&binaries, &data_dir, port, &password).await?;
    assert_eq!(count_items(&reopened, "svc").await?, 0);
    drop(reopened);
    assert!(data_dir.join("PG_VERSION").exists(), "the persistent data directory was deleted");
    assert!(PgServer::open(&binaries, dir.path(), port, &password).await.is_err(), "not a cluster");
    Ok(())
}

#[tokio::test]
async fn drop_stops_server_and_removes_files() -> Result<()> {
    let server = start_server(PgOptions::default()).await?;
    let (port, dir) = (server.port(), server.socket_dir().to_owned());
    drop(server);
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err(), "still listening");
    assert!(!dir.exists(), "{} still exists", dir.display());
    Ok(())
}

#[tokio::test]
async fn start_reports_invalid_setting() -> Result<()> {
    let options =
        PgOptions { settings: vec![("shared_buffers".into(), "lots".into())], ..PgOptions::default() };
    let error = format!("{:#}", start_server(options).await.expect_err("the setting is invalid"));
    assert!(error.contains("shared_buffers"), "{error}");
    Ok(())
}

#[tokio::test]
async fn test_databases_are_separate() -> Result<()> {
    let (first, second) = tokio::try_join!(test_database(), test_database())?;
    first.connect().await?.batch_execute("CREATE TABLE mine (id int)").await?;
    assert!(second.connect().await?.query("SELECT * FROM mine", &[]).await.is_err(), "databases are shared");
    let server_of =
        |database: &TestDatabase| database.url().rsplit_once('/').map(|(server, _)| server.to_owned());
    assert_eq!(server_of(&first), server_of(&second), "the server is not shared");
    Ok(())
}

#[tokio::test]
async fn template_is_prepared_once_and_copied() -> Result<()> {
    static PREPARED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let make = || {
        test_database_from("counted", |url| async move {
            PREPARED.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
            let connection = tokio::spawn(connection);
            client.batch_execute("CREATE TABLE items (id int)").await?;
            drop(client);
            Ok(connection.await??)
        })
    };
    let (first, second) = tokio::try_join!(make(), make())?;
    first.connect().await?.batch_execute("INSERT INTO items VALUES (1)").await?;
    assert_eq!(second.connect().await?.query("SELECT * FROM items", &[]).await?.len(), 0);
    assert_eq!(PREPARED.load(std::sync::atomic::Ordering::SeqCst), 1);
    Ok(())
}

#[tokio::test]
async fn dropped_database_is_removed_by_next_request() -> Result<()> {
    let dropped = test_database().await?;
    let name = dropped.name().to_owned();
    let _still_connected = dropped.connect().await?;
    drop(dropped);
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        // A concurrent test may have taken the pending drops, and may still be dropping the databases.
        let next = test_database().await?;
        let client = next.connect().await?;
        if client.query("SELECT 1 FROM pg_database WHERE datname = $1", &[&name]).await?.is_empty() {
            return Ok(());
        }
        assert!(Instant::now() < deadline, "{name} is still on the server");
    }
}

#[tokio::test]
async fn run_server_prepares_once_and_drops_stale_databases() -> Result<()> {
    let run = RunServer::start().await?;
    let (_, value) = run.variable();
    let (port, password) = value.split_once(' ').expect("PORT PASSWORD");
    let server = PgConnectionInfo { port: port.parse()?, password: password.to_owned() };
    let prepare = async |url: String| -> Result<()> {
        let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
        let connection = tokio::spawn(connection);
        client.batch_execute("CREATE TABLE items (id int)").await?;
        drop(client);
        Ok(connection.await??)
    };
    let failed =
        run_server::prepare_template(&server, "key", async |url| anyhow::bail!("no schema for {url}")).await;
    assert!(failed.is_err(), "a failed preparation must not publish a template");
    let (template, second_template) = tokio::try_join!(
        run_server::prepare_template(&server, "key", prepare),
        run_server::prepare_template(&server, "key", prepare)
    )?;
    assert_eq!(template, second_template);
    let mut ended_process = std::process::Command::new("true").spawn()?;
    let names = [format!("test_{}_0", ended_process.id()), format!("test_{}_0", std::process::id())];
    ended_process.wait()?;
    for name in &names {
        server.create_database_from_template(&template, name).await?;
        server.connect(name).await?.batch_execute("INSERT INTO items VALUES (1)").await?;
    }
    run_server::drop_databases_of_ended_tests(&server).await?;
    let remaining = server.list_databases().await?;
    assert_eq!(names.map(|name| remaining.contains(&name)), [false, true]);
    Ok(())
}
