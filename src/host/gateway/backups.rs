//! `GET /api/backups`: the lines of `backup.jsonl`, newest first.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::StatusCode;
use serde_json::value::RawValue;

use super::bridge::json;
use super::state::Gateway;
use crate::fsx::FileError;
use crate::http::problem::Problem;

const DEFAULT_LIMIT: usize = 50;
const LARGEST_LIMIT: usize = 1000;
/// How much of the file's end is read: more lines than anybody may ask for.
const TAIL: u64 = 2 * 1024 * 1024;

pub async fn list(State(gateway): State<Arc<Gateway>>, RawQuery(query): RawQuery) -> Response {
    let limit = match limit(query.as_deref()) {
        Ok(limit) => limit,
        Err(problem) => return problem.into_response(),
    };
    let path = gateway.config.layout.logs().join("backup.jsonl");
    match tokio::task::spawn_blocking(move || newest(&path, limit)).await {
        Ok(Ok(lines)) => {
            let body = format!("{{\"backups\":[{}]}}", lines.join(","));
            json(StatusCode::OK, Bytes::from(body))
        }
        Ok(Err(error)) => Problem::internal(&error).into_response(),
        Err(error) => Problem::internal(&error).into_response(),
    }
}

fn limit(query: Option<&str>) -> Result<usize, Problem> {
    let mut limit = DEFAULT_LIMIT;
    for (name, value) in url::form_urlencoded::parse(query.unwrap_or_default().as_bytes()) {
        if name != "limit" {
            return Err(Problem::field("?", "takes limit alone"));
        }
        let asked = value.parse().ok().filter(|limit| (1..=LARGEST_LIMIT).contains(limit));
        limit = asked.ok_or_else(|| Problem::field("?limit", "must be an integer from 1 to 1000"))?;
    }
    Ok(limit)
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
