//! Gateway side of a run: sends the request, follows the agent's output, and builds the interaction.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use secrecy::ExposeSecret;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::state::Dispatch;
use crate::agents::adapters::preview::Secrets;
use crate::agents::adapters::settings::{Agent, AgentSettings};
use crate::agents::adapters::{Adapter, Event, Exit, Outcome};
use crate::agents::bridge_tokens::{BridgeToken, BridgeTokens};
use crate::agents::kernel::Kernel;
use crate::agents::protocol::{END_TIMEOUT, GatewayFrame, RunRequest, RunResult, RunnerFrame};
use crate::audit::protocol::{self, COMMAND_TOOLS, Message, Process, WRITER_TOOLS};
use crate::records::entry::{DispatchError, Interaction, ResultStatus};
use crate::records::money::Dollars;
use svc_base::clock;

/// Timeout for connecting to the runner, and for each write to it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Model name recorded when the model is unknown.
const UNKNOWN_MODEL: &str = "unknown";
/// Tools that start subagents.
const SPAWN_TOOLS: [&str; 4] = ["Agent", "Task", "spawn_agent", "task"];

/// Reason for stopping a run early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EndReason {
    Cancelled,
    Deadline,
    Shutdown,
    Paused,
}

/// Gateway resources used by a run.
pub struct RunContext<'a> {
    pub kernel: &'a Kernel,
    /// The svc-agent socket.
    pub agent_socket: &'a Path,
    pub bridge_tokens: &'a Arc<BridgeTokens>,
    /// The bridge socket for agents.
    pub bridge_socket: &'a Path,
    /// The svc-watch socket.
    pub watcher_socket: &'a Path,
    /// Cancelled at shutdown.
    pub stop: &'a CancellationToken,
    /// Cancelled when dispatches are paused for a final backup.
    pub pause: &'a CancellationToken,
    pub settings: &'a AgentSettings,
}

/// Runs a dispatch to completion and returns its interaction and final text.
pub async fn run(context: &RunContext<'_>, dispatch: &Dispatch) -> (Interaction, Option<String>) {
    let start = Instant::now();
    let RunEnd { outcome, is_interrupted } =
        match context.settings.agents.get(&dispatch.accepted.entry.agent_name) {
            Some(agent) => GatewayRun::new(context, dispatch, agent, start).execute(agent).await,
            None => failed_outcome("NoAgent", "the agent is no longer in system/config.json").into(),
        };
    context.kernel.note(&format!(
        "dispatch {}: {} after {:.1} s",
        dispatch.id(),
        if outcome.status == ResultStatus::Success { "success" } else { "error" },
        start.elapsed().as_secs_f64()
    ));
    let entry = &dispatch.accepted.entry;
    let model = outcome.model.clone().or_else(|| entry.model.clone());
    let cost = context.settings.cost(&outcome, entry.model.as_deref());
    let reserved = dispatch.reserved_amount();
    if let Some(estimate) = estimate_cost(context.settings, &outcome, cost, is_interrupted, reserved) {
        context.kernel.note(&format!(
            "dispatch {}: ended before reporting its full cost, estimated at {estimate}",
            dispatch.id()
        ));
        let text = outcome.text.clone();
        let ended = build_interaction(dispatch, outcome, model, estimate, start.elapsed());
        return (Interaction { cost_estimated: true, ..ended }, text);
    }
    if cost.is_none() && outcome.tokens_in + outcome.tokens_out > 0 {
        let model = model.as_deref().unwrap_or(UNKNOWN_MODEL);
        context.kernel.note(&format!(
            "dispatch {}: recorded with a cost of $0: no price for {model} in system/config.json",
            dispatch.id()
        ));
    }
    let text = outcome.text.clone();
    (build_interaction(dispatch, outcome, model, cost.unwrap_or_default(), start.elapsed()), text)
}

