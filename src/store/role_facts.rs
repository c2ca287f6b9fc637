//! What a server knows of a role besides its rights in a database, as a side record keeps it: attributes, settings,
//! memberships. Never a password.

use serde::{Deserialize, Serialize};

/// One role of the server that a snapshot was taken of.
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
    /// -1: none.
    pub connection_limit: i32,
    /// As PostgreSQL writes it; `None`: for ever.
    pub valid_until: Option<String>,
    /// `ALTER ROLE … SET`, for every database.
    pub settings: Vec<RoleSetting>,
    pub member_of: Vec<Membership>,
}

impl Default for RoleFacts {
    /// As `CREATE ROLE` makes one.
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

/// A value that sessions of a role begin with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RoleSetting {
    pub name: String,
    pub value: String,
}

/// `GRANT role TO …`, with its options.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Membership {
    pub role: String,
    pub admin: bool,
    pub inherit: bool,
    pub set: bool,
}
