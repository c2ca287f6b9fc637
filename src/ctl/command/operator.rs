//! `svcctl operator`: named operators and their tokens.

use anyhow::Context;
use http::Method;
use serde_json::{Value, json};

use crate::applet::Failure;
use crate::ctl::api::{Answer, Api};
use crate::ctl::args::{OperatorCommand, TokenOptions};
use crate::ctl::confirm;
use crate::ctl::out::{Out, print};
use crate::ctl::show::View;
use crate::ctl::show::operator::{self, IssuedToken, Operator, Operators, WhoAmI};
use crate::fsx;

pub async fn run(api: &Api, command: OperatorCommand, out: &Out) -> Result<(), Failure> {
    match command {
        OperatorCommand::Add { name, scopes, token } => {
            let body = json!({"name": name, "scopes": scopes, "ttlSeconds": token.ttl});
            let answer = api.send(Method::POST, &["operators"], Some(&body)).await?;
            issued(&answer, &token, out)
        }
        OperatorCommand::Rotate { name, overlap, token } => {
            let body = json!({"ttlSeconds": token.ttl, "overlapSeconds": overlap});
            let path = ["operators", name.as_str(), "rotate"];
            let answer = api.send(Method::POST, &path, Some(&body)).await?;
            issued(&answer, &token, out)
        }
        OperatorCommand::List => {
            let answer = api.get(&["operators"], &[]).await?;
            out.answer(&answer, |view| Ok(operator::list(view, &answer.read::<Operators>()?.operators)))
        }
        OperatorCommand::Revoke { name, yes } => {
            let what =
                format!("All tokens of operator {name} end now, for good. The name cannot be used again.");
            if confirm::is_due(&what, yes)? {
                confirm::ask(&what, name.as_str())?;
            }
            let path = ["operators", name.as_str(), "revoke"];
            let answer = api.send(Method::POST, &path, None).await?;
            out.answer(&answer, |view| Ok(operator::list(view, &[answer.read::<Operator>()?])))
        }
        OperatorCommand::Whoami => {
            let answer = api.get(&["operators", "whoami"], &[]).await?;
            out.answer(&answer, |view| Ok(operator::who_am_i(view, &answer.read::<WhoAmI>()?)))
        }
    }
}

/// Shows a new token, or writes it to its file and shows the rest.
fn issued(answer: &Answer, options: &TokenOptions, out: &Out) -> Result<(), Failure> {
    let Some(file) = &options.token_file else {
        return out.answer(answer, |view| Ok(operator::issued(view, &answer.read::<IssuedToken>()?, None)));
    };
    let issued: IssuedToken = answer.read()?;
    let name = &issued.operator.name;
    fsx::write_atomic(file, format!("{}\n", issued.token).as_bytes(), 0o600).with_context(|| {
        format!(
            "the token of {name} could not be written and is lost\n  next: `svcctl operator rotate {name} --token-file FILE` \
             makes another one"
        )
    })?;
    if out.json {
        let mut body: Value = answer.read()?;
        body["token"] = Value::Null;
        body["tokenFile"] = file.display().to_string().into();
        return print(&format!("{body}\n"));
    }
    print(&operator::issued(&View::of_stdout(), &issued, Some(file)))
}