/// Estimates the cost if the program may have used more than it reported. `None` otherwise, or if the model is free.
fn estimate_cost(
    settings: &AgentSettings,
    outcome: &Outcome,
    cost: Option<Dollars>,
    is_interrupted: bool,
    reserved: Dollars,
) -> Option<Dollars> {
    if settings.is_free(outcome) {
        return None;
    }
    match (outcome.has_unreported_usage, outcome.cost) {
        // The reported cost covers only earlier turns.
        (true, Some(reported)) => Some(reported + reserved),
        // Any reported tokens may be only part of the actual usage.
        (true, None) => Some(cost.unwrap_or_default().max(reserved)),
        (false, _) => {
            (is_interrupted && (cost.is_none() || !AgentSettings::has_usage(outcome))).then_some(reserved)
        }
    }
}

/// Builds the interaction for a dispatch that ended without a run.
pub fn interaction_without_run(dispatch: &Dispatch, name: &str, message: &str) -> Interaction {
    let model = dispatch.accepted.entry.model.clone();
    build_interaction(dispatch, failed_outcome(name, message), model, Dollars::ZERO, Duration::ZERO)
}

/// Builds the interaction for a dispatch whose run was interrupted without an outcome. The cost is unknown, so the
/// reserved amount is recorded instead.
pub fn interrupted_interaction(
    dispatch: &Dispatch,
    name: &str,
    message: &str,
    reserved: Dollars,
) -> Interaction {
    Interaction { cost: reserved, cost_estimated: true, ..interaction_without_run(dispatch, name, message) }
}

/// How a run ended.
struct RunEnd {
    outcome: Outcome,
    /// Whether the agent was running and didn't exit on its own, so its cost may be unreported.
    is_interrupted: bool,
}

impl From<Outcome> for RunEnd {
    /// No agent was running, or it exited on its own.
    fn from(outcome: Outcome) -> Self {
        Self { outcome, is_interrupted: false }
    }
}

fn failed_outcome(name: &str, message: impl Into<String>) -> Outcome {
    Outcome {
        conversation_id: None,
        model: None,
        tokens_in: 0,
        tokens_out: 0,
        tokens_cached: 0,
        cost: None,
        has_unreported_usage: false,
        tools: Vec::new(),
        status: ResultStatus::Error,
        error: Some(dispatch_error(name, message)),
        text: None,
    }
}

fn dispatch_error(name: &str, message: impl Into<String>) -> DispatchError {
    DispatchError { name: name.to_owned(), message: message.into(), stack: None, tool: None, turn: None }
}

fn build_interaction(
    dispatch: &Dispatch,
    outcome: Outcome,
    model: Option<String>,
    cost: Dollars,
    duration: Duration,
) -> Interaction {
    let accepted = &dispatch.accepted;
    let conversation_id = accepted.entry.conversation_id.clone().or(outcome.conversation_id);
    Interaction {
        version: Interaction::FORMAT_VERSION,
        id: accepted.id.clone(),
        timestamp: clock::now_ms(),
        accepted_at: Some(accepted.accepted_at),
        started_at: dispatch.started_at(),
        sender_id: accepted.sender_id.clone(),
        conversation_id: conversation_id.unwrap_or_else(|| accepted.id.clone()),
        model: model.unwrap_or_else(|| UNKNOWN_MODEL.to_owned()),
        agent_name: accepted.entry.agent_name.clone(),
        tokens_in: outcome.tokens_in,
        tokens_out: outcome.tokens_out,
        cost,
        cost_estimated: false,
        duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
        tools: outcome.tools,
        status: outcome.status,
        error: outcome.error,
        batch: accepted.batch.is_some(),
        batch_id: accepted.batch.as_ref().map(|batch| batch.id.clone()),
        batch_size: accepted.batch.as_ref().map(|batch| batch.size),
        fingerprint: Some(accepted.fingerprint.clone()).filter(|fingerprint| !fingerprint.is_empty()),
    }
}

/// Registers the runner with svc-watch, which attributes the runner's descendants to this dispatch.
async fn announce_to_watcher(socket: &Path, dispatch: &Dispatch, runner: u32) {
    let runner = Process::from_pid(i32::try_from(runner).unwrap_or_default());
    let begin = Message::dispatch_begin(dispatch.id(), &dispatch.accepted.entry.agent_name, runner);
    protocol::send_from_dispatcher(socket, begin).await;
}

