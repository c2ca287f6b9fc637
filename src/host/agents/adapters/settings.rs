//! Agent settings from the owner's `system/config.json`: programs, concurrency and model prices.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;

use super::{AdapterKind, Outcome};
use crate::records::money::Dollars;

const DEFAULT_AGENT_NAME: &str = "claude";
/// Default agent command, used when no agents are configured: the bundled Claude Code. It can edit the owner's files
/// without confirmation; any other action requiring permission is denied.
const DEFAULT_AGENT_COMMAND: [&str; 3] = ["claude", "--permission-mode", "acceptEdits"];
const DEFAULT_CONCURRENCY: usize = 4;
const MAX_CONCURRENCY: usize = 64;
pub const DEFAULT_DEADLINE_SECONDS: u64 = 3600;
pub const MAX_DEADLINE_SECONDS: u64 = 86_400;
pub const MAX_AGENT_NAME_CHARS: usize = 64;

const MAX_APPS_PER_AGENT: usize = 64;
const MAX_SLUG_BYTES: usize = 64;

/// An agent program and its options.
#[derive(Clone, PartialEq)]
pub struct Agent {
    pub adapter: AdapterKind,
    pub command: Vec<String>,
    /// Default model, for dispatches that don't request one.
    pub model: Option<String>,
    pub deadline_seconds: u64,
    pub environment: BTreeMap<String, String>,
    /// Slugs of apps whose tables the agent can access through the bridge.
    pub apps: Vec<String>,
}

impl fmt::Debug for Agent {
    /// Omits the command and the environment, which may contain secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent")
            .field("adapter", &self.adapter)
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

/// Model prices, per million tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Price {
    pub input: Dollars,
    pub output: Dollars,
    /// Price of cached input tokens; defaults to `input`.
    #[serde(default)]
    pub cached_input: Option<Dollars>,
}

impl Price {
    /// Cost of a run, with each component rounded to the nearest billionth of a dollar.
    fn cost(self, outcome: &Outcome) -> Dollars {
        const MILLION: u64 = 1_000_000;
        let cached = outcome.tokens_cached.min(outcome.tokens_in);
        self.input.scaled(outcome.tokens_in - cached, MILLION)
            + self.cached_input.unwrap_or(self.input).scaled(cached, MILLION)
            + self.output.scaled(outcome.tokens_out, MILLION)
    }

