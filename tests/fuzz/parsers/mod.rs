//! The parsers with their rules, apart from what plays them: tests/fuzz mutates valid documents by proptest, and
//! tests/libfuzzer searches by coverage. Both hold a parser to the same rules.

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

/// A parser, and what must hold of it.
pub struct Target {
    /// Of its corpus.
    pub name: &'static str,
    /// Documents that are in order.
    pub valid: BoxedStrategy<Vec<u8>>,
    /// Holds of any bytes: refused, or accepted within the rules. The error says which rule is broken.
    pub holds: fn(&[u8]) -> Result<(), String>,
    /// A document that is in order is accepted, and says what it said. Without it, refusing all would hold.
    pub accepts: fn(&[u8]) -> Result<(), String>,
    /// Of the short form.
    pub cases: u32,
}

/// All that need no other program to run.
pub fn targets() -> Vec<Target> {
    vec![
        objects::pointer(),
        objects::side_record(),
        release::manifest(),
        release::signature(),
        archive::unpacked(),
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