/// Issues a token if the agent may use apps. On failure, the agent still runs, but its bridge requests are refused.
fn issue_token(context: &RunContext<'_>, dispatch: &Dispatch, agent: &Agent) -> Option<BridgeToken> {
    if agent.apps.is_empty() {
        return None;
    }
    let issued = context.bridge_tokens.issue(dispatch.id(), &agent.apps);
    issued.map_err(|error| tracing::error!(%error, id = dispatch.id(), "cannot issue a bridge token")).ok()
}

struct GatewayRun<'a> {
    context: &'a RunContext<'a>,
    dispatch: &'a Dispatch,
    adapter: Box<dyn Adapter>,
    start: Instant,
    deadline: Instant,
    is_started: bool,
    end_reason: Option<EndReason>,
    secrets: Secrets,
    environment: BTreeMap<String, String>,
    /// Whether the agent's hooks use the same call ids as its output.
    has_shared_call_ids: bool,
    /// The agent's bridge token, revoked at the end of the run.
    _token: Option<BridgeToken>,
}

impl<'a> GatewayRun<'a> {
    fn new(context: &'a RunContext<'a>, dispatch: &'a Dispatch, agent: &Agent, start: Instant) -> Self {
        let deadline = start + Duration::from_secs(dispatch.accepted.entry.deadline_seconds);
        let (mut environment, token) = (agent.environment.clone(), issue_token(context, dispatch, agent));
        if let Some(token) = &token {
            let bridge = context.bridge_socket.display().to_string();
            environment.insert("SVC_BRIDGE_SOCKET".to_owned(), bridge);
            environment.insert("SVC_BRIDGE_TOKEN".to_owned(), token.secret.expose_secret().to_owned());
        }
        let (adapter, secrets) = (agent.adapter.create_adapter(), Secrets::from_environment(&environment));
        Self {
            context,
            dispatch,
            adapter,
            start,
            deadline,
            is_started: false,
            end_reason: None,
            secrets,
            environment,
            has_shared_call_ids: agent.adapter.has_shared_call_ids(),
            _token: token,
        }
    }

    fn build_request(&self, agent: &Agent) -> GatewayFrame {
        let accepted = &self.dispatch.accepted;
        GatewayFrame::Run(Box::new(RunRequest {
            version: RunRequest::PROTOCOL_VERSION,
            id: accepted.id.clone(),
            agent_name: accepted.entry.agent_name.clone(),
            adapter: agent.adapter,
            command: agent.command.clone(),
            model: accepted.entry.model.clone(),
            conversation_id: accepted.entry.conversation_id.clone(),
            prompt: accepted.entry.prompt.clone(),
            environment: self.environment.clone(),
        }))
    }

