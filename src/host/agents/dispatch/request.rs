//! Dispatch request parsing, validation and fingerprinting. Fingerprints detect reused ids.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::agents::adapters::settings::{Agent, AgentSettings, MAX_AGENT_NAME_CHARS, MAX_DEADLINE_SECONDS};
use svc_http::fields::Fields;

pub const MAX_SENDER_CHARS: usize = 200;
pub const MAX_CONVERSATION_CHARS: usize = 200;
pub const MAX_MODEL_CHARS: usize = 200;
pub const MAX_PROMPT_CHARS: usize = 512 << 10;
pub const MAX_BATCH_ENTRIES: usize = 100;
pub const MAX_BODY_BYTES: usize = 2 << 20;

/// Dispatch or batch id, chosen by the caller or generated.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DispatchId(String);

impl DispatchId {
    pub const PATTERN: &str = "^[A-Za-z0-9][A-Za-z0-9._-]{0,103}$";
    const MAX_CHARS: usize = 104;
    /// Maximum length of a caller-chosen id; leaves room for an entry index.
    const MAX_CALLER_ID_CHARS: usize = 100;

    pub fn generate() -> Self {
        Self(uuid::Uuid::now_v7().to_string())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this has the form of a batch entry id.
    fn is_entry_id(&self) -> bool {
        let suffix = self.0.rsplit_once('.').map(|(_, suffix)| suffix);
        suffix.is_some_and(|suffix| !suffix.is_empty() && suffix.bytes().all(|byte| byte.is_ascii_digit()))
    }

    /// The id of this batch's entry at `index`.
    pub fn entry_id(&self, index: usize) -> String {
        format!("{}.{index}", self.0)
    }
}

impl FromStr for DispatchId {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_valid = text.len() <= Self::MAX_CHARS
            && text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || ".-_".contains(c));
        if is_valid {
            Ok(Self(text.to_owned()))
        } else {
            Err(
                "must have 1 to 104 letters, digits, dots, dashes and underscores, and begin with a letter or digit",
            )
        }
    }
}

impl TryFrom<String> for DispatchId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<DispatchId> for String {
    fn from(id: DispatchId) -> Self {
        id.0
    }
}

impl fmt::Display for DispatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A prompt for a configured agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PromptEntry {
    pub agent_name: String,
    /// The requested model, or else the agent's default.
    pub model: Option<String>,
    pub conversation_id: Option<String>,
    pub prompt: String,
    pub deadline_seconds: u64,
}

/// A validated request.
#[derive(Debug, Clone)]
pub struct DispatchRequest {
    pub id: Option<DispatchId>,
    pub sender_id: String,
    pub is_batch: bool,
    /// Exactly one entry, unless the request is a batch.
    pub entries: Vec<PromptEntry>,
    /// Digest of the request's own fields, excluding its id. Defaults from the settings aren't included.
    pub fingerprint: String,
}

/// Options for a single entry, or defaults for all entries of a request.
#[derive(Serialize)]
struct EntryOptions {
    agent_name: Option<String>,
    model: Option<String>,
    conversation_id: Option<String>,
    deadline_seconds: Option<u64>,
}

impl EntryOptions {
    fn read(fields: &mut Fields) -> Self {
        let deadline_seconds = fields.optional_number("deadlineSeconds");
        if deadline_seconds.is_some_and(|seconds| !(1..=MAX_DEADLINE_SECONDS).contains(&seconds)) {
            fields.add_error("deadlineSeconds", format!("must be from 1 to {MAX_DEADLINE_SECONDS}"));
        }
        Self {
            agent_name: fields.optional_text("agentName", MAX_AGENT_NAME_CHARS),
            model: fields.optional_text("model", MAX_MODEL_CHARS),
            conversation_id: fields.optional_text("conversationId", MAX_CONVERSATION_CHARS),
            deadline_seconds,
        }
    }

    fn to_json(&self, prompt: &str) -> Value {
        json!({ "choice": self, "prompt": prompt })
    }

