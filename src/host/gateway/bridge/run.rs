//! Runs a plan through the app's role and puts PostgreSQL's JSON into the answer, byte for byte.

use std::error::Error;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::TryStreamExt;
use http::{HeaderValue, StatusCode, header};
use tokio_postgres::types::{FromSql, Type};
use tokio_postgres::{Row, RowStream};

use super::cursor::Cursor;
use super::order::Order;
use super::param::Param;
use super::plan::{Page, Plan};
use super::refusal;
use super::sql::Sql;
use crate::host::gateway::database::{Connection, Pool};
use crate::http::problem::{Code, Problem};

/// How long after its own time limit a statement may still be silent before its connection is given up.
const GRACE: Duration = Duration::from_secs(5);
/// A page ends early when it has this many bytes, so that no answer can fill the memory.
const LARGEST_PAGE: usize = 8 * 1024 * 1024;

/// Runs `plan`; `statement_timeout` is the role's.
///
/// # Errors
/// The refusal as the caller may know it.
pub async fn run(pool: &Arc<Pool>, plan: Plan<'_>, statement_timeout: Duration) -> Result<Response, Problem> {
    let lease = pool.lease().await.map_err(|error| refusal::of_pool(&error))?;
    let ran = tokio::time::timeout(statement_timeout + GRACE, answer(&lease, plan)).await;
    ran.unwrap_or_else(|_| {
        lease.give_up();
        Err(refusal::too_slow())
    })
}

async fn answer(connection: &Connection, plan: Plan<'_>) -> Result<Response, Problem> {
    match plan {
        Plan::Made(sql) => {
            let rows = rows(connection, sql).await?;
            let row = rows.first().ok_or_else(lost)?;
            Ok(json(StatusCode::CREATED, wrapped(json_of(row)?)))
        }
        Plan::One(sql) => match rows(connection, sql).await?.first() {
            Some(row) => Ok(json(StatusCode::OK, wrapped(json_of(row)?))),
            None => Err(Problem::new(Code::NotFound, "There is no row with this id.")),
        },
        Plan::Number(sql) => {
            let count = number(connection, sql).await?;
            Ok(json(StatusCode::OK, wrapped(format!("{{\"count\":{count}}}").as_bytes())))
        }
        Plan::Page(page) => page_of(connection, page).await,
    }
}

async fn page_of(connection: &Connection, page: Page<'_>) -> Result<Response, Problem> {
    let Page { rows, count, limit, order } = page;
    // Both questions go out before the first answer is read.
    let (mut filled, count) = tokio::try_join!(fill(connection, rows, limit, &order), async {
        match count {
            Some(sql) => number(connection, sql).await.map(Some),
            None => Ok(None),
        }
    })?;
    let body = &mut filled.body;
    body.put_slice(b"],\"nextCursor\":");
    match filled.last.filter(|_| filled.more) {
        Some(keys) => {
            body.put_u8(b'"');
            body.put_slice(Cursor::new(&order, keys).encode().as_bytes());
            body.put_u8(b'"');
        }
        None => body.put_slice(b"null"),
    }
    if let Some(count) = count {
        body.put_slice(format!(",\"count\":{count}").as_bytes());
    }
    body.put_u8(b'}');
    Ok(json(StatusCode::OK, filled.body.freeze()))
}

/// The rows of a page, as far as it goes.
struct Filled {
    body: BytesMut,
    /// The order's values of the last row.
    last: Option<Vec<Option<String>>>,
    /// Whether rows come after it.
    more: bool,
}

/// Takes rows until the page has its number of them or is large enough; the cursor leads on from either.
async fn fill(connection: &Connection, sql: Sql, limit: usize, order: &Order<'_>) -> Result<Filled, Problem> {
    let refused = |error: tokio_postgres::Error| refusal::of_error(&error);
    let mut rows = pin!(start(connection, sql).await.map_err(refused)?);
    let mut body = BytesMut::with_capacity(4096);
    body.put_slice(b"{\"data\":[");
    let (mut shown, mut last_row) = (0, None::<Row>);
    let mut more = false;
    while let Some(row) = rows.try_next().await.map_err(refused)? {
        if shown == limit || body.len() >= LARGEST_PAGE {
            more = true;
            break;
        }
        if shown > 0 {
            body.put_u8(b',');
        }
        body.put_slice(json_of(&row)?);
        shown += 1;
        last_row = Some(row);
    }
    let keys = |row: Row| (1..=order.keys.len()).map(|index| row.try_get(index)).collect::<Result<_, _>>();
    let last = last_row.filter(|_| more).map(keys).transpose().map_err(refused)?;
    Ok(Filled { body, last, more })
}

async fn rows(connection: &Connection, sql: Sql) -> Result<Vec<Row>, Problem> {
    let ran = async { start(connection, sql).await?.try_collect().await };
    ran.await.map_err(|error| refusal::of_error(&error))
}

async fn start(connection: &Connection, sql: Sql) -> Result<RowStream, tokio_postgres::Error> {
    let types: Vec<Type> = sql.params.iter().map(Param::sql_type).collect();
    let statement = connection.statement(&sql.text, &types).await?;
    connection.client.query_raw(&statement, &sql.params).await
}

async fn number(connection: &Connection, sql: Sql) -> Result<i64, Problem> {
    let rows = rows(connection, sql).await?;
    let row = rows.first().ok_or_else(lost)?;
    row.try_get(0).map_err(|error| refusal::of_error(&error))
}

/// A statement that always answers with a row did not.
fn lost() -> Problem {
    tracing::error!("a statement gave no row");
    Problem::new(Code::Internal, "The failure is logged under this request id.")
}

/// The bytes of a `json` value, unparsed.
struct Raw<'a>(&'a [u8]);

impl<'a> FromSql<'a> for Raw<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(raw))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSON
    }
}

fn json_of(row: &Row) -> Result<&[u8], Problem> {
    let raw: Raw<'_> = row.try_get(0).map_err(|error| refusal::of_error(&error))?;
    Ok(raw.0)
}

fn wrapped(data: &[u8]) -> Bytes {
    let mut body = BytesMut::with_capacity(data.len() + 10);
    body.put_slice(b"{\"data\":");
    body.put_slice(data);
    body.put_u8(b'}');
    body.freeze()
}

pub fn json(status: StatusCode, body: Bytes) -> Response {
    let mut response = (status, body).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
