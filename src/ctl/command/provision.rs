//! `svcctl provision`: shows a new machine's cost and quota, prompts for confirmation, and creates the machine.

use anyhow::anyhow;
use http::{Method, StatusCode};
use serde_json::{Map, Value, json};

use super::machine::{
    insert_flag, insert_if_some, insert_list, into_object, print_outcome, slot_data_at_risk,
};
use super::risk;
use crate::api::{ApiClient, ApiResponse, CallError};
use crate::args::{CostLimit, Provision};
use crate::confirm;
use crate::output::Output;
use crate::show::View;
use crate::show::quote;
use svc_base::applet::{Exit, Failure};
use svc_wire::change::ProvisionedMachine;
use svc_wire::quote::{Price, ProvisionQuote};
use svc_wire::text::WireString;

const CONFIRMATION_WORD: &str = "yes";

pub async fn run(api: &ApiClient, args: Provision, out: &Output) -> Result<(), Failure> {
    if !args.dry_run
        && let Some(effect) = risk::provision_risk(&args)
        && confirm::is_required(&effect, args.yes)?
    {
        let at_risk = slot_data_at_risk(api, &args.user, &args.slot).await?;
        confirm::prompt(&format!("{effect}{at_risk}"), args.user.as_str())?;
    }
    let mut body = request_body(&args);
    let quote = fetch_quote(api, &body).await?;
    if args.dry_run {
        let response = quote.ok_or_else(|| {
            let error =
                anyhow!("the platform's release is too old for --dry-run\n  next: update the platform");
            Failure::new(Exit::Unavailable, error)
        })?;
        return out.print_response(&response, |view| Ok(quote::show(view, &response.parse()?)));
    }
    let quote: Option<ProvisionQuote> = quote.map(|response| response.parse()).transpose()?;
    confirm_cost_and_opt_in(&args, quote.as_ref())?;
    if let Some(quote) = quote.as_ref().filter(|quote| needs_cost_confirmation(quote)) {
        insert_if_some(&mut body, "confirmedMonthlyCost", quote.monthly_cost.clone());
        insert_flag(&mut body, "confirmedOptIn", quote.adds_customer);
    }
    let response = api.send(Method::POST, &["vps", "provision"], Some(&body.into())).await?;
    print_outcome::<ProvisionedMachine>(api, response, args.wait, out).await
}

fn request_body(args: &Provision) -> Map<String, Value> {
    let mut body = into_object(json!({"idpUserId": args.user, "slot": args.slot, "handle": args.handle}));
    insert_if_some(&mut body, "serverType", args.server_type.clone());
    insert_if_some(&mut body, "location", args.location.clone());
    insert_list(&mut body, "fallbackLocations", &args.fallback_locations);
    insert_if_some(&mut body, "imageVersion", args.image_version.clone());
    if args.preview {
        body.insert("kind".to_owned(), "preview".into());
    }
    insert_flag(&mut body, "acceptLoss", args.accept_loss);
    insert_flag(&mut body, "allowEmpty", args.allow_empty);
    body
}

/// Fetches the quote, or `None` if the platform predates this route.
async fn fetch_quote(api: &ApiClient, body: &Map<String, Value>) -> Result<Option<ApiResponse>, CallError> {
    let body = Value::Object(body.clone());
    match api.send(Method::POST, &["vps", "provision", "quote"], Some(&body)).await {
        Ok(response) => Ok(Some(response)),
        Err(CallError::Problem(problem))
            if matches!(problem.status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED)
                && matches!(problem.code.as_deref(), Some("not_found" | "method_not_allowed")) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Whether the cost must be confirmed. Older platforms only report whether the request adds a customer.
fn needs_cost_confirmation(quote: &ProvisionQuote) -> bool {
    quote.adds_customer || quote.needs_cost_confirmation
}

/// If the request adds a customer or changes a customer's server type, prompts for any confirmation not given as an
/// option.
fn confirm_cost_and_opt_in(args: &Provision, quote: Option<&ProvisionQuote>) -> Result<(), Failure> {
    let adds_customer = quote.map_or(!args.preview, |quote| quote.adds_customer);
    if !adds_customer && !quote.is_some_and(needs_cost_confirmation) {
        return Ok(());
    }
    let price = match quote {
        Some(quote) => quote::cost(quote),
        None => "a cost that this platform's release does not report".to_owned(),
    };
    let effect = if adds_customer {
        format!("This adds the customer {} (slot {}), at {price}.", args.user, args.slot)
    } else {
        format!(
            "This replaces the machine of {} (slot {}) with one of a different server type, at {price}.",
            args.user, args.slot
        )
    };
    let cost_limit = args.confirm_cost.as_ref();
    if let Some(CostLimit::AtMost(limit)) = cost_limit {
        check_cost(&effect, quote.and_then(|quote| quote.monthly_cost.as_ref()), limit)?;
    }
    let (needs_cost, needs_opt_in) = (cost_limit.is_none(), adds_customer && !args.confirm_opt_in);
    let missing: Vec<_> = [("--confirm-cost", needs_cost), ("--confirm-opt-in", needs_opt_in)]
        .into_iter()
        .filter_map(|(option, is_missing)| is_missing.then_some(option))
        .collect();
    let is_prompted = confirm::is_required_without(&effect, &missing)?;
    match quote {
        Some(quote) if is_prompted => eprint!("{}", quote::show(&View::for_stdout(), quote)),
        _ => {
            eprintln!("{effect}");
            let warnings = quote.map(quote::warnings).unwrap_or_default();
            warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
        }
    }
    if needs_cost {
        confirm::prompt(&format!("\nYou accept the monthly cost: {price}."), CONFIRMATION_WORD)?;
    }
    if needs_opt_in {
        confirm::prompt(
            &format!("\nYou confirm that the customer {} has explicitly opted in.", args.user),
            CONFIRMATION_WORD,
        )?;
    }
    Ok(())
}

/// Checks the cost against the `--confirm-cost` limit.
///
/// # Errors
/// [`Exit::Refused`] if the cost is above the limit, in a different currency, or unknown.
fn check_cost(effect: &str, cost: Option<&WireString<Price>>, limit: &Price) -> Result<(), Failure> {
    let cost = cost.and_then(|cost| cost.as_str().parse::<Price>().ok());
    match cost {
        Some(cost) if cost.currency == limit.currency && cost.micros <= limit.micros => Ok(()),
        _ => {
            let error = anyhow!(
                "{effect} --confirm-cost accepts at most {limit}; nothing was done\n  next: run `svcctl \
                 provision --dry-run` to see the cost, then accept it with --confirm-cost"
            );
            Err(Failure::new(Exit::Refused, error))
        }
    }
}