    async fn execute(mut self, agent: &Agent) -> RunEnd {
        let end_reason = if self.dispatch.cancel.is_cancelled() {
            Some(EndReason::Cancelled)
        } else if self.context.pause.is_cancelled() {
            Some(EndReason::Paused)
        } else {
            self.context.stop.is_cancelled().then_some(EndReason::Shutdown)
        };
        if let Some(reason) = end_reason {
            let error = Some(self.end_reason_error(reason));
            return Outcome { error, ..failed_outcome("", String::new()) }.into();
        }
        let request = self.build_request(agent);
        let timeout = CONNECT_TIMEOUT.min(self.deadline.saturating_duration_since(Instant::now()));
        let connected = async {
            let mut connection = UnixStream::connect(self.context.agent_socket).await?;
            request.write(&mut connection).await?;
            Ok::<_, std::io::Error>(connection.into_split())
        };
        let (from_runner, to_runner) = match tokio::time::timeout(timeout, connected).await {
            Ok(Ok(halves)) => halves,
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot reach svc-agent");
                let message = "cannot reach svc-agent: is svc-agent.socket active?";
                return failed_outcome("NoRunner", message).into();
            }
            Err(_) => {
                let message = "svc-agent did not accept the run before the connection timeout or deadline";
                return failed_outcome("NoRunner", message).into();
            }
        };
        let ended = self.follow(from_runner, to_runner).await;
        let at_ms = self.elapsed_ms();
        let is_terminated = self.end_reason.is_some()
            || ended.as_ref().map_or(true, |ended| ended.exit.is_caused_by_signal());
        let mut outcome = match ended {
            Ok(mut ended) => {
                self.secrets.redact(&mut ended.stderr_tail);
                if ended.is_resumed {
                    self.adapter.set_resumed();
                }
                if let Some(usage) = ended.usage {
                    self.adapter.set_usage(usage);
                }
                self.adapter.finish(at_ms, ended.exit, &ended.stderr_tail)
            }
            Err(failed) => {
                // Usage and tools reported so far still count.
                let reported = self.adapter.finish(at_ms, Exit::Signal(9), "");
                Outcome { status: ResultStatus::Error, error: Some(failed), ..reported }
            }
        };
        if let (Some(reason), ResultStatus::Error) = (self.end_reason, outcome.status) {
            let reported = outcome.error.take();
            let (tool, turn) = reported.map(|reported| (reported.tool, reported.turn)).unwrap_or_default();
            outcome.error = Some(DispatchError { tool, turn, ..self.end_reason_error(reason) });
        }
        let is_interrupted = self.is_started && is_terminated && outcome.status == ResultStatus::Error;
        RunEnd { outcome, is_interrupted }
    }

    fn end_reason_error(&self, reason: EndReason) -> DispatchError {
        let (name, message) = match reason {
            EndReason::Cancelled => ("Cancelled", "the dispatch was cancelled".to_owned()),
            EndReason::Deadline => {
                let seconds = self.dispatch.accepted.entry.deadline_seconds;
                ("DeadlineExceeded", format!("the agent was stopped at the deadline of {seconds} s"))
            }
            EndReason::Shutdown => ("Interrupted", "the agent was stopped: the gateway shut down".to_owned()),
            EndReason::Paused => {
                let message = "the agent was stopped: a final backup of this machine is being taken";
                ("Interrupted", message.to_owned())
            }
        };
        dispatch_error(name, message)
    }

    /// Milliseconds since the start.
    fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    async fn follow(
        &mut self,
        mut from_runner: OwnedReadHalf,
        mut to_runner: OwnedWriteHalf,
    ) -> Result<RunResult, DispatchError> {
        // Read frames in a separate task. Reads aren't cancel safe: a partial read would lose the stream position.
        let (frame_sender, mut frame_receiver) = tokio::sync::mpsc::channel(2);
        let reader = tokio::spawn(async move {
            while let Ok(Some(frame)) = RunnerFrame::read(&mut from_runner).await {
                if frame_sender.send(frame).await.is_err() {
                    return;
                }
            }
        });
        let mut give_up_at = None;
        let ended = loop {
            let gave_up = async {
                match give_up_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let end_requested = async {
                tokio::select! {
                    () = self.dispatch.cancel.cancelled() => EndReason::Cancelled,
                    () = self.context.stop.cancelled() => EndReason::Shutdown,
                    () = self.context.pause.cancelled() => EndReason::Paused,
                    () = tokio::time::sleep_until(self.deadline) => EndReason::Deadline,
                }
            };
            tokio::select! {
                frame = frame_receiver.recv() => match frame {
                    Some(RunnerFrame::Ready { pid }) => {
                        announce_to_watcher(self.context.watcher_socket, self.dispatch, pid).await;
                        // A runner that doesn't get the go-ahead times out.
                        let _ = tokio::time::timeout(CONNECT_TIMEOUT, GatewayFrame::Go.write(&mut to_runner)).await;
                    }
                    Some(RunnerFrame::Ended(ended)) => break Ok(ended),
                    Some(RunnerFrame::Refused(reason)) => break Err(dispatch_error("NotStarted", reason)),
                    Some(frame) => self.handle_frame(frame),
                    None => {
                        let message = "svc-agent disconnected without a result: see journalctl -u 'svc-agent@*'";
                        break Err(dispatch_error("NoRunner", message));
                    }
                },
                reason = end_requested, if self.end_reason.is_none() => {
                    self.end_reason = Some(reason);
                    give_up_at = Some(Instant::now() + END_TIMEOUT);
                    // A runner that doesn't get the cancellation is abandoned after `END_TIMEOUT`.
                    let _ = tokio::time::timeout(CONNECT_TIMEOUT, GatewayFrame::Cancel.write(&mut to_runner)).await;
                }
                () = gave_up => {
                    let seconds = END_TIMEOUT.as_secs();
                    let message = format!("svc-agent did not stop the agent within {seconds} s");
                    break Err(dispatch_error("NoRunner", message));
                }
            }
        };
        reader.abort();
        ended
    }

    fn handle_frame(&mut self, frame: RunnerFrame) {
        match frame {
            RunnerFrame::Started { pid } => {
                self.is_started = true;
                let entry = &self.dispatch.accepted.entry;
                self.context.kernel.note(&format!(
                    "dispatch {}: {} is running for {} as process {pid}",
                    self.dispatch.id(),
                    entry.agent_name,
                    self.dispatch.accepted.sender_id
                ));
            }
            RunnerFrame::Line(line) => {
                let line = String::from_utf8_lossy(&line);
                for event in self.adapter.parse_line(self.elapsed_ms(), &self.secrets.redact_line(&line)) {
                    if let Event::Started { conversation_id: Some(conversation), .. } = &event {
                        self.dispatch.set_conversation(conversation);
                    }
                    self.publish(&event);
                }
            }
            RunnerFrame::LongLine => {
                // It may have been a tool call containing a whole file.
                self.dispatch.add_seen_call("", self.has_shared_call_ids);
                tracing::warn!(id = self.dispatch.id(), "skipped an oversized line of agent output");
            }
            RunnerFrame::Ready { .. } | RunnerFrame::Ended(_) | RunnerFrame::Refused(_) => {}
        }
    }

    fn publish(&self, event: &Event) {
        if let Event::ToolStarted { name, is_recorded: true, .. } = event
            && SPAWN_TOOLS.contains(&&**name)
        {
            let (id, agent) = (self.dispatch.id(), &self.dispatch.accepted.entry.agent_name);
            self.context.kernel.note(&format!("dispatch {id}: {agent} started a subagent with {name}"));
        }
        if let Event::ToolStarted { id, name, .. } = event
            && (COMMAND_TOOLS.contains(&&**name) || WRITER_TOOLS.contains(&&**name))
        {
            self.dispatch.add_seen_call(id, self.has_shared_call_ids);
        }
        let data = serde_json::to_value(event).expect("plain fields serialize to JSON");
        let kind = data["type"].as_str().unwrap_or_default().to_owned();
        self.dispatch.publish(&kind, &data);
    }
}

