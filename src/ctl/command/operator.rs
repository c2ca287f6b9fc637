//! `svcctl operator`: manages named operators and their tokens.

use std::path::Path;

use anyhow::{Context, anyhow, ensure};
use http::Method;
use serde_json::{Value, json};

use crate::api::{ApiClient, ApiResponse};
use crate::args::{OperatorCommand, TokenOptions};
use crate::confirm;
use crate::output::{Output, print};
use crate::show::View;
use crate::show::operator;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::fsx;
use svc_wire::operator::{IssuedToken, Operator, OperatorList, WhoAmI};

pub async fn run(api: &ApiClient, command: OperatorCommand, out: &Output) -> Result<(), Failure> {
    match command {
        OperatorCommand::Add { name, scopes, token } => {
            check_token_file(&token, ExistingFile::Keep).or_exit(Exit::Refused)?;
            let body = json!({"name": name, "scopes": scopes, "ttlSeconds": token.ttl_seconds});
            let response = api.send(Method::POST, &["operators"], Some(&body)).await?;
            output_token(&response, &token, ExistingFile::Keep, out)
        }
        OperatorCommand::Rotate { name, overlap_seconds, token } => {
            check_token_file(&token, ExistingFile::Replace).or_exit(Exit::Refused)?;
            let body = json!({"ttlSeconds": token.ttl_seconds, "overlapSeconds": overlap_seconds});
            let path = ["operators", name.as_str(), "rotate"];
            let response = api.send(Method::POST, &path, Some(&body)).await?;
            output_token(&response, &token, ExistingFile::Replace, out)
        }
        OperatorCommand::List => {
            let response = api.get(&["operators"], &[]).await?;
            out.print_response(&response, |view| {
                Ok(operator::list(view, &response.parse::<OperatorList>()?.operators))
            })
        }
        OperatorCommand::Revoke { name, yes } => {
            let effect = format!(
                "This revokes all tokens of operator {name} permanently. The name cannot be reused while the audit log \
                 contains it."
            );
            if confirm::is_required(&effect, yes)? {
                confirm::prompt(&effect, name.as_str())?;
            }
            let path = ["operators", name.as_str(), "revoke"];
            let response = api.send(Method::POST, &path, None).await?;
            out.print_response(&response, |view| Ok(operator::list(view, &[response.parse::<Operator>()?])))
        }
        OperatorCommand::Whoami => {
            let response = api.get(&["operators", "whoami"], &[]).await?;
            out.print_response(&response, |view| Ok(operator::who_am_i(view, &response.parse::<WhoAmI>()?)))
        }
    }
}

/// How to treat an existing token file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExistingFile {
    /// The file may hold another operator's token, which the platform only stores as a hash.
    Keep,
    Replace,
}

/// Rejects an unwritable token file before a token is created.
fn check_token_file(options: &TokenOptions, existing: ExistingFile) -> anyhow::Result<()> {
    let Some(file) = &options.token_file else { return Ok(()) };
    let name = file.display();
    let dir = match file.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    ensure!(
        dir.is_dir(),
        "{name}: the directory {} does not exist; nothing was changed\n  next: create it, then try again",
        dir.display()
    );
    ensure!(!file.is_dir(), "{name} is a directory; nothing was changed\n  next: name a file for the token");
    let exists = file.symlink_metadata().is_ok();
    ensure!(
        existing == ExistingFile::Replace || !exists,
        "{name} already exists and may contain another operator's token; nothing was changed\n  next: choose another \
         file, or run `svcctl operator rotate NAME --token-file FILE` to replace the token in an existing file"
    );
    let probe = dir.join(format!(".svcctl-{}.tmp", uuid::Uuid::new_v4().simple()));
    std::fs::File::create_new(&probe)
        .and_then(|_| std::fs::remove_file(&probe))
        .with_context(|| format!("cannot create a file in {}; nothing was changed", dir.display()))
}

fn write_token(file: &Path, token: &str, existing: ExistingFile) -> anyhow::Result<()> {
    let content = format!("{token}\n");
    match existing {
        ExistingFile::Replace => fsx::write_atomic(file, content.as_bytes(), 0o600)?,
        ExistingFile::Keep => ensure!(
            fsx::create_atomic(file, content.as_bytes(), 0o600)?,
            "{} was created concurrently by another program",
            file.display()
        ),
    }
    Ok(())
}

/// Prints a new token and its operator. With a token file, the token is written there instead.
fn output_token(
    response: &ApiResponse,
    options: &TokenOptions,
    existing: ExistingFile,
    out: &Output,
) -> Result<(), Failure> {
    let Some(file) = &options.token_file else {
        return out.print_response(response, |view| {
            Ok(operator::issued(view, &response.parse::<IssuedToken>()?, None))
        });
    };
    let issued: IssuedToken = response.parse()?;
    let name = &issued.issue.operator.name;
    if let Err(error) = write_token(file, &issued.token, existing) {
        let error = anyhow!(
            "operator {name} has a new token, but it could not be written and is lost: {error:#}\n  next: run \
             `svcctl operator rotate {name} --token-file FILE` to issue another one"
        );
        return Err(Failure::new(Exit::Unavailable, error));
    }
    if out.is_json {
        let mut body: Value = response.parse()?;
        body["token"] = Value::Null;
        body["tokenFile"] = file.display().to_string().into();
        return print(&format!("{body}\n"));
    }
    print(&operator::issued(&View::for_stdout(), &issued, Some(file)))
}
