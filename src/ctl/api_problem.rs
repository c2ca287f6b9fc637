//! Parses platform error responses, and picks the operator advice and exit code.

use std::time::Duration;

use clap::CommandFactory;
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use url::Url;

use super::args::Args;
use super::show::compact;
use svc_base::applet::{Exit, Failure};
use svc_base::untrusted_text;

/// A problem from the platform, or an error response from an intermediary.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.message())]
pub struct ApiProblem {
    pub status: StatusCode,
    pub code: Option<String>,
    pub detail: String,
    pub request_id: Option<String>,
    /// The body, if it is problem+json.
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

impl ApiProblem {
    /// Parses an error response. A body that isn't problem+json is replaced with a generic message.
    pub fn parse(status: StatusCode, body: &str, retry_after: Option<Duration>) -> Self {
        let one_line = |text: &str| untrusted_text::one_line(text).into_owned();
        let (code, mut detail, request_id) = match serde_json::from_str::<Problem>(body) {
            Ok(Problem { code, detail, request_id }) => {
                (Some(one_line(&code)), detail, request_id.as_deref().map(one_line))
            }
            Err(_) => (None, format!("{status} without problem+json: is this the platform's URL?"), None),
        };
        let body = serde_json::from_str::<Box<Value>>(body).ok().filter(|_| code.is_some());
        if let Some(body) = &body {
            detail = replace_fields_with_options(&detail, body);
            detail.push_str(&describe_members(body, &detail));
        }
        let detail = untrusted_text::replace_unprintable(&detail).into_owned();
        Self { status, code, detail, request_id, body, retry_after }
    }

