//! Lost data is copied back from an earlier snapshot through the side database, exactly as requested.

use anyhow::{Context, Result};
use kit::s3::S3Server;
use serde_json::{Value, json};

use super::machine::{self, Machine};

const CREATE_SHOP: &str = r#"
    CREATE ROLE app_shop NOLOGIN; GRANT CONNECT ON DATABASE svc TO app_shop;
    CREATE SCHEMA app_shop AUTHORIZATION app_shop;
    CREATE TYPE app_shop.mood AS ENUM ('good', 'bad');
    CREATE TABLE app_shop.customers (
        id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, email text UNIQUE, mood app_shop.mood, moods app_shop.mood[],
        doc json, more jsonb, raw bytea, price numeric, "when" timestamptz DEFAULT '2026-01-02 03:04:05+00',
        shout text GENERATED ALWAYS AS (upper(email)) STORED);
    CREATE TABLE app_shop.orders (
        id serial PRIMARY KEY, customer int NOT NULL REFERENCES app_shop.customers ON DELETE CASCADE, "Odd ""Name" text);
    CREATE TABLE app_shop.log (message text);
    CREATE INDEX log_said ON app_shop.log (message);
    ALTER TABLE app_shop.customers OWNER TO app_shop; ALTER TABLE app_shop.orders OWNER TO app_shop;
    ALTER TABLE app_shop.log OWNER TO app_shop;
    INSERT INTO app_shop.customers (email, mood, moods, doc, more, raw, price)
        SELECT 'c' || n, 'good', '{good,bad}', '{"a":  1}', '{"n": 1}', '\xdeadbeef', n * 1.10 FROM generate_series(1, 500) n;
    INSERT INTO app_shop.customers (email) VALUES (NULL), ('lonely');
    INSERT INTO app_shop.orders (customer, "Odd ""Name") SELECT 1 + n % 500, E'tab\t\\n' || n FROM generate_series(1, 2000) n;
    INSERT INTO app_shop.log SELECT 'line ' || n FROM generate_series(1, 300) n;
"#;

/// Creates a shop machine with a snapshot that is open as a side database.
pub async fn machine_with_side_database(store: &S3Server) -> Result<Machine> {
    let machine = Machine::in_use(store, 1).await?;
    machine.client().await?.batch_execute(CREATE_SHOP).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    let result = run_side(&machine, &["open"])?.expect(0);
    assert!(
        result.stdout.contains("app_shop.orders") && result.stdout.contains("2000 rows"),
        "{}",
        result.stdout
    );
    Ok(machine)
}

pub fn run_side(machine: &Machine, args: &[&str]) -> Result<machine::RunResult> {
    let args: Vec<&str> = ["svc-db-backup", "side"].iter().chain(args).copied().collect();
    machine.run(&args)
}

