//! Executes a prepared plan and writes the response.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::future::{join_all, try_join};
use futures_util::{TryStreamExt, future};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use tokio_postgres::{Row, RowStream, Statement};

use super::cursor::{Cursor, key_text};
use super::param::Param;
use super::plan::{FindPlan, InsertGroup, MutationPlan, MutationTarget, Plan, RowQuery};
use super::problems::{self, ErrorContext};
use super::request::Returning;
use super::row::{self, RowError, RowFormat};
use super::sql::Sql;
use crate::apps::{ChangedRows, Column};
use crate::database::Connection;
use svc_http::problem::{Code, Problem};

/// A page that reaches this size ends early, which bounds the memory of one response. The responses of a transaction
/// share this limit.
const MAX_RESPONSE_BYTES: usize = 8 * 1024 * 1024;
/// Maximum number of attempts for an upsert whose row is inserted and deleted concurrently.
const MAX_UPSERT_ATTEMPTS: usize = 3;

/// The response to one operation: a complete JSON object.
#[derive(Debug)]
pub struct BridgeResponse {
    pub status: StatusCode,
    pub body: Bytes,
    /// Whether PostgreSQL's result was read to the end.
    pub is_fully_read: bool,
}

impl BridgeResponse {
    fn ok(body: impl Into<Bytes>) -> Self {
        Self { status: StatusCode::OK, body: body.into(), is_fully_read: true }
    }

    fn created(body: impl Into<Bytes>) -> Self {
        Self { status: StatusCode::CREATED, ..Self::ok(body) }
    }

    /// Combines a transaction's responses.
    pub fn combine(responses: &[Self]) -> Bytes {
        let size: usize = responses.iter().map(|response| response.body.len() + 1).sum();
        let mut body = Vec::with_capacity(size + 16);
        body.extend_from_slice(b"{\"data\":");
        put_json_array(&mut body, responses.iter().map(|response| response.body.as_ref()));
        body.push(b'}');
        body.into()
    }
}

/// The number of bytes that the response may still use, and the counter of changed rows. A transaction's operations
/// share one budget.
#[derive(Debug)]
pub struct ResponseBudget<'c> {
    remaining_bytes: AtomicUsize,
    has_unread_results: AtomicBool,
    changed_rows: &'c ChangedRows,
}

impl<'c> ResponseBudget<'c> {
    pub fn new(changed_rows: &'c ChangedRows) -> Self {
        Self {
            remaining_bytes: AtomicUsize::new(MAX_RESPONSE_BYTES),
            has_unread_results: AtomicBool::new(false),
            changed_rows,
        }
    }

    /// The budget of a plan that bounds its own response.
    pub fn unlimited(changed_rows: &'c ChangedRows) -> Self {
        Self { remaining_bytes: AtomicUsize::new(usize::MAX), ..Self::new(changed_rows) }
    }

    /// Returns whether an operation was refused while its results, or those of later operations, may still have been
    /// arriving. The connection must then be abandoned.
    pub fn has_unread_results(&self) -> bool {
        self.has_unread_results.load(Ordering::Relaxed)
    }

    /// Records that results may be unread, and returns the problem.
    fn refuse(&self, problem: Problem) -> Problem {
        self.has_unread_results.store(true, Ordering::Relaxed);
        problem
    }

    fn has_room(&self) -> bool {
        self.remaining_bytes.load(Ordering::Relaxed) > 0
    }

    /// Reserves all of `bytes` or fails.
    fn reserve(&self, bytes: usize) -> Result<(), Problem> {
        if bytes > self.remaining_bytes.load(Ordering::Relaxed) {
            return Err(self.refuse(problems::response_too_large()));
        }
        self.consume(bytes);
        Ok(())
    }

    /// Consumes `bytes`, or the rest of the budget if less remains.
    fn consume(&self, bytes: usize) {
        let remaining = self.remaining_bytes.load(Ordering::Relaxed);
        self.remaining_bytes.store(remaining.saturating_sub(bytes), Ordering::Relaxed);
    }
}

/// Whether a plan runs alone or as a step of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExecutionMode {
    Single,
    InTransaction,
}

/// A plan with its statements prepared on a connection.
pub struct PreparedPlan<'p, 't> {
    plan: &'p Plan<'t>,
    statements: Vec<Statement>,
}

impl<'p, 't> PreparedPlan<'p, 't> {
    pub fn plan(&self) -> &Plan<'t> {
        self.plan
    }

    /// Prepares the plan's statements.
    ///
    /// # Errors
    /// PostgreSQL rejects a statement, or the connection is lost.
    pub async fn prepare(connection: &Connection, plan: &'p Plan<'t>) -> Result<Self, Problem> {
        let context = ErrorContext::for_plan(plan);
        let mut statements = Vec::with_capacity(1);
        for sql in plan.statements() {
            let statement = connection.prepare_cached(&sql.text, &sql.params, Param::sql_type).await;
            statements.push(statement.map_err(|error| problems::from_database_error(&error, context))?);
        }
        Ok(Self { plan, statements })
    }
}

