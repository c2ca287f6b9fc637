//! An object store that fails in every way we know, as tables: each row names what goes wrong, and says how the run ends and
//! what is left of it.

mod backup;
mod restore;

use anyhow::{Result, ensure};
use jiff::SignedDuration;
use kit::s3::{Fault, Rule, S3Server};

use super::super::credentials::{Mood, Platform};
use super::super::machine::{Ended, Machine, Running};

/// A machine with short-lived credentials, its store, and the platform that gives them.
struct Field {
    store: S3Server,
    platform: Platform,
    machine: Machine,
}

/// What is done to the field before the run.
enum Break {
    /// These happen at the store; each must have happened.
    Rules(Vec<Rule>),
    Done(fn(&Field)),
}

fn rule(fault: Fault) -> Rule {
    Rule::new(fault)
}

fn one(rule: Rule) -> Break {
    Break::Rules(vec![rule])
}

impl Field {
    /// Spoils it, lets a run happen, and makes all well again.
    async fn spoilt(&self, spoil: Break, run: impl FnOnce() -> Result<Running>) -> Result<Ended> {
        let hits: Vec<_> = match spoil {
            Break::Rules(rules) => rules.into_iter().map(|rule| self.store.fault(rule)).collect(),
            Break::Done(spoil) => {
                spoil(self);
                Vec::new()
            }
        };
        let running = run()?;
        let ended = tokio::task::spawn_blocking(move || running.end()).await??;
        ensure!(hits.iter().all(|hits| hits.hits() > 0), "it did not happen:\n{}", ended.stderr);
        self.heal().await?;
        Ok(ended)
    }

    async fn heal(&self) -> Result<()> {
        self.store.heal();
        self.store.up()?;
        self.platform.mood(Mood::Gives);
        svc::fsx::remove_if_exists(&self.machine.path("var/lib/svc/store-credentials.json"))?;
        self.platform.equips(&self.machine, SignedDuration::from_hours(9)).await
    }
}

/// The store is there, and lets nobody in whose session began before.
fn expired_and_no_others(field: &Field) {
    field.platform.mood(Mood::Away);
    field.store.expire_sessions();
}

fn replaced(field: &Field) {
    field.platform.mood(Mood::Supersedes);
    field.store.expire_sessions();
}

fn revoked(field: &Field) {
    assert!(field.store.revoke_sessions("svc-host") > 0, "nobody had a session");
}
