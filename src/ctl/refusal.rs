//! What the platform said instead of yes: its problem+json, what an operator does about it, and the exit code.

use std::time::Duration;

use clap::CommandFactory;
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::api::CallError;
use super::args::Args;
use super::show::compact;
use crate::applet::{Exit, Failure};
use crate::untrusted_text;

/// A problem as it came, or an answer of something in between that is not the platform.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.line())]
pub struct Refusal {
    pub status: StatusCode,
    pub code: Option<String>,
    pub detail: String,
    pub request_id: Option<String>,
    /// The body where it is JSON, for `--json`.
    body: Option<Box<Value>>,
    pub retry_after: Option<Duration>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Problem {
    code: String,
    detail: String,
    request_id: Option<String>,
}

impl Refusal {
    pub fn read(status: StatusCode, body: &str, retry_after: Option<Duration>) -> Self {
        let (code, mut detail, request_id) = match serde_json::from_str::<Problem>(body) {
            Ok(problem) => (Some(problem.code), problem.detail, problem.request_id),
            Err(_) => (None, format!("{status}, and no problem+json: is this the platform's URL?"), None),
        };
        let body = serde_json::from_str::<Box<Value>>(body).ok().filter(|_| code.is_some());
        if let Some(body) = &body {
            detail = by_options(&detail, body);
            detail.push_str(&particulars(body, &detail));
        }
        let detail = untrusted_text::printable(&detail).into_owned();
        Self { status, code, detail, request_id, body, retry_after }
    }

    /// Whether the same call can succeed a moment later without anyone changing anything.
    pub fn is_transient(&self) -> bool {
        match self.code.as_deref() {
            Some("disabled" | "cost_limit_reached" | "preview_limit_reached") => false,
            // A gateway in between, while the platform restarts.
            None => {
                matches!(self.status.as_u16(), 502..=504)
            }
            Some(_) => matches!(self.status.as_u16(), 429 | 503 | 504),
        }
    }

    pub fn is_unauthorized(&self) -> bool {
        self.status == StatusCode::UNAUTHORIZED
    }

    pub fn exit(&self) -> Exit {
        match self.status.as_u16() {
            401 | 403 => Exit::Permission,
            429 | 503 | 504 => Exit::TryAgain,
            502 => Exit::Unavailable,
            507 | 400..=499 => Exit::Refused,
            _ => Exit::Internal,
        }
    }

    fn line(&self) -> String {
        let mut line = self.detail.clone();
        let mut known: Vec<String> = self.code.clone().into_iter().collect();
        known.extend(self.request_id.as_ref().map(|id| format!("request {id}")));
        if !known.is_empty() {
            line.push_str(&format!(" ({})", known.join(", ")));
        }
        if let Some(next) = self.advice() {
            line.push_str(&format!("\n  next: {next}"));
        }
        line
    }

    fn advice(&self) -> Option<&'static str> {
        let code = self.code.as_deref()?;
        let body = self.body.as_deref();
        match code {
            // The detail names the command.
            "invalid_state" if self.detail.contains("`svcctl ") => None,
            "invalid_state" => body.and_then(state_advice).or_else(|| advice(code)),
            "snapshot_unusable" if self.detail.contains("svcctl backup now") => Some(BACKUP_FIRST),
            "snapshot_unusable" if self.detail.contains("pointer") || self.detail.contains("/latest ") => {
                Some(UNUSABLE_POINTER)
            }
            // The detail names the option that overrides the refusal.
            "snapshot_unusable" if self.detail.contains("svcctl provision --allow-empty") => None,
            "conflict" | "not_found" if self.detail.contains("`svcctl ") => None,
            _ => advice(code),
        }
    }
}

/// The live server alone holds the data: `--allow-empty` would leave it behind.
const BACKUP_FIRST: &str = "`svcctl backup now <machine> --wait`, then `svcctl recover` again";

/// A pointer that is lost or damaged does not mean that there is no snapshot: `--allow-empty` would forget them all.
const UNUSABLE_POINTER: &str = "`svcctl pointer show <user>` says which snapshots exist, `svcctl pointer rebuild <user>` names one of them again";

