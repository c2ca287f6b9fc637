//! Subscription plans and the server types that each includes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::name::ServerType;

/// The subscription of a slot (specification, part 1.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Plan {
    Starter,
    Builder,
    Max,
}

impl Plan {
    pub const ALL: [Self; 3] = [Self::Starter, Self::Builder, Self::Max];

    /// The server types that this plan includes, smallest first.
    pub fn server_types(self) -> &'static [&'static str] {
        match self {
            Self::Starter => &["cpx22"],
            Self::Builder => &["cpx22", "cpx32"],
            Self::Max => &["cpx22", "cpx32", "cpx52"],
        }
    }

    pub fn contains(self, server_type: &ServerType) -> bool {
        self.server_types().contains(&server_type.as_str())
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starter => "starter",
            Self::Builder => "builder",
            Self::Max => "max",
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Plan {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|plan| plan.as_str() == text)
            .ok_or_else(|| "must be starter, builder or max".to_owned())
    }
}
