//! Who calls the control API as an operator, and what each may do. Pure: tokens are verified in `api::access`.
//!
//! Scopes are a plain set: none implies another, and an operator gives only scopes that they have themselves.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::machine::name::OperatorName;

/// What the audit calls a caller with `PLATFORM_SECRET`. No operator can have this name.
pub const PLATFORM_SECRET_ACTOR: &str = "operator";

/// What a route needs of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Machines, operations, rollouts and the audit, but no owner's data.
    Read,
    /// Changes of machines, and their snapshots.
    Operate,
    /// Subscriptions, and what owners have used.
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

    /// The scopes that are stored under these names. One that only a later release knows gives no right here.
    pub fn from_stored<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        Self(names.into_iter().filter_map(|name| name.parse().ok()).collect())
    }

    pub fn names(&self) -> Vec<&'static str> {
        self.0.iter().map(|scope| scope.as_str()).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether one of these is among them.
    pub fn has_any(&self, wanted: &[Scope]) -> bool {
        wanted.iter().any(|scope| self.0.contains(scope))
    }

    /// Those of `other` that are not among them.
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
    /// Who has `PLATFORM_SECRET`: the first admin, and the callers of the specification.
    PlatformSecret,
    Named {
        name: OperatorName,
        scopes: Scopes,
    },
}

impl Operator {
    /// As the audit names them.
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
    fn scope_reads_back_from_its_name() {
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
    fn stored_scopes_of_later_releases_give_no_right() {
        assert_eq!(Scopes::from_stored(["read", "fly"]), scopes(&[Scope::Read]));
        assert!(Scopes::from_stored(["fly"]).is_empty());
    }

    #[test]
    fn no_operator_can_have_an_actor_name_of_ours() {
        for taken in [PLATFORM_SECRET_ACTOR, "platform", "machine:x"] {
            assert!(taken.parse::<OperatorName>().is_err(), "{taken}");
        }
    }
}