/// Returns all rows of a table, as text.
async fn rows(machine: &Machine, database: &str, table: &str) -> Result<Vec<String>> {
    let client = machine.postgres.as_ref().context("the machine has no database")?.connect(database).await?;
    let rows = client.query(&format!("SELECT t::text FROM {table} t ORDER BY 1"), &[]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// Asserts that the tables have the same rows as in the side database.
async fn assert_as_in_snapshot(machine: &Machine, tables: &[&str]) -> Result<()> {
    for table in tables {
        let (live, side) = (rows(machine, "svc", table).await?, rows(machine, "svc_side", table).await?);
        assert_eq!(live, side, "{table}");
    }
    Ok(())
}

pub fn read_state(machine: &Machine) -> Result<Value> {
    Ok(serde_json::from_slice(&std::fs::read(machine.path("var/lib/svc/side.json"))?)?)
}

const TABLES: [&str; 3] = ["app_shop.customers", "app_shop.log", "app_shop.orders"];

#[tokio::test]
async fn missing_rows_are_copied_and_existing_ones_unchanged() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    let client = machine.client().await?;
    client
        .batch_execute(
            "DELETE FROM app_shop.customers WHERE id <= 100 OR email = 'lonely'; UPDATE app_shop.customers SET price = 7 WHERE id = 200;
             INSERT INTO app_shop.customers (email) VALUES ('new'), ('lonely');
             ALTER TABLE app_shop.customers DROP COLUMN raw, ADD COLUMN added text DEFAULT 'x'",
        )
        .await?;
    let unchanged = "SELECT count(*) FROM app_shop.customers WHERE id = 200 AND price = 7 OR email = 'new' AND added = 'x'";
    let tables = ["app_shop.orders", "app_shop.customers"];
    client.batch_execute("SELECT setval('app_shop.orders_id_seq', 1)").await?;
    let last_order_id = "SELECT last_value FROM app_shop.orders_id_seq";
    let dry_run = run_side(&machine, &["copy", tables[0], tables[1], "--dry-run"])?.expect(0);
    let restored = client.query_one("SELECT count(*) FROM app_shop.customers WHERE id <= 100", &[]).await?;
    assert_eq!(restored.get::<_, i64>(0), 0, "{}", dry_run.stdout);
    assert_eq!(client.query_one(last_order_id, &[]).await?.get::<_, i64>(0), 1, "after a dry run");
    let backups = machine.backup_records()?.len();
    let copied = run_side(&machine, &["copy", tables[0], tables[1]])?.expect(0);
    assert_eq!(client.query_one(last_order_id, &[]).await?.get::<_, i64>(0), 2000);
    assert_eq!(machine.backup_records()?.len(), backups + 1, "a backup must precede the copy");
    let last_copy = read_state(&machine)?["lastCopy"].clone();
    // One row's email address now belongs to another customer, so that row is not copied.
    let copied_table = |name: &str| {
        last_copy["tables"].as_array().unwrap().iter().find(|table| table["name"] == name).unwrap().clone()
    };
    let customers = copied_table("app_shop.customers");
    assert_eq!(
        (&customers["inserted"], &customers["skipped"]),
        (&100.into(), &1.into()),
        "{}",
        copied.stdout
    );
    assert_eq!(customers["leftOut"], json!(["raw"]));
    assert_eq!(client.query_one(unchanged, &[]).await?.get::<_, i64>(0), 2);
    assert_eq!(
        rows(&machine, "svc", "app_shop.orders").await?,
        rows(&machine, "svc_side", "app_shop.orders").await?
    );
    Ok(())
}

#[tokio::test]
async fn dangling_reference_aborts_the_copy_without_changes() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    let client = machine.client().await?;
    client.batch_execute("DELETE FROM app_shop.customers WHERE id = 5").await?;
    let before = rows(&machine, "svc", "app_shop.orders").await?;
    let result = run_side(&machine, &["copy", "app_shop.orders"])?.expect(65);
    assert!(
        result.stderr.contains("app_shop.orders") && result.stderr.contains("orders_customer_fkey"),
        "{}",
        result.stderr
    );
    assert!(!result.stderr.contains("(customer)=(5)"), "the error quotes a row: {}", result.stderr);
    assert_eq!(rows(&machine, "svc", "app_shop.orders").await?, before);
    assert_eq!(read_state(&machine)?["status"], "open");
    assert!(read_state(&machine)?["lastCopy"]["error"].as_str().unwrap().contains("orders_customer_fkey"));
    run_side(&machine, &["copy", "app_shop.orders", "app_shop.customers"])?.expect(0);
    assert_as_in_snapshot(&machine, &TABLES).await?;
    Ok(())
}