    fn with_defaults(self, defaults: &Self) -> Self {
        Self {
            agent_name: self.agent_name.or_else(|| defaults.agent_name.clone()),
            model: self.model.or_else(|| defaults.model.clone()),
            conversation_id: self.conversation_id.or_else(|| defaults.conversation_id.clone()),
            deadline_seconds: self.deadline_seconds.or(defaults.deadline_seconds),
        }
    }

    fn into_entry(
        self,
        fields: &mut Fields,
        prompt: String,
        settings: &AgentSettings,
    ) -> Option<PromptEntry> {
        let agent_name = self.agent_name.unwrap_or_else(|| settings.default_agent.clone());
        let Some(agent) = settings.agents.get(&agent_name) else {
            let names: Vec<&str> = settings.agents.keys().map(String::as_str).collect();
            let error = format!("is not an agent in system/config.json, which defines {}", names.join(", "));
            fields.add_error("agentName", error);
            return None;
        };
        Some(PromptEntry {
            model: self.model.or_else(|| agent.model.clone()),
            conversation_id: self.conversation_id,
            deadline_seconds: limit_deadline(self.deadline_seconds, agent),
            agent_name,
            prompt,
        })
    }
}

/// Caps the requested deadline: callers can only shorten the agent's deadline.
fn limit_deadline(requested: Option<u64>, agent: &Agent) -> u64 {
    requested.map_or(agent.deadline_seconds, |requested| requested.min(agent.deadline_seconds))
}

impl DispatchRequest {
    /// Parses a request from `principal`, adding errors to `fields`.
    pub fn read(fields: &mut Fields, principal: &str, settings: &AgentSettings) -> Option<Self> {
        let id: Option<DispatchId> = fields.optional("id");
        if id
            .as_ref()
            .is_some_and(|id| id.as_str().len() > DispatchId::MAX_CALLER_ID_CHARS || id.is_entry_id())
        {
            let max = DispatchId::MAX_CALLER_ID_CHARS;
            fields.add_error(
                "id",
                format!("must have at most {max} characters, and must not end with a dot and a number"),
            );
        }
        let sender_id = fields.optional_text("senderId", MAX_SENDER_CHARS);
        let options = EntryOptions::read(fields);
        let (has_prompt, is_batch) = (fields.has("prompt"), fields.has("batch"));
        // At most one of the two is parsed below. Discard the rest so it isn't reported as unknown.
        if is_batch || !has_prompt {
            fields.discard("prompt");
        }
        if has_prompt || !is_batch {
            fields.discard("batch");
        }
        let entries = match (has_prompt, is_batch) {
            (true, true) => {
                fields.add_error("batch", "cannot be given together with prompt");
                None
            }
            (false, true) => Self::read_batch(fields, &options, settings),
            (false, false) => {
                fields.add_error("prompt", "is required unless batch is given");
                fields.add_error("batch", "is required unless prompt is given");
                None
            }
            (true, false) => {
                let prompt = fields.required_text("prompt", MAX_PROMPT_CHARS)?;
                let own_fields = options.to_json(&prompt);
                options.into_entry(fields, prompt, settings).map(|entry| (vec![entry], own_fields))
            }
        }?;
        let (entries, own_fields) = entries;
        let sender_id = sender_id.unwrap_or_else(|| principal.to_owned());
        // Hash only the request's own fields: defaults from the settings may change before a retry.
        let hashed = json!({ "senderId": sender_id, "batch": is_batch, "given": own_fields });
        let fingerprint = hex::encode(Sha256::digest(hashed.to_string()));
        Some(Self { id, sender_id, is_batch, entries, fingerprint })
    }

