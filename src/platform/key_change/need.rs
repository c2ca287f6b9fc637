//! What still needs a platform key other than the current one, by counts and names: for the end of a change, for
//! process starts, and for `svcctl doctor platform`.

use std::fmt;
use std::time::Duration;

use deadpool_postgres::GenericClient;

use super::BATCH_SIZE;
use crate::db::platform_keys::{self, OtherProcess};
use crate::db::{self, DbError, upgrade_token};
use crate::keys::{Seal, SealedWith};
use crate::platform_key::KeyId;
use crate::token_rotation;
use crate::tokens::TokenMint;
use svc_machine::id::MachineId;

/// Maximum names of a kind in a message.
const MAX_NAMED: usize = 5;

#[derive(Debug, Default)]
pub struct KeyNeed {
    signing_keys: CountedNames,
    /// Machines whose hosts send heartbeats, by which their tokens rotate.
    machines: CountedNames,
    /// Not waited for: the database accepts their token by its hash, and it rotates when they are back.
    silent: CountedNames,
    fences: CountedNames,
    processes: CountedNames,
}

/// A count, and some of the names.
#[derive(Debug, Default)]
struct CountedNames {
    count: u64,
    names: Vec<String>,
}

impl CountedNames {
    fn note(&mut self, name: impl fmt::Display) {
        self.count += 1;
        if self.names.len() < MAX_NAMED {
            self.names.push(name.to_string());
        }
    }
}

impl KeyNeed {
    /// Everything that still needs a key other than the current one of `mint` and `seal`. Costs a row and a MAC for
    /// each machine that holds its slot.
    pub async fn find(
        client: &impl GenericClient,
        current: &KeyId,
        mint: &TokenMint,
        seal: &Seal,
        max_silence: Duration,
        process_ttl: Duration,
    ) -> Result<Self, DbError> {
        let mut need = Self::of_signing_keys(client, seal).await?;
        need.note_tokens(client, mint, max_silence).await?;
        need.note_fences(client, current).await?;
        for OtherProcess { process, .. } in
            platform_keys::list_with_other_key(client, current, process_ttl).await?
        {
            need.processes.note(process);
        }
        Ok(need)
    }

    /// The need of the signing keys only.
    pub async fn of_signing_keys(client: &impl GenericClient, seal: &Seal) -> Result<Self, DbError> {
        let mut need = Self::default();
        for key in signing_keys(client).await? {
            let with = seal.sealed_with(&key.kid, &key.sealed);
            // If there is a previous key that does not decrypt it either, removing that key loses nothing.
            if with == SealedWith::Previous || with == SealedWith::Neither && !seal.has_previous() {
                need.signing_keys.note(key.kid);
            }
        }
        Ok(need)
    }

    async fn note_tokens(
        &mut self,
        client: &impl GenericClient,
        mint: &TokenMint,
        max_silence: Duration,
    ) -> Result<(), DbError> {
        let mut after = MachineId(uuid::Uuid::nil());
        loop {
            let held = upgrade_token::list_after(client, after, max_silence, 10 * BATCH_SIZE).await?;
            let Some(last) = held.last() else { return Ok(()) };
            after = last.machine;
            for token in held {
                if token_rotation::is_made_by_current_key(mint, token.machine, token.generation, &token.hash)
                {
                    continue;
                }
                let named = if token.is_silent { &mut self.silent } else { &mut self.machines };
                named.note(token.machine);
            }
        }
    }

    async fn note_fences(&mut self, client: &impl GenericClient, current: &KeyId) -> Result<(), DbError> {
        let state = platform_keys::load_state(client, current).await?;
        if state.has_signed_fences {
            return Ok(());
        }
        let after = state.fences_after.as_ref();
        self.fences.count = platform_keys::count_slots_after(client, after).await?.unsigned_abs();
        let named = platform_keys::list_slots_after(client, after, MAX_NAMED as i64).await?;
        self.fences.names = named.into_iter().map(|(user, slot)| format!("{user}/{slot}")).collect();
        Ok(())
    }

    /// Whether nothing needs another key. Silent machines are not waited for.
    pub fn is_empty(&self) -> bool {
        let Self { signing_keys, machines, silent: _, fences, processes } = self;
        [signing_keys, machines, fences, processes].iter().all(|named| named.count == 0)
    }

    /// Whether processes with another current key are running: nothing is replaced before they have switched.
    pub fn has_processes(&self) -> bool {
        self.processes.count > 0
    }

    /// The silent machines with a token of another key.
    pub fn silent(&self) -> Option<String> {
        (self.silent.count > 0).then(|| list(&[("silent machine", &self.silent)]))
    }
}

impl fmt::Display for KeyNeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            ("sealed signing key", &self.signing_keys),
            ("machine's token", &self.machines),
            ("slot's fence", &self.fences),
            ("running process", &self.processes),
        ];
        f.write_str(&list(&parts))
    }
}

/// `1 sealed signing key (proof-…), 2 machines' tokens (…)`.
fn list(parts: &[(&str, &CountedNames)]) -> String {
    let part = |(what, named): &(&str, &CountedNames)| {
        let more = if named.count > named.names.len() as u64 { ", …" } else { "" };
        format!("{} {} ({}{more})", named.count, plural(what, named.count), named.names.join(", "))
    };
    let parts: Vec<String> = parts.iter().filter(|(_, named)| named.count > 0).map(part).collect();
    parts.join("; ")
}

fn plural(what: &str, count: u64) -> String {
    if count == 1 {
        return what.to_owned();
    }
    match what.split_once("'s ") {
        Some((whose, what)) => format!("{whose}s' {what}s"),
        None if what.ends_with('s') => format!("{what}es"),
        None => format!("{what}s"),
    }
}

/// Every signing key in the database, including retired ones.
pub async fn signing_keys(client: &impl GenericClient) -> Result<Vec<db::keys::StoredKey>, DbError> {
    let mut all: Vec<db::keys::StoredKey> = Vec::new();
    loop {
        let after = all.last().map_or("", |key| key.kid.as_str());
        let more = db::keys::list_after(client, after, BATCH_SIZE).await?;
        if more.is_empty() {
            return Ok(all);
        }
        all.extend(more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn need_counts_all_and_names_some() {
        let mut need = KeyNeed::default();
        assert!(need.is_empty());
        need.silent.note("quiet");
        assert!(need.is_empty(), "silent machines are not waited for");
        assert_eq!(need.silent().as_deref(), Some("1 silent machine (quiet)"));
        need.signing_keys.note("proof-1");
        (1..=7).for_each(|n| need.machines.note(n));
        assert!(!need.is_empty());
        let expected = "1 sealed signing key (proof-1); 7 machines' tokens (1, 2, 3, 4, 5, …)";
        assert_eq!(need.to_string(), expected);
        need.processes.note("p");
        need.processes.note("q");
        assert!(need.to_string().ends_with("2 running processes (p, q)"), "{need}");
    }
}
