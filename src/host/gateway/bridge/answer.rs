//! Executes a prepared plan and puts PostgreSQL's JSON into the answer, byte for byte.

use std::error::Error;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::response::{IntoResponse, Response};
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::future::{join_all, try_join};
use futures_util::{TryStreamExt, future};
use http::{HeaderValue, StatusCode, header};
use tokio_postgres::types::{FromSql, Type};
use tokio_postgres::{Row, RowStream, Statement};

use super::cursor::{Cursor, key};
use super::param::Param;
use super::plan::{Changed, Group, Page, Plan, Target};
use super::refusal::{self, Asked};
use super::request::Returning;
use super::sql::Sql;
use crate::host::gateway::apps::ChangedRows;
use crate::host::gateway::database::Connection;
use crate::http::problem::{Code, Problem};

/// A page ends early when the answer has this many bytes, so that no answer can fill the memory.
const LARGEST: usize = 8 * 1024 * 1024;
/// How often an upsert looks again for a row that comes and goes.
const TRIES: usize = 3;

/// What an operation answers: a whole JSON object.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub body: Bytes,
    /// Whether everything that PostgreSQL had to say was read.
    pub is_whole: bool,
}

impl Answer {
    fn ok(body: impl Into<Bytes>) -> Self {
        Self { status: StatusCode::OK, body: body.into(), is_whole: true }
    }

    fn made(body: impl Into<Bytes>) -> Self {
        Self { status: StatusCode::CREATED, ..Self::ok(body) }
    }

    /// The answers of a transaction as one.
    pub fn all(answers: &[Self]) -> Bytes {
        let size: usize = answers.iter().map(|answer| answer.body.len() + 1).sum();
        let mut body = BytesMut::with_capacity(size + 16);
        body.put_slice(b"{\"data\":");
        put_list(&mut body, answers.iter().map(|answer| answer.body.as_ref()));
        body.put_u8(b'}');
        body.freeze()
    }
}

/// How many bytes an answer may still take, and where changed rows count; the operations of a transaction share them.
#[derive(Debug)]
pub struct Room<'c> {
    bytes: AtomicUsize,
    changed: &'c ChangedRows,
}

impl<'c> Room<'c> {
    pub fn new(changed: &'c ChangedRows) -> Self {
        Self { bytes: AtomicUsize::new(LARGEST), changed }
    }

    fn is_left(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > 0
    }

    /// Takes all of it, or refuses.
    fn claim(&self, bytes: usize) -> Result<(), Problem> {
        if bytes > self.bytes.load(Ordering::Relaxed) {
            return Err(refusal::too_much());
        }
        self.take(bytes);
        Ok(())
    }

    fn take(&self, bytes: usize) {
        let left = self.bytes.load(Ordering::Relaxed);
        self.bytes.store(left.saturating_sub(bytes), Ordering::Relaxed);
    }
}

/// Whether a plan is a transaction by itself or a step of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    ByItself,
    InTransaction,
}

/// A plan and its statements, prepared on a connection.
pub struct Ready<'p, 't> {
    plan: &'p Plan<'t>,
    statements: Vec<Statement>,
}

impl<'p, 't> Ready<'p, 't> {
    /// # Errors
    /// When PostgreSQL refuses a statement.
    pub async fn prepare(connection: &Connection, plan: &'p Plan<'t>) -> Result<Self, Problem> {
        let asked = Asked::by(plan);
        let mut statements = Vec::with_capacity(1);
        for sql in plan.statements() {
            let types = || sql.params.iter().map(Param::sql_type).collect();
            let statement = connection.statement(&sql.text, types).await;
            statements.push(statement.map_err(|error| refusal::of_error(&error, asked))?);
        }
        Ok(Self { plan, statements })
    }
}

/// A connection, and what is asked of it.
#[derive(Clone, Copy)]
struct At<'c> {
    connection: &'c Connection,
    asked: Asked,
}