    /// Whether a retry may succeed without intervention.
    pub fn is_transient(&self) -> bool {
        match self.code.as_deref() {
            Some("disabled" | "cost_limit_reached" | "preview_limit_reached") => false,
            // Without a code, the response came from an intermediary, e.g. while the platform restarts.
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
        match (self.code.as_deref(), self.status.as_u16()) {
            // Despite the status, retries fail until the configuration or the machines change.
            (Some("disabled" | "preview_limit_reached"), _) => Exit::Refused,
            (_, 401 | 403) => Exit::Permission,
            (_, 429 | 503 | 504) => Exit::TryAgain,
            (_, 502) => Exit::Unavailable,
            (_, 507 | 400..=499) => Exit::Refused,
            _ => Exit::Internal,
        }
    }

    fn message(&self) -> String {
        let mut line = self.detail.clone();
        let mut context: Vec<String> = self.code.clone().into_iter().collect();
        context.extend(self.request_id.as_ref().map(|id| format!("request {id}")));
        if !context.is_empty() {
            line.push_str(&format!(" ({})", context.join(", ")));
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
            // The detail already names the command.
            "invalid_state" if self.detail.contains("`svcctl ") => None,
            "invalid_state" => body.and_then(state_advice).or_else(|| default_advice(code)),
            "snapshot_unusable" if self.detail.contains("svcctl backup now") => Some(BACKUP_FIRST_ADVICE),
            "snapshot_unusable" if self.detail.contains("pointer") || self.detail.contains("/latest ") => {
                Some(UNUSABLE_POINTER_ADVICE)
            }
            // The detail already names the override option.
            "snapshot_unusable" if self.detail.contains("svcctl provision --allow-empty") => None,
            "conflict" | "not_found" if self.detail.contains("`svcctl ") => None,
            "conflict" if self.detail.contains("ollout") => Some(OPEN_ROLLOUT_ADVICE),
            "conflict" if self.detail.starts_with("Hosts cannot update to ") => Some(UNUSABLE_RELEASE_ADVICE),
            "server_limit_reached" if self.detail.contains("PROVIDER_SERVER_LIMIT") => {
                Some(CONFIGURED_SERVER_LIMIT_ADVICE)
            }
            _ => default_advice(code),
        }
    }
}

const OPEN_ROLLOUT_ADVICE: &str =
    "run `svcctl deploy list` to see the rollouts and their states, and `svcctl deploy abort` to end one";

const UNUSABLE_RELEASE_ADVICE: &str = "publish the release again, signed and under a new version";

const CONFIGURED_SERVER_LIMIT_ADVICE: &str = "raise PROVIDER_SERVER_LIMIT and the project's limit at the provider, \
     or free a server: run `svcctl list --deleted` to see the machines whose servers are kept, and `svcctl \
     discard <machine>` to delete one";

/// Never suggests `--allow-empty`, which would abandon data that exists only on the live server.
const BACKUP_FIRST_ADVICE: &str =
    "run `svcctl backup now <machine> --wait`, and then run `svcctl recover` again";

/// Never suggests `--allow-empty`: snapshots may exist even if the pointer is missing or corrupt.
const UNUSABLE_POINTER_ADVICE: &str = "run `svcctl pointer show <user>` to see which snapshots exist, and \
     `svcctl pointer rebuild <user>` to make the pointer point to one of them";

/// Returns state-specific advice for `invalid_state`, if any.
fn state_advice(body: &Value) -> Option<&'static str> {
    if body["kind"].is_string() {
        return Some(
            "run `svcctl delete <machine>` first, or use another slot: `svcctl provision <user> --slot <slot>`",
        );
    }
    if body["operationId"].is_string() {
        return Some(
            "run `svcctl operation show <id> --wait` to follow the current operation; to use different \
             options, run `svcctl operation abandon <id>` to end that operation, and then run this command \
             again",
        );
    }
    Some(match body["machineStatus"].as_str()? {
        "kept" => {
            "run `svcctl status <machine>` to see what its server holds; to delete the server anyway, run \
             `svcctl discard <machine> --accept-loss`"
        }
        "deleting" => "wait until the operation that the message names has ended",
        "deleted" => {
            "run `svcctl list --deleted` to see the machine; if its server no longer exists, run `svcctl \
             provision` to restore the slot's snapshot"
        }
        "succeeded" | "cancelled" | "waiting" => {
            "run `svcctl operation show <id>` to see how the operation ended or what it is waiting for"
        }
        _ => return None,
    })
}

/// Replaces invalid field names in `detail` with the corresponding `svcctl` options.
fn replace_fields_with_options(detail: &str, body: &Value) -> String {
    let errors = body["errors"].as_array().into_iter().flatten();
    errors.filter_map(|error| error["pointer"].as_str()).fold(detail.to_owned(), |detail, pointer| {
        detail.replace(&format!("{pointer}: "), &format!("{}: ", option_for_field(pointer)))
    })
}

/// Returns the option for a request field, or the field itself if there is none.
fn option_for_field(pointer: &str) -> String {
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

/// Describes optional members not mentioned in `detail`: invalid fields, and the current and allowed states.
fn describe_members(body: &Value, detail: &str) -> String {
    let mut message = String::new();
    for error in body["errors"].as_array().into_iter().flatten() {
        let (pointer, reason) = (compact(error.get("pointer")), compact(error.get("detail")));
        let field = format!("{}: {reason}", option_for_field(&pointer));
        if !detail.contains(&field) {
            message.push_str(&format!("\n  {field}"));
        }
    }
    let allowed: Vec<_> =
        body["allowed"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    // The state explains the rejection only if it isn't itself allowed.
    let status = body["machineStatus"].as_str().filter(|status| !allowed.contains(status));
    // Older platforms write "; this needs ".
    let has_states = detail.contains(", but must be ") || detail.contains("; this needs ");
    if let Some(status) = status.filter(|_| !allowed.is_empty() && !has_states) {
        message.push_str(&format!(" The state is {status}, but must be {}.", allowed.join(" or ")));
    }
    message
}

/// Formats a failure as JSON: the platform's problem, if any, plus the exit code and advice.
pub fn failure_json(failure: &Failure) -> Value {
    let problem = failure.error.downcast_ref::<CallError>().and_then(|error| match error {
        CallError::Problem(problem) => Some(problem),
        _ => None,
    });
    let message = format!("{:#}", failure.error);
    let (detail, next) = match message.split_once("\n  next: ") {
        Some((detail, next)) => (detail.to_owned(), Some(next.to_owned())),
        None => (message, None),
    };
    let mut body = match problem.and_then(|problem| problem.body.clone()) {
        Some(problem) => *problem,
        None => json!({"detail": detail, "code": null}),
    };
    body["exit"] = (failure.exit as u8).into();
    body["next"] = next.into();
    body
}

/// Returns the default advice for a problem code.
fn default_advice(code: &str) -> Option<&'static str> {
    Some(match code {
        "invalid_request" => {
            "correct the fields that the message names; `svcctl <command> --help` explains them"
        }
        "unauthorized" => {
            "set PLATFORM_SECRET to the platform's secret or an operator's valid token, or pass with --secret-file a \
             file that contains one"
        }
        "forbidden" => {
            "run `svcctl operator whoami` to see your scopes, and use a token that has the required scope"
        }
        "subscription_required" => {
            "run `svcctl slot set <user> --slot <slot> --plan <plan>`, and then try again"
        }
        "server_type_not_allowed" => {
            "choose a server type from the slot's plan, or change the plan with `svcctl slot set`"
        }
        "machine_not_found" => {
            "run `svcctl list` to see the machines, or `svcctl list --deleted` to see the deleted ones. Specify a user \
             by the id in the USER column, not by the handle"
        }
        "not_found" => {
            "check the path or the id: `svcctl files versions <machine> <path>` shows the versions of a file; `svcctl list`, `svcctl \
             status <machine>` and `svcctl deploy list` show the existing ids"
        }
        "bundle_not_found" => {
            "run `svcctl bundle publish <dir> --image-version <version>`, and then try again"
        }
        "invalid_state" => {
            "run `svcctl status <machine>` to see the machine's state; then wait for its operation, or run \
             `svcctl recover <user>`"
        }
        "handle_taken" => {
            "choose another handle; `svcctl list --handle <handle>` shows which machine has this one"
        }
        "snapshot_unusable" => {
            "run `svcctl pointer show <user>` and `svcctl backup list <machine>` to see the slot's \
             snapshots, and `svcctl recover <user> --snapshot <key>` to restore one; run `svcctl recover \
             <user> --allow-empty` to start with an empty database, but only for a new user, or one whose \
             data is intentionally empty"
        }
        "idempotency_mismatch" => "run the command again: each run uses a new key",
        "preview_limit_reached" => "delete a preview machine first",
        "server_limit_reached" => {
            "raise PROVIDER_SERVER_LIMIT and the project's limit at the provider, or delete unused servers; \
             `svcctl fleet` shows the alarm"
        }
        "price_changed" | "confirmation_required" => {
            "run `svcctl provision` again: it shows the current cost and asks for the confirmations"
        }
        "disk_too_small" => {
            "use `--server-type` with `svcctl recover` or `svcctl provision` to choose a server type with a \
             larger disk"
        }
        "disk_would_shrink" => "choose a server type with a disk at least as large",
        "superseded" => "no action is needed: the machine was replaced, and stops automatically",
        "host_unreachable" => {
            "run `svcctl fleet` to see whether the host's certificate is missing, and `svcctl status \
             <machine>` to see the last heartbeat; if the host is lost, run `svcctl recover <user>`"
        }
        "host_refused" | "host_answer_invalid" => {
            "make the change that the message asks for; `svcctl status <machine>` shows the host's release \
             and its last heartbeat"
        }
        "provisioning_error" => {
            "check the quota, the location and the server type; the platform's log has the provider's \
             response under the request id"
        }
        "disabled" => "to permit provisioning, set CUSTOMER_VPS_ENABLED=true on the platform",
        "store_unavailable" => "check the object store, then try again",
        "database_unavailable" => "check the platform's database, then try again",
        "internal" => "find the cause in the platform's log under the request id",
        "rate_limited" | "unavailable" | "deadline_exceeded" => "try again in a moment",
        _ => return None,
    })
}

#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error(
        "the platform at {base} cannot be reached: {reason}\n  next: make sure that it is running, and check \
         PLATFORM_PUBLIC_URL or --platform-url"
    )]
    Unreachable { base: Url, reason: String },
    /// The connection succeeded, but the response timed out. The request may still take effect.
    #[error(
        "the platform at {base} did not respond within {seconds} s; the request may still take effect\n  \
         next: run `svcctl doctor platform` on the platform's server to see which part is hanging, or set a longer \
         timeout with --timeout"
    )]
    TimedOut { base: Url, seconds: u64 },
    #[error(transparent)]
    Problem(#[from] ApiProblem),
    #[error("unexpected response to {request}: {reason}")]
    InvalidResponse { request: String, reason: String },
}

