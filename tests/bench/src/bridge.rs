//! Bridge benchmark: the gateway, PostgREST and pgbench on the same rows in the same PostgreSQL, with fsync on.
//!
//! The gateway is measured as a whole: TLS, the platform's proof, validation, the app's own role. PostgREST checks a
//! JWT and switches to the same role, without TLS. pgbench only runs the statement.

use anyhow::{Result, ensure};
use serde_json::json;

use super::figures::{PRODUCT, Spec, Tally, Target};
use super::gateway::{Gateway, Machine};
use super::peers::pgbench;
use super::peers::postgrest::{self, Postgrest, RunningPostgrest};
use super::peers::wrk::{Request, Wrk};
use super::process::cpu_time;
use super::{Options, create_temp_dir, print_round};
use kit::fetch::target_dir;
use kit::pg::{Durability, PgBinaries, PgOptions, PgServer};

const INSERT: [&str; 3] =
    ["inserts/s, 1 connection", "inserts/s, 8 connections", "inserts/s, 32 connections"];
const FIND: [&str; 2] = ["finds/s, 8 connections", "finds/s, 32 connections"];
const INSERT_CPU: &str = "CPU per insert, 32 connections";
const FIND_CPU: &str = "CPU per find, 32 connections";
const INSERT_P99: &str = "insert p99, 32 connections, relative to the peer's median";
const FIND_P99: &str = "find p99, 32 connections, relative to the peer's median";

const PGBENCH: &str = "pgbench";
const POSTGREST: &str = "PostgREST";

pub const ROWS: [Spec; 14] = [
    Spec { name: INSERT[0], unit: "1/s", against: Some(PGBENCH), target: Target::RatioAtLeast(0.55) },
    Spec { name: INSERT[0], unit: "1/s", against: Some(POSTGREST), target: Target::None },
    Spec { name: INSERT[1], unit: "1/s", against: Some(PGBENCH), target: Target::None },
    Spec { name: INSERT[1], unit: "1/s", against: Some(POSTGREST), target: Target::None },
    Spec { name: INSERT[2], unit: "1/s", against: Some(PGBENCH), target: Target::RatioAtLeast(0.75) },
    Spec { name: INSERT[2], unit: "1/s", against: Some(POSTGREST), target: Target::RatioAtLeast(5.0) },
    Spec { name: FIND[0], unit: "1/s", against: Some(PGBENCH), target: Target::None },
    Spec { name: FIND[0], unit: "1/s", against: Some(POSTGREST), target: Target::None },
    Spec { name: FIND[1], unit: "1/s", against: Some(PGBENCH), target: Target::RatioAtLeast(0.55) },
    Spec { name: FIND[1], unit: "1/s", against: Some(POSTGREST), target: Target::RatioAtLeast(5.0) },
    Spec { name: INSERT_CPU, unit: "µs", against: Some(POSTGREST), target: Target::AtMost(65.0) },
    Spec { name: FIND_CPU, unit: "µs", against: Some(POSTGREST), target: Target::AtMost(75.0) },
    Spec { name: INSERT_P99, unit: "µs", against: Some(POSTGREST), target: Target::RatioAtMost(1.0) },
    Spec { name: FIND_P99, unit: "µs", against: Some(POSTGREST), target: Target::RatioAtMost(1.0) },
];

const DATABASE: &str = "svc";
const APP: &str = "bench";
/// The name of the app's schema and of its role.
const SCHEMA: &str = "app_bench";
/// Size of PostgREST's connection pool: the gateway's limit per app.
const POOL_SIZE: u32 = 16;
/// Rows in `docs`; a hundred of each kind.
const DOCS_ROWS: u32 = 2000;
const FIND_LIMIT: usize = 20;

/// The same call in each side's format.
struct Call {
    bridge_body: String,
    postgrest_path: &'static str,
    postgrest_body: Option<String>,
    sql: String,
}

struct Testbed {
    server: PgServer,
    machine: Machine,
    gateway: Gateway,
    postgrest: RunningPostgrest,
    wrk: Wrk,
    insert: Call,
    find: Call,
    _dir: tempfile::TempDir,
}

