//! The operators that call the control API, and their scopes. Pure: tokens are verified in `api::access`.
//!
//! Scopes are a plain set: none implies another, and an operator can grant only scopes that they have.

use std::collections::BTreeSet;

use svc_machine::name::OperatorName;
use svc_wire::operator::Scope;
use svc_wire::text::Text;

/// The audit's name for callers with `PLATFORM_SECRET`. No operator can have this name.
pub const PLATFORM_SECRET_ACTOR: &str = "operator";

/// The scopes of one operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scopes(BTreeSet<Scope>);

impl Scopes {
    pub fn all() -> Self {
        Self(Scope::ALL.into())
    }

    /// The scopes stored under these names. An unknown one, of a later release, grants nothing.
    pub fn from_stored<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        Self(names.into_iter().filter_map(|name| name.parse().ok()).collect())
    }

    /// The scopes as the API shows them.
    pub fn texts(&self) -> Vec<Text<Scope>> {
        self.0.iter().map(Into::into).collect()
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
        assert!("root".parse::<Scope>().is_err());
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
