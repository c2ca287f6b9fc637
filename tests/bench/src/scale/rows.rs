//! Benchmarks queries on a table of ten million rows: a find by index, a page in the middle, and counts, through the
//! bridge and as SQL.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio_postgres::Client;

use super::super::Options;
use super::super::figures::{PRODUCT, Tally, median};
use super::super::gateway::{Gateway, Machine};
use super::{DIRECT_SQL, median_query_ms, new_machine};
use kit::pg::PgServer;

pub const FIND: &str = "find 20 of 10,000,000 rows by index";
pub const PAGE: &str = "page of 1,000 in the middle of 10,000,000 rows";
pub const COUNT_KIND: &str = "count 100,000 of 10,000,000 rows by index";
pub const COUNT_ALL: &str = "count 10,000,000 rows";

const DATABASE: &str = "svc_rows";
const APP: &str = "large";
const TABLE: &str = "app_large.items";
const ROWS: u64 = 10_000_000;
const KINDS: u64 = 100;
const REPEATS: usize = 50;
const COUNT_REPEATS: usize = 3;

pub struct LargeTable {
    machine: Machine,
    gateway: Gateway,
    client: Client,
    /// The cursor of the page before the measured one.
    cursor: String,
}

impl LargeTable {
    pub async fn create(server: &PgServer, options: &Options) -> Result<Self> {
        let machine = new_machine(server, DATABASE).await?;
        let columns = json!({ "kind": "text", "rank": "bigint" });
        let tables = json!({ "items": { "columns": columns, "indexes": [["kind", "rank"], ["rank"]] } });
        machine.install_app(APP, &tables)?;
        let gateway = machine.start(&options.svc)?;
        gateway.wait_until_ready(&machine, 1).await?;
        println!("  creating a table of {ROWS} rows");
        let client = server.connect(DATABASE).await?;
        client
            .batch_execute(&format!(
                "INSERT INTO {TABLE} (kind, rank) SELECT 'kind' || n % {KINDS}, n FROM generate_series(1, {ROWS}) n"
            ))
            .await?;
        // `VACUUM` cannot run in a transaction, and the statements of a batch share a transaction.
        client.batch_execute(&format!("VACUUM ANALYZE {TABLE}")).await?;
        let mut table = Self { machine, gateway, client, cursor: String::new() };
        table.cursor = table.find_middle_cursor().await?;
        Ok(table)
    }

    /// Returns the cursor of a page whose last row is in the middle of the table.
    async fn find_middle_cursor(&self) -> Result<String> {
        let first = json!({ "action": "find", "app": APP, "table": "items", "limit": 1,
            "filter": { "rank": { "gte": ROWS / 2 } }, "orderBy": ["rank"] });
        let page = self.gateway.query(&self.machine, &first.to_string()).await?;
        Ok(page["nextCursor"].as_str().with_context(|| format!("no cursor in {page}"))?.to_owned())
    }

    pub async fn measure(&self, tally: &mut Tally) -> Result<()> {
        let find = json!({ "action": "find", "app": APP, "table": "items", "limit": 20,
            "filter": { "kind": "kind7" }, "orderBy": ["rank"] });
        let sql = format!("SELECT * FROM {TABLE} WHERE kind = 'kind7' ORDER BY rank, id LIMIT 20");
        self.compare(tally, FIND, &find, &sql, REPEATS).await?;
        let page = json!({ "action": "find", "app": APP, "table": "items", "limit": 1000,
            "filter": { "rank": { "gte": ROWS / 2 } }, "orderBy": ["rank"], "after": self.cursor });
        let sql = format!("SELECT * FROM {TABLE} WHERE rank > {} ORDER BY rank, id LIMIT 1000", ROWS / 2);
        self.compare(tally, PAGE, &page, &sql, REPEATS).await?;
        let count =
            |filter: Value| json!({ "action": "count", "app": APP, "table": "items", "filter": filter });
        let sql = format!("SELECT count(*) FROM {TABLE} WHERE kind = 'kind7'");
        self.compare(tally, COUNT_KIND, &count(json!({ "kind": "kind7" })), &sql, COUNT_REPEATS).await?;
        let all = self.gateway.query(&self.machine, &count(json!({})).to_string()).await?;
        ensure!(all["data"]["count"] == ROWS, "the table has {} rows", all["data"]["count"]);
        let sql = format!("SELECT count(*) FROM {TABLE}");
        self.compare(tally, COUNT_ALL, &count(json!({})), &sql, COUNT_REPEATS).await
    }

    async fn compare(
        &self,
        tally: &mut Tally,
        name: &'static str,
        query: &Value,
        sql: &str,
        repeats: usize,
    ) -> Result<()> {
        let ours = median_query_ms(&self.gateway, &self.machine, &query.to_string(), repeats).await?;
        tally.add(name, PRODUCT, ours);
        let statement = self.client.prepare(sql).await?;
        let mut times = Vec::with_capacity(repeats);
        for _ in 0..repeats {
            let started = Instant::now();
            self.client.query(&statement, &[]).await?;
            times.push(started.elapsed().as_secs_f64() * 1000.0);
        }
        tally.add(name, DIRECT_SQL, median(&times).context("no query was sent")?);
        Ok(())
    }
}