/// Milliseconds since an interrupted dispatch started, or zero if unknown.
pub fn elapsed_ms(started_at: Option<Timestamp>, now: Timestamp) -> u64 {
    let elapsed = started_at.map_or(0, |at| now.as_millisecond().saturating_sub(at.as_millisecond()));
    u64::try_from(elapsed).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_counts_reservation_for_unreported_usage() {
        let settings = AgentSettings::default();
        let dollars = |cents: u64| Dollars::from_nanos(cents * 10_000_000);
        let reserved = dollars(200);
        let outcome = |has_unreported_usage, cost: Option<u64>| Outcome {
            has_unreported_usage,
            cost: cost.map(dollars),
            ..failed_outcome("ExitCode", String::new())
        };
        let estimate = |outcome: &Outcome, cost, is_interrupted| {
            estimate_cost(&settings, outcome, outcome.cost.or(cost), is_interrupted, reserved)
        };
        // The agent exited on its own, possibly with an arbitrary exit code.
        assert_eq!(estimate(&outcome(true, None), None, false), Some(reserved));
        assert_eq!(estimate(&outcome(true, None), Some(dollars(300)), false), Some(dollars(300)));
        assert_eq!(estimate(&outcome(true, Some(1)), None, false), Some(dollars(201)));
        assert_eq!(estimate(&outcome(false, Some(1)), None, true), None);
        assert_eq!(estimate(&outcome(false, None), None, true), Some(reserved));
        assert_eq!(estimate(&outcome(false, None), None, false), None);
    }
}