/// What to do next, where the state that does not allow it says so.
fn state_advice(body: &Value) -> Option<&'static str> {
    if body["kind"].is_string() {
        return Some(
            "`svcctl delete <machine>` first, or name another slot: `svcctl provision <user> --slot <slot>`",
        );
    }
    if body["operationId"].is_string() {
        return Some(
            "`svcctl operation show <id> --wait` follows the one that runs; `svcctl operation abandon <id>` ends it, then \
             again with other options",
        );
    }
    Some(match body["machineStatus"].as_str()? {
        "kept" => {
            "`svcctl status <machine>` shows what its server holds; `svcctl discard <machine> --accept-loss` deletes it \
             all the same"
        }
        "deleting" => "wait for that operation; the detail names it",
        "deleted" => {
            "`svcctl list --deleted` shows it; where its server is gone, `svcctl provision` restores the slot's snapshot"
        }
        "succeeded" | "cancelled" | "waiting" => {
            "`svcctl operation show <id>` shows how it ended or what it waits for"
        }
        _ => return None,
    })
}

/// With the wrong fields named by the options of `svcctl` that set them.
fn by_options(detail: &str, body: &Value) -> String {
    let errors = body["errors"].as_array().into_iter().flatten();
    errors.filter_map(|error| error["pointer"].as_str()).fold(detail.to_owned(), |detail, pointer| {
        detail.replace(&format!("{pointer}: "), &format!("{}: ", option_of(pointer)))
    })
}

/// The option that sets a field of a request; a field that none sets stays as the API names it.
fn option_of(pointer: &str) -> String {
    let name = match pointer.trim_start_matches(['/', '?']) {
        "snapshotKey" => "snapshot".to_owned(),
        "startDate" => "from".to_owned(),
        "endDate" => "to".to_owned(),
        "groupBy" => "by".to_owned(),
        "userId" => "user".to_owned(),
        name => name.chars().fold(String::new(), |mut option, letter| {
            if letter.is_ascii_uppercase() {
                option.push('-');
            }
            option.push(letter.to_ascii_lowercase());
            option
        }),
    };
    if has_option(&Args::command(), &name) { format!("--{name}") } else { pointer.to_owned() }
}

fn has_option(command: &clap::Command, name: &str) -> bool {
    command.get_arguments().any(|argument| argument.get_long() == Some(name))
        || command.get_subcommands().any(|sub| has_option(sub, name))
}

