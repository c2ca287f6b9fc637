//! `GET /api/backups`: the lines of `backup.jsonl`, newest first.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use axum::extract::{RawQuery, State};
use axum::response::Response;
use axum::routing::get;
use bytes::Bytes;
use http::{Method, StatusCode};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::blocking::blocking;
use super::bridge;
use super::endpoint::{Endpoint, OWN_BODY, OWNERS, told};
use super::state::Gateway;
use crate::fsx::FileError;
use crate::http::fields::Fields;
use crate::http::openapi::{
    Operation, Parameter, Place, array, count, named, nullable, object, one_of, text, time,
};
use crate::http::problem::{Code, Problem};

const DEFAULT_LIMIT: usize = 50;
const LARGEST_LIMIT: usize = 1000;
/// How much of the file's end is read: more lines than anybody may ask for.
const TAIL: u64 = 2 * 1024 * 1024;

pub async fn list(
    State(gateway): State<Arc<Gateway>>,
    RawQuery(query): RawQuery,
) -> Result<Response, Problem> {
    let limit = limit(query.as_deref())?;
    let path = gateway.config.layout.logs().join("backup.jsonl");
    let lines = blocking(move || newest(&path, limit)).await?;
    let body = format!("{{\"backups\":[{}]}}", lines.join(","));
    Ok(bridge::json(StatusCode::OK, Bytes::from(body)))
}

fn limit(query: Option<&str>) -> Result<usize, Problem> {
    let mut query = Fields::of_query(query.unwrap_or_default());
    let limit = query.within("limit", 1..=LARGEST_LIMIT, DEFAULT_LIMIT);
    query.finish(Some(limit))
}

/// The last `limit` whole lines, newest first; a torn or broken line is left out.
pub(super) fn newest(path: &Path, limit: usize) -> Result<Vec<String>, FileError> {
    let text = match tail(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(FileError::at("read", path)(error)),
    };
    let text = String::from_utf8_lossy(&text);
    let whole = text.lines().rev().map(str::trim);
    let objects =
        whole.filter(|line| line.starts_with('{') && serde_json::from_str::<&RawValue>(line).is_ok());
    Ok(objects.take(limit).map(str::to_owned).collect())
}

fn tail(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    file.seek(SeekFrom::Start(size.saturating_sub(TAIL)))?;
    let mut text = Vec::new();
    file.take(TAIL).read_to_end(&mut text)?;
    Ok(text)
}

pub static LIST: Endpoint = Endpoint {
    operation: Operation {
        id: "listBackups",
        method: Method::GET,
        path: "/api/backups",
        summary: "The runs of the backup, the newest first.",
        credentials: OWNERS,
        parameters: &[Parameter {
            name: "limit",
            place: Place::Query,
            schema: || json!({ "type": "integer", "minimum": 1, "maximum": LARGEST_LIMIT, "default": DEFAULT_LIMIT }),
            about: "How many.",
        }],
        body: None,
        answers: &[told(200, "The runs.", || object(&[("backups", array(named("Backup")))], &[]))],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    largest_body: OWN_BODY,
    serve: || get(list),
};

/// A line of `backup.jsonl`. Later releases may say more in one.
pub fn told_run() -> Value {
    let mut line = object(
        &[("timestamp", time()), ("status", one_of(&["success", "error"])), ("stage", text())],
        &[
            ("key", nullable(text())),
            ("sizeBytes", nullable(count())),
            ("sha256", nullable(text())),
            ("durationMs", count()),
            ("error", text()),
        ],
    );
    line["additionalProperties"] = true.into();
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_newest_first_and_torn_ones_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("backup.jsonl");
        assert!(newest(&path, 5).unwrap().is_empty());
        std::fs::write(&path, "{\"n\":1}\nnot json\n{\"n\":2}\n{\"n\":3}\n{\"n\":").unwrap();
        assert_eq!(newest(&path, 2).unwrap(), [r#"{"n":3}"#, r#"{"n":2}"#]);
    }

    #[test]
    fn the_limit_is_checked() {
        assert_eq!(limit(None).unwrap(), DEFAULT_LIMIT);
        assert_eq!(limit(Some("limit=3")).unwrap(), 3);
        for bad in ["limit=0", "limit=x", "limit=1001", "other=1"] {
            assert!(limit(Some(bad)).is_err(), "{bad}");
        }
    }
}
