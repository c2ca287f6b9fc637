//! Settings for new machines and for the provider that creates their servers.

use std::num::NonZeroU64;
use std::time::Duration;

use secrecy::SecretString;
use url::Url;

use super::read_seconds;
use crate::vars;
use svc_base::config::{Env, Flag};
use svc_base::variable::Variable;
use svc_machine::name::{ImageVersion, Location, ServerType};

pub struct Provisioning {
    pub enabled: Flag,
    pub billing_enforcement: Flag,
    /// Whether a request that incurs new costs must confirm them: one that provisions a new customer, or one that
    /// replaces a failed machine with a machine of a different server type.
    pub confirmation: Flag,
    /// The environment's name, shown to operators.
    pub environment: Option<String>,
    pub image_version: ImageVersion,
    pub server_type: ServerType,
    pub location: Location,
    /// The locations to try, in this order, if the provider has no capacity in the requested location.
    pub fallback_locations: Vec<Location>,
    pub preview_max_per_owner: u32,
    pub preview_ttl: Duration,
}

pub struct ProviderConfig {
    pub api_url: Url,
    pub token: SecretString,
    /// The project's name, shown to operators.
    pub project: Option<String>,
    /// Maximum number of servers in the project.
    pub server_limit: Option<u64>,
    pub image: String,
    /// How long a server may take to appear after a create request that received no response.
    pub unconfirmed_create_timeout: Duration,
}

/// Maximum length of the environment and project names.
const MAX_NAME_CHARS: usize = 64;

/// Maximum number of fallback locations per machine.
pub const MAX_FALLBACK_LOCATIONS: usize = 8;

pub(super) fn read_provisioning(env: &mut Env) -> Option<Provisioning> {
    let enabled = env.flag(&vars::CUSTOMER_VPS_ENABLED);
    let billing_enforcement = env.flag(&vars::BILLING_ENFORCEMENT);
    let confirmation = env.flag(&vars::PROVISION_CONFIRMATION);
    let environment = read_short_name(env, &vars::PLATFORM_ENVIRONMENT);
    let image_version = env.required(&vars::CUSTOMER_VPS_IMAGE_VERSION);
    let server_type = read_or_default(env, &vars::PROVIDER_SERVER_TYPE);
    let location = read_or_default(env, &vars::PROVIDER_LOCATION);
    let fallback_locations = read_fallback_locations(env);
    let preview_max_per_owner = env.or_default(&vars::PREVIEW_MAX_PER_OWNER);
    let preview_ttl =
        Duration::from_secs(env.or_default::<u64>(&vars::PREVIEW_TTL_HOURS).saturating_mul(3600));
    Some(Provisioning {
        enabled,
        billing_enforcement,
        confirmation,
        environment,
        image_version: image_version?,
        server_type: server_type?,
        location: location?,
        fallback_locations: fallback_locations?,
        preview_max_per_owner,
        preview_ttl,
    })
}

/// Reads a list such as `nbg1,hel1`, in the order in which the locations are tried.
fn read_fallback_locations(env: &mut Env) -> Option<Vec<Location>> {
    let variable = &vars::PROVIDER_FALLBACK_LOCATIONS;
    let text = env.text(variable).unwrap_or_default();
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    match names.map(str::parse).collect::<Result<Vec<Location>, _>>() {
        Ok(locations) if locations.len() <= MAX_FALLBACK_LOCATIONS => Some(locations),
        Ok(_) => {
            env.add_error(variable, format!("must name at most {MAX_FALLBACK_LOCATIONS} locations"));
            None
        }
        Err(error) => {
            env.add_error(variable, error);
            None
        }
    }
}

fn read_or_default<T: std::str::FromStr<Err: std::fmt::Display>>(
    env: &mut Env,
    variable: &Variable,
) -> Option<T> {
    if env.is_set(variable) { env.optional(variable) } else { Some(variable.default_value()) }
}

pub(super) fn read_provider(env: &mut Env) -> Option<ProviderConfig> {
    let api_url = match env.is_set(&vars::PROVIDER_API_URL) {
        true => env.web_url(&vars::PROVIDER_API_URL),
        false => Some(vars::PROVIDER_API_URL.default_value()),
    };
    let token = env.required_secret(&vars::PROVIDER_API_TOKEN);
    let project = read_short_name(env, &vars::PROVIDER_PROJECT);
    let server_limit = env.optional(&vars::PROVIDER_SERVER_LIMIT).map(NonZeroU64::get);
    let image = env.or_default(&vars::PROVIDER_IMAGE);
    let unconfirmed_create_timeout = read_seconds(env, &vars::PROVIDER_AMBIGUOUS_WAIT_SECONDS);
    Some(ProviderConfig {
        api_url: api_url?,
        token: token?,
        project,
        server_limit,
        image,
        unconfirmed_create_timeout,
    })
}

/// Reads a name that is shown to operators on one line.
fn read_short_name(env: &mut Env, variable: &Variable) -> Option<String> {
    let name = env.text(variable)?;
    if name.chars().count() > MAX_NAME_CHARS || name.chars().any(char::is_control) {
        env.add_error(variable, format!("must have at most {MAX_NAME_CHARS} characters, on one line"));
        return None;
    }
    Some(name)
}
