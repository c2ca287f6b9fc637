//! Uses the bridge as an app developer does.

use anyhow::Result;
use kit::pg::test_database;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use svc::http::proof::Route;

use super::host::{Host, Machine, send_json, unique_name};

/// Returns the definition of a table with one column of every type.
fn table_with_every_type() -> Value {
    json!({ "things": {
        "columns": {
            "title": "text", "done": "boolean", "size": "integer", "big": "bigint", "price": "numeric",
            "ratio": "double", "day": "date", "at": "timestamptz", "meta": "jsonb", "ref": "uuid", "raw": "bytea"
        },
        "indexes": ["title", "meta"], "unique": [["ref"]]
    } })
}

/// A host with one app, whose table has a column of every type.
pub struct TestApp {
    pub host: Host,
    pub slug: String,
    pub database: kit::pg::TestDatabase,
}

impl TestApp {
    pub async fn new() -> Result<Self> {
        Self::with_env(&[]).await
    }

    pub async fn with_env(env: &[(&str, &str)]) -> Result<Self> {
        let (database, slug) = (test_database().await?, unique_name("things"));
        let mut machine = Machine::new(&database.url())?;
        machine.env.extend(env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        machine.add_app(&slug, &table_with_every_type())?;
        let host = machine.start()?;
        host.wait_until_registered(&slug).await?;
        Ok(Self { host, slug, database })
    }

    /// Returns the app's schema; its role has the same name.
    pub fn schema(&self) -> String {
        format!("app_{}", self.slug.replace('-', "_"))
    }

    /// Sends a query and returns the response's status and body.
    pub async fn query(&self, action: &str, fields: Value) -> Result<(u16, Value)> {
        let (status, response) = self.host.query(&self.body(action, fields)).await?;
        Ok((status.as_u16(), response))
    }

    /// Sends a query that must succeed, and returns its `data`.
    pub async fn query_data(&self, action: &str, fields: Value) -> Result<Value> {
        self.host.query_data(&self.body(action, fields)).await
    }

    pub async fn count(&self) -> Result<i64> {
        Ok(self.query_data("count", json!({})).await?["count"].as_i64().unwrap_or(-1))
    }

    pub fn body(&self, action: &str, fields: Value) -> Value {
        let mut body = json!({ "action": action, "app": self.slug, "table": "things" });
        if let (Some(body), Value::Object(fields)) = (body.as_object_mut(), fields) {
            body.extend(fields);
        }
        body
    }

    pub async fn insert(&self, data: Value) -> Result<Value> {
        self.host.query_data(&self.body("insert", json!({ "data": data }))).await
    }

    pub async fn find_titles(&self, fields: Value) -> Result<Vec<String>> {
        let rows = self.host.query_data(&self.body("find", fields)).await?;
        Ok(rows
            .as_array()
            .into_iter()
            .flatten()
            .map(|r| r["title"].as_str().unwrap_or("-").to_owned())
            .collect())
    }
}

#[tokio::test]
async fn row_is_returned_as_written() -> Result<()> {
    let app = TestApp::new().await?;
    let data = json!({
        "title": "Zürich \"quoted\" \u{1F600}\n", "done": true, "size": -5, "big": "9223372036854775807",
        "price": "12345678901234567890.000100", "ratio": 0.1, "day": "2026-02-28",
        "at": "2026-01-02T03:04:05.678+02:00", "meta": { "a": [1, null, { "b": "c" }], "n": 1.50 },
        "ref": "0192d1f0-0000-7000-8000-000000000001", "raw": "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PA=="
    });
    let insert = app.body("insert", json!({ "data": data }));
    let (status, response) = app.host.query(&insert).await?;
    assert_eq!(status, StatusCode::CREATED, "{response}");
    let row = &response["data"];
    for (name, value) in data.as_object().expect("the data is an object") {
        let expected = if name == "at" { json!("2026-01-02T01:04:05.678Z") } else { value.clone() };
        assert_eq!(row[name], expected, "{name}");
    }
    assert_eq!(row["id"].as_str().map(str::len), Some(36));
    let created = row["created_at"].as_str().unwrap_or_default();
    assert!(created.ends_with('Z') && created.len() == 24, "{created}");
    let get = app.body("get", json!({ "id": row["id"] }));
    assert_eq!(app.host.query_data(&get).await?, *row, "`get` must return the same row");
    let found = app.host.query_data(&app.body("find", json!({ "filter": { "id": row["id"] } }))).await?;
    assert_eq!(found, json!([row]));
    Ok(())
}

#[tokio::test]
async fn insert_handles_nulls_small_numbers_and_chosen_ids() -> Result<()> {
    let app = TestApp::new().await?;
    let row = app.insert(json!({ "title": null, "big": 42, "price": 1 })).await?;
    assert_eq!((&row["title"], &row["done"]), (&Value::Null, &Value::Null));
    assert_eq!(
        (&row["big"], &row["price"]),
        (&json!(42), &json!("1")),
        "a bigint in the safe range must be a number"
    );
    let chosen = "0192d1f0-0000-7000-8000-00000000abcd";
    assert_eq!(app.insert(json!({ "id": chosen })).await?["id"], chosen);
    let (status, problem) = app.host.query(&app.body("insert", json!({ "data": { "id": chosen } }))).await?;
    assert_eq!((status, problem["code"].as_str()), (StatusCode::CONFLICT, Some("conflict")), "{problem}");
    Ok(())
}

#[tokio::test]
async fn filters_match_expected_rows() -> Result<()> {
    let app = TestApp::new().await?;
    for (title, size, meta) in [
        ("apple", Some(1), json!({ "tags": ["red"], "n": 1 })),
        ("apricot", Some(2), json!({ "tags": ["orange"] })),
        ("banana", Some(3), json!({ "tags": ["yellow", "red"] })),
        ("100%", None, json!(null)),
    ] {
        app.insert(json!({ "title": title, "size": size, "meta": meta, "price": size.map(|s| s * 10) }))
            .await?;
    }
    let cases = [
        (json!({}), "apple apricot banana 100%"),
        (json!({ "title": "apple" }), "apple"),
        (json!({ "size": { "gt": 1, "lt": 3 } }), "apricot"),
        (json!({ "size": { "gte": 2 } }), "apricot banana"),
        (json!({ "price": { "lte": "20" } }), "apple apricot"),
        (json!({ "size": { "ne": 2 } }), "apple banana"),
        (json!({ "size": null }), "100%"),
        (json!({ "size": { "isNull": false } }), "apple apricot banana"),
        (json!({ "size": { "in": [1, 3, 99] } }), "apple banana"),
        (json!({ "price": { "in": ["10", 30] } }), "apple banana"),
        (json!({ "title": { "like": "ap%" } }), "apple apricot"),
        (json!({ "title": { "ilike": "%AN%" } }), "banana"),
        (json!({ "title": { "like": "100\\%" } }), "100%"),
        (json!({ "title": { "contains": "%" } }), "100%"),
        (json!({ "meta": { "contains": { "tags": ["red"] } } }), "apple banana"),
        (json!({ "or": [{ "title": "apple" }, { "size": 3 }] }), "apple banana"),
        (json!({ "not": { "title": { "like": "ap%" } } }), "banana 100%"),
        (
            json!({ "and": [{ "size": { "gt": 0 } }, { "or": [{ "size": 1 }, { "size": 2 }] }], "title": { "ne": "apple" } }),
            "apricot",
        ),
    ];
    for (filter, expected) in cases {
        let titles = app.find_titles(json!({ "filter": filter })).await?.join(" ");
        assert_eq!(titles, expected, "{filter}");
        let count = app.host.query_data(&app.body("count", json!({ "filter": filter }))).await?;
        assert_eq!(count["count"], expected.split(' ').count(), "{filter}");
    }
    Ok(())
}

#[tokio::test]
async fn pages_have_no_gap_or_duplicate() -> Result<()> {
    let app = TestApp::new().await?;
    for n in 0..23 {
        let size = if n % 5 == 4 { Value::Null } else { json!(n % 3) };
        app.insert(json!({ "title": format!("t{n:02}"), "size": size })).await?;
    }
    for order in [
        json!([]),
        json!([{ "column": "created_at", "direction": "desc" }]),
        json!([{ "column": "size" }]),
        json!([{ "column": "size", "direction": "desc" }]),
        json!([{ "column": "size", "direction": "desc" }, "title"]),
    ] {
        let all_titles = app.find_titles(json!({ "orderBy": order, "limit": 1000 })).await?;
        assert_eq!(all_titles.len(), 23);
        let (mut paged_titles, mut after) = (Vec::new(), Value::Null);
        loop {
            let mut find = app.body(
                "find",
                json!({ "orderBy": order, "limit": 4, "columns": ["title"], "count": "exact" }),
            );
            if after.is_string() {
                find["after"] = after.take();
            }
            let (status, mut page) = app.host.query(&find).await?;
            assert_eq!((status, &page["count"]), (StatusCode::OK, &json!(23)), "{page}");
            let rows = page["data"].as_array().cloned().unwrap_or_default();
            assert!(rows.iter().all(|row| row.as_object().is_some_and(|row| row.len() == 1)), "{page}");
            paged_titles.extend(rows.iter().map(|row| row["title"].as_str().unwrap_or_default().to_owned()));
            after = page["nextCursor"].take();
            if after.is_null() {
                break;
            }
        }
        assert_eq!(paged_titles, all_titles, "{order}");
    }
    Ok(())
}

#[tokio::test]
async fn cursor_value_with_quotes_is_bound_as_parameter() -> Result<()> {
    let app = TestApp::new().await?;
    for title in ["a", "b'; DROP TABLE things; --", "c\\", "d\"", "e"] {
        app.insert(json!({ "title": title })).await?;
    }
    let mut after = Value::Null;
    for expected in ["a", "b'; DROP TABLE things; --", "c\\", "d\"", "e"] {
        let mut find = app.body("find", json!({ "orderBy": ["title"], "limit": 1 }));
        if after.is_string() {
            find["after"] = after.take();
        }
        let (_, mut page) = app.host.query(&find).await?;
        assert_eq!(page["data"][0]["title"], expected, "{page}");
        after = page["nextCursor"].take();
    }
    Ok(())
}

#[tokio::test]
async fn schemas_list_tables_and_columns() -> Result<()> {
    let app = TestApp::new().await?;
    let (status, all) = app.host.get("/api/bridge/schemas").await?;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(all["data"][0]["app"], app.slug.as_str());
    let table = &all["data"][0]["tables"][0];
    assert_eq!(table["table"], "things");
    let id_column = json!({ "column": "id", "type": "uuid", "builtIn": true, "nullable": false });
    assert_eq!(table["columns"][0], id_column);
    let by_query = app.host.query_data(&json!({ "action": "schemas", "app": app.slug })).await?;
    assert_eq!(by_query, all["data"]);
    Ok(())
}

#[tokio::test]
async fn app_cannot_act_for_another_app() -> Result<()> {
    let app = TestApp::new().await?;
    let other = unique_name("other");
    app.host.machine.add_app(&other, &json!({ "t": { "columns": { "a": "text" } } }))?;
    app.host.wait_until_registered(&other).await?;
    let as_app = |slug: &str, method: Method, path: &str| {
        let mut claims = app.host.machine.claims(Route::App);
        claims.app = Some(slug.to_owned());
        app.host.unsigned_request(method, path).header("x-svc-proof", app.host.machine.signer.sign(&claims))
    };
    let insert = app.body("insert", json!({ "data": { "title": "mine" } }));
    let (status, _) = send_json(as_app(&app.slug, Method::POST, "/api/bridge/query").json(&insert)).await?;
    assert_eq!(status, StatusCode::CREATED);
    let (status, problem) =
        send_json(as_app(&other, Method::POST, "/api/bridge/query").json(&insert)).await?;
    assert_eq!((status, problem["code"].as_str()), (StatusCode::FORBIDDEN, Some("forbidden")), "{problem}");
    let (_, own) = send_json(as_app(&app.slug, Method::GET, "/api/bridge/schemas")).await?;
    let slugs: Vec<&Value> = own["data"].as_array().into_iter().flatten().map(|app| &app["app"]).collect();
    assert_eq!(slugs, [app.slug.as_str()]);
    let other_page = format!("/apps/{other}/");
    for path in ["/api/apps", "/api/backups", "/", other_page.as_str()] {
        let (status, _) = send_json(as_app(&app.slug, Method::GET, path)).await?;
        assert_eq!(status, StatusCode::FORBIDDEN, "{path}");
    }
    Ok(())
}

#[tokio::test]
async fn concurrent_requests_get_their_own_responses() -> Result<()> {
    let app = TestApp::new().await?;
    let inserts = (0..200).map(|n| {
        let body = app.body("insert", json!({ "data": { "title": format!("n{n}"), "size": n } }));
        let host = &app.host;
        async move { anyhow::Ok((n, host.query_data(&body).await?)) }
    });
    for (n, row) in futures_util::future::try_join_all(inserts).await? {
        assert_eq!((&row["size"], &row["title"]), (&json!(n), &json!(format!("n{n}"))));
    }
    assert_eq!(app.host.query_data(&app.body("count", json!({}))).await?["count"], 200);
    Ok(())
}
