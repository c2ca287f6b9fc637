//! The operators who call the control API, and their scopes. `api::access` verifies their tokens.
//!
//! Scopes are a plain set: no scope implies another, and an operator can grant only the scopes that they have.

use std::collections::BTreeSet;

use svc_machine::name::OperatorName;
use svc_wire::operator::Scope;
use svc_wire::text::WireString;

/// The name in the audit log for callers with `PLATFORM_SECRET`. No operator can have this name.
pub const PLATFORM_SECRET_ACTOR: &str = "operator";

/// An operator's scopes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scopes(BTreeSet<Scope>);

impl Scopes {
    pub fn all() -> Self {
        Self(Scope::ALL.into())
    }

    /// Parses stored scope names. An unknown name, which a later release may have stored, grants nothing.
    pub fn from_stored<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        Self(names.into_iter().filter_map(|name| name.parse().ok()).collect())
    }

    /// Returns the scopes in the form that the API returns.
    pub fn to_wire(&self) -> Vec<WireString<Scope>> {
        self.0.iter().map(Into::into).collect()
    }

    pub fn names(&self) -> Vec<&'static str> {
        self.0.iter().map(|scope| scope.as_str()).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether the set contains at least one of these scopes.
    pub fn has_any(&self, wanted: &[Scope]) -> bool {
        wanted.iter().any(|scope| self.0.contains(scope))
    }

    /// Returns the scopes in `requested` that this set lacks.
    pub fn missing(&self, requested: &Self) -> Vec<&'static str> {
        requested.0.difference(&self.0).map(|scope| scope.as_str()).collect()
    }
}

impl FromIterator<Scope> for Scopes {
    fn from_iter<I: IntoIterator<Item = Scope>>(scopes: I) -> Self {
        Self(scopes.into_iter().collect())
    }
}

/// The caller of an operator route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operator {
    /// A caller with `PLATFORM_SECRET`, who has every scope.
    PlatformSecret,
    Named {
        name: OperatorName,
        scopes: Scopes,
    },
}

impl Operator {
    /// Returns the caller's name in the audit log.
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

    fn scopes(list: &[Scope]) -> Scopes {
        list.iter().copied().collect()
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
    fn from_stored_ignores_unknown_scopes() {
        assert_eq!(Scopes::from_stored(["read", "fly"]), scopes(&[Scope::Read]));
        assert!(Scopes::from_stored(["fly"]).is_empty());
    }

    #[test]
    fn operator_name_cannot_be_reserved_actor() {
        for reserved in [PLATFORM_SECRET_ACTOR, "platform", "machine:x"] {
            assert!(reserved.parse::<OperatorName>().is_err(), "{reserved}");
        }
    }
}
