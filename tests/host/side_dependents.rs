//! `DROP TABLE … CASCADE` drops other tables' foreign keys, views and statistics: they are recreated with the table, or
//! reported.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::machine::{self, Machine};
use super::side::{machine_with_side_database, read_state, run_side};

const TABLE: &str = "app_shop.customers";
const DEPENDENTS: &str = "
    CREATE ROLE reader NOLOGIN;
    CREATE VIEW app_shop.totals WITH (security_barrier) AS
        SELECT c.id, c.email, count(o.*) AS orders FROM app_shop.customers c JOIN app_shop.orders o ON o.customer = c.id
         GROUP BY c.id, c.email;
    ALTER VIEW app_shop.totals OWNER TO app_shop; GRANT SELECT ON app_shop.totals TO reader;
    CREATE VIEW app_shop.best AS SELECT * FROM app_shop.totals WHERE orders > 3;
    CREATE MATERIALIZED VIEW app_shop.emails AS SELECT email FROM app_shop.customers;
    CREATE VIEW app_shop.mixed AS SELECT c.email, l.message FROM app_shop.customers c, app_shop.log l;
    CREATE STATISTICS app_shop.moods (dependencies) ON mood, price FROM app_shop.customers;
    ALTER STATISTICS app_shop.moods OWNER TO app_shop;
    CREATE FUNCTION app_shop.first_customer() RETURNS app_shop.customers LANGUAGE sql
        AS 'SELECT * FROM app_shop.customers LIMIT 1'";

/// Creates a machine whose database lacks the table and its dependents. A snapshot that contains them is open as a side
/// database.
async fn machine_with_dropped_table(store: &kit::s3::S3Server) -> Result<Machine> {
    machine_with_dropped_dependents(store, "").await
}

/// Like [`machine_with_dropped_table`], but with additional dependents.
async fn machine_with_dropped_dependents(
    store: &kit::s3::S3Server,
    more_dependents: &str,
) -> Result<Machine> {
    let machine = machine_with_side_database(store).await?;
    machine.client().await?.batch_execute(DEPENDENTS).await?;
    machine.client().await?.batch_execute(more_dependents).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    run_side(&machine, &["open"])?.expect(0);
    machine.client().await?.batch_execute("DROP TABLE app_shop.customers CASCADE").await?;
    Ok(machine)
}

fn read_copied_table(machine: &Machine) -> Result<Value> {
    Ok(read_state(machine)?["lastCopy"]["tables"][0].clone())
}

/// Reads one value from the owner's database, as text.
async fn query_text(machine: &Machine, sql: &str) -> Result<String> {
    let row = machine.client().await?.query_one(&format!("SELECT ({sql})::text"), &[]).await?;
    row.try_get::<_, Option<String>>(0)?.context("the value is NULL")
}

const FOREIGN_KEY: &str = "constraint orders_customer_fkey on table app_shop.orders";
const IS_FOREIGN_KEY_VALID: &str =
    "SELECT convalidated FROM pg_constraint WHERE conname = 'orders_customer_fkey'";

