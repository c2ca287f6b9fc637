//! Frames from agents, their hooks and the process that runs them: no file content is passed on, and every stored
//! string has a maximum length.

use proptest::prelude::*;
use serde_json::{Value, json};
use svc::host::agents::adapters::{AdapterKind, Exit, Outcome};
use svc::host::agents::protocol::{GatewayFrame, RunResult, RunnerFrame};
use svc::host::audit::hook;
use svc::host::audit::protocol::Message;
use svc::host::records::entry::DispatchError;

use super::Target;
use super::objects::block_on;

/// Recorded output from agent programs.
const RECORDED_OUTPUT: [&str; 5] = [
    include_str!("../../agents/recordings/claude/basic.stdout.jsonl"),
    include_str!("../../agents/recordings/claude/parallel.stdout.jsonl"),
    include_str!("../../agents/recordings/claude/err500.stdout.jsonl"),
    include_str!("../../agents/recordings/codex/basic.stdout.jsonl"),
    include_str!("../../agents/recordings/codex/err500.stdout.jsonl"),
];

pub fn hook_input() -> Target {
    Target {
        name: "hook-input",
        valid: hooks().boxed(),
        check_any: check_any_hook,
        check_valid: check_valid_hook,
        cases: 1000,
    }
}

/// Text in the fields that must not be passed on.
const CONTENT: &str = "the-content-of-a-file";

fn hooks() -> impl Strategy<Value = Vec<u8>> {
    let event =
        prop_oneof![Just("PreToolUse"), Just("PostToolUse"), Just("PostToolUseFailure"), Just("Stop")];
    let tool =
        prop_oneof![Just("Bash"), Just("Write"), Just("Edit"), Just("apply_patch"), Just("NotebookEdit")];
    (event, tool, "[a-z0-9-]{1,20}", "/[a-z/]{1,20}").prop_map(|(event, tool, id, path)| {
        let input = json!({ "session_id": id, "transcript_path": "/x/.claude/y", "cwd": path,
            "hook_event_name": event, "tool_name": tool, "tool_use_id": id,
            "tool_input": { "file_path": path, "content": CONTENT, "command": CONTENT },
            "tool_response": { "stdout": CONTENT, "backgroundTaskId": "b1" } });
        input.to_string().into_bytes()
    })
}

/// Checks that every string sent to the watcher is a known constant, the configured agent name, or the value of a
/// permitted field.
fn check_any_hook(bytes: &[u8]) -> Result<(), String> {
    let Ok(Some(message)) = hook::read_input(bytes) else { return check_any_message(bytes) };
    // Fields that the hook skips may contain invalid strings, which this test's parser rejects.
    let Ok(input) = serde_json::from_slice::<Value>(bytes) else { return Ok(()) };
    let fields = ["session_id", "tool_name", "tool_use_id", "cwd", "agent_id", "agent_type"];
    let mut allowed: Vec<&str> = fields.iter().filter_map(|field| input[field].as_str()).collect();
    allowed.extend(
        ["file_path", "notebook_path"].iter().filter_map(|field| input["tool_input"][field].as_str()),
    );
    allowed.extend(["", "claude", "claude-code", "codex", "agent"]);
    let agent_name = std::env::var("SVC_AGENT_NAME").unwrap_or_default();
    allowed.push(&agent_name);
    let sent = serde_json::to_value(&message).map_err(|error| error.to_string())?;
    for (name, value) in sent.as_object().into_iter().flatten() {
        let is_own = ["phase", "sentAt", "version", "isBackground"].contains(&name.as_str());
        if !is_own && !value.as_str().is_some_and(|text| allowed.contains(&text)) {
            return Err(format!("{name} is {value}"));
        }
    }
    check_any_message(&serde_json::to_vec(&message).map_err(|error| error.to_string())?)
}

/// Checks that a message that the watcher accepts is unchanged after it is written and parsed again.
fn check_any_message(line: &[u8]) -> Result<(), String> {
    let Ok(message) = serde_json::from_slice::<Message>(line) else { return Ok(()) };
    let text = serde_json::to_vec(&message).map_err(|error| error.to_string())?;
    let reparsed: Message =
        serde_json::from_slice(&text).map_err(|error| format!("cannot be reparsed: {error}"))?;
    // The wire format does not carry fractions of a millisecond.
    let reparsed = Message { sent_at: message.sent_at, ..reparsed };
    if reparsed == message { Ok(()) } else { Err(format!("{message:?} was reparsed as {reparsed:?}")) }
}

fn check_valid_hook(bytes: &[u8]) -> Result<(), String> {
    let message =
        hook::read_input(bytes).map_err(|error| error.to_string())?.ok_or("the input was ignored")?;
    let text = serde_json::to_string(&message).map_err(|error| error.to_string())?;
    if text.contains(CONTENT) || message.actor != "claude-code" {
        return Err(format!("{text} is sent"));
    }
    Ok(())
}

pub fn agent_frames() -> Target {
    Target {
        name: "agent-frames",
        valid: frames().boxed(),
        check_any: |bytes| block_on(check_any_frames(bytes)),
        check_valid: |bytes| block_on(check_valid_frames(bytes)),
        cases: 1000,
    }
}