#[tokio::test]
async fn every_mode_works_and_a_dropped_table_is_recreated() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    let client = machine.client().await?;
    let damage = "UPDATE app_shop.customers SET price = 7, doc = '[]' WHERE id % 2 = 0; DELETE FROM app_shop.orders WHERE id % 3 = 0;
                INSERT INTO app_shop.customers (email) VALUES ('new');
                INSERT INTO app_shop.orders (customer) SELECT id FROM app_shop.customers WHERE email = 'new'";
    client.batch_execute(damage).await?;
    // Without a key, rows cannot be matched, so only the whole table can be replaced.
    let result = run_side(&machine, &["copy", "app_shop.log"])?.expect(65);
    assert!(
        result.stderr.contains("no primary key") && result.stderr.contains("replace"),
        "{}",
        result.stderr
    );

    run_side(&machine, &["copy", "--mode", "overwrite", TABLES[0], TABLES[2]])?.expect(0);
    let copied = read_state(&machine)?["lastCopy"]["tables"].clone();
    assert_eq!(
        (&copied[0]["updated"], &copied[0]["inserted"], &copied[0]["deleted"]),
        (&251.into(), &0.into(), &0.into()),
        "{copied}"
    );
    assert_eq!((&copied[1]["updated"], &copied[1]["inserted"]), (&0.into(), &666.into()), "{copied}");
    assert_eq!(rows(&machine, "svc", TABLES[0]).await?.len(), 503, "the new customer must be kept");

    // This is refused, because it would also delete the new customer's order, whose table was not requested.
    let result = run_side(&machine, &["copy", "--mode", "replace", TABLES[0]])?.expect(65);
    assert!(result.stderr.contains("app_shop.orders"), "{}", result.stderr);
    client.batch_execute("TRUNCATE app_shop.log; INSERT INTO app_shop.log VALUES ('since')").await?;
    run_side(&machine, &["copy", "--mode", "replace", TABLES[0], TABLES[1], TABLES[2]])?.expect(0);
    assert_as_in_snapshot(&machine, &TABLES).await?;
    // Sequences continue after the copied values.
    client
        .batch_execute(
            "INSERT INTO app_shop.orders (customer) VALUES (1); DELETE FROM app_shop.orders WHERE id > 2000",
        )
        .await?;

    client.batch_execute("DROP SCHEMA app_shop CASCADE").await?;
    let dry_run = run_side(&machine, &["copy", TABLES[1], "--dry-run"])?.expect(0);
    assert!(dry_run.stdout.contains("300 inserted"), "{}", dry_run.stdout);
    // The enum type was dropped with the schema. A table that cannot be recreated is reported, and leaves nothing
    // behind.
    let result = run_side(&machine, &["copy", TABLES[0]])?.expect(65);
    assert!(result.stderr.contains("pg_restore") && result.stderr.contains("mood"), "{}", result.stderr);
    client.batch_execute("CREATE TYPE app_shop.mood AS ENUM ('good', 'bad')").await?;
    run_side(&machine, &["copy", TABLES[0], TABLES[1], TABLES[2], "--no-backup"])?.expect(0);
    assert_as_in_snapshot(&machine, &TABLES).await?;
    let owner =
        client.query_one("SELECT tableowner::text FROM pg_tables WHERE tablename = 'log'", &[]).await?;
    let indexes = client.query("SELECT FROM pg_indexes WHERE tablename = 'log'", &[]).await?;
    assert_eq!((owner.get::<_, &str>(0), indexes.len()), ("app_shop", 1));
    Ok(())
}

/// An order that now belongs to a newer customer would be deleted with that customer, and the order's notes with it,
/// although the snapshot has the order.
#[tokio::test]
async fn replace_refuses_cascade_through_copied_table() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    let client = machine.client().await?;
    client
        .batch_execute(
            "CREATE TABLE app_shop.notes (about int REFERENCES app_shop.orders ON DELETE CASCADE);
             INSERT INTO app_shop.notes VALUES (7); INSERT INTO app_shop.customers (email) VALUES ('new');
             UPDATE app_shop.orders SET customer = c.id FROM app_shop.customers c WHERE orders.id = 7 AND c.email = 'new'",
        )
        .await?;
    let replace = ["copy", "--mode", "replace", "--no-backup", TABLES[0], TABLES[2]];
    let result = run_side(&machine, &replace)?.expect(65);
    assert!(result.stderr.contains("change the rows in app_shop.notes"), "{}", result.stderr);
    client.batch_execute("UPDATE app_shop.orders SET customer = 8 WHERE id = 7").await?;
    run_side(&machine, &replace)?.expect(0);
    assert_as_in_snapshot(&machine, &[TABLES[0], TABLES[2]]).await?;
    assert_eq!(rows(&machine, "svc", "app_shop.notes").await?, ["(7)"]);
    Ok(())
}