#[tokio::test]
async fn dropped_table_is_restored_with_its_dependents() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_dropped_table(&store).await?;
    let expected = json!([
        "view app_shop.totals",
        "view app_shop.best",
        "materialized view app_shop.emails",
        "view app_shop.mixed",
        FOREIGN_KEY,
        "statistics object app_shop.moods"
    ]);
    let sorted = |value: &Value| {
        let mut names: Vec<String> = serde_json::from_value(value.clone()).unwrap_or_default();
        names.sort();
        names
    };
    let dry_run = run_side(&machine, &["copy", TABLE, "--dry-run"])?.expect(0);
    assert!(
        dry_run.stdout.contains(&format!("recreated with the table: {FOREIGN_KEY}")),
        "{}",
        dry_run.stdout
    );
    assert_eq!(sorted(&read_copied_table(&machine)?["recreated"]), sorted(&expected));
    assert_eq!(query_text(&machine, "SELECT to_regclass('app_shop.totals') IS NULL").await?, "true");

    run_side(&machine, &["copy", TABLE])?.expect(0);
    let table = read_copied_table(&machine)?;
    assert_eq!(sorted(&table["recreated"]), sorted(&expected), "{table}");
    assert_eq!(table["notRecreated"], json!(["function app_shop.first_customer()"]), "{table}");
    assert_eq!(query_text(&machine, IS_FOREIGN_KEY_VALID).await?, "true");
    let view = "SELECT count(*) = 1 FROM pg_class WHERE oid = 'app_shop.totals'::regclass AND relowner = 'app_shop'::regrole \
                AND reloptions = '{security_barrier=true}' AND has_table_privilege('reader', oid, 'SELECT')";
    assert_eq!(query_text(&machine, view).await?, "true");
    assert_eq!(query_text(&machine, "SELECT count(*) FROM app_shop.best").await?, "500");
    assert_eq!(query_text(&machine, "SELECT count(*) FROM app_shop.emails").await?, "502");
    let statistics = "SELECT stxowner::regrole FROM pg_statistic_ext WHERE stxname = 'moods'";
    assert_eq!(query_text(&machine, statistics).await?, "app_shop");
    Ok(())
}

#[tokio::test]
async fn dependents_that_cannot_be_recreated_are_reported() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_dropped_table(&store).await?;
    let damage = "INSERT INTO app_shop.orders (customer) VALUES (99999); DROP TABLE app_shop.log;
                CREATE STATISTICS app_shop.moods ON id, customer FROM app_shop.orders";
    machine.client().await?.batch_execute(damage).await?;
    run_side(&machine, &["copy", TABLE])?.expect(0);
    let table = read_copied_table(&machine)?;
    let is_listed = |list: &str, prefix: &str| {
        table[list].as_array().is_some_and(|names| {
            names.iter().any(|name| name.as_str().is_some_and(|name| name.starts_with(prefix)))
        })
    };
    assert!(is_listed("recreated", &format!("{FOREIGN_KEY} (NOT VALID")), "{table}");
    assert_eq!(query_text(&machine, IS_FOREIGN_KEY_VALID).await?, "false");
    assert!(
        is_listed("notRecreated", "view app_shop.mixed"),
        "a view must be reported if its other table is missing: {table}"
    );
    assert!(is_listed("recreated", "view app_shop.best"), "{table}");
    assert!(
        is_listed("notRecreated", "statistics object app_shop.moods"),
        "statistics must be reported if their name is in use: {table}"
    );
    let client = machine.client().await?;
    client
        .batch_execute("INSERT INTO app_shop.orders (customer) VALUES (88888)")
        .await
        .expect_err("a new row must be checked");
    Ok(())
}

/// A view whose function was dropped does not prevent the table's recreation.
#[tokio::test]
async fn all_dropped_dependents_are_reported() -> Result<()> {
    const MORE_DEPENDENTS: &str = "
        CREATE FUNCTION app_shop.label(c app_shop.customers) RETURNS text LANGUAGE sql AS 'SELECT $1.email';
        CREATE VIEW app_shop.labels AS SELECT app_shop.label(c) FROM app_shop.customers c;
        CREATE VIEW app_shop.firsts AS SELECT * FROM app_shop.first_customer();
        CREATE TABLE app_shop.copies (id int DEFAULT nextval('app_shop.customers_id_seq'), many app_shop.customers[]);
        CREATE VIEW app_shop.numbers AS SELECT id FROM app_shop.copies";
    let store = machine::start_store()?;
    let machine = machine_with_dropped_dependents(&store, MORE_DEPENDENTS).await?;
    run_side(&machine, &["copy", TABLE, "--no-backup"])?.expect(0);
    let table = read_copied_table(&machine)?;
    assert_eq!(query_text(&machine, "SELECT count(*) FROM app_shop.customers").await?, "502");
    assert_eq!(query_text(&machine, "SELECT count(*) FROM app_shop.best").await?, "500");
    let mut names: Vec<&str> = table["notRecreated"]
        .as_array()
        .context("nothing is listed")?
        .iter()
        .filter_map(|name| name.as_str()?.split(": ").next())
        .collect();
    let expected = [
        "column many of table app_shop.copies",
        "default value for column id of table app_shop.copies",
        "function app_shop.first_customer()",
        "function app_shop.label(app_shop.customers)",
        "view app_shop.firsts",
        "view app_shop.labels",
    ];
    names.sort_unstable();
    assert_eq!(names, expected, "{table}");
    Ok(())
}

