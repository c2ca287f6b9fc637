//! Reads and checks the requested locations for a new machine's server: the preferred one, and fallbacks.

use super::problems;
use crate::config::MAX_FALLBACK_LOCATIONS;
use crate::context::Platform;
use svc_http::fields::Fields;
use svc_http::problem::{Problem, format_chain};
use svc_machine::name::Location;

/// The locations in a request.
#[derive(Debug, Clone, Default)]
pub struct RequestedLocations {
    /// `None` means the replaced machine's location in a recovery, and otherwise the platform's default.
    pub location: Option<Location>,
    /// `None` means the platform's fallback locations.
    pub fallback: Option<Vec<Location>>,
}

impl RequestedLocations {
    pub fn read(fields: &mut Fields) -> Self {
        let name = "fallbackLocations";
        let location = fields.optional("location");
        let is_present = fields.has(name);
        let names = fields.strings(name, MAX_FALLBACK_LOCATIONS);
        let fallback = names.iter().map(|name| name.parse()).collect::<Result<Vec<Location>, _>>();
        let fallback =
            fallback.inspect_err(|error| fields.add_error(name, error)).ok().filter(|_| is_present);
        Self { location, fallback }
    }

    /// Rejects locations that the provider does not offer. If the provider cannot be queried, the check passes: the
    /// provider checks the location again when the server is created.
    ///
    /// # Errors
    /// `invalid_request` if the provider does not offer one of the locations.
    pub async fn ensure_known(&self, platform: &Platform) -> Result<(), Problem> {
        for (pointer, location) in self.locations_with_pointers() {
            ensure_offered(pointer, location, has_location(platform, location).await)?;
        }
        Ok(())
    }

    /// Like [`Self::ensure_known`], but uses the locations cached for quotes.
    ///
    /// # Errors
    /// Same as [`Self::ensure_known`].
    pub async fn ensure_known_for_quote(&self, platform: &Platform) -> Result<(), Problem> {
        for (pointer, location) in self.locations_with_pointers() {
            let is_offered = platform.quotes.has_location(location, has_location(platform, location)).await;
            ensure_offered(pointer, location, is_offered)?;
        }
        Ok(())
    }

    /// Returns the requested locations, each with the JSON pointer to its field.
    fn locations_with_pointers(&self) -> impl Iterator<Item = (&'static str, &Location)> {
        let fallback = self.fallback.iter().flatten().map(|location| ("/fallbackLocations", location));
        self.location.iter().map(|location| ("/location", location)).chain(fallback)
    }

    /// Returns the requested fallback locations, or the platform's, excluding `location` itself.
    pub fn fallback_for(&self, platform: &Platform, location: &Location) -> Vec<Location> {
        let fallback = self.fallback.as_ref().unwrap_or(&platform.config.provisioning.fallback_locations);
        fallback.iter().filter(|other| *other != location).cloned().collect()
    }

    /// Returns whether the requested fallback locations differ from those of a running recovery, apart from their
    /// order. `current` and `fallback` are the locations of the recovery's new machine. `has_changed_location` is true
    /// if the recovery has moved to another location at least once.
    pub fn differs_in_fallback(
        &self,
        current: &Location,
        fallback: &[Location],
        has_changed_location: bool,
    ) -> bool {
        let Some(requested) = &self.fallback else { return false };
        let candidates = || std::iter::once(current).chain(fallback);
        if requested.iter().any(|location| !candidates().any(|candidate| candidate == location)) {
            return true;
        }
        // The location that the recovery tried first is not one of its fallbacks. After a move, it is unknown which one
        // that was, unless the request names it.
        let first = if has_changed_location { self.location.as_ref() } else { Some(current) };
        let mut missing = candidates().filter(|candidate| !requested.contains(candidate));
        match first {
            Some(first) => missing.any(|candidate| candidate != first),
            None => missing.count() > 1,
        }
    }
}

async fn has_location(platform: &Platform, location: &Location) -> Result<bool, Problem> {
    platform.provider.has_location(location).await.map_err(|error| {
        tracing::warn!(%location, error = %format_chain(&error), "cannot check the location with the provider");
        problems::provider_problem(&error)
    })
}

fn ensure_offered(
    pointer: &str,
    location: &Location,
    is_offered: Result<bool, Problem>,
) -> Result<(), Problem> {
    if is_offered.unwrap_or(true) {
        return Ok(());
    }
    Err(Problem::field(pointer, format!("{location} is not a location that the provider offers")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(names: &[&str]) -> Vec<Location> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    fn differs(
        location: Option<&str>,
        fallback: &[&str],
        candidates: &[&str],
        has_changed_location: bool,
    ) -> bool {
        let location = location.map(|name| name.parse().unwrap());
        let requested = RequestedLocations { location, fallback: Some(parse(fallback)) };
        let candidates = parse(candidates);
        requested.differs_in_fallback(&candidates[0], &candidates[1..], has_changed_location)
    }

    #[test]
    fn differs_in_fallback_detects_added_and_missing_locations() {
        let candidates = ["nbg1", "hel1", "fsn1"];
        assert!(!differs(None, &["hel1", "fsn1"], &candidates, false));
        assert!(!differs(None, &["fsn1", "hel1", "nbg1"], &candidates, false));
        assert!(differs(None, &[], &candidates, false));
        assert!(differs(None, &["hel1"], &candidates, false));
        assert!(differs(None, &["hel1", "fsn1", "ash"], &candidates, false));
        let all = parse(&candidates);
        assert!(
            !RequestedLocations::default().differs_in_fallback(&all[0], &all[1..], false),
            "omitted fallback locations match"
        );
    }

    #[test]
    fn differs_in_fallback_ignores_first_location_after_move() {
        let candidates = ["hel1", "fsn1", "nbg1"];
        for location in [None, Some("nbg1")] {
            assert!(!differs(location, &["hel1", "fsn1"], &candidates, true), "{location:?}");
            assert!(differs(location, &["hel1"], &candidates, true), "{location:?}");
            assert!(differs(location, &[], &candidates, true), "{location:?}");
        }
        assert!(differs(Some("nbg1"), &["nbg1", "hel1"], &candidates, true));
    }
}
