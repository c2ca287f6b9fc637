//! An operation, step by step.

use serde::Deserialize;
use serde_json::Value;

use super::human::{ago, seconds};
use super::{Colour, View, compact};
use crate::untrusted_text::one_line;

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
    /// How many older entries the platform left out.
    #[serde(default)]
    pub log_omitted: u64,
}

/// What an operation waits for an operator to decide.
#[derive(Debug, Deserialize)]
pub struct Question {
    pub code: Option<String>,
    pub detail: String,
}

impl Question {
    /// Whether the step that asks may find another answer when it runs again.
    fn may_be_settled(&self) -> bool {
        self.code.as_ref().is_some_and(|code| code.starts_with("last_backup"))
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LogEntry {
    /// Grows from entry to entry; earlier platforms do not send it.
    pub seq: Option<u64>,
    pub at: String,
    pub step: String,
    pub outcome: Option<String>,
    pub detail: Option<Value>,
    /// How often it was repeated after `at`, and when last.
    #[serde(default)]
    pub repeats: u64,
    pub repeated_at: Option<String>,
}

impl LogEntry {
    /// That a step was filed or begun says nothing that its end does not say as well.
    pub fn is_news(&self) -> bool {
        !matches!(self.outcome.as_deref(), Some("filed" | "begun"))
    }
}

impl Operation {
    /// The question that it waits with, if it waits.
    pub fn question(&self) -> Option<&Question> {
        self.question.as_ref().filter(|_| self.state == "waiting")
    }

    pub fn is_under_way(&self) -> bool {
        matches!(self.state.as_str(), "running" | "waiting")
    }

    /// The commands that answer its question, and what each does.
    pub fn answers(&self) -> Vec<String> {
        let id = &self.operation_id;
        let back = match self.kind.as_str() {
            "provision" | "recover" => "the slot goes back to the machine that it had",
            "delete" => "the deletion is undone",
            _ => "it ends as far as it has got",
        };
        let again = self.question().filter(|question| question.may_be_settled());
        let again =
            again.map(|_| format!("`svcctl operation continue {id}`: the last backup is tried again"));
        let is_outdated =
            self.question().is_some_and(|question| question.code.as_deref() == Some("database_behind_store"));
        let what =
            if is_outdated { "the machine is deleted again" } else { "it goes ahead, and that data is lost" };
        let others = [
            format!("`svcctl operation continue {id} --accept-loss`: {what}"),
            format!("`svcctl operation abandon {id}`: {back}"),
        ];
        again.into_iter().chain(others).collect()
    }

    /// The question with its answers, each on a line of its own.
    pub fn question_lines(&self) -> Vec<String> {
        let Some(question) = self.question() else { return Vec::new() };
        let words = std::iter::once("either").chain(std::iter::repeat("or"));
        let answers = words.zip(self.answers()).map(|(word, answer)| format!("  {word:<6}  {answer}"));
        std::iter::once(format!("question: {}", one_line(&question.detail))).chain(answers).collect()
    }

    /// `  12.3 s  create_server  done`; the time counts from the operation's start.
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
            format!("(repeated {} times, last at {})", entry.repeats, self.offset(last).trim())
        })
    }

    /// The entries after the one with this number, and the number of the last.
    pub fn entries_after(&self, seen: u64) -> (Vec<&LogEntry>, u64) {
        let numbered = self.log.iter().zip(1..).map(|(entry, place)| (entry.seq.unwrap_or(place), entry));
        let last = numbered.clone().map(|(number, _)| number).max().unwrap_or(seen);
        (numbered.filter(|(number, _)| *number > seen).map(|(_, entry)| entry).collect(), last)
    }

    /// A time of the API, from the operation's start.
    pub fn offset(&self, at: &str) -> String {
        let from = self.created_at.as_deref().and_then(|created| seconds(created, at));
        from.map_or_else(|| at.to_owned(), |from| format!("{:>7.1} s", from.max(0.0)))
    }
}

pub fn one(view: &View, o: &Operation) -> String {
    let mut head = vec![
        view.paint(Some(Colour::Strong), &o.kind),
        view.paint(Colour::of_state(operation_colour(&o.state)), &o.state),
    ];
    if o.is_under_way() {
        head.extend(o.step.as_ref().map(|step| format!("at {step}")));
        head.extend(o.attempts.filter(|n| *n > 0).map(|n| format!("try {}", n + 1)));
    }
    head.extend(o.error_code.as_ref().map(|code| view.paint(Some(Colour::Bad), code)));
    head.extend(o.created_at.as_deref().map(|at| ago(view.now, at)));
    let took = o.created_at.as_deref().zip(o.ended_at.as_deref()).and_then(|(from, to)| seconds(from, to));
    head.extend(took.map(|took| format!("took {took:.1} s")));
    head.push(view.paint(Some(Colour::Faint), &o.operation_id));
    let mut shown = head.join("  ") + "\n";
    for line in o.question_lines() {
        shown.push_str(&format!("{}\n", view.paint(Some(Colour::Bad), &line)));
    }
    if o.log_omitted > 0 {
        shown.push_str(&format!("({} older entries are not shown)\n", o.log_omitted));
    }
    for entry in o.log.iter().filter(|entry| entry.is_news()) {
        shown.push_str(&format!("{}\n", o.line(view, entry)));
    }
    shown
}

/// An operation that runs is under way, where a machine that runs is well.
fn operation_colour(state: &str) -> &str {
    if state == "running" { "retry" } else { state }
}
