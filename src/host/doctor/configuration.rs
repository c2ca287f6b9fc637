//! The env files as applets read them: every mistake, none of the values.

use crate::config::Env;
use crate::diagnosis::Findings;
use crate::host::config::{self, DatabaseUrl, Identity, PlatformLink, environment};
use crate::host::layout::Layout;
use crate::store::config::StoreConfig;

const NEXT: &str =
    "provisioning wrote these files and nobody edits them: put the value back, or recover the machine";

pub fn check(layout: &Layout) -> Findings {
    let findings = Findings::of("configuration");
    match read(environment(layout), layout) {
        Ok(identity) => findings.ok(format!(
            "machine {} of {}, slot {}, epoch {}",
            identity.machine, identity.user, identity.slot, identity.epoch
        )),
        Err(mistakes) => {
            mistakes.into_iter().fold(findings, |findings, mistake| findings.problem(mistake, NEXT))
        }
    }
}

fn read(mut env: Env, layout: &Layout) -> Result<Identity, Vec<String>> {
    let identity = Identity::read(&mut env);
    let link = PlatformLink::read(&mut env, layout);
    let keys = config::first_proof_keys(&mut env);
    let store = StoreConfig::read(&mut env);
    let url = DatabaseUrl::read(&mut env);
    let database = match url.as_ref().map(DatabaseUrl::config) {
        Some(Err(error)) => {
            error.mistakes.iter().for_each(|mistake| env.mistake("DATABASE_URL", mistake.as_str()));
            None
        }
        Some(Ok(_)) => Some(()),
        None => None,
    };
    let built = link.zip(keys).zip(store).zip(database).zip(identity).map(|(_, identity)| identity);
    env.finish(built).map_err(|error| error.mistakes)
}
