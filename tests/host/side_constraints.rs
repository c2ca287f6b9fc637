//! A copy from the side database honors deferrable constraints and never changes rows in referencing tables.

use anyhow::Result;

use super::machine::{self, Machine};
use super::side::run_side;

const CREATE_TABLES: &str = "
    CREATE SCHEMA app_todo;
    CREATE TABLE app_todo.lists (id int PRIMARY KEY);
    CREATE TABLE app_todo.items (
        id serial PRIMARY KEY, list int REFERENCES app_todo.lists DEFERRABLE INITIALLY DEFERRED,
        position int UNIQUE DEFERRABLE);
    CREATE TABLE app_todo.notes (item int REFERENCES app_todo.items ON DELETE CASCADE);
    INSERT INTO app_todo.lists VALUES (1), (2);
    INSERT INTO app_todo.items (list, position) VALUES (1, 1), (2, 2), (2, 3);
    INSERT INTO app_todo.notes VALUES (1)";

async fn machine_with_side_database(store: &kit::s3::S3Server) -> Result<Machine> {
    let machine = Machine::in_use(store, 1).await?;
    machine.client().await?.batch_execute(CREATE_TABLES).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    run_side(&machine, &["open"])?.expect(0);
    Ok(machine)
}

async fn count(machine: &Machine, from: &str) -> Result<i64> {
    let query = format!("SELECT count(*) FROM {from}");
    Ok(machine.client().await?.query_one(&query, &[]).await?.try_get(0)?)
}

#[tokio::test]
async fn deferred_constraint_is_checked_before_the_commit() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    let client = machine.client().await?;
    let damage = "DELETE FROM app_todo.items WHERE list = 2; DELETE FROM app_todo.lists WHERE id = 2;
                  ALTER SEQUENCE app_todo.items_id_seq RESTART";
    client.batch_execute(damage).await?;
    for mode in ["missing", "overwrite"] {
        let dry_run = ["copy", "app_todo.items", "--no-backup", "--mode", mode, "--dry-run"];
        let copy = &dry_run[..dry_run.len() - 1];
        for args in [&dry_run[..], copy] {
            let result = run_side(&machine, args)?.expect(65);
            assert!(result.stderr.contains("items_list_fkey"), "{args:?}: {}", result.stderr);
        }
    }
    assert_eq!(count(&machine, "app_todo.items").await?, 1);
    let last_id = client.query_one("SELECT last_value FROM app_todo.items_id_seq", &[]).await?;
    assert_eq!(last_id.try_get::<_, i64>(0)?, 1, "a refused copy must not change a sequence");
    run_side(&machine, &["copy", "app_todo.items", "app_todo.lists", "--no-backup"])?.expect(0);
    assert_eq!(count(&machine, "app_todo.items").await?, 3);
    Ok(())
}

#[tokio::test]
async fn missing_mode_copies_despite_deferrable_unique_constraint() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    let client = machine.client().await?;
    client.batch_execute("DELETE FROM app_todo.items WHERE position = 3").await?;
    run_side(&machine, &["copy", "app_todo.items", "--no-backup"])?.expect(0);
    assert_eq!(count(&machine, "app_todo.items WHERE id = 3 AND position = 3").await?, 1);
    // Row 3 now conflicts with row 9 and cannot be skipped: ON CONFLICT does not support deferrable constraints.
    let replacement =
        "DELETE FROM app_todo.items WHERE position = 3; INSERT INTO app_todo.items VALUES (9, 1, 3)";
    client.batch_execute(replacement).await?;
    let result = run_side(&machine, &["copy", "app_todo.items", "--no-backup"])?.expect(65);
    assert!(result.stderr.contains("items_position_key"), "{}", result.stderr);
    Ok(())
}

#[tokio::test]
async fn replace_deletes_only_unreferenced_rows() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_side_database(&store).await?;
    let client = machine.client().await?;
    let replace = ["copy", "app_todo.items", "--mode", "replace", "--no-backup"];
    client.batch_execute("INSERT INTO app_todo.items VALUES (9, 1, 9), (10, 1, 10)").await?;
    client.batch_execute("INSERT INTO app_todo.notes VALUES (10)").await?;
    let result = run_side(&machine, &replace)?.expect(65);
    assert!(result.stderr.contains("change the rows in app_todo.notes"), "{}", result.stderr);
    client.batch_execute("DELETE FROM app_todo.notes WHERE item = 10").await?;
    run_side(&machine, &replace)?.expect(0);
    assert_eq!(count(&machine, "app_todo.items").await?, 3);
    assert_eq!(count(&machine, "app_todo.notes WHERE item = 1").await?, 1);
    Ok(())
}
