//! Converts operation rows, with their logs, to operations in the API.

use deadpool_postgres::GenericClient;
use serde::Deserialize;

use crate::db::operation_log::{self, LogLineRow};
use crate::db::operations::OperationRow;
use crate::db::{self, DbError};
use svc_machine::id::MachineId;
use svc_wire::operation::{LogLine, Operation, OperationState, Question};
use svc_wire::text::WireString;

/// Converts an operation, and loads the newest lines of its log and the number of older lines omitted.
pub async fn load_with_log(client: &impl GenericClient, row: &OperationRow) -> Result<Operation, DbError> {
    let newest = operation_log::load_newest_lines(client, row.id).await?;
    let log = newest.lines.into_iter().map(LogLine::from).collect();
    Ok(Operation { log, log_omitted: Some(newest.omitted.unsigned_abs()), ..Operation::from(row) })
}

/// Loads a machine's operations with their logs, newest first.
pub async fn load_for_machine(client: &impl GenericClient, id: MachineId) -> Result<Vec<Operation>, DbError> {
    let mut operations = Vec::new();
    for row in db::operations::list_for_machine(client, id).await? {
        operations.push(load_with_log(client, &row).await?);
    }
    Ok(operations)
}

/// Converts the operation without its log.
impl From<&OperationRow> for Operation {
    fn from(row: &OperationRow) -> Self {
        let question = row.question.as_ref().filter(|_| !row.has_ended());
        let waiting = question.map(|_| OperationState::Waiting.into());
        Self {
            operation_id: row.id.into(),
            machine_id: row.machine.into(),
            kind: row.kind.clone(),
            state: waiting.unwrap_or_else(|| WireString::from_stored(&row.state)),
            question: question.and_then(|question| Question::deserialize(question).ok()),
            step: row.step.clone(),
            attempts: row.attempts.unsigned_abs().into(),
            error_code: row.error_code.clone(),
            created_at: row.created_at.into(),
            updated_at: row.updated_at.into(),
            ended_at: row.ended_at.map(Into::into),
            request_id: Some(row.request_id.clone()).filter(|id| !id.is_empty()),
            log: Vec::new(),
            log_omitted: None,
        }
    }
}

impl From<LogLineRow> for LogLine {
    fn from(row: LogLineRow) -> Self {
        let is_repeated = row.repeated_at.is_some();
        Self {
            seq: Some(row.seq.unsigned_abs()),
            at: row.at.into(),
            step: row.step,
            outcome: row.outcome,
            detail: row.detail,
            request_id: None,
            repeats: is_repeated.then(|| row.repeats.unsigned_abs().into()),
            repeated_at: row.repeated_at.map(Into::into),
        }
    }
}
