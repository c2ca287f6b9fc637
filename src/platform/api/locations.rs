//! Where a new machine's server is created: the location that is asked for, and those to fall back to.

use crate::http::fields::Fields;
use crate::http::problem::{Problem, chain};
use crate::machine::name::Location;
use crate::platform::config::MAX_FALLBACK_LOCATIONS;
use crate::platform::context::Platform;

/// The locations of a request; `None` where it leaves the choice to the platform.
#[derive(Debug, Clone, Default)]
pub struct AskedLocations {
    pub location: Option<Location>,
    pub fallback: Option<Vec<Location>>,
}

impl AskedLocations {
    pub fn read(fields: &mut Fields) -> Self {
        let name = "fallbackLocations";
        let location = fields.optional("location");
        let is_given = fields.has(name);
        let names = fields.strings(name, MAX_FALLBACK_LOCATIONS);
        let fallback = names.iter().map(|name| name.parse()).collect::<Result<Vec<Location>, _>>();
        let fallback = fallback.inspect_err(|why| fields.wrong(name, why)).ok().filter(|_| is_given);
        Self { location, fallback }
    }

    /// Refuses what is no location of the provider. A provider that does not answer now decides nothing: it is asked
    /// again for the server itself.
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
                    let detail = format!("{location} is no location of the provider");
                    return Err(Problem::field(pointer, detail));
                }
                Err(error) => {
                    tracing::warn!(%location, error = %chain(&error), "whether the provider has a location is not known");
                }
            }
        }
        Ok(())
    }

    /// The platform's unless the request names its own; never the location itself.
    pub fn fallback_of(&self, platform: &Platform, location: &Location) -> Vec<Location> {
        let fallback = self.fallback.as_ref().unwrap_or(&platform.config.provisioning.fallback_locations);
        fallback.iter().filter(|other| *other != location).cloned().collect()
    }
}