    fn read_batch(
        fields: &mut Fields,
        options: &EntryOptions,
        settings: &AgentSettings,
    ) -> Option<(Vec<PromptEntry>, Value)> {
        let items = fields.nested_array("batch", 1..=MAX_BATCH_ENTRIES)?;
        let (mut entries, mut own_fields) = (Vec::new(), vec![options.to_json("")]);
        let count = items.len();
        for mut entry in items {
            let prompt = entry.required_text("prompt", MAX_PROMPT_CHARS);
            let own_options = EntryOptions::read(&mut entry);
            own_fields.push(own_options.to_json(prompt.as_deref().unwrap_or_default()));
            let options = own_options.with_defaults(options);
            entries.extend(prompt.and_then(|prompt| options.into_entry(&mut entry, prompt, settings)));
            fields.close(entry);
        }
        (entries.len() == count).then_some((entries, Value::Array(own_fields)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: Value) -> Result<DispatchRequest, String> {
        let Value::Object(body) = body else { return Err("not an object".to_owned()) };
        let mut fields = Fields::from_body(body);
        let request = DispatchRequest::read(&mut fields, "user_owner", &AgentSettings::default());
        fields.finish(request).map_err(|problem| problem.detail)
    }

    #[test]
    fn request_is_parsed_with_defaults() {
        let one = read(json!({ "prompt": "do it" })).unwrap();
        assert_eq!((&*one.sender_id, one.is_batch, one.entries.len()), ("user_owner", false, 1));
        assert_eq!((&*one.entries[0].agent_name, one.entries[0].deadline_seconds), ("claude", 3600));
        let same = read(json!({ "prompt": "do it", "id": "a" })).unwrap();
        let other = read(json!({ "prompt": "do it", "senderId": "x" })).unwrap();
        assert!(one.fingerprint == same.fingerprint && one.fingerprint != other.fingerprint);
        let batch = read(json!({ "model": "m", "deadlineSeconds": 5, "batch": [{ "prompt": "1" },
            { "prompt": "2", "model": "n", "conversationId": "c", "deadlineSeconds": 9999 }] }));
        let entries = batch.unwrap().entries;
        assert_eq!((entries[0].model.as_deref(), entries[0].deadline_seconds), (Some("m"), 5));
        assert_eq!((entries[1].model.as_deref(), entries[1].deadline_seconds), (Some("n"), 3600));
    }

    #[test]
    fn read_treats_null_as_absent() {
        let one = read(json!({ "prompt": "x", "batch": null })).unwrap();
        assert!(!one.is_batch && one.entries.len() == 1);
        assert!(read(json!({ "prompt": null, "batch": [{ "prompt": "x" }] })).unwrap().is_batch);
    }

    #[test]
    fn read_never_reports_prompt_or_batch_as_unknown() {
        for body in [json!({ "prompt": "x", "batch": [] }), json!({ "prompt": null, "batch": null })] {
            let error = read(body.clone()).expect_err("the request is invalid");
            assert!(!error.contains("is not a field"), "{body}: {error}");
        }
    }

    #[test]
    fn read_names_the_field_of_each_error() {
        for (body, expected) in [
            (json!({}), "/prompt: is required"),
            (json!({ "prompt": "" }), "/prompt: must have 1"),
            (json!({ "prompt": "x", "batch": [] }), "/batch: cannot be given together with prompt"),
            (json!({ "batch": [] }), "/batch: must be an array of 1 to 100"),
            (json!({ "batch": [{}] }), "/batch/0/prompt: is required"),
            (
                json!({ "batch": [{ "prompt": "x" }, { "prompt": "x", "agentName": "no" }] }),
                "/batch/1/agentName",
            ),
            (json!({ "prompt": "x", "agentName": "no" }), "which defines claude"),
            (json!({ "prompt": "x", "id": "../x" }), "/id: must have"),
            (
                json!({ "prompt": "x", "id": "b.12" }),
                "/id: must have at most 100 characters, and must not end with a dot",
            ),
            (json!({ "prompt": "x", "deadlineSeconds": 0 }), "/deadlineSeconds: must be from 1"),
            (json!({ "prompt": "x", "other": 1 }), "/other: is not a field"),
        ] {
            let error = read(body.clone()).expect_err("the request is invalid");
            assert!(error.contains(expected), "{body}: {error}");
        }
    }
}
