//! Ids of machines and operations: UUIDs of their own type, made in time order (v7).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be a UUID, as 01890a5d-ac96-774b-bcce-b302099a8057 is")]
pub struct NotAnId;

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
            type Err = NotAnId;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                // The one form that we write; the parser knows more of them.
                if text.len() != 36 {
                    return Err(NotAnId);
                }
                text.parse().map(Self).map_err(|_| NotAnId)
            }
        }
    };
}

uuid_id!(
    /// One server life of a slot: a row of `user_machines`.
    MachineId
);
uuid_id!(
    /// One release for many machines.
    RolloutId
);
uuid_id!(
    /// One persisted operation on a machine.
    OperationId
);
uuid_id!(
    /// One token of an operator.
    OperatorTokenId
);
uuid_id!(
    /// One entry of the operators' audit.
    AuditId
);