/// Runs what is ready. In a transaction everything is sent when this is first polled.
///
/// # Errors
/// The refusal as the caller may know it.
pub async fn execute(
    connection: &Connection,
    ready: Ready<'_, '_>,
    way: Way,
    room: &Room<'_>,
) -> Result<Answer, Problem> {
    let Ready { plan, statements } = ready;
    let at = At { connection, asked: Asked::by(plan) };
    let answer = match (plan, statements.as_slice()) {
        (Plan::Made(sql), [statement]) => {
            let rows = at.rows(statement, sql).await?;
            let row = rows.first().ok_or_else(refusal::lost)?;
            Ok(Answer::made(wrapped(at.json_of(row)?)))
        }
        (Plan::ManyMade(groups), statements) => at.many(groups, statements).await,
        (Plan::Upserted { write, otherwise }, [first, rest @ ..]) => {
            let otherwise = otherwise.as_ref().zip(rest.first());
            room.changed.add(1);
            at.upserted((write, first), otherwise, way).await
        }
        (Plan::One(sql), [statement]) => match at.rows(statement, sql).await?.first() {
            Some(row) => Ok(Answer::ok(wrapped(at.json_of(row)?))),
            None => Err(absent()),
        },
        (Plan::Number(sql), [statement]) => {
            let count = at.number(statement, sql).await?;
            Ok(Answer::ok(wrapped(format!("{{\"count\":{count}}}").as_bytes())))
        }
        // These take room row by row.
        (Plan::Page(page), [rows, count @ ..]) => return at.page(page, rows, count.first(), room).await,
        (Plan::Changed(changed), [statement]) => return at.changed(changed, statement, room).await,
        _ => Err(refusal::lost()),
    }?;
    // A single answer has been bounded by its plan; what was written by itself cannot be refused any more.
    if way == Way::InTransaction {
        room.claim(answer.body.len())?;
    }
    Ok(answer)
}

