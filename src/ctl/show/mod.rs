//! Text views of API responses. Views are pure functions: the time, width and color setting come from a [`View`].

pub mod accepted_change;
pub mod audit;
pub mod backup;
pub mod boot;
pub mod bundle;
pub mod bundle_keys;
mod certificates;
pub mod copies;
pub mod deploy;
pub mod failure;
pub mod files;
pub mod fleet;
mod human;
pub mod machine;
pub mod operation;
pub mod operator;
pub mod pointer;
pub mod quote;
pub mod report;
pub mod slot;
mod table;
pub mod token;
pub mod usage;

use std::io::IsTerminal;

use jiff::Timestamp;
use serde_json::Value;

use super::vars;
use svc_base::untrusted_text::one_line;
use svc_base::vars::NO_COLOR;

/// Rendering parameters for a text view.
#[derive(Debug, Clone, Copy)]
pub struct View {
    pub now: Timestamp,
    pub has_colors: bool,
    /// Terminal width in columns, or `None` if unlimited.
    pub width: Option<u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Color {
    Good,
    Warning,
    Bad,
    Faint,
    Strong,
}

impl View {
    /// Returns the view for standard output. Colors and width require a terminal, and `NO_COLOR` disables colors.
    pub fn for_stdout() -> Self {
        let is_terminal = std::io::stdout().is_terminal();
        let width = is_terminal.then(|| comfy_table::Table::new().width()).flatten();
        Self { now: Timestamp::now(), has_colors: is_terminal && is_color_allowed(), width }
    }

    pub fn paint(&self, color: Option<Color>, text: &str) -> String {
        match color.filter(|_| self.has_colors && !text.is_empty()) {
            Some(color) => format!("\x1b[{}m{text}\x1b[0m", color.code()),
            None => text.to_owned(),
        }
    }
}

impl Color {
    fn code(self) -> &'static str {
        match self {
            Self::Good => "32",
            Self::Warning => "33",
            Self::Bad => "31",
            Self::Faint => "2",
            Self::Strong => "1",
        }
    }

    /// Returns the color for an API state, such as that of a machine, operation or subscription.
    pub fn for_state(state: &str) -> Option<Self> {
        match state {
            "running" | "succeeded" | "done" | "active" => Some(Self::Good),
            "provisioning" | "recovering" | "resizing" | "retry" => Some(Self::Warning),
            "failed" | "error" | "given_up" | "waiting" | "asked" => Some(Self::Bad),
            "deleted" | "replaced" | "off" | "cancelled" | "inactive" => Some(Self::Faint),
            _ => None,
        }
    }
}

/// Whether colors are allowed (see no-color.org). Dumb terminals don't support them.
fn is_color_allowed() -> bool {
    NO_COLOR.env_value().is_none() && vars::TERM.env_value().is_none_or(|term| term != "dumb")
}

fn or_empty(value: Option<&String>) -> String {
    value.cloned().unwrap_or_default()
}

/// Formats a value on one line: strings unquoted, objects as `name=value …` without nulls.
pub fn compact(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => one_line(text).into_owned(),
        Some(Value::Object(members)) => {
            let present = members.iter().filter(|(_, value)| !value.is_null());
            present
                .map(|(name, value)| format!("{name}={}", compact(Some(value))))
                .collect::<Vec<_>>()
                .join(" ")
        }
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod older_platform_tests;
#[cfg(test)]
mod test_data;
#[cfg(test)]
mod tests;
