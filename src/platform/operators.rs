//! The operators that call the control API, and their scopes. Pure: tokens are verified in `api::access`.
//!
//! Scopes are a plain set: none implies another, and an operator can grant only scopes that they have.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use svc_machine::name::OperatorName;

/// The audit's name for callers with `PLATFORM_SECRET`. No operator can have this name.
pub const PLATFORM_SECRET_ACTOR: &str = "operator";

/// The permission that a route requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Machines, operations, rollouts and the audit, without owner data.
    Read,
    /// Changes of machines, and their snapshots.
    Operate,
    /// Subscriptions, and usage by owners.
    Billing,
    /// The platform's metrics.
    Metrics,
    /// Operators and the audit.
    Admin,
}

impl Scope {
    pub const ALL: [Self; 5] = [Self::Read, Self::Operate, Self::Billing, Self::Metrics, Self::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Operate => "operate",
            Self::Billing => "billing",
            Self::Metrics => "metrics",
            Self::Admin => "admin",
        }
    }
}

impl FromStr for Scope {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|scope| scope.as_str() == text);
        found.ok_or_else(|| format!("must be one of {}", Self::ALL.map(Self::as_str).join(", ")))
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for Scope {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_str(self.as_str())
    }
}

/// The scopes of one operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Scopes(BTreeSet<Scope>);

impl Scopes {
    pub fn all() -> Self {
        Self(Scope::ALL.into())
    }

    /// The scopes stored under these names. An unknown one, of a later release, grants nothing.
    pub fn from_stored<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        Self(names.into_iter().filter_map(|name| name.parse().ok()).collect())
    }

    pub fn names(&self) -> Vec<&'static str> {
        self.0.iter().map(|scope| scope.as_str()).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it has at least one of these.
    pub fn has_any(&self, wanted: &[Scope]) -> bool {
        wanted.iter().any(|scope| self.0.contains(scope))
    }

    /// The scopes of `other` that it lacks.
    pub fn missing(&self, other: &Self) -> Vec<&'static str> {
        other.0.difference(&self.0).map(|scope| scope.as_str()).collect()
    }
}

impl FromIterator<Scope> for Scopes {
    fn from_iter<I: IntoIterator<Item = Scope>>(scopes: I) -> Self {
        Self(scopes.into_iter().collect())
    }
}

/// The caller of a route for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operator {
    /// The holder of `PLATFORM_SECRET`: the first admin, and the callers of the specification.
    PlatformSecret,
    Named {
        name: OperatorName,
        scopes: Scopes,
    },
}

impl Operator {
    /// The caller's name in the audit.
    pub fn actor(&self) -> &str {
        match self {
            Self::PlatformSecret => PLATFORM_SECRET_ACTOR,
            Self::Named { name, .. } => name.as_str(),
        }
    }

    pub fn scopes(&self) -> Scopes {
        match self {
            Self::PlatformSecret => Scopes::all(),
            Self::Named { scopes, .. } => scopes.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scopes(all: &[Scope]) -> Scopes {
        all.iter().copied().collect()
    }

    #[test]
    fn scope_round_trips_through_its_name() {
        for scope in Scope::ALL {
            assert_eq!(scope.as_str().parse(), Ok(scope));
        }
        assert!("root".parse::<Scope>().unwrap_err().contains("read, operate, billing, metrics, admin"));
    }

    #[test]
    fn admin_scope_implies_no_other_scope() {
        let admin = scopes(&[Scope::Admin]);
        assert!(!admin.has_any(&[Scope::Read, Scope::Operate, Scope::Billing, Scope::Metrics]));
        assert_eq!(admin.missing(&scopes(&[Scope::Admin, Scope::Operate])), ["operate"]);
        assert!(Scopes::all().missing(&scopes(&Scope::ALL)).is_empty());
    }

    #[test]
    fn stored_scopes_of_later_releases_are_ignored() {
        assert_eq!(Scopes::from_stored(["read", "fly"]), scopes(&[Scope::Read]));
        assert!(Scopes::from_stored(["fly"]).is_empty());
    }

    #[test]
    fn operator_names_exclude_reserved_actors() {
        for taken in [PLATFORM_SECRET_ACTOR, "platform", "machine:x"] {
            assert!(taken.parse::<OperatorName>().is_err(), "{taken}");
        }
    }
}
