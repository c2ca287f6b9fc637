//! Subscription plans and the server types that each includes.

use serde::{Deserialize, Serialize};

use super::choice::must_be_one_of;
use super::name::ServerType;

/// A subscription plan (specification, part 1.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(
    strum::EnumString, strum::IntoStaticStr, strum::VariantArray, strum::VariantNames, strum::Display,
)]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = unknown_plan)]
pub enum Plan {
    Starter,
    Builder,
    Max,
}

impl Plan {
    pub const ALL: &'static [Self] = <Self as strum::VariantArray>::VARIANTS;
    pub const NAMES: &'static [&'static str] = <Self as strum::VariantNames>::VARIANTS;

    /// Returns the server types that this plan includes, smallest first.
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
        self.into()
    }
}

fn unknown_plan(_: &str) -> String {
    must_be_one_of(Plan::NAMES)
}
