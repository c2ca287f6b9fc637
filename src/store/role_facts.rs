//! Facts about the roles on a PostgreSQL server, as recorded in a sidecar: attributes, settings and memberships, but no
//! passwords.

use serde::{Deserialize, Serialize};

/// A role on the server from which a snapshot was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RoleFacts {
    pub name: String,
    pub superuser: bool,
    pub login: bool,
    pub inherit: bool,
    pub create_database: bool,
    pub create_role: bool,
    pub replication: bool,
    pub bypass_rls: bool,
    /// -1 means no limit.
    pub connection_limit: i32,
    /// When the role's password expires, in PostgreSQL's format; `None` for no expiry.
    pub valid_until: Option<String>,
    /// Set by `ALTER ROLE … SET` for all databases.
    pub settings: Vec<RoleSetting>,
    pub member_of: Vec<Membership>,
}

impl Default for RoleFacts {
    /// Returns the defaults of `CREATE ROLE`.
    fn default() -> Self {
        Self {
            name: String::new(),
            superuser: false,
            login: false,
            inherit: true,
            create_database: false,
            create_role: false,
            replication: false,
            bypass_rls: false,
            connection_limit: -1,
            valid_until: None,
            settings: Vec::new(),
            member_of: Vec::new(),
        }
    }
}

/// A default setting for a role's sessions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RoleSetting {
    pub name: String,
    pub value: String,
}

/// A membership granted by `GRANT role TO …`, with its options.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Membership {
    pub role: String,
    pub admin: bool,
    pub inherit: bool,
    pub set: bool,
}