/// A connection and the context for its errors.
#[derive(Clone, Copy)]
pub struct Executor<'c> {
    pub connection: &'c Connection,
    pub context: ErrorContext,
}

/// Executes a prepared plan. In a transaction, all statements are sent on the first poll.
///
/// # Errors
/// A statement fails, the connection is lost, the row does not exist, the mutation matches too many rows, a concurrent
/// change prevents the upsert, no cursor can be created, or the response is too large.
pub async fn execute(
    connection: &Connection,
    prepared: PreparedPlan<'_, '_>,
    mode: ExecutionMode,
    budget: &ResponseBudget<'_>,
) -> Result<BridgeResponse, Problem> {
    let PreparedPlan { plan, statements } = prepared;
    let executor = Executor { connection, context: ErrorContext::for_plan(plan) };
    let response = match (plan, statements.as_slice()) {
        (Plan::Insert(query), [statement]) => {
            let rows = executor.query_rows(statement, &query.sql).await?;
            executor.created_row(rows.first(), &query.columns)
        }
        (Plan::InsertMany(groups), statements) => executor.insert_many(groups, statements).await,
        (Plan::Upsert { write, fallback }, [first, rest @ ..]) => {
            let fallback = fallback.as_ref().zip(rest.first());
            budget.changed_rows.add(1);
            executor.upsert((write, first), fallback, mode).await
        }
        (Plan::Get(query), [statement]) => match executor.query_rows(statement, &query.sql).await?.first() {
            Some(row) => Ok(BridgeResponse::ok(executor.row_data(row, RowFormat::for_read(&query.columns))?)),
            None => Err(row_not_found()),
        },
        (Plan::Count(sql), [statement]) => {
            let count = executor.query_number(statement, sql).await?;
            Ok(BridgeResponse::ok(format!("{{\"data\":{{\"count\":{count}}}}}")))
        }
        // These plans consume the budget row by row.
        (Plan::Find(page), [rows, count @ ..]) => {
            return executor.find_page(page, (rows, count.first()), mode, budget).await;
        }
        (Plan::Mutation(mutation), [statement]) => {
            return executor.apply_mutation(mutation, statement, budget).await;
        }
        _ => Err(problems::bridge_defect("statements do not match their plan")),
    }?;
    // Outside a transaction, the plan itself bounds the response, and a write is already committed.
    if mode == ExecutionMode::InTransaction {
        budget.reserve(response.body.len())?;
    }
    Ok(response)
}

