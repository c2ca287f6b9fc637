//! Text view of a `provision` quote: the machine to create, its cost, and the quota.

use super::human::{format_ago, format_time};
use super::table::{self, Cell};
use super::{Color, View};
use svc_wire::fleet::{Exercise, Exercises};
use svc_wire::quote::{LocationCost, ProvisionQuote};

/// Formats the cost as `9.5081 EUR a month (cpx22 in nbg1)` or, for several locations, `up to 11.90 EUR a month (cpx22
/// in nbg1 or ash)`.
pub fn cost(quote: &ProvisionQuote) -> String {
    let cost = quote.monthly_cost.as_ref().map_or("no cost", |cost| cost.as_str());
    let (prefix, locations) = match &quote.costs[..] {
        several @ [_, _, ..] => {
            let names: Vec<_> = several.iter().map(|cost| cost.location.as_str()).collect();
            ("up to ", names.join(" or "))
        }
        _ => ("", quote.location.to_string()),
    };
    format!("{prefix}{cost} a month ({} in {locations})", quote.server_type)
}

pub fn show(view: &View, quote: &ProvisionQuote) -> String {
    let named_or = |name: Option<&str>, unnamed: &str| name.unwrap_or(unnamed).to_owned();
    let environment = named_or(quote.environment.as_deref(), "not named (PLATFORM_ENVIRONMENT)");
    let project = named_or(quote.provider_project.as_deref(), "not named (PROVIDER_PROJECT)");
    let existing = quote.existing.as_ref();
    let existing = existing.map(|machine| format!("{} is {}", machine.machine_id, machine.status));
    let release = quote.image_version.as_ref().map(|version| format!(", release {version}"));
    let machine = format!(
        "{} in {}, {}, handle {}{}",
        quote.server_type,
        quote.location,
        quote.kind,
        quote.handle,
        release.unwrap_or_default()
    );
    let mut text = table::render_pairs(
        view,
        &[
            (
                "environment",
                Cell::colored(Some(Color::Strong), format!("{environment}, {}", quote.platform_url)),
            ),
            (
                "provider",
                Cell::colored(Some(Color::Strong), format!("{}, project {project}", quote.provider)),
            ),
            ("slot", format!("{}/{}", quote.idp_user_id, quote.slot).into()),
            ("subscription", subscription(view, quote).into()),
            ("existing", existing.unwrap_or_default().into()),
            ("machine", machine.into()),
        ],
    );
    let costs: Vec<_> = quote.costs.iter().map(|cost| ("cost", Cell::from(location_cost(cost)))).collect();
    text.push_str(&table::render_pairs(view, &costs));
    if !costs.is_empty() {
        let excluded = "object storage and extra traffic; no volume or provider backup is ordered";
        text.push_str(&table::render_pairs(view, &[("not included", excluded.into())]));
    }
    text.push_str(&table::render_pairs(
        view,
        &[("quota", quota(quote).into()), ("exercised", exercises(view, &quote.exercises).into())],
    ));
    for warning in warnings(quote) {
        text.push_str(&format!("{} {warning}\n", view.paint(Some(Color::Warning), "warning:")));
    }
    text
}

fn subscription(view: &View, quote: &ProvisionQuote) -> String {
    let description = match &quote.subscription {
        None => "none".to_owned(),
        Some(subscription) => {
            let end = subscription.current_period_end.as_ref();
            let end =
                end.map(|end| format!(", paid until {}", format_time(view.now, end))).unwrap_or_default();
            let purpose = if subscription.test { ", a test slot" } else { "" };
            format!("{}, {}{end}{purpose}", subscription.plan, subscription.status)
        }
    };
    if quote.billing_enforced { description } else { format!("{description} (not enforced)") }
}

/// Formats a location's cost as
/// `nbg1: 10.1031 EUR a month with VAT, 8.49 EUR without: server 9.5081 EUR, public IPv4 0.595 EUR`.
fn location_cost(cost: &LocationCost) -> String {
    let LocationCost { location, server, public_ipv4, total, total_net } = cost;
    let address = public_ipv4.as_ref().map(|price| format!(", public IPv4 {price}")).unwrap_or_default();
    format!("{location}: {total} a month with VAT, {total_net} without: server {server}{address}")
}

fn quota(quote: &ProvisionQuote) -> String {
    match (quote.servers, quote.server_limit) {
        (None, _) => String::new(),
        (Some(servers), Some(limit)) if servers < limit => {
            format!("{servers} of {limit} servers in use; one more fits")
        }
        (Some(servers), Some(limit)) => {
            format!(
                "{servers} of {limit} servers; the replacement of a failed machine may exceed the limit by one"
            )
        }
        (Some(servers), None) => format!(
            "{servers} servers; the limit is unknown: check it at the provider, and set PROVIDER_SERVER_LIMIT"
        ),
    }
}

/// Formats the last exercises as `recovery 12 d ago, rollback never`.
pub fn exercises(view: &View, exercises: &Exercises) -> String {
    let last = |exercise: &Exercise| match &exercise.last_at {
        Some(at) => format_ago(view.now, at),
        None => "never".to_owned(),
    };
    format!("recovery {}, rollback {}", last(&exercises.recovery), last(&exercises.rollback))
}

/// Returns warnings for exercises that are due.
pub fn warnings(quote: &ProvisionQuote) -> Vec<String> {
    let Exercises { recovery, rollback } = &quote.exercises;
    [("recovery", recovery, "`svcctl recover`"), ("rollback", rollback, "`svcctl delete` or `svcctl fail`")]
        .into_iter()
        .filter(|(_, exercise, _)| !exercise.is_current)
        .map(|(name, _, command)| {
            format!(
                "a {name} has not been exercised on a test slot in the last 90 days: exercise it before you add \
                 many users (run `svcctl slot set USER --plan PLAN --test`, `svcctl provision`, then {command})"
            )
        })
        .collect()
}
