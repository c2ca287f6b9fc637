//! The parsers and their rules, independent of the runner: tests/fuzz mutates valid documents with proptest, and
//! tests/libfuzzer runs coverage-guided fuzzing. Both apply the same rules.

mod app_manifest;
mod app_path;
mod archive;
mod bridge;
mod codex_session;
mod dump_head;
mod environment;
mod event_id;
mod frames;
mod headers;
mod heartbeat;
mod import;
mod jwks;
mod objects;
mod owner_config;
mod release;
mod systemd;
mod tar_entries;
mod tokens;
mod usage_report;

use proptest::prelude::*;

/// A parser and its rules.
pub struct Target {
    /// The name of the target and of its corpus.
    pub name: &'static str,
    /// A strategy for valid documents.
    pub valid: BoxedStrategy<Vec<u8>>,
    /// A rule for arbitrary bytes: they are rejected, or accepted within the limits. The error names the violated rule.
    pub check_any: fn(&[u8]) -> Result<(), String>,
    /// A rule for valid documents: they are accepted with the right result. Without it, a parser could reject
    /// everything.
    pub check_valid: fn(&[u8]) -> Result<(), String>,
    /// The number of cases in a short run.
    pub cases: u32,
}

/// Returns all targets that need no external program.
pub fn targets() -> Vec<Target> {
    vec![
        objects::pointer(),
        objects::sidecar(),
        release::manifest(),
        release::signature(),
        archive::target(),
        tar_entries::target(),
        environment::env_file(),
        environment::boot_env(),
        app_manifest::target(),
        bridge::request(),
        bridge::filter(),
        bridge::cursor(),
        tokens::jwt(),
        tokens::proof(),
        heartbeat::target(),
        frames::hook_input(),
        frames::agent_frames(),
        frames::agent_output(),
        event_id::target(),
        import::listing(),
        import::manifest(),
        jwks::target(),
        owner_config::target(),
        usage_report::target(),
        headers::set_cookie(),
        headers::hop_by_hop(),
        app_path::target(),
        codex_session::target(),
        dump_head::target(),
    ]
}