impl At<'_> {
    /// The rows in the order in which the request has them.
    async fn many(self, groups: &[Group], statements: &[Statement]) -> Result<Answer, Problem> {
        let each = groups.iter().zip(statements).map(|(group, statement)| self.rows(statement, &group.sql));
        let mut made: Vec<(usize, Row)> = Vec::new();
        for (group, rows) in groups.iter().zip(join_all(each).await) {
            made.extend(group.rows.iter().copied().zip(rows?));
        }
        made.sort_unstable_by_key(|(index, _)| *index);
        let rows = made.iter().map(|(_, row)| self.json_of(row)).collect::<Result<Vec<_>, _>>()?;
        let mut body = BytesMut::with_capacity(rows.iter().map(|row| row.len() + 1).sum::<usize>() + 16);
        body.put_slice(b"{\"data\":");
        put_list(&mut body, rows.into_iter());
        body.put_u8(b'}');
        Ok(Answer::made(body))
    }

    /// In a transaction the row stays locked by the first statement, so that the second finds it.
    async fn upserted(
        self,
        write: (&Sql, &Statement),
        otherwise: Option<(&Sql, &Statement)>,
        way: Way,
    ) -> Result<Answer, Problem> {
        let answer = |rows: Vec<Row>| match rows.first() {
            Some(row) => self.json_of(row).map(|row| Some(Answer::ok(wrapped(row)))),
            None => Ok(None),
        };
        let first = || self.rows(write.1, write.0);
        let Some((sql, statement)) = otherwise else {
            return answer(first().await?)?.ok_or_else(refusal::lost);
        };
        let second = || self.rows(statement, sql);
        if way == Way::InTransaction {
            let (made, found) = try_join(first(), second()).await?;
            return answer(made)?.or(answer(found)?).ok_or_else(refusal::overtaken);
        }
        for _ in 0..TRIES {
            if let Some(answer) = answer(first().await?)? {
                return Ok(answer);
            }
            if let Some(answer) = answer(second().await?)? {
                return Ok(answer);
            }
        }
        Err(refusal::overtaken())
    }

    async fn page(
        self,
        page: &Page<'_>,
        rows: &Statement,
        count: Option<&Statement>,
        room: &Room<'_>,
    ) -> Result<Answer, Problem> {
        // Both questions go out before the first answer is read.
        let counted = async {
            match page.count.as_ref().zip(count) {
                Some((sql, statement)) => self.number(statement, sql).await.map(Some),
                None => Ok(None),
            }
        };
        let (mut filled, count) = future::try_join(self.fill(page, rows, room), counted).await?;
        let body = &mut filled.body;
        body.put_slice(b"],\"nextCursor\":");
        match filled.last {
            Some(keys) => {
                let cursor = Cursor::new(&page.order, &page.filter, keys).encode();
                let cursor = cursor.ok_or_else(|| {
                    Problem::field("/orderBy", "cannot be paged by: a row's value in it is too long")
                })?;
                body.put_u8(b'"');
                body.put_slice(cursor.as_bytes());
                body.put_u8(b'"');
            }
            None => body.put_slice(b"null"),
        }
        if let Some(count) = count {
            body.put_slice(format!(",\"count\":{count}").as_bytes());
        }
        body.put_u8(b'}');
        Ok(Answer { is_whole: filled.is_whole, ..Answer::ok(filled.body) })
    }

    /// Takes rows until the page has its number of them or is large enough; the cursor leads on from either.
    async fn fill(self, page: &Page<'_>, statement: &Statement, room: &Room<'_>) -> Result<Filled, Problem> {
        let refused = |error: tokio_postgres::Error| refusal::of_error(&error, self.asked);
        let mut rows = pin!(self.start(statement, &page.rows).await.map_err(refused)?);
        let mut filled = Filled { body: BytesMut::with_capacity(4096), last: None, is_whole: true };
        filled.body.put_slice(b"{\"data\":[");
        let (mut shown, mut last_row) = (0, None::<Row>);
        let mut more = false;
        while let Some(row) = rows.try_next().await.map_err(refused)? {
            if more {
                continue;
            }
            // A page has a row at least, or its cursor would lead nowhere.
            if shown == page.limit || (shown > 0 && !room.is_left()) {
                more = true;
                filled.is_whole = shown == page.limit;
                if filled.is_whole {
                    continue;
                }
                break;
            }
            if shown > 0 {
                filled.body.put_u8(b',');
            }
            let json = self.json_of(&row)?;
            filled.body.put_slice(json);
            room.take(json.len());
            shown += 1;
            last_row = Some(row);
        }
        let keys =
            |row: Row| (1..=page.order.keys.len()).map(|index| key(&row, index)).collect::<Result<_, _>>();
        filled.last = last_row.filter(|_| more).map(keys).transpose().map_err(refused)?;
        Ok(filled)
    }

    async fn changed(
        self,
        changed: &Changed,
        statement: &Statement,
        room: &Room<'_>,
    ) -> Result<Answer, Problem> {
        let refused = |error: tokio_postgres::Error| refusal::of_error(&error, self.asked);
        let mut stream = pin!(self.start(statement, &changed.sql).await.map_err(refused)?);
        let column = usize::from(changed.at_most.is_some());
        let (mut matched, mut affected, mut listed) = (0_i64, 0_i64, 0_usize);
        let mut rows = BytesMut::new();
        while let Some(row) = stream.try_next().await.map_err(refused)? {
            if changed.at_most.is_some() {
                matched = row.try_get(0).map_err(refused)?;
            }
            match changed.returning {
                Returning::Number => affected = row.try_get(column).map_err(refused)?,
                Returning::Rows => {
                    let Some(Raw(json)) = row.try_get::<_, Option<Raw<'_>>>(column).map_err(refused)? else {
                        continue;
                    };
                    affected += 1;
                    if room.is_left() {
                        if listed > 0 {
                            rows.put_u8(b',');
                        }
                        rows.put_slice(json);
                        room.take(json.len());
                        listed += 1;
                    }
                }
            }
        }
        match changed.at_most {
            Some(most) if matched > most => return Err(refusal::too_many(most)),
            None if changed.returning == Returning::Number => {
                affected = stream.rows_affected().unwrap_or(0).try_into().unwrap_or(i64::MAX);
            }
            _ => {}
        }
        room.changed.add(affected.try_into().unwrap_or(0));
        if affected == 0 && changed.target == Target::Id {
            return Err(absent());
        }
        let mut body = BytesMut::with_capacity(rows.len() + 64);
        body.put_slice(format!("{{\"data\":{{\"affected\":{affected}").as_bytes());
        if changed.returning == Returning::Rows {
            body.put_slice(b",\"rows\":[");
            body.put_slice(&rows);
            body.put_u8(b']');
            if usize::try_from(affected).unwrap_or(usize::MAX) > listed {
                body.put_slice(b",\"truncated\":true");
            }
        }
        body.put_slice(b"}}");
        Ok(Answer::ok(body))
    }

    async fn rows(self, statement: &Statement, sql: &Sql) -> Result<Vec<Row>, Problem> {
        let ran = async { self.start(statement, sql).await?.try_collect().await };
        ran.await.map_err(|error| refusal::of_error(&error, self.asked))
    }

    /// Sends the statement when it is first polled.
    async fn start(self, statement: &Statement, sql: &Sql) -> Result<RowStream, tokio_postgres::Error> {
        self.connection.client.query_raw(statement, &sql.params).await
    }

    async fn number(self, statement: &Statement, sql: &Sql) -> Result<i64, Problem> {
        let rows = self.rows(statement, sql).await?;
        let row = rows.first().ok_or_else(refusal::lost)?;
        row.try_get(0).map_err(|error| refusal::of_error(&error, self.asked))
    }

    fn json_of(self, row: &Row) -> Result<&[u8], Problem> {
        let raw: Raw<'_> = row.try_get(0).map_err(|error| refusal::of_error(&error, self.asked))?;
        Ok(raw.0)
    }
}

/// The rows of a page, as far as it goes.
struct Filled {
    body: BytesMut,
    /// The order's values of the last row, if rows come after it.
    last: Option<Vec<Option<String>>>,
    is_whole: bool,
}

fn absent() -> Problem {
    Problem::new(Code::NotFound, "There is no row with this id.")
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

fn put_list<'a>(body: &mut BytesMut, items: impl Iterator<Item = &'a [u8]>) {
    body.put_u8(b'[');
    for (index, item) in items.enumerate() {
        if index > 0 {
            body.put_u8(b',');
        }
        body.put_slice(item);
    }
    body.put_u8(b']');
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
