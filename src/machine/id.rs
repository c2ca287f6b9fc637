//! The ids of machines, operations and other records: distinct UUID types, ordered by time (v7).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be a UUID such as 01890a5d-ac96-774b-bcce-b302099a8057")]
pub struct InvalidId;

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            pub fn new() -> Self {
                Self(Uuid::now_v7())
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                // Accept only the hyphenated format; the parser would accept others.
                if text.len() != 36 {
                    return Err(InvalidId);
                }
                text.parse().map(Self).map_err(|_| InvalidId)
            }
        }
    };
}

uuid_id!(
    /// Identifies a machine: a row in `user_machines`, which holds a slot until it is replaced or deleted.
    MachineId
);
uuid_id!(
    /// Identifies a rollout of a release to many machines.
    RolloutId
);
uuid_id!(
    /// Identifies a persisted operation on a machine.
    OperationId
);
uuid_id!(
    /// Identifies an operator's token.
    OperatorTokenId
);
uuid_id!(
    /// Identifies an entry in the operators' audit log.
    AuditId
);
