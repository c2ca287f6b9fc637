//! Text view of an operation and its log.

use super::human::{format_ago, seconds_between};
use super::{Color, View};
use svc_base::quantity::pluralize;
use svc_base::untrusted_text::one_line;
use svc_wire::operation::{LogLine, Operation, OperationState, Question};

/// Question code for a held-back final backup.
pub const HELD_BACK_CODE: &str = "last_backup_held_back";

/// Question code for a fence whose signature couldn't be verified.
const UNVERIFIED_FENCE_CODE: &str = "unverified_fence";

/// Question code for choosing the snapshot to restore.
const NEWER_SNAPSHOT_CODE: &str = "newer_snapshot";

/// Whether retrying the step may resolve the question.
fn can_retry_resolve(question: &Question) -> bool {
    let code = question.code.as_str();
    code.starts_with("last_backup") || [UNVERIFIED_FENCE_CODE, NEWER_SNAPSHOT_CODE].contains(&code)
}

/// Whether to show a log line. We omit operation creation and step starts, since they're implied by the line for the
/// step's end.
pub fn should_show(line: &LogLine) -> bool {
    !matches!(line.outcome.as_str(), "filed" | "begun")
}

/// Returns why the current step is being retried or is waiting, if the last log line says so.
fn waiting_reason(operation: &Operation) -> Option<String> {
    let last = operation.log.last().filter(|_| operation.state.is(OperationState::Running))?;
    let is_waiting = match last.outcome.as_str() {
        "retry" => operation.error_code.is_some() || operation.attempts > 0,
        outcome => outcome == "waits",
    };
    let reason = last.detail.as_ref().filter(|_| is_waiting && operation.step == last.step);
    reason.map(|reason| one_line(reason).into_owned())
}

/// Formats the commands that answer the operation's question, and their effects.
pub fn format_answers(operation: &Operation) -> Vec<String> {
    let id = &operation.operation_id;
    let abandon_effect = match operation.kind.as_str() {
        "provision" | "recover" => "the slot returns to its old machine",
        "delete" => "the deletion is undone",
        _ => "the operation stops at its current step",
    };
    let code = operation.question().map(|question| question.code.as_str());
    let retry = operation.question().filter(|question| can_retry_resolve(question)).map(|_| {
        let retry_effect = match code {
            Some(HELD_BACK_CODE) => format!(
                "after `svcctl backup accept {}`, the operation continues with the accepted snapshot; \
                 otherwise the host takes another backup, and the operation waits again if that backup is \
                 also held back",
                operation.machine_id
            ),
            Some(UNVERIFIED_FENCE_CODE) => {
                "the fence is verified again (correct the platform keys first)".to_owned()
            }
            _ => "the final backup is retried".to_owned(),
        };
        format!("`svcctl operation continue {id}`: {retry_effect}")
    });
    let accept_effect = match code {
        Some(NEWER_SNAPSHOT_CODE) => {
            "the new machine restores the latest snapshot; the newer one stays in the store"
        }
        Some("database_behind_store") => "the machine is deleted again",
        Some(UNVERIFIED_FENCE_CODE) => {
            "the operation continues, regardless of the machine that the fence names"
        }
        Some(HELD_BACK_CODE) => {
            "the operation continues with the newest snapshot that is not held back; data that exists only on \
             the old server is lost when that server is deleted"
        }
        _ => {
            "the operation continues; data that exists only on the old server is lost when that server is deleted"
        }
    };
    let newer = operation.question().and_then(|question| question.snapshot_key.as_ref()).map(|key| {
        format!(
            "`svcctl operation continue {id} --snapshot {key}`: the new machine restores the newer snapshot"
        )
    });
    let accept_and_abandon = [
        format!("`svcctl operation continue {id} --accept-loss`: {accept_effect}"),
        format!("`svcctl operation abandon {id}`: {abandon_effect}"),
    ];
    newer.into_iter().chain(retry).chain(accept_and_abandon).collect()
}

/// Formats the question and its answers, one per line.
pub fn format_question(operation: &Operation) -> Vec<String> {
    let Some(question) = operation.question() else { return Vec::new() };
    let conjunctions = std::iter::once("either").chain(std::iter::repeat("or"));
    let answers = conjunctions.zip(format_answers(operation));
    let answers = answers.map(|(conjunction, answer)| format!("  {conjunction:<6}  {answer}"));
    std::iter::once(format!("question: {}", one_line(&question.detail))).chain(answers).collect()
}

/// Formats a log line as `  12.3 s  create_server  done`, starting with the time since the operation's start.
pub fn format_log_line(view: &View, operation: &Operation, line: &LogLine) -> String {
    let outcome = line.outcome.as_str();
    let detail = line.detail.as_deref().map(one_line).unwrap_or_default();
    let parts = [
        format_offset(operation, &line.at),
        line.step.clone(),
        view.paint(Color::for_state(outcome), outcome),
        view.paint(Some(Color::Faint), &detail),
        format_repeats(operation, line),
    ];
    parts.iter().filter(|part| !part.is_empty()).cloned().collect::<Vec<_>>().join("  ")
}

fn format_repeats(operation: &Operation, line: &LogLine) -> String {
    let repeated = line.repeats.filter(|repeats| *repeats > 0).zip(line.repeated_at.as_ref());
    repeated.map_or_else(String::new, |(repeats, last)| {
        format!(
            "(repeated {}, last at {})",
            pluralize(repeats, "time"),
            format_offset(operation, last).trim()
        )
    })
}

