//! The session file of a run's thread, which Codex writes and the agent's tools can forge: only the thread's own calls
//! count.

use std::fs;
use std::path::PathBuf;

use jiff::Timestamp;
use proptest::prelude::*;
use serde_json::{Value, json};
use svc::host::agents::adapters::codex_sessions;
use svc::host::agents::adapters::codex_sessions::SessionUsage;

use super::Target;

pub fn target() -> Target {
    Target { name: "codex-session", valid: sessions().boxed(), check_any, check_valid, cases: 400 }
}

const THREAD: &str = "01a20129-46c0-7e12-862a-5371ec4ee03f";

fn sessions() -> impl Strategy<Value = Vec<u8>> {
    let call = (any::<u32>(), any::<u32>(), any::<bool>());
    prop::collection::vec(call, 0..5).prop_map(|calls| {
        let line = |kind: &str, payload: Value| {
            json!({ "timestamp": "2026-11-22T03:00:00Z", "type": kind, "payload": payload }).to_string()
        };
        let mut lines = vec![
            line("session_meta", json!({ "session_id": THREAD, "id": THREAD })),
            line("turn_context", json!({ "model": "gpt-5.5" })),
        ];
        lines.extend(calls.into_iter().map(|(tokens_in, tokens_out, is_own)| {
            let thread = if is_own { THREAD } else { "another" };
            let usage =
                json!({ "input_tokens": tokens_in, "cached_input_tokens": 1, "output_tokens": tokens_out });
            line("token_usage_record", json!({ "thread_id": thread, "usage": usage }))
        }));
        (lines.join("\n") + "\n").into_bytes()
    })
}

fn read_usage(bytes: &[u8]) -> Option<SessionUsage> {
    thread_local! {
        static SESSIONS: (tempfile::TempDir, PathBuf) = {
            let dir = tempfile::tempdir().expect("create a temporary directory");
            let day = dir.path().join("2026/11/22");
            fs::create_dir_all(&day).expect("create a directory");
            (dir, day.join(format!("rollout-2026-11-22T02-50-12-{THREAD}.jsonl")))
        };
    }
    SESSIONS.with(|(sessions, file)| {
        fs::write(file, bytes).expect("write a file");
        codex_sessions::read_usage(sessions.path(), THREAD, Timestamp::UNIX_EPOCH)
    })
}

/// Counts the thread's calls in lines that are JSON, and sums their tokens.
fn sum_recorded_calls(bytes: &[u8]) -> (usize, u64, u64) {
    let lines = bytes.split(|byte| *byte == b'\n').skip(1);
    let records = lines.filter_map(|line| serde_json::from_slice::<Value>(line).ok());
    let payloads = records.map(|record| record["payload"].clone());
    let own = payloads.filter(|payload| payload["thread_id"] == THREAD && payload["usage"].is_object());
    own.fold((0, 0, 0), |(count, tokens_in, tokens_out), payload| {
        let tokens = |name: &str| payload["usage"][name].as_u64().unwrap_or(0);
        (
            count + 1,
            tokens_in.saturating_add(tokens("input_tokens")),
            tokens_out.saturating_add(tokens("output_tokens")),
        )
    })
}

fn check_any(bytes: &[u8]) -> Result<(), String> {
    let Some(usage) = read_usage(bytes) else { return Ok(()) };
    // A file whose thread has a different id is a subagent's: the calls that count have that id, so the check below
    // does not apply.
    let first = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let is_own = serde_json::from_slice::<Value>(first).is_ok_and(|meta| meta["payload"]["id"] == THREAD);
    let (count, tokens_in, tokens_out) = sum_recorded_calls(bytes);
    // A line may count even if this test's parser rejects it because of an ignored member, so the check does not apply
    // if that parser finds no calls.
    if is_own && count > 0 && (usage.tokens_in > tokens_in || usage.tokens_out > tokens_out) {
        return Err(format!(
            "reported {usage:?}, but {count} calls used {tokens_in} input and {tokens_out} output tokens"
        ));
    }
    Ok(())
}

fn check_valid(bytes: &[u8]) -> Result<(), String> {
    let (count, tokens_in, tokens_out) = sum_recorded_calls(bytes);
    let usage = read_usage(bytes);
    let actual = usage.as_ref().map(|usage| (usage.tokens_in, usage.tokens_out));
    if actual == (count > 0).then_some((tokens_in, tokens_out)) {
        Ok(())
    } else {
        Err(format!("{usage:?} for {count} calls"))
    }
}