impl Executor<'_> {
    /// Returns the rows in request order.
    async fn insert_many(
        self,
        groups: &[InsertGroup<'_>],
        statements: &[Statement],
    ) -> Result<BridgeResponse, Problem> {
        let queries = groups
            .iter()
            .zip(statements)
            .map(|(group, statement)| self.query_rows(statement, &group.query.sql));
        let mut created: Vec<(usize, Row, RowFormat<'_>)> = Vec::new();
        for (group, rows) in groups.iter().zip(join_all(queries).await) {
            let format = RowFormat::for_write(0, &group.query.columns);
            created.extend(group.rows.iter().zip(rows?).map(|(index, row)| (*index, row, format)));
        }
        created.sort_unstable_by_key(|(index, ..)| *index);
        let mut body = b"{\"data\":[".to_vec();
        for (position, (_, row, format)) in created.iter().enumerate() {
            if position > 0 {
                body.push(b',');
            }
            self.write_row(row, *format, &mut body)?;
        }
        body.extend_from_slice(b"]}");
        Ok(BridgeResponse::created(body))
    }

    /// In a transaction, the first statement locks the row, so the second one finds it.
    async fn upsert(
        self,
        write: (&RowQuery<'_>, &Statement),
        fallback: Option<(&RowQuery<'_>, &Statement)>,
        mode: ExecutionMode,
    ) -> Result<BridgeResponse, Problem> {
        // Both statements return all columns.
        let format = RowFormat::for_write(0, &write.0.columns);
        let response = |rows: Vec<Row>| match rows.first() {
            Some(row) => self.row_data(row, format).map(|data| Some(BridgeResponse::ok(data))),
            None => Ok(None),
        };
        let first = || self.query_rows(write.1, &write.0.sql);
        let Some((query, statement)) = fallback else {
            return response(first().await?)?.ok_or_else(problems::missing_row);
        };
        let second = || self.query_rows(statement, &query.sql);
        if mode == ExecutionMode::InTransaction {
            let (created, existing) = try_join(first(), second()).await?;
            return response(created)?.or(response(existing)?).ok_or_else(problems::concurrent_change);
        }
        for _ in 0..MAX_UPSERT_ATTEMPTS {
            if let Some(response) = response(first().await?)? {
                return Ok(response);
            }
            if let Some(response) = response(second().await?)? {
                return Ok(response);
            }
        }
        Err(problems::concurrent_change())
    }

    async fn find_page(
        self,
        page: &FindPlan<'_>,
        (rows_statement, count_statement): (&Statement, Option<&Statement>),
        mode: ExecutionMode,
        budget: &ResponseBudget<'_>,
    ) -> Result<BridgeResponse, Problem> {
        // Both queries are sent before the first result is read.
        let count_rows = async {
            match page.count.as_ref().zip(count_statement) {
                Some((sql, statement)) => self.query_number(statement, sql).await.map(Some),
                None => Ok(None),
            }
        };
        let read = future::try_join(self.fill_page(page, rows_statement, mode, budget), count_rows).await;
        let (mut page_buffer, count) = read.map_err(|problem| {
            // The other query may still be running. In a transaction, ROLLBACK waits for it.
            let may_have_unread_result = count_statement.is_some() && mode == ExecutionMode::Single;
            if may_have_unread_result { budget.refuse(problem) } else { problem }
        })?;
        let body = &mut page_buffer.body;
        body.extend_from_slice(b"],\"nextCursor\":");
        match page_buffer.last_keys {
            Some(keys) => {
                let cursor = Cursor::new(&page.order, &page.filter, keys).encode();
                let cursor = cursor.ok_or_else(|| {
                    let detail = "cannot be used for paging: a value of its columns is too long";
                    budget.refuse(Problem::field("/orderBy", detail))
                })?;
                body.push(b'"');
                body.extend_from_slice(cursor.as_bytes());
                body.push(b'"');
            }
            None => body.extend_from_slice(b"null"),
        }
        if let Some(count) = count {
            body.extend_from_slice(format!(",\"count\":{count}").as_bytes());
        }
        body.push(b'}');
        Ok(BridgeResponse {
            is_fully_read: page_buffer.is_fully_read,
            ..BridgeResponse::ok(page_buffer.body)
        })
    }

    /// Reads rows until the page has reached its limit or the byte budget is used up; in either case, the cursor
    /// continues from there.
    async fn fill_page(
        self,
        page: &FindPlan<'_>,
        statement: &Statement,
        mode: ExecutionMode,
        budget: &ResponseBudget<'_>,
    ) -> Result<PageBuffer, Problem> {
        let to_problem = |error: tokio_postgres::Error| problems::from_database_error(&error, self.context);
        let mut rows = pin!(self.send_query(statement, &page.rows).await.map_err(to_problem)?);
        let mut page_buffer =
            PageBuffer { body: Vec::with_capacity(4096), last_keys: None, is_fully_read: true };
        page_buffer.body.extend_from_slice(b"{\"data\":[");
        let (mut listed_rows, mut last_row) = (0, None::<Row>);
        let mut has_more = false;
        while let Some(row) = rows.try_next().await.map_err(to_problem)? {
            if has_more {
                continue;
            }
            // A page has at least one row; otherwise its cursor would not advance.
            if listed_rows == page.limit || (listed_rows > 0 && !budget.has_room()) {
                has_more = true;
                // In a transaction, a later error of the statement must not be missed: COMMIT would roll back without
                // an error.
                page_buffer.is_fully_read = listed_rows == page.limit || mode == ExecutionMode::InTransaction;
                if page_buffer.is_fully_read {
                    continue;
                }
                break;
            }
            if listed_rows > 0 {
                page_buffer.body.push(b',');
            }
            let format = RowFormat::for_read(&page.columns);
            let size = self.write_row(&row, format, &mut page_buffer.body).map_err(|p| budget.refuse(p))?;
            if mode == ExecutionMode::InTransaction && listed_rows == 0 {
                budget.reserve(size)?;
            } else {
                budget.consume(size);
            }
            listed_rows += 1;
            last_row = Some(row);
        }
        let keys = |row: Row| {
            let first = page.columns.len();
            (first..first + page.order.keys.len())
                .map(|index| key_text(&row, index))
                .collect::<Result<_, _>>()
        };
        page_buffer.last_keys = last_row.filter(|_| has_more).map(keys).transpose().map_err(to_problem)?;
        Ok(page_buffer)
    }

    async fn apply_mutation(
        self,
        mutation: &MutationPlan<'_>,
        statement: &Statement,
        budget: &ResponseBudget<'_>,
    ) -> Result<BridgeResponse, Problem> {
        let to_problem = |error: tokio_postgres::Error| problems::from_database_error(&error, self.context);
        let mut stream = pin!(self.send_query(statement, &mutation.sql).await.map_err(to_problem)?);
        let first_column = usize::from(mutation.max_affected.is_some());
        let (mut matched, mut affected, mut listed) = (0_i64, 0_i64, 0_usize);
        let mut rows = Vec::new();
        while let Some(row) = stream.try_next().await.map_err(to_problem)? {
            if mutation.max_affected.is_some() {
                matched = row.try_get(0).map_err(to_problem)?;
            }
            match mutation.returning {
                Returning::Count => affected = row.try_get(first_column).map_err(to_problem)?,
                Returning::Rows => {
                    // If nothing is changed, a bounded mutation still returns one row, for the number of matched rows.
                    if row.try_get::<_, Option<bool>>(first_column).map_err(to_problem)?.is_none() {
                        continue;
                    }
                    affected += 1;
                    if budget.has_room() {
                        if listed > 0 {
                            rows.push(b',');
                        }
                        let format = RowFormat::for_write(first_column + 1, &mutation.columns);
                        budget.consume(self.write_row(&row, format, &mut rows)?);
                        listed += 1;
                    }
                }
            }
        }
        match mutation.max_affected {
            Some(max) if matched > max => return Err(problems::too_many_rows(max)),
            None if mutation.returning == Returning::Count => {
                affected = stream.rows_affected().unwrap_or(0).try_into().unwrap_or(i64::MAX);
            }
            _ => {}
        }
        budget.changed_rows.add(affected.try_into().unwrap_or(0));
        if affected == 0 && mutation.target == MutationTarget::Id {
            return Err(row_not_found());
        }
        let mut body = Vec::with_capacity(rows.len() + 64);
        body.extend_from_slice(format!("{{\"data\":{{\"affected\":{affected}").as_bytes());
        if mutation.returning == Returning::Rows {
            body.extend_from_slice(b",\"rows\":[");
            body.extend_from_slice(&rows);
            body.push(b']');
            if usize::try_from(affected).unwrap_or(usize::MAX) > listed {
                body.extend_from_slice(b",\"truncated\":true");
            }
        }
        body.extend_from_slice(b"}}");
        Ok(BridgeResponse::ok(body))
    }

    /// Returns the response to a single-row insert.
    pub fn created_row(self, row: Option<&Row>, columns: &[&Column]) -> Result<BridgeResponse, Problem> {
        let row = row.ok_or_else(problems::missing_row)?;
        Ok(BridgeResponse::created(self.row_data(row, RowFormat::for_write(0, columns))?))
    }

    async fn query_rows(self, statement: &Statement, sql: &Sql) -> Result<Vec<Row>, Problem> {
        let rows = async { self.send_query(statement, sql).await?.try_collect().await };
        rows.await.map_err(|error| problems::from_database_error(&error, self.context))
    }

    /// The statement is sent on the first poll.
    async fn send_query(self, statement: &Statement, sql: &Sql) -> Result<RowStream, tokio_postgres::Error> {
        self.connection.client.query_raw(statement, &sql.params).await
    }

    async fn query_number(self, statement: &Statement, sql: &Sql) -> Result<i64, Problem> {
        let rows = self.query_rows(statement, sql).await?;
        let row = rows.first().ok_or_else(problems::missing_row)?;
        row.try_get(0).map_err(|error| problems::from_database_error(&error, self.context))
    }

    /// Returns `{"data":…}` with one row.
    fn row_data(self, row: &Row, format: RowFormat<'_>) -> Result<Vec<u8>, Problem> {
        let mut data = Vec::with_capacity(512);
        data.extend_from_slice(b"{\"data\":");
        self.write_row(row, format, &mut data)?;
        data.push(b'}');
        Ok(data)
    }

    /// Appends a row; returns the size of its JSON.
    fn write_row(self, row: &Row, format: RowFormat<'_>, out: &mut Vec<u8>) -> Result<usize, Problem> {
        row::write_row(row, format, out).map_err(|error| match error {
            RowError::Database(error) => problems::from_database_error(&error, self.context),
            RowError::TooLarge => problems::row_too_large(),
        })
    }
}

/// The rows of a page that have been read so far.
struct PageBuffer {
    body: Vec<u8>,
    /// The order keys of the last row, if more rows follow.
    last_keys: Option<Vec<Option<String>>>,
    is_fully_read: bool,
}

fn row_not_found() -> Problem {
    Problem::new(Code::NotFound, "There is no row with this id.")
}

fn put_json_array<'a>(body: &mut Vec<u8>, items: impl Iterator<Item = &'a [u8]>) {
    body.push(b'[');
    for (index, item) in items.enumerate() {
        if index > 0 {
            body.push(b',');
        }
        body.extend_from_slice(item);
    }
    body.push(b']');
}

pub fn json_response(status: StatusCode, body: Bytes) -> Response {
    let mut headers = HeaderMap::with_capacity(4);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}