/// What some codes say beyond their detail: the wrong fields, the state that is and those that would do.
fn particulars(body: &Value, known: &str) -> String {
    let mut said = String::new();
    for error in body["errors"].as_array().into_iter().flatten() {
        let (pointer, detail) = (compact(error.get("pointer")), compact(error.get("detail")));
        let field = format!("{}: {detail}", option_of(&pointer));
        if !known.contains(&field) {
            said.push_str(&format!("\n  {field}"));
        }
    }
    let allowed: Vec<_> =
        body["allowed"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    // A state that would do says nothing of why it was refused, nor does one where no state would: the detail does.
    let status = body["machineStatus"].as_str().filter(|status| !allowed.contains(status));
    let is_said = known.contains("; this needs ");
    if let Some(status) = status.filter(|_| !allowed.is_empty() && !is_said) {
        said.push_str(&format!(" It is {status}, and must be {}.", allowed.join(" or ")));
    }
    said
}

/// A failure for programs: the platform's problem where there is one, with the exit code and what to do next.
pub fn json(failure: &Failure) -> Value {
    let refusal = failure.error.downcast_ref::<CallError>().and_then(|error| match error {
        CallError::Refused(refusal) => Some(refusal),
        _ => None,
    });
    let said = format!("{:#}", failure.error);
    let (detail, next) = match said.split_once("\n  next: ") {
        Some((detail, next)) => (detail.to_owned(), Some(next.to_owned())),
        None => (said, None),
    };
    let mut body = match refusal.and_then(|refusal| refusal.body.clone()) {
        Some(problem) => *problem,
        None => json!({"detail": detail, "code": null}),
    };
    body["exit"] = (failure.exit as u8).into();
    body["next"] = next.into();
    body
}

/// What to do next, by code.
fn advice(code: &str) -> Option<&'static str> {
    Some(match code {
        "invalid_request" => "correct the named fields; `svcctl <command> --help` explains them",
        "unauthorized" => {
            "PLATFORM_SECRET or --secret-file must be the platform's secret, or the valid token of an operator"
        }
        "forbidden" => "`svcctl operator whoami` shows your scopes; use a token that has the missing one",
        "subscription_required" => "`svcctl slot set <user> --slot <slot> --plan <plan>`, then again",
        "server_type_not_allowed" => {
            "choose a type of the slot's plan, or change the plan with `svcctl slot set`"
        }
        "machine_not_found" => "`svcctl list` shows the machines, `svcctl list --deleted` the deleted ones",
        "not_found" => {
            "check the id; `svcctl list`, `svcctl status <machine>` and `svcctl deploy list` show them"
        }
        "conflict" => {
            "`svcctl deploy list` shows the rollouts and their states; a release that hosts cannot take is published \
             again, signed and under a new version"
        }
        "bundle_not_found" => "`svcctl bundle publish <dir> --image-version <version>`, then again",
        "invalid_state" => {
            "`svcctl status <machine>` shows its state; wait for its operation, or `svcctl recover <user>`"
        }
        "handle_taken" => "choose another handle; `svcctl list --handle <handle>` shows whose it is",
        "snapshot_unusable" => {
            "`svcctl pointer show <user>` and `svcctl backup list <machine>` say what the slot has; `svcctl recover <user> \
             --snapshot <key>` names one, `svcctl recover <user> --allow-empty` starts without (only for a new or \
             intentionally empty user)"
        }
        "idempotency_mismatch" => "run the command again: each run has a key of its own",
        "preview_limit_reached" => "delete a preview machine first",
        "disk_too_small" => {
            "choose a type with a larger disk: `svcctl recover <user> --server-type <type>`; `svcctl provision` takes \
             `--server-type`, too"
        }
        "disk_would_shrink" => "choose a type with a disk that is no smaller",
        "superseded" => "nothing: the machine was replaced, and stops by itself",
        "host_unreachable" => {
            "`svcctl status <machine>` says when its host was last heard; `svcctl recover <user>` if it is lost"
        }
        "host_refused" | "host_answer_invalid" => {
            "the detail says what to change; `svcctl status <machine>` shows the host's release and its last heartbeat"
        }
        "provisioning_error" => {
            "the platform's log has the provider's answer under the request id; check quota, location and server type"
        }
        "disabled" => "set CUSTOMER_VPS_ENABLED=true on the platform, where that is intended",
        "store_unavailable" => "nothing was changed; check the object store, then again",
        "database_unavailable" => "check the platform's database, then again",
        "internal" => "the platform's log has the cause under the request id",
        "rate_limited" | "unavailable" | "deadline_exceeded" => "again in a moment",
        _ => return None,
    })
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        let exit = match &error {
            CallError::Unreachable { .. } | CallError::NoAnswer { .. } => Exit::Unavailable,
            CallError::Refused(refusal) => refusal.exit(),
            CallError::Unreadable { .. } => Exit::Internal,
        };
        Self::new(exit, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::problem::Code;

    fn refusal(status: u16, code: &str) -> Refusal {
        let body = format!(r#"{{"status":{status},"code":"{code}","detail":"Because.","requestId":"r-1"}}"#);
        Refusal::read(StatusCode::from_u16(status).unwrap(), &body, None)
    }

    #[test]
    fn a_refusal_says_why_under_which_request_and_what_next() {
        let said = refusal(404, "bundle_not_found").to_string();
        for part in ["Because.", "bundle_not_found", "request r-1", "svcctl bundle publish"] {
            assert!(said.contains(part), "{said}");
        }
    }

    #[test]
    fn wrong_fields_and_states_are_named() {
        let read = |text: &str| Refusal::read(StatusCode::BAD_REQUEST, text, None).to_string();
        let said = read(
            r#"{"code":"invalid_request","detail":"Wrong.","errors":[{"pointer":"/slot","detail":"too long"}]}"#,
        );
        assert!(said.contains("\n  --slot: too long"), "{said}");
        let said = read(
            r#"{"code":"invalid_state","detail":"No.","machineStatus":"resizing","allowed":["running","failed"]}"#,
        );
        assert!(said.contains("It is resizing, and must be running or failed."), "{said}");
    }

    #[test]
    fn invalid_state_advises_by_what_the_state_belongs_to() {
        let read = |member: &str| {
            let text = format!(r#"{{"code":"invalid_state","detail":"No.",{member}}}"#);
            Refusal::read(StatusCode::CONFLICT, &text, None).to_string()
        };
        assert!(read(r#""machineStatus":"kept""#).contains("svcctl discard <machine> --accept-loss"));
        assert!(!read(r#""machineStatus":"kept""#).contains("It is kept"));
        assert!(read(r#""machineStatus":"deleted""#).contains("svcctl list --deleted"));
        assert!(read(r#""machineStatus":"succeeded""#).contains("svcctl operation show"));
        assert!(read(r#""machineStatus":"running","kind":"preview""#).contains("another slot"));
        let said = read(r#""machineStatus":"failed","allowed":["failed"]"#);
        assert!(said.contains("svcctl recover") && !said.contains("It is failed"), "{said}");
        let under_way = read(r#""machineStatus":"recovering","operationId":"o-1""#);
        assert!(under_way.contains("svcctl operation abandon"), "{under_way}");
        let named = r#"{"code":"invalid_state","detail":"Not so: `svcctl delete m` does it.","machineStatus":"running"}"#;
        let named = Refusal::read(StatusCode::CONFLICT, named, None).to_string();
        assert!(!named.contains("next:"), "{named}");
    }

    #[test]
    fn lost_pointer_never_advises_to_start_empty() {
        let text = r#"{"code":"snapshot_unusable","detail":"user_1/primary/system/db/latest cannot be recovered from: the pointer is missing."}"#;
        let said = Refusal::read(StatusCode::CONFLICT, text, None).to_string();
        assert!(said.contains("svcctl pointer rebuild") && !said.contains("--allow-empty"), "{said}");
        assert!(refusal(409, "snapshot_unusable").to_string().contains("--allow-empty"));
        let text = r#"{"code":"snapshot_unusable","detail":"No snapshot. Take a backup first: `svcctl backup now m --wait`."}"#;
        let said = Refusal::read(StatusCode::CONFLICT, text, None).to_string();
        assert!(said.contains("then `svcctl recover` again") && !said.contains("--allow-empty"), "{said}");
        assert!(refusal(409, "disk_too_small").to_string().contains("--server-type"));
    }

    #[test]
    fn for_programs_a_failure_is_the_problem_with_exit_and_next() {
        let failure = Failure::from(CallError::from(refusal(404, "bundle_not_found")));
        let said = json(&failure);
        assert_eq!((&said["code"], &said["exit"]), (&"bundle_not_found".into(), &65.into()));
        assert!(said["next"].as_str().unwrap().contains("bundle publish"), "{said}");
        let other = json(&Failure::new(Exit::TryAgain, anyhow::anyhow!("late\n  next: look")));
        assert_eq!(other, json!({"detail": "late", "code": null, "exit": 75, "next": "look"}));
    }

    #[test]
    fn every_status_has_its_exit_code() {
        for (code, exit) in [
            (Code::InvalidRequest, Exit::Refused),
            (Code::Unauthorized, Exit::Permission),
            (Code::ServerTypeNotAllowed, Exit::Permission),
            (Code::MachineNotFound, Exit::Refused),
            (Code::SnapshotUnusable, Exit::Refused),
            (Code::RateLimited, Exit::TryAgain),
            (Code::ProvisioningError, Exit::Unavailable),
            (Code::StoreUnavailable, Exit::TryAgain),
            (Code::Internal, Exit::Internal),
        ] {
            assert_eq!(refusal(code.status().as_u16(), code.as_str()).exit(), exit, "{code:?}");
        }
    }

    #[test]
    fn what_is_no_problem_document_does_not_pass_for_one() {
        let refusal = Refusal::read(StatusCode::BAD_GATEWAY, "<html>", None);
        assert!(refusal.is_transient());
        assert!(refusal.to_string().contains("502"), "{refusal}");
    }

    #[test]
    fn only_what_passes_by_itself_is_tried_again() {
        assert!(refusal(503, "store_unavailable").is_transient());
        assert!(!refusal(503, "disabled").is_transient());
        assert!(!refusal(502, "provisioning_error").is_transient());
        assert!(!refusal(500, "internal").is_transient());
        assert!(!refusal(409, "invalid_state").is_transient());
    }
}