    fn is_free(self) -> bool {
        [self.input, self.output, self.cached_input.unwrap_or(self.input)]
            .iter()
            .all(|price| *price == Dollars::ZERO)
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct AgentSettings {
    pub agents: BTreeMap<String, Agent>,
    pub default_agent: String,
    /// Maximum number of concurrently running agents.
    pub concurrency: usize,
    pub prices: BTreeMap<String, Price>,
}

impl Default for AgentSettings {
    fn default() -> Self {
        let agent = Agent {
            adapter: AdapterKind::ClaudeCode,
            command: DEFAULT_AGENT_COMMAND.map(str::to_owned).into(),
            model: None,
            deadline_seconds: DEFAULT_DEADLINE_SECONDS,
            environment: BTreeMap::new(),
            apps: Vec::new(),
        };
        Self {
            agents: BTreeMap::from([(DEFAULT_AGENT_NAME.to_owned(), agent)]),
            default_agent: DEFAULT_AGENT_NAME.to_owned(),
            concurrency: DEFAULT_CONCURRENCY,
            prices: BTreeMap::new(),
        }
    }
}

impl AgentSettings {
    /// Validates the agents and applies defaults.
    ///
    /// # Errors
    /// A message naming the invalid setting. Values are never quoted, since they can be secrets.
    pub fn validate(
        agents: BTreeMap<String, AgentEntry>,
        dispatch: DispatchSection,
        prices: BTreeMap<String, Price>,
    ) -> Result<Self, String> {
        let validated = agents.into_iter().map(|(name, agent)| Ok((name.clone(), agent.validate(&name)?)));
        let mut agents = validated.collect::<Result<BTreeMap<_, _>, String>>()?;
        if agents.is_empty() {
            agents = Self::default().agents;
        }
        let default_agent = match dispatch.default_agent {
            Some(name) if agents.contains_key(&name) => name,
            Some(_) => return Err("dispatch.defaultAgent must be a name in agents".to_owned()),
            None => agents.keys().next().cloned().unwrap_or_default(),
        };
        let concurrency = dispatch.concurrency.unwrap_or(DEFAULT_CONCURRENCY);
        if !(1..=MAX_CONCURRENCY).contains(&concurrency) {
            return Err(format!("dispatch.concurrency must be a number from 1 to {MAX_CONCURRENCY}"));
        }
        Ok(Self { agents, default_agent, concurrency, prices })
    }

    /// Cost of a run, in order of precedence: as reported by the program, from the price of the model it reported, or
    /// from the price of the requested model, which may be an alias. `None` if no price is known.
    ///
    /// A zero price for the requested model is ignored if the program reported a different model, which may not be
    /// free.
    pub fn cost(&self, outcome: &Outcome, requested: Option<&str>) -> Option<Dollars> {
        let price = |model: Option<&str>| self.prices.get(model?);
        let requested_price = || price(requested).filter(|price| outcome.model.is_none() || !price.is_free());
        let calculated_cost =
            || Some(price(outcome.model.as_deref()).or_else(requested_price)?.cost(outcome));
        outcome.cost.or_else(calculated_cost)
    }

    /// Whether the run reported its cost or any tokens.
    pub fn has_usage(outcome: &Outcome) -> bool {
        outcome.cost.is_some() || outcome.tokens_in + outcome.tokens_out > 0
    }

    /// Whether the reported model is priced at zero.
    pub fn is_free(&self, outcome: &Outcome) -> bool {
        let price = outcome.model.as_ref().and_then(|model| self.prices.get(model));
        price.is_some_and(|price| price.is_free())
    }
}

/// An agent as it appears in the file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentEntry {
    adapter: AdapterKind,
    command: Vec<String>,
    model: Option<String>,
    deadline_seconds: Option<u64>,
    #[serde(default)]
    environment: BTreeMap<String, String>,
    #[serde(default)]
    apps: Vec<String>,
}

/// The `dispatch` section as it appears in the file.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct DispatchSection {
    default_agent: Option<String>,
    concurrency: Option<usize>,
}