#[tokio::test]
async fn table_is_recreated_with_view_that_its_policy_reads() -> Result<()> {
    const MORE_DEPENDENTS: &str = "
        CREATE POLICY own ON app_shop.customers USING (id IN (SELECT id FROM app_shop.totals))";
    let store = machine::start_store()?;
    let machine = machine_with_dropped_dependents(&store, MORE_DEPENDENTS).await?;
    run_side(&machine, &["copy", TABLE, "--no-backup"])?.expect(0);
    let table = read_copied_table(&machine)?;
    assert!(
        table["recreated"].as_array().is_some_and(|names| names.contains(&"view app_shop.best".into())),
        "{table}"
    );
    assert_eq!(query_text(&machine, "SELECT count(*) FROM pg_policy WHERE polname = 'own'").await?, "1");
    assert_eq!(query_text(&machine, "SELECT count(*) FROM app_shop.best").await?, "500");
    Ok(())
}

#[tokio::test]
async fn rolled_back_dependents_are_not_reported_as_recreated() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_dropped_table(&store).await?;
    let disconnect = "
        CREATE FUNCTION public.disconnect() RETURNS event_trigger LANGUAGE plpgsql
            AS 'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); END';
        CREATE EVENT TRIGGER disconnect ON ddl_command_end WHEN TAG IN ('CREATE STATISTICS')
            EXECUTE FUNCTION public.disconnect()";
    machine.client().await?.batch_execute(disconnect).await?;
    let result = run_side(&machine, &["copy", TABLE, "--no-backup"])?;
    assert_ne!(result.exit_code, Some(0), "{}", result.stdout);
    let table = read_copied_table(&machine)?;
    let names = |list: &str| -> Vec<String> {
        table[list].as_array().into_iter().flatten().map(|name| name.as_str().unwrap().to_owned()).collect()
    };
    assert!(!names("recreated").iter().any(|name| name.starts_with(FOREIGN_KEY)), "{table}");
    assert!(names("recreated").contains(&"view app_shop.best".to_owned()), "{table}");
    assert!(names("notRecreated").iter().any(|name| name.starts_with(FOREIGN_KEY)), "{table}");
    let keys = "SELECT count(*) FROM pg_constraint WHERE conname = 'orders_customer_fkey'";
    assert_eq!(query_text(&machine, keys).await?, "0");
    Ok(())
}

#[tokio::test]
async fn dropped_child_is_copied_with_rows_of_its_parent() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    let client = machine.client().await?;
    let damage = "DROP TABLE app_shop.orders CASCADE; DELETE FROM app_shop.customers WHERE id <= 100";
    client.batch_execute(damage).await?;
    run_side(&machine, &["copy", "app_shop.orders", TABLE, "--no-backup"])?.expect(0);
    assert_eq!(query_text(&machine, IS_FOREIGN_KEY_VALID).await?, "true");
    assert_eq!(query_text(&machine, "SELECT count(*) FROM app_shop.orders").await?, "2000");
    assert_eq!(query_text(&machine, "SELECT count(*) FROM app_shop.customers").await?, "502");

    client.batch_execute(damage).await?;
    run_side(&machine, &["copy", "app_shop.orders", "--no-backup"])?.expect(0);
    assert_eq!(query_text(&machine, IS_FOREIGN_KEY_VALID).await?, "false");
    let table = read_copied_table(&machine)?;
    let key = format!("{FOREIGN_KEY} (NOT VALID: existing rows refer to missing rows)");
    assert_eq!(table["recreated"], json!([key]), "{table}");
    Ok(())
}
