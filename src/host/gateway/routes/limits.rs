//! `/api/limits`: cost limits and current spending. The owner and admins can change the limits.

use std::sync::{Arc, PoisonError};

use axum::Json;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use http::{HeaderMap, Method};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::auth::{Caller, OWNER_OR_ADMIN, Principal, PrincipalResolver, READERS};
use crate::body;
use crate::endpoint::{DEFAULT_MAX_BODY_BYTES, Endpoint, documented_json};
use crate::writers::Writers;
use svc_base::clock::{now_ms, rfc3339_ms};
use svc_base::fsx::{self, FileError};
use svc_host::agents::kernel::Kernel;
use svc_host::agents::owner_config;
use svc_host::agents::owner_config::OwnerSettings;
use svc_host::records::calendar::Calendar;
use svc_host::records::entry::{AuditEntry, FileOperation};
use svc_host::records::limits::{Period, Spending};
use svc_host::records::money::Dollars;
use svc_host::records::writer::LogFile;
use svc_host::system::blocking::run_blocking;
use svc_host::system::layout::Layout;
use svc_http::fields::Fields;
use svc_http::openapi::{
    Operation, Parameter, ParameterLocation, boolean, nullable, number, object, request_object, schema_ref,
    text, text_up_to, time,
};
use svc_http::problem::{Code, Problem};
use svc_http::usage::MAX_USER_ID_CHARS;

/// Maximum length of a time zone name.
const MAX_ZONE_CHARS: usize = 64;