impl AgentEntry {
    fn validate(self, name: &str) -> Result<Agent, String> {
        if name.is_empty()
            || name.chars().count() > MAX_AGENT_NAME_CHARS
            || name.chars().any(char::is_control)
        {
            return Err(format!("agents: a name must be 1 to {MAX_AGENT_NAME_CHARS} printable characters"));
        }
        let invalid = |requirement: &str| Err(format!("agents.{name}.{requirement}"));
        if self.command.first().is_none_or(String::is_empty)
            || self.command.iter().any(|argument| argument.contains('\0'))
        {
            return invalid("command must be a program and its arguments, without NUL");
        }
        let is_variable_name = |name: &str| !name.is_empty() && !name.contains(['=', '\0']);
        if !self.environment.iter().all(|(name, value)| is_variable_name(name) && !value.contains('\0')) {
            return invalid("environment must have non-empty names without = or NUL, and values without NUL");
        }
        let deadline_seconds = self.deadline_seconds.unwrap_or(DEFAULT_DEADLINE_SECONDS);
        if !(1..=MAX_DEADLINE_SECONDS).contains(&deadline_seconds) {
            return invalid(&format!("deadlineSeconds must be a number from 1 to {MAX_DEADLINE_SECONDS}"));
        }
        let is_slug =
            |app: &String| !app.is_empty() && app.len() <= MAX_SLUG_BYTES && !app.contains(char::is_control);
        if self.apps.len() > MAX_APPS_PER_AGENT || !self.apps.iter().all(is_slug) {
            return invalid(&format!(
                "apps must be at most {MAX_APPS_PER_AGENT} slugs of 1 to {MAX_SLUG_BYTES} bytes, \
                 without control characters"
            ));
        }
        Ok(Agent {
            adapter: self.adapter,
            command: self.command,
            model: self.model,
            deadline_seconds,
            environment: self.environment,
            apps: self.apps,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::agents::owner_config::OwnerSettings;

    fn parse(file: &Value) -> Result<AgentSettings, String> {
        OwnerSettings::parse(file.to_string().as_bytes()).map(|settings| settings.agents)
    }

    #[test]
    fn settings_without_agents_use_the_default() {
        let settings = parse(&json!({"costLimits": {"daily": 1}})).unwrap();
        assert_eq!(settings, AgentSettings::default());
        assert_eq!(settings.agents[&settings.default_agent].command[0], "claude");
    }

    #[test]
    fn parse_rejects_invalid_settings() {
        let agent = |overrides: Value| {
            let mut agent = json!({"adapter": "json-lines", "command": ["x"]});
            agent.as_object_mut().unwrap().extend(overrides.as_object().unwrap().clone());
            json!({"agents": {"a": agent}})
        };
        assert!(
            parse(&agent(json!({"deadlineSeconds": 5, "environment": {"A": "b=c"}, "apps": ["notes"]})))
                .is_ok()
        );
        for invalid in [
            agent(json!({"command": []})),
            agent(json!({"command": [""]})),
            agent(json!({"adapter": "other"})),
            agent(json!({"deadlineSeconds": 0})),
            agent(json!({"environment": {"A=B": "c"}})),
            agent(json!({"apps": "notes"})),
            agent(json!({"apps": [""]})),
            json!({"dispatch": {"defaultAgent": "unknown"}}),
            json!({"dispatch": {"concurrency": 0}}),
            json!({"prices": {"m": {"input": -1, "output": 0}}}),
        ] {
            assert!(parse(&invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn cost_follows_order_of_precedence() {
        let settings =
            parse(&json!({"prices": {"m": {"input": 1.25, "output": 10}, "free": {"input": 0, "output": 0},
                "c": {"input": 1.25, "output": 10, "cachedInput": 0.125}}}))
            .unwrap();
        let mut outcome = Outcome {
            conversation_id: None,
            model: None,
            tokens_in: 1_000_000,
            tokens_out: 250_000,
            tokens_cached: 800_000,
            cost: None,
            has_unreported_usage: false,
            tools: Vec::new(),
            status: crate::records::entry::ResultStatus::Success,
            error: None,
            text: None,
        };
        assert_eq!(settings.cost(&outcome, Some("m")), Some(Dollars::from_nanos(3_750_000_000)));
        assert_eq!(settings.cost(&outcome, Some("c")), Some(Dollars::from_nanos(2_850_000_000)));
        assert_eq!(settings.cost(&outcome, Some("other")), None);
        outcome.model = Some("other".to_owned());
        assert_eq!(settings.cost(&outcome, Some("m")), Some(Dollars::from_nanos(3_750_000_000)));
        outcome.model = Some("free".to_owned());
        assert_eq!(settings.cost(&outcome, Some("m")), Some(Dollars::ZERO));
        outcome.cost = Some(Dollars::from_nanos(1));
        assert_eq!(settings.cost(&outcome, Some("m")), Some(Dollars::from_nanos(1)));
        (outcome.cost, outcome.model) = (None, Some("other".to_owned()));
        assert_eq!(
            settings.cost(&outcome, Some("free")),
            None,
            "a free model was requested, but a different one ran"
        );
        outcome.model = None;
        assert_eq!(settings.cost(&outcome, Some("free")), Some(Dollars::ZERO));
    }
}