#[tokio::test]
async fn replace_restores_rows_despite_changed_constraints() -> Result<()> {
    let store = machine::start_store()?;
    let machine = Machine::in_use(&store, 1).await?;
    let client = machine.client().await?;
    client
        .batch_execute(
            "CREATE SCHEMA app_tree;
             CREATE TABLE app_tree.nodes (id int PRIMARY KEY, parent int REFERENCES app_tree.nodes, position int UNIQUE);
             CREATE TABLE app_tree.leaves (id int PRIMARY KEY, node int NOT NULL REFERENCES app_tree.nodes);
             CREATE TABLE app_tree.notes (tenant text, id int, PRIMARY KEY (tenant, id));
             INSERT INTO app_tree.nodes VALUES (1, NULL, 1), (2, 1, 2); INSERT INTO app_tree.leaves VALUES (1, 2);
             INSERT INTO app_tree.notes VALUES ('a', 1), ('b', 1)",
        )
        .await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    run_side(&machine, &["open"])?.expect(0);
    let replace = |tables: &[&str]| {
        let options = ["copy", "--mode", "replace", "--no-backup"];
        run_side(&machine, &options.iter().chain(tables).copied().collect::<Vec<&str>>())
    };
    let both_tables = ["app_tree.leaves", "app_tree.nodes"];
    let moves = [
        "INSERT INTO app_tree.nodes VALUES (3, NULL, 3); UPDATE app_tree.nodes SET parent = 3 WHERE id = 2",
        "INSERT INTO app_tree.nodes VALUES (3, NULL, 3); UPDATE app_tree.leaves SET node = 3",
        "UPDATE app_tree.nodes SET position = position + 10; UPDATE app_tree.nodes SET position = 13 - position",
    ];
    for damage in moves {
        client.batch_execute(damage).await?;
        let before = rows(&machine, "svc", both_tables[1]).await?;
        // This is refused, because a row in app_tree.leaves refers to a row that must be deleted.
        let result = replace(&both_tables[1..])?.expect(65);
        assert!(result.stderr.contains("name both tables"), "{}", result.stderr);
        assert_eq!(rows(&machine, "svc", both_tables[1]).await?, before);
        replace(&both_tables)?.expect(0);
        assert_as_in_snapshot(&machine, &both_tables).await?;
    }

    // Two rows of the snapshot have the same value in the new key.
    let rekey = "DELETE FROM app_tree.notes WHERE tenant = 'b'; ALTER TABLE app_tree.notes DROP CONSTRAINT notes_pkey";
    client.batch_execute(rekey).await?;
    client.batch_execute("ALTER TABLE app_tree.notes ADD PRIMARY KEY (id)").await?;
    let result = replace(&["app_tree.notes"])?.expect(65);
    assert!(result.stderr.contains("notes_pkey"), "{}", result.stderr);
    assert_eq!(rows(&machine, "svc", "app_tree.notes").await?, ["(a,1)"]);
    client.batch_execute("ALTER TABLE app_tree.notes DROP CONSTRAINT notes_pkey").await?;
    replace(&["app_tree.notes"])?.expect(0);
    assert_as_in_snapshot(&machine, &["app_tree.notes"]).await
}

#[tokio::test]
async fn open_selects_snapshot_by_time_and_close_cleans_up() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    let first = read_state(&machine)?["key"].clone();
    let time_between = jiff::Timestamp::now().to_string();
    machine.client().await?.batch_execute("DELETE FROM app_shop.orders; DROP TABLE app_shop.log").await?;
    machine.run(&["svc-db-backup", "run", "--accept-loss"])?.expect(0);
    run_side(&machine, &["open"])?.expect(0);
    assert_ne!(read_state(&machine)?["key"], first);
    assert_eq!(read_state(&machine)?["tables"].as_array().map(Vec::len), Some(2));
    run_side(&machine, &["open", "--at", &time_between])?.expect(0);
    assert_eq!(read_state(&machine)?["key"], first);
    let result = run_side(&machine, &["open", "--at", "2020-01-01T00:00:00Z"])?.expect(65);
    assert!(result.stderr.contains("no snapshot taken at or before 2020-01-01"), "{}", result.stderr);
    let result = run_side(&machine, &["copy", TABLES[0]])?.expect(65);
    assert!(result.stderr.contains("side open"), "{}", result.stderr);
    run_side(&machine, &["open", first.as_str().context("side.json has no key")?])?.expect(0);
    for invalid_table in ["svc.side_copies", "public.nothing", "app_shop.orders; DROP TABLE x"] {
        run_side(&machine, &["copy", invalid_table])?.expect(65);
    }
    let can_connect = "SELECT has_database_privilege('app_shop', 'svc_side', 'CONNECT')";
    assert!(!machine.client().await?.query_one(can_connect, &[]).await?.get::<_, bool>(0));
    // Hourly backups and drills are unaffected, and do not delete the side database.
    machine.run(&["svc-db-backup"])?.expect(0);
    machine.run(&["svc-db-backup", "drill"])?.expect(0);
    assert!(machine.databases().await?.contains(&"svc_side".to_owned()));
    run_side(&machine, &["close"])?.expect(0);
    run_side(&machine, &["close"])?.expect(0);
    assert_eq!(read_state(&machine)?["status"], "closed");
    let remaining: Vec<_> =
        machine.databases().await?.into_iter().filter(|name| name.starts_with("svc_")).collect();
    assert_eq!(remaining, Vec::<String>::new());
    let files: Vec<_> = std::fs::read_dir(machine.path("var/lib/svc/drill"))?
        .flatten()
        .map(|file| file.file_name())
        .collect();
    assert_eq!(files, ["lock"]);
    Ok(())
}