/// Returns the log lines after a sequence number, and the last sequence number. Falls back to line positions for older
/// platforms, which don't send sequence numbers.
pub fn lines_after(operation: &Operation, after: u64) -> (Vec<&LogLine>, u64) {
    let numbered = operation.log.iter().zip(1..).map(|(line, position)| (line.seq.unwrap_or(position), line));
    let last = numbered.clone().map(|(number, _)| number).max().unwrap_or(after);
    (numbered.filter(|(number, _)| *number > after).map(|(_, line)| line).collect(), last)
}

/// Formats an API timestamp relative to the operation's start.
pub fn format_offset(operation: &Operation, at: &str) -> String {
    let from = seconds_between(&operation.created_at, at);
    from.map_or_else(|| at.to_owned(), |from| format!("{:>7.1} s", from.max(0.0)))
}

/// Returns the noun for an operation kind.
pub fn kind_noun(kind: &str) -> &str {
    match kind {
        "provision" => "provisioning",
        "recover" => "recovery",
        "delete" => "deletion",
        "reinstate" => "reinstatement",
        "remove_server" => "removal of the server",
        "power_on" => "power-on",
        "power_off" => "power-off",
        kind => kind,
    }
}

/// Formats the operation, its question and its log.
pub fn details(view: &View, o: &Operation) -> String {
    let mut head = vec![
        view.paint(Some(Color::Strong), &o.kind),
        view.paint(Color::for_state(operation_color_state(&o.state)), &o.state),
    ];
    if o.is_in_progress() {
        head.push(format!("at {}", o.step));
        head.extend((o.attempts > 0).then(|| format!("attempt {}", o.attempts + 1)));
    }
    head.extend(o.error_code.as_ref().map(|code| view.paint(Some(Color::Bad), code)));
    head.push(format_ago(view.now, &o.created_at));
    let duration = o.ended_at.as_ref().and_then(|ended| seconds_between(&o.created_at, ended));
    head.extend(duration.map(|seconds| format!("took {seconds:.1} s")));
    head.push(view.paint(Some(Color::Faint), &o.operation_id));
    let mut text = head.join("  ") + "\n";
    if let Some(reason) = waiting_reason(o) {
        text.push_str(&format!("{}\n", view.paint(Some(Color::Warning), &format!("waiting: {reason}"))));
    }
    for line in format_question(o) {
        text.push_str(&format!("{}\n", view.paint(Some(Color::Bad), &line)));
    }
    let omitted = o.log_omitted.unwrap_or_default();
    if omitted > 0 {
        let (noun, verb) = if omitted == 1 { ("line", "is") } else { ("lines", "are") };
        text.push_str(&format!("({omitted} older {noun} {verb} not shown)\n"));
    }
    for line in o.log.iter().filter(|line| should_show(line)) {
        text.push_str(&format!("{}\n", format_log_line(view, o, line)));
    }
    text
}

/// Maps an operation's state to the state whose color to use: a running machine is healthy, but a running operation is
/// merely in progress.
fn operation_color_state(state: &str) -> &str {
    if state == "running" { "retry" } else { state }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const ID: &str = "019a0000-0000-7000-8000-000000000002";
    const MACHINE: &str = "019a0000-0000-7000-8000-000000000001";

    fn parse_operation(value: &Value) -> Operation {
        serde_json::from_value(value.clone()).unwrap()
    }

    #[test]
    fn waiting_reason_requires_log_line_for_current_step() {
        let mut waiting = json!({
            "operationId": ID, "machineId": MACHINE, "kind": "delete", "state": "running", "step": "last_backup",
            "attempts": 1, "errorCode": null, "createdAt": "T", "updatedAt": "T",
            "log": [{"at": "T", "step": "last_backup", "outcome": "retry", "detail": "the store does not respond"}],
        });
        let reason = |operation: &Value| waiting_reason(&parse_operation(operation));
        assert_eq!(reason(&waiting).as_deref(), Some("the store does not respond"));
        waiting["attempts"] = 0.into();
        assert_eq!(reason(&waiting), None);
        waiting["errorCode"] = "store_unavailable".into();
        assert!(reason(&waiting).is_some());
        waiting["step"] = "power_off_server".into();
        assert_eq!(reason(&waiting), None);
        waiting["step"] = "last_backup".into();
        waiting["state"] = "failed".into();
        assert_eq!(reason(&waiting), None);
    }

    #[test]
    fn answers_describe_effect_on_held_back_snapshot() {
        let answers = format_answers(&parse_operation(&json!({
            "operationId": ID, "machineId": MACHINE, "kind": "recover", "state": "waiting", "step": "last_backup",
            "attempts": 0, "createdAt": "T", "updatedAt": "T",
            "question": {"code": "last_backup_held_back", "detail": "Held back."},
        })));
        for (answer, expected) in answers.iter().zip([
            format!(
                "`svcctl operation continue {ID}`: after `svcctl backup accept {MACHINE}`, the operation continues"
            ),
            "the operation continues with the newest snapshot that is not held back".to_owned(),
            "the slot returns to its old machine".to_owned(),
        ]) {
            assert!(answer.contains(&expected), "{expected}: {answer}");
        }
        assert!(answers[0].contains("otherwise the host takes another backup"), "{}", answers[0]);
    }
}
