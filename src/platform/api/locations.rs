//! Locations for a new machine's server: the requested one, and fallbacks.

use crate::config::MAX_FALLBACK_LOCATIONS;
use crate::context::Platform;
use svc_http::fields::Fields;
use svc_http::problem::{Problem, chain};
use svc_machine::name::Location;

/// The locations of a request; `None` means the platform's default.
#[derive(Debug, Clone, Default)]
pub struct RequestedLocations {
    pub location: Option<Location>,
    pub fallback: Option<Vec<Location>>,
}

impl RequestedLocations {
    pub fn read(fields: &mut Fields) -> Self {
        let name = "fallbackLocations";
        let location = fields.optional("location");
        let is_given = fields.has(name);
        let names = fields.strings(name, MAX_FALLBACK_LOCATIONS);
        let fallback = names.iter().map(|name| name.parse()).collect::<Result<Vec<Location>, _>>();
        let fallback = fallback.inspect_err(|why| fields.wrong(name, why)).ok().filter(|_| is_given);
        Self { location, fallback }
    }

    /// Rejects unknown locations. An unreachable provider passes the check, because the order of the server checks again.
    ///
    /// # Errors
    /// `invalid_request`.
    pub async fn check(&self, platform: &Platform) -> Result<(), Problem> {
        let fallback = self.fallback.iter().flatten().map(|location| ("/fallbackLocations", location));
        for (pointer, location) in
            self.location.iter().map(|location| ("/location", location)).chain(fallback)
        {
            match platform.provider.has_location(location).await {
                Ok(true) => {}
                Ok(false) => {
                    let detail = format!("{location} is not a location of the provider");
                    return Err(Problem::field(pointer, detail));
                }
                Err(error) => {
                    tracing::warn!(%location, error = %chain(&error), "cannot check the location with the provider");
                }
            }
        }
        Ok(())
    }

    /// The requested fallbacks, or the platform's; without the location itself.
    pub fn fallback_for(&self, platform: &Platform, location: &Location) -> Vec<Location> {
        let fallback = self.fallback.as_ref().unwrap_or(&platform.config.provisioning.fallback_locations);
        fallback.iter().filter(|other| *other != location).cloned().collect()
    }
}
