//! Text view of an operation and its log.

use serde::Deserialize;
use serde_json::Value;

use super::human::{ago, seconds};
use super::{Colour, View, compact};
use svc_base::quantity::counted;
use svc_base::untrusted_text::one_line;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Operation {
    pub operation_id: String,
    pub machine_id: String,
    pub kind: String,
    pub state: String,
    pub step: Option<String>,
    pub attempts: Option<u64>,
    pub error_code: Option<String>,
    pub created_at: Option<String>,
    pub ended_at: Option<String>,
    pub question: Option<Question>,
    #[serde(default)]
    pub log: Vec<LogEntry>,
    /// Number of older entries that the platform omitted.
    #[serde(default)]
    pub log_omitted: u64,
}

/// The code of the question about a held last backup.
pub const HELD_BACK: &str = "last_backup_held_back";
const UNVERIFIED_FENCE: &str = "unverified_fence";

/// The code of the question which snapshot to restore.
const NEWER_SNAPSHOT: &str = "newer_snapshot";

/// A question that an operator must answer.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Question {
    pub code: Option<String>,
    pub detail: String,
    /// The snapshot that an answer may choose.
    pub snapshot_key: Option<String>,
}

impl Question {
    /// Whether a retry of the step may resolve the question.
    fn may_be_settled(&self) -> bool {
        let settled_codes = [UNVERIFIED_FENCE, NEWER_SNAPSHOT];
        self.code
            .as_deref()
            .is_some_and(|code| code.starts_with("last_backup") || settled_codes.contains(&code))
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LogEntry {
    /// Increases from entry to entry; older platforms omit it.
    pub seq: Option<u64>,
    pub at: String,
    pub step: String,
    pub outcome: Option<String>,
    pub detail: Option<Value>,
    /// Number of repetitions after `at`, and the time of the last one.
    #[serde(default)]
    pub repeats: u64,
    pub repeated_at: Option<String>,
}

impl LogEntry {
    /// Whether to show it: the end of a step implies that it was filed and begun.
    pub fn should_show(&self) -> bool {
        !matches!(self.outcome.as_deref(), Some("filed" | "begun"))
    }
}

impl Operation {
    /// Its question, if it waits for a decision.
    pub fn question(&self) -> Option<&Question> {
        self.question.as_ref().filter(|_| self.state == "waiting")
    }

    pub fn noun(&self) -> &str {
        kind_noun(&self.kind)
    }

    pub fn is_under_way(&self) -> bool {
        matches!(self.state.as_str(), "running" | "waiting")
    }

    /// The reason why the current step is retried or waits, if that is its last entry.
    fn waits_for(&self) -> Option<String> {
        let last = self.log.last().filter(|_| self.state == "running")?;
        let is_retried = self.error_code.is_some() || self.attempts.is_some_and(|attempts| attempts > 0);
        let is_waiting = match last.outcome.as_deref() {
            Some("retry") => is_retried,
            outcome => outcome == Some("waits"),
        };
        let why = last.detail.as_ref().filter(|_| is_waiting && self.step.as_ref() == Some(&last.step));
        why.map(|why| compact(Some(why)))
    }

    /// The commands that answer its question, with their effects.
    pub fn answers(&self) -> Vec<String> {
        let id = &self.operation_id;
        let back = match self.kind.as_str() {
            "provision" | "recover" => "the slot returns to its old machine",
            "delete" => "the deletion is undone",
            _ => "it ends at its current step",
        };
        let code = self.question().and_then(|question| question.code.as_deref());
        let again = self.question().filter(|question| question.may_be_settled()).map(|_| {
            let what = match code {
                Some(HELD_BACK) => format!(
                    "after `svcctl backup accept {}` it goes ahead with the accepted snapshot; otherwise its host takes \
                     another backup, and the operation waits again if that is held, too",
                    self.machine_id
                ),
                Some(UNVERIFIED_FENCE) => "with the right platform keys, the fence is verified again".to_owned(),
                _ => "the last backup is retried".to_owned(),
            };
            format!("`svcctl operation continue {id}`: {what}")
        });
        let what = match code {
            Some(NEWER_SNAPSHOT) => {
                "the new machine restores the latest snapshot; the newer one stays in the store"
            }
            Some("database_behind_store") => "the machine is deleted again",
            Some(UNVERIFIED_FENCE) => "it goes ahead, regardless of the machine that the fence names",
            Some(HELD_BACK) => {
                "it goes ahead with the newest snapshot that is not held; data that exists only on the old server is lost \
                 when that is deleted"
            }
            _ => "it goes ahead, and that data is lost when the old server is deleted",
        };
        let newer = self.question().and_then(|question| question.snapshot_key.as_ref()).map(|key| {
            format!("`svcctl operation continue {id} --snapshot {key}`: the new machine restores the newer snapshot")
        });
        let others = [
            format!("`svcctl operation continue {id} --accept-loss`: {what}"),
            format!("`svcctl operation abandon {id}`: {back}"),
        ];
        newer.into_iter().chain(again).chain(others).collect()
    }

    /// The question and its answers, one per line.
    pub fn question_lines(&self) -> Vec<String> {
        let Some(question) = self.question() else { return Vec::new() };
        let words = std::iter::once("either").chain(std::iter::repeat("or"));
        let answers = words.zip(self.answers()).map(|(word, answer)| format!("  {word:<6}  {answer}"));
        std::iter::once(format!("question: {}", one_line(&question.detail))).chain(answers).collect()
    }

    /// `  12.3 s  create_server  done`, with the time since the operation's start.
    pub fn line(&self, view: &View, entry: &LogEntry) -> String {
        let outcome = entry.outcome.as_deref().unwrap_or_default();
        let detail = compact(entry.detail.as_ref());
        let parts = [
            self.offset(&entry.at),
            entry.step.clone(),
            view.paint(Colour::of_state(outcome), outcome),
            view.paint(Some(Colour::Faint), &detail),
            self.repeats(entry),
        ];
        parts.iter().filter(|part| !part.is_empty()).cloned().collect::<Vec<_>>().join("  ")
    }

    fn repeats(&self, entry: &LogEntry) -> String {
        let last = entry.repeated_at.as_deref().filter(|_| entry.repeats > 0);
        last.map_or_else(String::new, |last| {
            format!("(repeated {}, last at {})", counted(entry.repeats, "time"), self.offset(last).trim())
        })
    }

    /// The entries after this sequence number, and the last sequence number.
    pub fn entries_after(&self, seen: u64) -> (Vec<&LogEntry>, u64) {
        let numbered = self.log.iter().zip(1..).map(|(entry, place)| (entry.seq.unwrap_or(place), entry));
        let last = numbered.clone().map(|(number, _)| number).max().unwrap_or(seen);
        (numbered.filter(|(number, _)| *number > seen).map(|(_, entry)| entry).collect(), last)
    }

    /// A time of the API, relative to the operation's start.
    pub fn offset(&self, at: &str) -> String {
        let from = self.created_at.as_deref().and_then(|created| seconds(created, at));
        from.map_or_else(|| at.to_owned(), |from| format!("{:>7.1} s", from.max(0.0)))
    }
}

/// The noun for an operation of this kind.
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

pub fn one(view: &View, o: &Operation) -> String {
    let mut head = vec![
        view.paint(Some(Colour::Strong), &o.kind),
        view.paint(Colour::of_state(operation_colour(&o.state)), &o.state),
    ];
    if o.is_under_way() {
        head.extend(o.step.as_ref().map(|step| format!("at {step}")));
        head.extend(o.attempts.filter(|n| *n > 0).map(|n| format!("attempt {}", n + 1)));
    }
    head.extend(o.error_code.as_ref().map(|code| view.paint(Some(Colour::Bad), code)));
    head.extend(o.created_at.as_deref().map(|at| ago(view.now, at)));
    let took = o.created_at.as_deref().zip(o.ended_at.as_deref()).and_then(|(from, to)| seconds(from, to));
    head.extend(took.map(|took| format!("took {took:.1} s")));
    head.push(view.paint(Some(Colour::Faint), &o.operation_id));
    let mut shown = head.join("  ") + "\n";
    if let Some(why) = o.waits_for() {
        shown.push_str(&format!("{}\n", view.paint(Some(Colour::Moving), &format!("waiting: {why}"))));
    }
    for line in o.question_lines() {
        shown.push_str(&format!("{}\n", view.paint(Some(Colour::Bad), &line)));
    }
    if o.log_omitted > 0 {
        let (entries, are) = if o.log_omitted == 1 { ("entry", "is") } else { ("entries", "are") };
        shown.push_str(&format!("({} older {entries} {are} not shown)\n", o.log_omitted));
    }
    for entry in o.log.iter().filter(|entry| entry.should_show()) {
        shown.push_str(&format!("{}\n", o.line(view, entry)));
    }
    shown
}

/// The state for the colour of an operation: a running operation is in progress, while a running machine is healthy.
fn operation_colour(state: &str) -> &str {
    if state == "running" { "retry" } else { state }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ID: &str = "019a0000-0000-7000-8000-000000000002";
    const MACHINE: &str = "019a0000-0000-7000-8000-000000000001";

    fn read(value: &Value) -> Operation {
        serde_json::from_value(value.clone()).unwrap()
    }

    #[test]
    fn waits_for_shows_why_the_current_step_is_retried() {
        let mut waiting = json!({
            "operationId": ID, "machineId": MACHINE, "kind": "delete", "state": "running", "step": "last_backup",
            "attempts": 1, "errorCode": null,
            "log": [{"at": "T", "step": "last_backup", "outcome": "retry", "detail": "the store does not answer"}],
        });
        let why = |operation: &Value| read(operation).waits_for();
        assert_eq!(why(&waiting).as_deref(), Some("the store does not answer"));
        waiting["attempts"] = 0.into();
        assert_eq!(why(&waiting), None);
        waiting["errorCode"] = "store_unavailable".into();
        assert!(why(&waiting).is_some());
        waiting["step"] = "power_off_server".into();
        assert_eq!(why(&waiting), None);
        waiting["step"] = "last_backup".into();
        waiting["state"] = "failed".into();
        assert_eq!(why(&waiting), None);
    }

    /// Each answer says what happens to the held snapshot.
    #[test]
    fn answers_to_a_held_backup_are_precise() {
        let answers = read(&json!({
            "operationId": ID, "machineId": MACHINE, "kind": "recover", "state": "waiting", "step": "last_backup",
            "question": {"code": "last_backup_held_back", "detail": "Held back."},
        }))
        .answers();
        for (answer, part) in answers.iter().zip([
            format!(
                "`svcctl operation continue {ID}`: after `svcctl backup accept {MACHINE}` it goes ahead with"
            ),
            "it goes ahead with the newest snapshot that is not held".to_owned(),
            "the slot returns to its old machine".to_owned(),
        ]) {
            assert!(answer.contains(&part), "{part}: {answer}");
        }
        assert!(answers[0].contains("otherwise its host takes another backup"), "{}", answers[0]);
    }
}
