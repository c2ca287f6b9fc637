//! Finds everything that still needs a platform key other than the current one. The result decides whether a key
//! rotation can end and whether a process may start, and `svcctl doctor platform` reports it.

use std::fmt;
use std::time::Duration;

use deadpool_postgres::GenericClient;

use super::BATCH_SIZE;
use crate::db::platform_keys::{self, OtherProcess};
use crate::db::{self, DbError, upgrade_token};
use crate::keys::{OpeningKey, Seal};
use crate::platform_key::KeyId;
use crate::token_rotation;
use crate::tokens::TokenMint;
use svc_machine::id::MachineId;

/// Maximum number of names of each kind in a message.
const MAX_NAMED: usize = 5;

/// The secrets and processes that need a platform key other than the current one.
#[derive(Debug, Default)]
pub struct KeyDependents {
    /// Signing keys that only another key opens.
    signing_keys: CountedNames,
    /// Slots whose file key is sealed with another key.
    file_keys: CountedNames,
    /// Machines whose token was issued with another key and will rotate, because their hosts are sending heartbeats.
    machines: CountedNames,
    /// Silent machines. A rotation does not wait for them: their tokens stay valid, because the database has their
    /// hashes, and rotate when the hosts send heartbeats again.
    silent: CountedNames,
    /// Slots whose fence has not been checked yet in this rotation.
    fences: CountedNames,
    /// Running processes with a different current key.
    processes: CountedNames,
}

/// A count, and the first [`MAX_NAMED`] names.
#[derive(Debug, Default)]
struct CountedNames {
    count: u64,
    names: Vec<String>,
}

impl CountedNames {
    fn add(&mut self, name: impl fmt::Display) {
        self.count += 1;
        if self.names.len() < MAX_NAMED {
            self.names.push(name.to_string());
        }
    }
}

impl KeyDependents {
    /// Returns whether nothing except machines' tokens needs a different key.
    pub fn has_only_tokens(&self) -> bool {
        let Self { signing_keys, file_keys, machines: _, silent: _, fences, processes } = self;
        [signing_keys, file_keys, fences, processes].iter().all(|names| names.count == 0)
    }

    /// Finds everything that needs a key other than the current key of `mint` and `seal`. Reads a row and computes a
    /// MAC for each machine that holds its slot.
    pub async fn find(
        client: &impl GenericClient,
        current: &KeyId,
        mint: &TokenMint,
        seal: &Seal,
        max_heartbeat_gap: Duration,
        process_ttl: Duration,
    ) -> Result<Self, DbError> {
        let mut dependents = Self::find_signing_key_dependents(client, seal).await?;
        (dependents.file_keys.count, dependents.file_keys.names) =
            db::files_keys::list_sealed_with_other(client, current, MAX_NAMED as i64).await?;
        dependents.add_tokens(client, mint, max_heartbeat_gap).await?;
        dependents.add_fences(client, current).await?;
        for OtherProcess { process, .. } in
            platform_keys::list_with_other_key(client, current, process_ttl).await?
        {
            dependents.processes.add(process);
        }
        Ok(dependents)
    }

    /// Finds only the signing keys that need a different key.
    pub async fn find_signing_key_dependents(
        client: &impl GenericClient,
        seal: &Seal,
    ) -> Result<Self, DbError> {
        let mut dependents = Self::default();
        for key in list_signing_keys(client).await? {
            let opening = seal.find_opening_key(&key.kid, &key.sealed);
            // If both keys are set, a signing key that neither of them opens does not need the previous key.
            if opening == OpeningKey::Previous || opening == OpeningKey::Neither && !seal.has_previous() {
                dependents.signing_keys.add(key.kid);
            }
        }
        Ok(dependents)
    }