pub async fn measure(options: &Options) -> Result<Tally> {
    let testbed = Testbed::prepare(options).await?;
    let mut tally = Tally::default();
    for round in 0..options.rounds {
        print_round(round, options.rounds);
        // Each round starts with the same table.
        let admin = testbed.server.connect(DATABASE).await?;
        admin.batch_execute(&format!("TRUNCATE {SCHEMA}.items; CHECKPOINT")).await?;
        for (connections, name) in [1, 8, 32].into_iter().zip(INSERT) {
            testbed.measure_call(&mut tally, &testbed.insert, name, connections, options.seconds)?;
        }
        for (connections, name) in [8, 32].into_iter().zip(FIND) {
            testbed.measure_call(&mut tally, &testbed.find, name, connections, options.seconds)?;
        }
    }
    Ok(tally)
}

impl Testbed {
    async fn prepare(options: &Options) -> Result<Self> {
        let dir = create_temp_dir()?;
        let (wrk, postgrest) = (Wrk::fetch()?, Postgrest::fetch()?);
        let pg = PgBinaries::locate_or_fetch(&target_dir())?;
        let settings = vec![("shared_buffers".to_owned(), "256MB".to_owned())];
        let server = PgServer::start(
            &pg,
            PgOptions { durability: Durability::FsyncOn, settings, ..PgOptions::default() },
        )
        .await?;
        server.create_database(DATABASE).await?;
        let machine = Machine::new(&server.url(DATABASE))?;
        let columns =
            json!({ "kind": "text", "body": "text", "done": "boolean", "rank": "bigint", "extra": "jsonb" });
        let docs = json!({ "columns": columns.clone(), "indexes": [["kind", "created_at", "id"]] });
        machine.install_app(APP, &json!({ "items": { "columns": columns }, "docs": docs }))?;
        let gateway = machine.start(&options.svc)?;
        gateway.wait_until_ready(&machine, 1).await?;
        let login_url = prepare_database(&server).await?;
        let postgrest = postgrest.serve(dir.path(), &login_url, SCHEMA, POOL_SIZE).await?;
        let testbed = Self {
            server,
            machine,
            gateway,
            postgrest,
            wrk,
            insert: insert_call(),
            find: find_call(),
            _dir: dir,
        };
        testbed.check_results_agree().await?;
        Ok(testbed)
    }

    /// Checks that the gateway and PostgREST both insert a row, and find the same number of rows with the same first
    /// row: otherwise, fast error responses would yield good figures.
    async fn check_results_agree(&self) -> Result<()> {
        let inserted = self.gateway.query(&self.machine, &self.insert.bridge_body).await?;
        ensure!(
            inserted["data"]["id"].is_string(),
            "unexpected response from the bridge to an insert: {inserted}"
        );
        let found = self.gateway.query(&self.machine, &self.find.bridge_body).await?;
        let found_rows = found["data"].as_array().map_or(0, Vec::len);
        let client = reqwest::Client::builder().no_proxy().build()?;
        let mut results = Vec::new();
        for call in [&self.insert, &self.find] {
            let Request { url, headers, body } = self.postgrest_request(call);
            let mut request = match body {
                Some(body) => client.post(url).body(body),
                None => client.get(url),
            };
            for (name, value) in headers {
                request = request.header(name, value);
            }
            let response = request.send().await?;
            let (status, body) = (response.status(), response.text().await?);
            ensure!(
                status.is_success(),
                "PostgREST: {status}: {body}\n{}",
                self.postgrest.process.log_tail()
            );
            let rows: Vec<serde_json::Value> = serde_json::from_str(&body)?;
            results.push(rows);
        }
        ensure!(
            results[0].len() == 1 && results[0][0]["id"].is_string(),
            "unexpected response from PostgREST to an insert: {:?}",
            results[0]
        );
        ensure!(
            found_rows == FIND_LIMIT && results[1].len() == FIND_LIMIT,
            "the bridge found {found_rows} rows, PostgREST {}",
            results[1].len()
        );
        ensure!(
            found["data"][0]["id"] == results[1][0]["id"],
            "the bridge found {} first, PostgREST {}",
            found["data"][0],
            results[1][0]
        );
        Ok(())
    }

