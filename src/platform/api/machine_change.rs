//! [`ChangeRequest`] reads an operator's request to change one machine. [`MachineChange`] makes the change: in one
//! transaction, it locks the machine's row, writes an audit entry if the machine has changed, and stores the response.
//! A repeated request receives the stored response. Routes whose change does not fit this sequence use only
//! [`ChangeRequest`].

use axum::extract::Request;
use deadpool_postgres::{Object, Transaction};
use http::StatusCode;
use serde::Serialize;

use super::call::{ApiCall, path_id};
use super::mutation::{self, AuditChange, Mutation, Reply};
use super::problems;
use crate::context::Platform;
use crate::db;
use crate::db::machine_row::MachineRow;
use svc_http::problem::Problem;
use svc_machine::id::MachineId;

/// An operator's request to change one machine. Its body and query have not been parsed yet.
pub struct ChangeRequest {
    pub call: ApiCall,
    pub id: MachineId,
    pub mutation: Mutation,
}

impl ChangeRequest {
    /// Authenticates the operator, and parses the machine's id and the idempotency key.
    ///
    /// # Errors
    /// Same as [`ApiCall::read`] and [`ApiCall::authenticate_operator`]; `invalid_request` if the id or the idempotency
    /// key is invalid.
    pub async fn read(platform: &Platform, id: &str, request: Request) -> Result<Self, Problem> {
        let call = ApiCall::read(request).await?;
        let operator = call.authenticate_operator(platform).await?;
        let id = path_id("machineId", id)?;
        let mutation = Mutation::from_call(&call, &operator)?;
        Ok(Self { call, id, mutation })
    }
}

/// What a change locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockScope {
    /// The machine's row.
    Machine,
    /// The machine's row, and an advisory lock on its user, which serializes changes that may assign or release one of
    /// the user's slots.
    User,
}

/// The result of [`MachineChange::begin`].
pub enum ChangeStart<'a> {
    /// An earlier request with this key already received this response.
    Replayed(Reply),
    Started(Box<MachineChange<'a>>),
}

/// An in-progress change to one machine.
pub struct MachineChange<'a> {
    pub tx: Transaction<'a>,
    /// The locked row before the change.
    pub machine: MachineRow,
    mutation: &'a Mutation,
}

/// The effect of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeEffect {
    Unchanged,
    /// The machine has changed. Contains the action's name for the audit log.
    Changed(&'static str),
}

impl<'a> MachineChange<'a> {
    /// Begins the change and locks the machine, unless the request is replayed.
    ///
    /// # Errors
    /// `machine_not_found` if there is no such machine; otherwise, same as [`Mutation::begin`].
    pub async fn begin(
        session: &'a mut Object,
        mutation: &'a Mutation,
        id: MachineId,
        lock: LockScope,
    ) -> Result<ChangeStart<'a>, Problem> {
        let not_found = || problems::machine_not_found(&id.to_string());
        let user = match lock {
            LockScope::User => Some(db::machines::get(session, id).await?.ok_or_else(not_found)?.user),
            LockScope::Machine => None,
        };
        let tx = db::begin(session).await?;
        if let Some(user) = user {
            db::lock(&tx, &format!("user {user}")).await?;
        }
        if let Some(reply) = mutation.begin(&tx).await? {
            return Ok(ChangeStart::Replayed(reply));
        }
        let machine = db::machines::lock(&tx, id).await?.ok_or_else(not_found)?;
        Ok(ChangeStart::Started(Box::new(Self { tx, machine, mutation })))
    }

    /// Writes the audit entry if the machine has changed, stores the response, and commits. `body` receives the machine
    /// after the change.
    ///
    /// # Errors
    /// `database_unavailable` if the database is unreachable or busy; `internal` after any other database error.
    pub async fn end<T: Serialize>(
        self,
        effect: ChangeEffect,
        status: StatusCode,
        body: impl FnOnce(&MachineRow) -> T,
    ) -> Result<Reply, Problem> {
        let Self { tx, machine, mutation } = self;
        let id = machine.id.to_string();
        let after = db::machines::get(&tx, machine.id).await?;
        let after = after.ok_or_else(|| problems::machine_not_found(&id))?;
        let reply = Reply::new(status, body(&after));
        match effect {
            ChangeEffect::Unchanged => {}
            ChangeEffect::Changed(action) => {
                let (before, after) = (Some(machine.audit_record()), Some(after.audit_record()));
                let change = AuditChange { action, target: id, before, after };
                mutation::write_audit(&tx, mutation.actor(), &change).await?;
            }
        }
        mutation.store(&tx, &reply).await?;
        db::commit(tx).await?;
        Ok(reply)
    }
}