fn frames() -> impl Strategy<Value = Vec<u8>> {
    let frame = prop_oneof![
        any::<u32>().prop_map(|pid| RunnerFrame::Ready { pid }),
        any::<u32>().prop_map(|pid| RunnerFrame::Started { pid }),
        prop::collection::vec(any::<u8>(), 0..60).prop_map(RunnerFrame::Line),
        Just(()).prop_map(|()| RunnerFrame::LongLine),
        "\\PC{0,20}".prop_map(RunnerFrame::Refused),
        any::<i32>().prop_map(|code| RunnerFrame::Ended(RunResult {
            exit: Exit::Code(code),
            stderr_tail: "no".to_owned(),
            usage: None,
            is_resumed: code % 2 == 0,
        })),
    ];
    prop::collection::vec(frame, 1..6).prop_map(|frames| {
        let mut bytes = Vec::new();
        block_on(async {
            for frame in &frames {
                frame.write(&mut bytes).await.expect("writing to memory does not fail");
            }
        });
        bytes
    })
}

/// Checks that any input is read to its end or rejected, and that every frame is unchanged after it is written and
/// parsed again.
async fn check_any_frames(bytes: &[u8]) -> Result<(), String> {
    let mut input = bytes;
    loop {
        let before = input.len();
        let Ok(Some(frame)) = RunnerFrame::read(&mut input).await else { break };
        let consumed = before - input.len();
        if consumed < 5 {
            return Err(format!("{frame:?} was parsed from {consumed} bytes"));
        }
        let mut written = Vec::new();
        frame.write(&mut written).await.map_err(|error| error.to_string())?;
        let reparsed = RunnerFrame::read(&mut &written[..]).await.map_err(|error| error.to_string())?;
        if reparsed.as_ref() != Some(&frame) {
            return Err(format!("{frame:?} was reparsed as {reparsed:?}"));
        }
    }
    let mut input = bytes;
    while let Ok(Some(frame)) = GatewayFrame::read(&mut input).await {
        let mut written = Vec::new();
        frame.write(&mut written).await.map_err(|error| error.to_string())?;
        let reparsed = GatewayFrame::read(&mut &written[..]).await.map_err(|error| error.to_string())?;
        let is_same = match (&frame, reparsed) {
            (GatewayFrame::Run(request), Some(GatewayFrame::Run(reparsed_request))) => {
                serde_json::to_vec(request).ok() == serde_json::to_vec(&reparsed_request).ok()
            }
            (GatewayFrame::Go, Some(GatewayFrame::Go))
            | (GatewayFrame::Cancel, Some(GatewayFrame::Cancel)) => true,
            _ => false,
        };
        if !is_same {
            return Err("a reparsed frame from the gateway differs".to_owned());
        }
    }
    Ok(())
}

async fn check_valid_frames(bytes: &[u8]) -> Result<(), String> {
    let (mut input, mut written) = (bytes, Vec::new());
    while let Some(frame) = RunnerFrame::read(&mut input).await.map_err(|error| error.to_string())? {
        frame.write(&mut written).await.map_err(|error| error.to_string())?;
    }
    if written == bytes { Ok(()) } else { Err("the frames differ".to_owned()) }
}

pub fn agent_output() -> Target {
    Target {
        name: "agent-output",
        valid: outputs().boxed(),
        check_any: |bytes| {
            ADAPTER_KINDS.into_iter().try_for_each(|kind| check_bounds(&run_adapter(kind, bytes)))
        },
        check_valid: |bytes| {
            let is_understood = |kind| run_adapter(kind, bytes).conversation_id.is_some();
            if ADAPTER_KINDS.into_iter().any(is_understood) {
                Ok(())
            } else {
                Err("no adapter understands the output".to_owned())
            }
        },
        cases: 400,
    }
}

const ADAPTER_KINDS: [AdapterKind; 3] = [AdapterKind::ClaudeCode, AdapterKind::Codex, AdapterKind::JsonLines];

/// Selects a recorded output and truncates it to fewer than 40 lines.
fn outputs() -> impl Strategy<Value = Vec<u8>> {
    (prop::sample::select(&RECORDED_OUTPUT[..]), 3..40usize)
        .prop_map(|(text, lines)| text.lines().take(lines).collect::<Vec<_>>().join("\n").into_bytes())
}

fn run_adapter(kind: AdapterKind, bytes: &[u8]) -> Outcome {
    let mut adapter = kind.create_adapter();
    for (at_ms, line) in (0..).zip(String::from_utf8_lossy(bytes).lines()) {
        drop(adapter.parse_line(at_ms, line));
    }
    adapter.finish(u64::MAX, Exit::Code(0), "text on standard error")
}

/// Checks that a run's stored result is within its limits.
fn check_bounds(outcome: &Outcome) -> Result<(), String> {
    let check_length = |field: &str, text: Option<&str>, max: usize| match text {
        Some(text) if text.chars().count() > max => {
            Err(format!("{field} has {} characters", text.chars().count()))
        }
        _ => Ok(()),
    };
    check_length("the conversation", outcome.conversation_id.as_deref(), 201)?;
    check_length("the model", outcome.model.as_deref(), 201)?;
    for tool in &outcome.tools {
        check_length("a tool's name", Some(&tool.name), 201)?;
        check_length("a tool's input", Some(&tool.input_preview), 201)?;
    }
    if let Some(DispatchError { name, message, stack, tool, .. }) = &outcome.error {
        check_length("an error's name", Some(name), 201)?;
        check_length("an error's message", Some(message), 2001)?;
        check_length("an error's stack", stack.as_deref(), 4001)?;
        check_length("an error's tool", tool.as_deref(), 201)?;
    }
    Ok(())
}