/// `GET /api/limits`.
pub async fn show(
    State(kernel): State<Arc<Kernel>>,
    State(resolver): State<Arc<PrincipalResolver>>,
    Caller(caller): Caller,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, Problem> {
    let mut query = Fields::from_query(&query.unwrap_or_default());
    let user = query.optional_text("userId", MAX_USER_ID_CHARS);
    let user = query.finish(Some(user))?;
    Ok(Json(limits_json(&kernel, &user.unwrap_or_else(|| default_sender_id(&resolver, &caller))).await?))
}

/// Returns the default sender id for a caller's dispatches.
pub fn default_sender_id(resolver: &PrincipalResolver, caller: &Principal) -> String {
    match caller {
        Principal::Owner { sub } | Principal::OwnerProcess { sub } => sub.as_str().to_owned(),
        Principal::App { slug } => format!("app:{slug}"),
        Principal::Platform | Principal::Admin | Principal::Agent { .. } => {
            resolver.owner().as_str().to_owned()
        }
    }
}

async fn limits_json(kernel: &Kernel, user: &str) -> Result<Value, Problem> {
    kernel.wait_for_usage_store().await?;
    let (settings, now) = (kernel.settings(), Timestamp::now());
    let spending = kernel.spent(user, &settings, now)?;
    let [daily, monthly] = Period::ALL.map(|period| period_json(&settings, &spending, period, now));
    Ok(json!({
        "userId": user,
        "timeZone": settings.time_zone,
        "reservation": settings.limits.reservation,
        "daily": daily,
        "monthly": monthly,
        "mistake": settings.error,
    }))
}

fn period_json(settings: &OwnerSettings, spending: &Spending, period: Period, now: Timestamp) -> Value {
    let (limit, spent) = (settings.limits.for_period(period), spending.in_period(period));
    let is_limited = limit > Dollars::ZERO;
    let resets_at = match period {
        Period::Daily => settings.calendar.start_of_next_day(now),
        Period::Monthly => settings.calendar.start_of_next_month(now),
    };
    json!({
        "limit": limit,
        "spent": spent,
        "reserved": spending.reserved,
        "remaining": is_limited.then(|| limit.saturating_sub(spent + spending.reserved)),
        // At or above 80% of the limit.
        "warning": is_limited && spent >= limit.scaled(4, 5),
        "reached": is_limited && spent + spending.reserved >= limit,
        "resetsAt": rfc3339_ms(resets_at),
    })
}

/// Requested limit changes; `None` keeps the current value.
struct LimitsChange {
    daily: Option<Dollars>,
    monthly: Option<Dollars>,
    reservation: Option<Dollars>,
    time_zone: Option<String>,
}

/// `PUT /api/limits`: updates `system/config.json` and records the change in `audit.jsonl`.
pub async fn set(
    State(kernel): State<Arc<Kernel>>,
    State(resolver): State<Arc<PrincipalResolver>>,
    State(layout): State<Layout>,
    State(writers): State<Arc<Writers>>,
    Caller(caller): Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let mut fields = body::read_fields(&headers, body, DEFAULT_MAX_BODY_BYTES).await?;
    let change = LimitsChange {
        daily: read_dollars(&mut fields, "daily"),
        monthly: read_dollars(&mut fields, "monthly"),
        reservation: read_dollars(&mut fields, "reservation"),
        time_zone: read_time_zone(&mut fields),
    };
    let change = fields.finish(Some(change))?;
    // A change made after the final backup would be lost.
    let permit = writers.admit()?;
    let file = layout.settings();
    let records = kernel.records().clone();
    let lock = kernel.settings_lock();
    let changed = run_blocking(move || {
        // Held until the file is written, even if the client disconnects.
        let _permit = permit;
        let _guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let new_size_bytes = write_limits(&file, &change)?;
        if let Some(size_bytes) = new_size_bytes {
            // A dropped line is reported as a gap.
            let _ = records.append(LogFile::Audit, &audit_entry(size_bytes));
        }
        Ok::<_, FileError>(new_size_bytes.is_some())
    })
    .await?;
    if !changed {
        let detail = "system/config.json or its costLimits is not a JSON object: correct it and try again. \
                      Nothing was changed.";
        return Err(Problem::new(Code::Conflict, detail));
    }
    Ok(Json(limits_json(&kernel, &default_sender_id(&resolver, &caller)).await?))
}

fn read_dollars(fields: &mut Fields, name: &str) -> Option<Dollars> {
    let amount = fields.decimal(name)?;
    Dollars::from_f64(amount).map_err(|error| fields.add_error(name, error)).ok()
}

fn read_time_zone(fields: &mut Fields) -> Option<String> {
    let zone = fields.optional_text("timeZone", MAX_ZONE_CHARS)?;
    if Calendar::for_zone(&zone).is_err() {
        fields.add_error("timeZone", "must be a time zone such as Europe/Berlin");
    }
    Some(zone)
}

/// Returns the audit entry for the gateway's change to `system/config.json`, since the file watcher doesn't report
/// changes below `system`.
fn audit_entry(size_bytes: u64) -> AuditEntry {
    AuditEntry {
        version: AuditEntry::FORMAT_VERSION,
        timestamp: now_ms(),
        op: FileOperation::Write,
        path: "system/config.json".to_owned(),
        escaped: false,
        size_bytes,
        actor: "svc-gateway".to_owned(),
        agent_name: None,
        dispatch_id: None,
        tool: None,
        ambiguous: false,
    }
}

/// Updates the limits in the file, preserving everything else. Returns the new file size, or `None` if the file or its
/// `costLimits` isn't a JSON object, in which case the file is left unchanged.
fn write_limits(file: &std::path::Path, change: &LimitsChange) -> Result<Option<u64>, FileError> {
    let text = owner_config::read_config_file(file)?;
    let parsed = text.map_or(Ok(Value::Object(Map::new())), |text| serde_json::from_slice(&text));
    let Ok(Value::Object(mut settings)) = parsed else { return Ok(None) };
    let limits = settings.entry("costLimits").or_insert_with(|| json!({}));
    let Value::Object(limits) = limits else { return Ok(None) };
    for (name, amount) in
        [("daily", change.daily), ("monthly", change.monthly), ("reservation", change.reservation)]
    {
        if let Some(amount) = amount {
            limits.insert(name.to_owned(), json!(amount));
        }
    }
    if let Some(zone) = &change.time_zone {
        limits.insert("timeZone".to_owned(), json!(zone));
    }
    let mut text = serde_json::to_vec_pretty(&settings).expect("a JSON value can be serialized");
    text.push(b'\n');
    if let Some(dir) = file.parent() {
        std::fs::create_dir_all(dir).map_err(FileError::wrap("create directory", dir))?;
    }
    // Group-readable for the owner's programs.
    fsx::write_atomic(file, &text, 0o640)?;
    Ok(Some(text.len() as u64))
}

pub fn limits_schema() -> Value {
    let period = object(
        &[
            ("limit", number()),
            ("spent", number()),
            ("reserved", number()),
            ("remaining", nullable(number())),
            ("warning", boolean()),
            ("reached", boolean()),
            ("resetsAt", time()),
        ],
        &[],
    );
    object(
        &[
            ("userId", text()),
            ("timeZone", text()),
            ("reservation", number()),
            ("daily", period.clone()),
            ("monthly", period),
            ("mistake", nullable(text())),
        ],
        &[],
    )
}

pub static SHOW_LIMITS: Endpoint = Endpoint {
    operation: Operation {
        id: "showLimits",
        method: Method::GET,
        path: "/api/limits",
        summary: "A user's daily and monthly cost limits and current spending. 0 means no limit.",
        credentials: READERS,
        parameters: &[Parameter {
            name: "userId",
            location: ParameterLocation::Query,
            schema: || text_up_to(MAX_USER_ID_CHARS),
            description: "The user or channel; the default is the owner.",
        }],
        body: None,
        responses: &[documented_json(200, "The limits.", || schema_ref("Limits"))],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static SET_LIMITS: Endpoint = Endpoint {
    operation: Operation {
        id: "setLimits",
        method: Method::PUT,
        path: "/api/limits",
        summary: "Changes the limits, which apply to each user separately. Omitted fields keep their values.",
        credentials: OWNER_OR_ADMIN,
        parameters: &[],
        body: Some(|| {
            let amount = || json!({ "type": "number", "minimum": 0, "maximum": 1_000_000_000 });
            request_object(
                &[],
                &[
                    ("daily", amount()),
                    ("monthly", amount()),
                    ("reservation", amount()),
                    ("timeZone", text_up_to(MAX_ZONE_CHARS)),
                ],
            )
        }),
        responses: &[documented_json(200, "The new limits.", || schema_ref("Limits"))],
        problems: &[Code::Forbidden, Code::Unavailable, Code::Conflict],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};