/// A role that the machine no longer has is created with the side database, and dropped with it.
#[tokio::test]
async fn drill_does_not_make_side_database_roles_permanent() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    let client = machine.client().await?;
    run_side(&machine, &["close"])?.expect(0);
    let drop_role = "REASSIGN OWNED BY app_shop TO CURRENT_USER; DROP OWNED BY app_shop; DROP ROLE app_shop";
    client.batch_execute(drop_role).await?;
    run_side(&machine, &["open"])?.expect(0);
    machine.run(&["svc-db-backup", "drill"])?.expect(0);
    run_side(&machine, &["close"])?.expect(0);
    assert!(client.query_opt("SELECT FROM pg_roles WHERE rolname = 'app_shop'", &[]).await?.is_none());
    Ok(())
}

/// A copy that only recreates tables adds no entry to `svc.side_copies`, so only `side.json` prevents its repetition.
#[tokio::test]
async fn recorded_copy_is_not_repeated_over_later_rows() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    let client = machine.client().await?;
    client.batch_execute("DROP TABLE app_shop.log").await?;
    let args = ["svc-db-backup", "side", "copy", "app_shop.log", "--mode", "replace", "--no-backup"];
    machine.run_with(&args, &[("FAILPOINTS", "side.recorded=return(kill)")])?.expect_killed();
    client.batch_execute("INSERT INTO app_shop.log VALUES ('since')").await?;
    run_side(&machine, &["serve"])?.expect(0);
    assert!(!machine.path("var/lib/svc/requests/side").exists());
    assert_eq!(rows(&machine, "svc", "app_shop.log").await?.len(), 301);
    Ok(())
}

#[tokio::test]
async fn failed_copy_is_repeated_after_a_kill() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    machine.client().await?.batch_execute("DELETE FROM app_shop.orders WHERE id = 7").await?;
    let args = ["svc-db-backup", "side", "copy", "app_shop.orders", "--no-backup"];
    let points = "side.fetched=return(error);side.recorded=return(kill)";
    machine.run_with(&args, &[("FAILPOINTS", points)])?.expect_killed();
    assert!(read_state(&machine)?["lastCopy"]["error"].is_string());
    run_side(&machine, &["serve"])?.expect(0);
    assert_eq!(read_state(&machine)?["lastCopy"].get("error"), None);
    assert_as_in_snapshot(&machine, &["app_shop.orders"]).await
}