    async fn add_tokens(
        &mut self,
        client: &impl GenericClient,
        mint: &TokenMint,
        max_heartbeat_gap: Duration,
    ) -> Result<(), DbError> {
        let mut after = MachineId(uuid::Uuid::nil());
        loop {
            let tokens = upgrade_token::list_after(client, after, max_heartbeat_gap, 10 * BATCH_SIZE).await?;
            let Some(last) = tokens.last() else { return Ok(()) };
            after = last.machine;
            for token in tokens {
                if token_rotation::is_token_issued_with_current_key(
                    mint,
                    token.machine,
                    token.generation,
                    &token.hash,
                ) {
                    continue;
                }
                let machines = if token.is_silent { &mut self.silent } else { &mut self.machines };
                machines.add(token.machine);
            }
        }
    }

    async fn add_fences(&mut self, client: &impl GenericClient, current: &KeyId) -> Result<(), DbError> {
        let progress = platform_keys::load_progress(client, current).await?;
        if progress.has_signed_fences {
            return Ok(());
        }
        let after = progress.last_processed_slot.as_ref();
        self.fences.count = platform_keys::count_slots_after(client, after).await?.unsigned_abs();
        let slots = platform_keys::list_slots_after(client, after, MAX_NAMED as i64).await?;
        self.fences.names = slots.into_iter().map(|(user, slot)| format!("{user}/{slot}")).collect();
        Ok(())
    }

    /// Returns whether nothing needs a different key. Ignores silent machines, because a rotation does not wait for
    /// them.
    pub fn is_empty(&self) -> bool {
        let Self { signing_keys, file_keys, machines, silent: _, fences, processes } = self;
        [signing_keys, file_keys, machines, fences, processes].iter().all(|names| names.count == 0)
    }

    /// Returns whether processes with a different current key are running. No secret is replaced before they have
    /// switched.
    pub fn has_processes(&self) -> bool {
        self.processes.count > 0
    }

    /// Describes the silent machines whose tokens were issued with a different key; `None` if there are none.
    pub fn describe_silent(&self) -> Option<String> {
        (self.silent.count > 0).then(|| format_list(&[("silent machine", &self.silent)]))
    }
}

impl fmt::Display for KeyDependents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            ("sealed signing key", &self.signing_keys),
            ("slot's file key", &self.file_keys),
            ("machine's token", &self.machines),
            ("slot's fence", &self.fences),
            ("running process", &self.processes),
        ];
        f.write_str(&format_list(&parts))
    }
}

/// Formats a list such as `1 sealed signing key (proof-…); 2 machines' tokens (…)`.
fn format_list(parts: &[(&str, &CountedNames)]) -> String {
    let part = |(noun, names): &(&str, &CountedNames)| {
        let more = if names.count > names.names.len() as u64 { ", …" } else { "" };
        format!("{} {} ({}{more})", names.count, pluralize(noun, names.count), names.names.join(", "))
    };
    let parts: Vec<String> = parts.iter().filter(|(_, names)| names.count > 0).map(part).collect();
    parts.join("; ")
}

fn pluralize(noun: &str, count: u64) -> String {
    if count == 1 {
        return noun.to_owned();
    }
    match noun.split_once("'s ") {
        Some((owner, noun)) => format!("{owner}s' {noun}s"),
        None if noun.ends_with('s') => format!("{noun}es"),
        None => format!("{noun}s"),
    }
}

/// Lists every signing key in the database, including retired keys.
pub async fn list_signing_keys(client: &impl GenericClient) -> Result<Vec<db::keys::StoredKey>, DbError> {
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
    fn display_counts_all_and_names_first_five() {
        let mut dependents = KeyDependents::default();
        assert!(dependents.is_empty());
        dependents.silent.add("quiet");
        assert!(dependents.is_empty(), "silent machines do not count");
        assert_eq!(dependents.describe_silent().as_deref(), Some("1 silent machine (quiet)"));
        dependents.signing_keys.add("proof-1");
        (1..=7).for_each(|n| dependents.machines.add(n));
        assert!(!dependents.is_empty());
        let expected = "1 sealed signing key (proof-1); 7 machines' tokens (1, 2, 3, 4, 5, …)";
        assert_eq!(dependents.to_string(), expected);
        dependents.processes.add("p");
        dependents.processes.add("q");
        assert!(dependents.to_string().ends_with("2 running processes (p, q)"), "{dependents}");
    }
}
