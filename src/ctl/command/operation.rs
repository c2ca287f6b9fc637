//! `svcctl operation`: how far one is, and an operator's decision.

use std::time::Duration;

use anyhow::anyhow;
use http::Method;
use serde_json::json;

use crate::applet::{Exit, Failure};
use crate::ctl::api::Api;
use crate::ctl::args::{Operation as Args, OperationCommand, Wait};
use crate::ctl::out::Out;
use crate::ctl::show::operation::{self, Operation};
use crate::ctl::wait;
use crate::machine::id::OperationId;

pub async fn run(api: &Api, args: Args, out: &Out) -> Result<(), Failure> {
    match (args.command, args.operation) {
        (Some(OperationCommand::Show { operation, wait }), _) => show(api, operation, wait, out).await,
        (Some(OperationCommand::Continue { operation, accept_loss, wait }), _) => {
            let body = if accept_loss { json!({"acceptLoss": true}) } else { json!({}) };
            let path = ["vps", "operations", &operation.to_string(), "continue"];
            let answer = api.send(Method::POST, &path, Some(&body)).await?;
            if wait.wait.is_some() {
                return show(api, operation, wait, out).await;
            }
            out.answer(&answer, |view| Ok(operation::one(view, &answer.read()?)))
        }
        (Some(OperationCommand::Abandon { operation }), _) => {
            let path = ["vps", "operations", &operation.to_string(), "abandon"];
            let answer = api.send(Method::POST, &path, None).await?;
            out.answer(&answer, |view| Ok(operation::one(view, &answer.read()?)))
        }
        (None, Some(operation)) => show(api, operation, args.wait, out).await,
        (None, None) => Err(Failure::new(Exit::Usage, anyhow!("an operation's id is missing"))),
    }
}

async fn show(api: &Api, id: OperationId, wait: Wait, out: &Out) -> Result<(), Failure> {
    let path = ["vps", "operations", &id.to_string()];
    let mut answer = api.get(&path, &[]).await?;
    let mut operation: Operation = answer.read()?;
    if let Some(seconds) = wait.wait {
        let within = Duration::from_secs(seconds);
        wait::until_settled(api, &operation.machine_id, Some(&operation.operation_id), within).await?;
        answer = api.get(&path, &[]).await?;
        operation = answer.read()?;
    }
    out.answer(&answer, |view| Ok(operation::one(view, &operation)))
}
