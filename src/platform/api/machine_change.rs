//! What the routes by which an operator changes one machine share: replay, the row's lock, and the audit row and the
//! answer in the transaction of the change.

use axum::extract::Request;
use deadpool_postgres::{Object, Transaction};
use http::StatusCode;
use serde_json::Value;

use super::call::{Call, path_id};
use super::fault;
use super::mutation::{Changed, Mutation, Reply};
use crate::http::problem::Problem;
use crate::machine::id::MachineId;
use crate::platform::context::Platform;
use crate::platform::db;
use crate::platform::db::machine_row::MachineRow;

/// A request of an operator to change one machine. What its body or query says is still to be read.
pub struct ChangeRequest {
    pub call: Call,
    pub id: MachineId,
    pub mutation: Mutation,
}

impl ChangeRequest {
    /// Reads all but the body: who sends it, which machine it is about, and under which key.
    ///
    /// # Errors
    /// `request_too_large`, `unauthorized`, `invalid_request`.
    pub async fn read(platform: &Platform, id: &str, request: Request) -> Result<Self, Problem> {
        let call = Call::read(request).await?;
        let operator = call.operator(platform).await?;
        let id = path_id("machineId", id)?;
        let mutation = Mutation::of(&call, &operator)?;
        Ok(Self { call, id, mutation })
    }
}

/// What else is locked besides the machine's row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    Machine,
    /// Everything of its user: the change may give or take a slot.
    User,
}

/// How a change begins.
pub enum Begun<'a> {
    /// The request was answered before: nothing is to be done.
    Replayed(Reply),
    Open(Box<MachineChange<'a>>),
}

/// A change of one machine that is under way.
pub struct MachineChange<'a> {
    pub tx: Transaction<'a>,
    /// As it was, locked.
    pub machine: MachineRow,
    mutation: &'a Mutation,
}

/// How a change ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    Unchanged,
    /// Audited under this name.
    Changed(&'static str),
}

impl<'a> MachineChange<'a> {
    /// Locks the machine, if the request was not answered before.
    ///
    /// # Errors
    /// `machine_not_found`, `idempotency_mismatch`, `database_unavailable`.
    pub async fn begin(
        session: &'a mut Object,
        mutation: &'a Mutation,
        id: MachineId,
        lock: Lock,
    ) -> Result<Begun<'a>, Problem> {
        let not_found = || fault::machine_not_found(&id.to_string());
        let user = match lock {
            Lock::User => Some(db::machines::get(session, id).await?.ok_or_else(not_found)?.user),
            Lock::Machine => None,
        };
        let tx = db::begin(session).await?;
        if let Some(user) = user {
            db::lock(&tx, &format!("user {user}")).await?;
        }
        if let Some(reply) = mutation.begin(&tx).await? {
            return Ok(Begun::Replayed(reply));
        }
        let machine = db::machines::lock(&tx, id).await?.ok_or_else(not_found)?;
        Ok(Begun::Open(Box::new(Self { tx, machine, mutation })))
    }

    /// Writes audit row and answer, and commits. The answer is made of the machine as it is after the change.
    ///
    /// # Errors
    /// `database_unavailable`.
    pub async fn end(
        self,
        effect: Effect,
        status: StatusCode,
        body: impl FnOnce(&MachineRow) -> Value,
    ) -> Result<Reply, Problem> {
        let Self { tx, machine, mutation } = self;
        let id = machine.id.to_string();
        let after = db::machines::get(&tx, machine.id).await?;
        let after = after.ok_or_else(|| fault::machine_not_found(&id))?;
        let reply = Reply::new(status, body(&after));
        match effect {
            Effect::Unchanged => mutation.store(&tx, &reply).await?,
            Effect::Changed(action) => {
                let (before, after) = (machine.record(), after.record());
                let changed = Changed { action, target: &id, before: Some(&before), after: Some(&after) };
                mutation.record(&tx, &reply, &changed).await?;
            }
        }
        db::commit(tx).await?;
        Ok(reply)
    }
}