impl CallError {
    /// Whether a retry may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::TimedOut { .. } => true,
            Self::Problem(problem) => problem.is_transient(),
            Self::InvalidResponse { .. } => false,
        }
    }

    /// Returns the message without the advice.
    pub fn brief(&self) -> String {
        let message = self.to_string();
        message.split_once("\n  next: ").map_or(message.clone(), |(brief, _)| brief.to_owned())
    }

    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Problem(problem) => problem.retry_after,
            _ => None,
        }
    }
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        let exit = match &error {
            CallError::Unreachable { .. } | CallError::TimedOut { .. } => Exit::Unavailable,
            CallError::Problem(problem) => problem.exit(),
            CallError::InvalidResponse { .. } => Exit::Internal,
        };
        Self::new(exit, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use svc_http::problem::Code;

    fn api_problem(status: u16, code: &str) -> ApiProblem {
        let body = format!(r#"{{"status":{status},"code":"{code}","detail":"Because.","requestId":"r-1"}}"#);
        ApiProblem::parse(StatusCode::from_u16(status).unwrap(), &body, None)
    }

    #[test]
    fn message_shows_detail_request_id_and_advice() {
        let message = api_problem(404, "bundle_not_found").to_string();
        for part in ["Because.", "bundle_not_found", "request r-1", "svcctl bundle publish"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn message_replaces_control_characters() {
        let text = r#"{"code":"c\u001b[2J","detail":"d\u001b[2J","requestId":"r\u001b[2J\nnext: x"}"#;
        let message = ApiProblem::parse(StatusCode::CONFLICT, text, None).to_string();
        assert!(!message.contains(char::is_control), "{message:?}");
    }

    #[test]
    fn message_names_invalid_fields_and_states() {
        let message_of = |text: &str| ApiProblem::parse(StatusCode::BAD_REQUEST, text, None).to_string();
        let message = message_of(
            r#"{"code":"invalid_request","detail":"Wrong.","errors":[{"pointer":"/slot","detail":"too long"}]}"#,
        );
        assert!(message.contains("\n  --slot: too long"), "{message}");
        let message = message_of(
            r#"{"code":"invalid_state","detail":"No.","machineStatus":"resizing","allowed":["running","failed"]}"#,
        );
        assert!(message.contains("The state is resizing, but must be running or failed."), "{message}");
    }

    #[test]
    fn invalid_state_advice_depends_on_state() {
        let message_of = |member: &str| {
            let text = format!(r#"{{"code":"invalid_state","detail":"No.",{member}}}"#);
            ApiProblem::parse(StatusCode::CONFLICT, &text, None).to_string()
        };
        assert!(message_of(r#""machineStatus":"kept""#).contains("svcctl discard <machine> --accept-loss"));
        assert!(!message_of(r#""machineStatus":"kept""#).contains("The state is kept"));
        assert!(message_of(r#""machineStatus":"deleted""#).contains("svcctl list --deleted"));
        assert!(message_of(r#""machineStatus":"succeeded""#).contains("svcctl operation show"));
        assert!(message_of(r#""machineStatus":"running","kind":"preview""#).contains("another slot"));
        let message = message_of(r#""machineStatus":"failed","allowed":["failed"]"#);
        assert!(message.contains("svcctl recover") && !message.contains("The state is failed"), "{message}");
        let in_progress = message_of(r#""machineStatus":"recovering","operationId":"o-1""#);
        assert!(in_progress.contains("svcctl operation abandon"), "{in_progress}");
        let with_command =
            r#"{"code":"invalid_state","detail":"Run `svcctl delete m` instead.","machineStatus":"running"}"#;
        let message = ApiProblem::parse(StatusCode::CONFLICT, with_command, None).to_string();
        assert!(!message.contains("next:"), "{message}");
    }

    #[test]
    fn missing_pointer_advice_omits_allow_empty() {
        let text = r#"{"code":"snapshot_unusable","detail":"user_1/primary/system/db/latest cannot be recovered from: the pointer is missing."}"#;
        let message = ApiProblem::parse(StatusCode::CONFLICT, text, None).to_string();
        assert!(
            message.contains("svcctl pointer rebuild") && !message.contains("--allow-empty"),
            "{message}"
        );
        assert!(api_problem(409, "snapshot_unusable").to_string().contains("--allow-empty"));
        let text = r#"{"code":"snapshot_unusable","detail":"No snapshot. Take a backup first: `svcctl backup now m --wait`."}"#;
        let message = ApiProblem::parse(StatusCode::CONFLICT, text, None).to_string();
        assert!(
            message.contains("then run `svcctl recover` again") && !message.contains("--allow-empty"),
            "{message}"
        );
        assert!(api_problem(409, "disk_too_small").to_string().contains("--server-type"));
    }

    #[test]
    fn failure_json_adds_exit_and_next() {
        let failure = Failure::from(CallError::from(api_problem(404, "bundle_not_found")));
        let body = failure_json(&failure);
        assert_eq!((&body["code"], &body["exit"]), (&"bundle_not_found".into(), &65.into()));
        assert!(body["next"].as_str().unwrap().contains("bundle publish"), "{body}");
        let local = failure_json(&Failure::new(Exit::TryAgain, anyhow::anyhow!("late\n  next: look")));
        assert_eq!(local, json!({"detail": "late", "code": null, "exit": 75, "next": "look"}));
    }

    #[test]
    fn exit_depends_on_status_and_code() {
        for (code, exit) in [
            (Code::InvalidRequest, Exit::Refused),
            (Code::Unauthorized, Exit::Permission),
            (Code::ServerTypeNotAllowed, Exit::Permission),
            (Code::MachineNotFound, Exit::Refused),
            (Code::SnapshotUnusable, Exit::Refused),
            (Code::RateLimited, Exit::TryAgain),
            (Code::PreviewLimitReached, Exit::Refused),
            (Code::Disabled, Exit::Refused),
            (Code::ProvisioningError, Exit::Unavailable),
            (Code::StoreUnavailable, Exit::TryAgain),
            (Code::Internal, Exit::Internal),
        ] {
            assert_eq!(api_problem(code.status().as_u16(), code.as_str()).exit(), exit, "{code:?}");
        }
    }

    #[test]
    fn parse_accepts_bodies_without_problem_json() {
        let problem = ApiProblem::parse(StatusCode::BAD_GATEWAY, "<html>", None);
        assert!(problem.is_transient());
        assert!(problem.to_string().contains("502"), "{problem}");
    }

    #[test]
    fn is_transient_depends_on_status_and_code() {
        assert!(api_problem(503, "store_unavailable").is_transient());
        assert!(!api_problem(503, "disabled").is_transient());
        assert!(!api_problem(502, "provisioning_error").is_transient());
        assert!(!api_problem(500, "internal").is_transient());
        assert!(!api_problem(409, "invalid_state").is_transient());
    }
}
