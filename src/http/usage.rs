//! The query parameters for a usage report, which hosts serve to owners and the platform serves to operators.
//!
//! `svc_wire::usage` defines the report; the host computes its sums.

use jiff::civil::Date;
use serde_json::{Value, json};
use strum::{EnumString, IntoStaticStr, VariantNames};

use super::fields::Fields;
use super::openapi::{Parameter, ParameterLocation, string_enum, text_up_to};
use svc_machine::choice::must_be_one_of;

/// Maximum length of the id of a user or channel.
pub const MAX_USER_ID_CHARS: usize = 256;

/// How a report is grouped.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum, EnumString, IntoStaticStr, VariantNames,
)]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = unknown_group)]
pub enum GroupBy {
    #[default]
    Day,
    /// Weeks begin on Monday
    Week,
    Month,
    Model,
    User,
}

impl GroupBy {
    pub const NAMES: &'static [&'static str] = <Self as VariantNames>::VARIANTS;

    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

fn unknown_group(_: &str) -> String {
    must_be_one_of(GroupBy::NAMES)
}

/// Selects the usage that a report covers, and its grouping.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsageQuery {
    pub user_id: Option<String>,
    /// The first day.
    pub start: Option<Date>,
    /// The last day (inclusive).
    pub end: Option<Date>,
    pub group_by: GroupBy,
}

impl UsageQuery {
    /// Parses the parameters; errors are recorded in `query`.
    pub fn read(query: &mut Fields) -> Self {
        let user_id = query.optional_text("userId", MAX_USER_ID_CHARS);
        let (start, end) = (parse_date(query, "startDate"), parse_date(query, "endDate"));
        let group_by: Option<GroupBy> = query.optional("groupBy");
        if let (Some(start), Some(end)) = (start, end)
            && start > end
        {
            query.add_error("endDate", "must not be before startDate");
        }
        Self { user_id, start, end, group_by: group_by.unwrap_or_default() }
    }

    /// Returns the parameters in the format that [`Self::read`] parses.
    pub fn pairs(&self) -> Vec<(&'static str, String)> {
        let optional_pairs = [
            ("userId", self.user_id.clone()),
            ("startDate", self.start.map(|day| day.to_string())),
            ("endDate", self.end.map(|day| day.to_string())),
            ("groupBy", Some(self.group_by.as_str().to_owned())),
        ];
        optional_pairs.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
    }
}

/// Parses a day in the format `2026-11-22`.
fn parse_date(query: &mut Fields, name: &str) -> Option<Date> {
    let text: String = query.optional(name)?;
    let date = text.parse::<Date>().ok().filter(|date| date.to_string() == text);
    if date.is_none() {
        query.add_error(name, "must be a date such as 2026-11-22");
    }
    date
}

fn date_schema() -> Value {
    json!({ "type": "string", "format": "date" })
}

pub const USER_ID: Parameter = Parameter {
    name: "userId",
    location: ParameterLocation::Query,
    schema: || text_up_to(MAX_USER_ID_CHARS),
    description: "Only this user or channel.",
};
pub const START_DATE: Parameter = Parameter {
    name: "startDate",
    location: ParameterLocation::Query,
    schema: date_schema,
    description: "The first day.",
};
pub const END_DATE: Parameter = Parameter {
    name: "endDate",
    location: ParameterLocation::Query,
    schema: date_schema,
    description: "The last day (inclusive).",
};
pub const GROUP_BY: Parameter = Parameter {
    name: "groupBy",
    location: ParameterLocation::Query,
    schema: || string_enum(GroupBy::NAMES),
    description: "Grouping of the entries; default: day.",
};

#[cfg(test)]
mod tests {
    use url::form_urlencoded::Serializer;

    use super::*;

    fn read(query: &str) -> Result<UsageQuery, String> {
        let mut fields = Fields::from_query(query);
        let parsed = UsageQuery::read(&mut fields);
        fields.finish(Some(parsed)).map_err(|problem| problem.detail)
    }

    #[test]
    fn query_round_trips_through_pairs() {
        let query = UsageQuery {
            user_id: Some("telegram:7&x=1 ü".to_owned()),
            start: Some("2026-11-01".parse().unwrap()),
            end: Some("2026-11-30".parse().unwrap()),
            group_by: GroupBy::Model,
        };
        for query in [query, UsageQuery::default()] {
            let text = Serializer::new(String::new()).extend_pairs(query.pairs()).finish();
            assert_eq!(read(&text), Ok(query));
        }
        for &name in GroupBy::NAMES {
            assert_eq!(name.parse::<GroupBy>().unwrap().as_str(), name);
        }
    }

    #[test]
    fn query_names_each_invalid_parameter() {
        for (query, expected) in [
            ("startDate=yesterday", "?startDate: must be a date"),
            ("endDate=2026-02-30", "?endDate: must be a date"),
            ("startDate=2026-11-02&endDate=2026-11-01", "?endDate: must not be before startDate"),
            ("groupBy=hour", "?groupBy: must be day, week"),
            ("userId=", "?userId: must have 1 to 256"),
            ("other=1", "?other: is not a field"),
        ] {
            let error = read(query).unwrap_err();
            assert!(error.contains(expected), "{query}: {error}");
        }
    }
}