    fn postgrest_request(&self, call: &Call) -> Request {
        let bearer = format!("Bearer {}", self.postgrest.token(SCHEMA));
        let mut headers = vec![("Authorization".to_owned(), bearer)];
        if call.postgrest_body.is_some() {
            headers.push(("Content-Type".to_owned(), "application/json".to_owned()));
            headers.push(("Prefer".to_owned(), "return=representation".to_owned()));
        }
        let url = format!("http://{}{}", self.postgrest.address, call.postgrest_path);
        Request { url, headers, body: call.postgrest_body.clone() }
    }

    fn measure_call(
        &self,
        tally: &mut Tally,
        call: &Call,
        name: &'static str,
        connections: u32,
        seconds: u32,
    ) -> Result<()> {
        let extra = match name {
            name if name == INSERT[2] => Some((INSERT_CPU, INSERT_P99)),
            name if name == FIND[1] => Some((FIND_CPU, FIND_P99)),
            _ => None,
        };
        let sides = [
            (
                PRODUCT,
                self.gateway.bridge_request(&self.machine, call.bridge_body.clone()),
                &self.gateway.process,
            ),
            (POSTGREST, self.postgrest_request(call), &self.postgrest.process),
        ];
        for (side, request, process) in sides {
            let before = cpu_time(process.pid())?;
            let result = self.wrk.run_load(&request, connections, seconds)?;
            let spent = cpu_time(process.pid())? - before;
            tally.add(name, side, result.requests_per_second());
            if let Some((cost, p99)) = extra {
                tally.add(cost, side, result.cpu_micros_per_request(spent));
                tally.add(p99, side, if side == PRODUCT { result.p99 } else { result.p50 });
            }
        }
        tally.add(
            name,
            PGBENCH,
            pgbench::measure_tps(&self.server, DATABASE, &call.sql, connections, seconds)?,
        );
        Ok(())
    }
}

/// Fills `docs` and creates PostgREST's login role; returns the database URL for it.
async fn prepare_database(server: &PgServer) -> Result<String> {
    let admin = server.connect(DATABASE).await?;
    let (login, password) = (postgrest::LOGIN, uuid::Uuid::new_v4().simple().to_string());
    admin
        .batch_execute(&format!(
            "INSERT INTO {SCHEMA}.docs (kind, body, done, rank, extra, created_at) \
             SELECT 'kind' || n % 20, repeat('x', 100), n % 2 = 0, n, jsonb_build_object('n', n, 'tag', 'bench'), \
             timestamptz '2026-01-01' + n * interval '1 second' FROM generate_series(1, {DOCS_ROWS}) n; \
             ANALYZE {SCHEMA}.docs; \
             CREATE ROLE {login} LOGIN NOINHERIT PASSWORD '{password}'; GRANT {SCHEMA} TO {login}"
        ))
        .await?;
    Ok(format!("postgres://{login}:{password}@127.0.0.1:{}/{DATABASE}", server.port()))
}

fn insert_call() -> Call {
    let body = "x".repeat(100);
    let row = json!({ "kind": "kind7", "body": body, "done": false, "rank": 7, "extra": { "n": 7, "tag": "bench" } });
    Call {
        bridge_body: json!({ "action": "insert", "app": APP, "table": "items", "data": row }).to_string(),
        postgrest_path: "/items?select=id",
        postgrest_body: Some(row.to_string()),
        sql: format!(
            "INSERT INTO {SCHEMA}.items (kind, body, done, rank, extra) \
             VALUES ('kind7', '{body}', false, 7, '{{\"n\":7,\"tag\":\"bench\"}}') RETURNING id;"
        ),
    }
}

fn find_call() -> Call {
    Call {
        bridge_body: json!({ "action": "find", "app": APP, "table": "docs", "filter": { "kind": "kind7" },
            "orderBy": [{ "column": "created_at", "direction": "desc" }], "limit": FIND_LIMIT })
        .to_string(),
        postgrest_path: "/docs?kind=eq.kind7&order=created_at.desc,id.desc&limit=20",
        postgrest_body: None,
        sql: format!(
            "SELECT * FROM {SCHEMA}.docs WHERE kind = 'kind7' ORDER BY created_at DESC, id DESC LIMIT {FIND_LIMIT};"
        ),
    }
}