/// A run started by the path unit serves a request. If the run is killed at any point, the next run completes the
/// request, exactly once.
#[tokio::test]
async fn request_killed_at_any_step_is_completed_once() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    let client = machine.client().await?;
    let request_side = |action: Value| -> Result<()> {
        let request = json!({"requestId": uuid::Uuid::now_v7(), "requestedAt": "2026-01-02T03:04:05.678Z", "action": action});
        Ok(svc::fsx::write_atomic(
            &machine.path("var/lib/svc/requests/side"),
            request.to_string().as_bytes(),
            0o600,
        )?)
    };
    let serve =
        |points: &str| machine.run_with(&["svc-db-backup", "side", "serve"], &[("FAILPOINTS", points)]);
    let copy_points = [
        "side.saved",
        "side.recreated",
        "side.fetched",
        "side.copied",
        "side.committed",
        "side.dependents",
        "side.recorded",
    ];
    for point in svc::host::snapshots::backup::SIDE_FAILPOINTS {
        let kill = format!("{point}=return(kill)");
        if *point == "side.dropped" {
            request_side(json!({"action": "close"}))?;
            serve(&kill)?.expect_killed();
            serve("")?.expect(0);
            assert_eq!(read_state(&machine)?["status"], "closed");
            continue;
        }
        if !copy_points.contains(point) {
            request_side(json!({"action": "open"}))?;
            serve(&kill)?.expect_killed();
            serve("")?.expect(0);
            assert_eq!(read_state(&machine)?["status"], "open", "after a kill at {point}");
            assert!(!machine.path("var/lib/svc/requests/side").exists());
            continue;
        }
        client
            .batch_execute("DELETE FROM app_shop.orders WHERE id = 7; DROP TABLE IF EXISTS app_shop.log")
            .await?;
        let tables = json!(TABLES);
        request_side(
            json!({"action": "copy", "tables": tables, "mode": "overwrite", "dryRun": false, "backup": true}),
        )?;
        serve(&kill)?.expect_killed();
        let is_committed = ["side.committed", "side.dependents", "side.recorded"].contains(point);
        if is_committed {
            // Resuming must not undo a change that was made after the copy.
            client.batch_execute("UPDATE app_shop.customers SET price = 42 WHERE id = 9").await?;
        }
        serve("")?.expect(0);
        let state = read_state(&machine)?;
        assert_eq!(
            (&state["status"], state["lastCopy"].get("error")),
            (&"open".into(), None),
            "after a kill at {point}"
        );
        if is_committed {
            let price =
                client.query_one("SELECT price::text FROM app_shop.customers WHERE id = 9", &[]).await?;
            assert_eq!(price.get::<_, &str>(0), "42", "after a kill at {point}");
            client.batch_execute("UPDATE app_shop.customers SET price = 9.90 WHERE id = 9").await?;
        }
        assert_as_in_snapshot(&machine, &TABLES).await?;
    }
    request_side(json!({"action": "fly"}))?;
    serve("")?.expect(65);
    serve("")?.expect(0);
    Ok(())
}

/// A killed command is completed by the unit or by the next command.
#[tokio::test]
async fn killed_command_is_completed() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    let run_killed = |args: &[&str], point: &str| {
        let points = format!("{point}=return(kill)");
        let args: Vec<&str> = ["svc-db-backup", "side"].iter().chain(args).copied().collect();
        machine.run_with(&args, &[("FAILPOINTS", &points)]).map(machine::RunResult::expect_killed)
    };
    run_killed(&["open"], "side.loaded")?;
    assert_eq!(read_state(&machine)?["status"], "opening");
    run_side(&machine, &["serve"])?.expect(0);
    assert_eq!(read_state(&machine)?["status"], "open");

    machine.client().await?.batch_execute("DELETE FROM app_shop.orders WHERE id = 7").await?;
    run_killed(&["copy", "app_shop.orders", "--no-backup"], "side.fetched")?;
    let result = run_side(&machine, &["close"])?.expect(0);
    assert!(
        result.stdout.contains("1 inserted"),
        "the earlier request must be completed first: {}",
        result.stdout
    );
    assert_eq!(read_state(&machine)?["status"], "closed");
    assert!(!machine.path("var/lib/svc/requests/side").exists());
    Ok(())
}

/// Names in triggers resolve as in every other session. Other settings of the owner's database do not affect a copy.
#[tokio::test]
async fn owner_triggers_resolve_their_tables() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    let client = machine.client().await?;
    client
        .batch_execute(
            "CREATE TABLE noted (what text, isolation text DEFAULT current_setting('transaction_isolation'));
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN INSERT INTO noted VALUES (TG_OP || ' ' || upper(NEW.message)); RETURN NEW; END $$;
             CREATE TRIGGER noted AFTER INSERT ON app_shop.log FOR EACH ROW EXECUTE FUNCTION note();
             DELETE FROM app_shop.log WHERE message = 'line 7';
             ALTER DATABASE svc SET default_transaction_isolation = 'repeatable read';
             ALTER DATABASE svc SET default_transaction_read_only = on",
        )
        .await?;
    let replace = ["copy", "app_shop.log", "--mode", "replace", "--no-backup"];
    run_side(&machine, &replace)?.expect(0);
    let noted = client.query_one("SELECT count(*), min(what), max(isolation) FROM noted", &[]).await?;
    assert_eq!((noted.get::<_, i64>(0), noted.get::<_, &str>(1)), (300, "INSERT LINE 1"));
    assert_eq!(noted.get::<_, &str>(2), "read committed");
    client.batch_execute("DROP TABLE app_shop.log").await?;
    run_side(&machine, &replace)?.expect(0);
    assert_as_in_snapshot(&machine, &["app_shop.log"]).await
}
