//! One run of an agent, as the gateway sees it: an order to the runner, what comes back, and what it came to.

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
use crate::clock;
use crate::host::agents::adapters::preview::Secrets;
use crate::host::agents::adapters::settings::{Agent, AgentSettings};
use crate::host::agents::adapters::{Adapter, Event, Exit, Outcome};
use crate::host::agents::bridge_tokens::{AgentToken, AgentTokens};
use crate::host::agents::kernel::Kernel;
use crate::host::agents::protocol::{Ended, FromRunner, GRACE, Order, ToRunner};
use crate::host::audit::protocol;
use crate::host::audit::protocol::{COMMANDS, Message, Process, WRITERS};
use crate::host::records::entry::{Failed, Interaction, Status};
use crate::host::records::money::Dollars;

/// How long the runner may take to be there and to hear its order.
const CONNECT: Duration = Duration::from_secs(10);
/// How long a runner that was told to end may take, beside the agent's grace.
const ENDING: Duration = Duration::from_secs(15);
/// The model of a dispatch of which nobody named any.
const UNKNOWN: &str = "unknown";
/// The tools by which agents start others.
const SPAWNS: [&str; 4] = ["Agent", "Task", "spawn_agent", "task"];

/// Why a run was ended before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Cancelled,
    Deadline,
    Stopped,
    Paused,
}

/// What is needed of the gateway.
pub struct Surroundings<'a> {
    pub kernel: &'a Kernel,
    pub socket: &'a Path,
    pub agent_tokens: &'a Arc<AgentTokens>,
    /// The socket for agents that use the bridge.
    pub bridge: &'a Path,
    /// Where svc-watch listens.
    pub watcher: &'a Path,
    /// The gateway ends.
    pub stop: &'a CancellationToken,
    /// The machine's writers are stopped.
    pub pause: &'a CancellationToken,
    pub settings: &'a AgentSettings,
}

/// Runs it to its end, whatever that is.
pub async fn run(around: &Surroundings<'_>, dispatch: &Dispatch) -> (Interaction, Option<String>) {
    let begun = Instant::now();
    let outcome = match around.settings.agents.get(&dispatch.kept.entry.agent_name) {
        Some(agent) => Run::new(around, dispatch, agent, begun).play(agent).await,
        None => nothing("NoAgent", "the agent is no longer in system/config.json".to_owned()),
    };
    around.kernel.note(&format!(
        "dispatch {}: {} after {:.1} s",
        dispatch.id(),
        if outcome.status == Status::Success { "success" } else { "error" },
        begun.elapsed().as_secs_f64()
    ));
    let entry = &dispatch.kept.entry;
    let model = outcome.model.clone().or_else(|| entry.model.clone());
    let cost = around.settings.cost(&outcome, entry.model.as_deref());
    if cost.is_none() && outcome.tokens_in + outcome.tokens_out > 0 {
        let model = model.as_deref().unwrap_or(UNKNOWN);
        around.kernel.note(&format!(
            "dispatch {}: system/config.json has no price of {model}; it counts as $0",
            dispatch.id()
        ));
    }
    let text = outcome.text.clone();
    (interaction(dispatch, outcome, model, cost.unwrap_or_default(), begun.elapsed()), text)
}

/// One that is over without a run.
pub fn without_run(dispatch: &Dispatch, name: &str, message: &str) -> Interaction {
    let outcome = nothing(name, message.to_owned());
    let model = dispatch.kept.entry.model.clone();
    interaction(dispatch, outcome, model, Dollars::ZERO, Duration::ZERO)
}

fn nothing(name: &str, message: String) -> Outcome {
    Outcome {
        conversation_id: None,
        model: None,
        tokens_in: 0,
        tokens_out: 0,
        tokens_cached: 0,
        cost: None,
        tools: Vec::new(),
        status: Status::Error,
        error: Some(failed(name, message)),
        text: None,
    }
}

fn failed(name: &str, message: String) -> Failed {
    Failed { name: name.to_owned(), message, stack: None, tool: None, turn: None }
}

fn interaction(
    dispatch: &Dispatch,
    outcome: Outcome,
    model: Option<String>,
    cost: Dollars,
    took: Duration,
) -> Interaction {
    let kept = &dispatch.kept;
    let conversation_id = kept.entry.conversation_id.clone().or(outcome.conversation_id);
    Interaction {
        version: Interaction::VERSION,
        id: kept.id.clone(),
        timestamp: clock::now_ms(),
        sender_id: kept.sender_id.clone(),
        conversation_id: conversation_id.unwrap_or_else(|| kept.id.clone()),
        model: model.unwrap_or_else(|| UNKNOWN.to_owned()),
        agent_name: kept.entry.agent_name.clone(),
        tokens_in: outcome.tokens_in,
        tokens_out: outcome.tokens_out,
        cost,
        duration_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        tools: outcome.tools,
        status: outcome.status,
        error: outcome.error,
        batch: kept.batch.is_some(),
        batch_id: kept.batch.as_ref().map(|batch| batch.id.clone()),
    }
}

/// What the processes below the runner do is this dispatch's, whatever they say.
async fn tell_watcher(watcher: &Path, dispatch: &Dispatch, runner: u32) {
    let runner = Process::of(i32::try_from(runner).unwrap_or_default());
    let begin = Message::dispatch_begin(dispatch.id(), &dispatch.kept.entry.agent_name, runner);
    protocol::tell_of_dispatch(watcher, begin).await;
}

/// Without one the agent runs, and its requests to the bridge are refused.
fn token(around: &Surroundings<'_>, dispatch: &Dispatch, agent: &Agent) -> Option<AgentToken> {
    if agent.apps.is_empty() {
        return None;
    }
    let issued = around.agent_tokens.issue(dispatch.id(), &agent.apps);
    issued.map_err(|error| tracing::error!(%error, id = dispatch.id(), "an agent gets no token")).ok()
}

struct Run<'a> {
    around: &'a Surroundings<'a>,
    dispatch: &'a Dispatch,
    adapter: Box<dyn Adapter>,
    begun: Instant,
    deadline: Instant,
    why: Option<Why>,
    secrets: Secrets,
    environment: BTreeMap<String, String>,
    /// Whether the agent's hooks have the ids of its output.
    is_by_id: bool,
    /// Of an agent that uses the bridge; it ends with the run.
    _token: Option<AgentToken>,
}

impl<'a> Run<'a> {
    fn new(around: &'a Surroundings<'a>, dispatch: &'a Dispatch, agent: &Agent, begun: Instant) -> Self {
        let deadline = begun + Duration::from_secs(dispatch.kept.entry.deadline_seconds);
        let (mut environment, token) = (agent.environment.clone(), token(around, dispatch, agent));
        if let Some(token) = &token {
            let bridge = around.bridge.display().to_string();
            environment.insert("SVC_BRIDGE_SOCKET".to_owned(), bridge);
            environment.insert("SVC_BRIDGE_TOKEN".to_owned(), token.secret.expose_secret().to_owned());
        }
        let (adapter, secrets) = (agent.adapter.adapter(), Secrets::of(&environment));
        Self {
            around,
            dispatch,
            adapter,
            begun,
            deadline,
            why: None,
            secrets,
            environment,
            is_by_id: agent.adapter.has_ids_of_hooks(),
            _token: token,
        }
    }

    fn order(&self, agent: &Agent) -> ToRunner {
        let kept = &self.dispatch.kept;
        ToRunner::Order(Box::new(Order {
            version: Order::VERSION,
            id: kept.id.clone(),
            agent_name: kept.entry.agent_name.clone(),
            adapter: agent.adapter,
            command: agent.command.clone(),
            model: kept.entry.model.clone(),
            conversation_id: kept.entry.conversation_id.clone(),
            prompt: kept.entry.prompt.clone(),
            environment: self.environment.clone(),
        }))
    }

    async fn play(mut self, agent: &Agent) -> Outcome {
        let early = if self.dispatch.cancel.is_cancelled() {
            Some(Why::Cancelled)
        } else if self.around.pause.is_cancelled() {
            Some(Why::Paused)
        } else {
            self.around.stop.is_cancelled().then_some(Why::Stopped)
        };
        if let Some(why) = early {
            return Outcome { error: Some(self.ended_early(why)), ..nothing("", String::new()) };
        }
        let order = self.order(agent);
        let within = CONNECT.min(self.deadline.saturating_duration_since(Instant::now()));
        let connected = async {
            let mut connection = UnixStream::connect(self.around.socket).await?;
            order.write(&mut connection).await?;
            Ok::<_, std::io::Error>(connection.into_split())
        };
        let (from, to) = match tokio::time::timeout(within, connected).await {
            Ok(Ok(halves)) => halves,
            Ok(Err(error)) => {
                tracing::warn!(%error, "svc-agent cannot be reached");
                return nothing(
                    "NoRunner",
                    "svc-agent cannot be reached: is svc-agent.socket active?".into(),
                );
            }
            Err(_) => return nothing("NoRunner", "svc-agent did not take its order in time".into()),
        };
        let ended = self.follow(from, to).await;
        let at = self.at();
        let mut outcome = match ended {
            Ok(mut ended) => {
                self.secrets.hide(&mut ended.said);
                if let Some(used) = ended.used {
                    self.adapter.used(used);
                }
                self.adapter.ended(at, ended.exit, &ended.said)
            }
            Err(failed) => {
                // What was told of it until then counts.
                let told = self.adapter.ended(at, Exit::Signal(9), "");
                Outcome { status: Status::Error, error: Some(failed), ..told }
            }
        };
        if let (Some(why), Status::Error) = (self.why, outcome.status) {
            let told = outcome.error.take();
            let (tool, turn) = told.map(|told| (told.tool, told.turn)).unwrap_or_default();
            outcome.error = Some(Failed { tool, turn, ..self.ended_early(why) });
        }
        outcome
    }

    fn ended_early(&self, why: Why) -> Failed {
        let (name, message) = match why {
            Why::Cancelled => ("Cancelled", "it was cancelled".to_owned()),
            Why::Deadline => {
                let seconds = self.dispatch.kept.entry.deadline_seconds;
                ("DeadlineExceeded", format!("it was ended after {seconds} s, its deadline"))
            }
            Why::Stopped => ("Interrupted", "it was ended because the gateway ended".to_owned()),
            Why::Paused => {
                let message =
                    "it was ended because the platform stops this machine's writers for a last backup";
                ("Interrupted", message.to_owned())
            }
        };
        failed(name, message)
    }

    /// Milliseconds since the start.
    fn at(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    async fn follow(&mut self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> Result<Ended, Failed> {
        let gone =
            || failed("NoRunner", "svc-agent ended without a word: its unit's log says why".to_owned());
        // Frames are read by a task of their own: a read that is given up half-way would lose its place.
        let (frames, mut next) = tokio::sync::mpsc::channel(2);
        let reader = tokio::spawn(async move {
            while let Ok(Some(frame)) = FromRunner::read(&mut from).await {
                if frames.send(frame).await.is_err() {
                    return;
                }
            }
        });
        let mut give_up = None;
        let ended = loop {
            let wait_for_end = async {
                match give_up {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let why = async {
                tokio::select! {
                    () = self.dispatch.cancel.cancelled() => Why::Cancelled,
                    () = self.around.stop.cancelled() => Why::Stopped,
                    () = self.around.pause.cancelled() => Why::Paused,
                    () = tokio::time::sleep_until(self.deadline) => Why::Deadline,
                }
            };
            tokio::select! {
                frame = next.recv() => match frame {
                    Some(FromRunner::Ready { pid }) => {
                        tell_watcher(self.around.watcher, self.dispatch, pid).await;
                        // One that does not hear it ends by itself.
                        let _ = tokio::time::timeout(CONNECT, ToRunner::Go.write(&mut to)).await;
                    }
                    Some(FromRunner::Ended(ended)) => break Ok(ended),
                    Some(FromRunner::Refused(why)) => break Err(failed("NotStarted", why)),
                    Some(frame) => self.take(frame),
                    None => break Err(gone()),
                },
                why = why, if self.why.is_none() => {
                    self.why = Some(why);
                    give_up = Some(Instant::now() + GRACE + ENDING);
                    // One that does not hear it is given up.
                    let _ = tokio::time::timeout(CONNECT, ToRunner::Cancel.write(&mut to)).await;
                }
                () = wait_for_end => {
                    break Err(failed("NoRunner", "svc-agent did not end the agent in time".to_owned()));
                }
            }
        };
        reader.abort();
        ended
    }

    fn take(&mut self, frame: FromRunner) {
        match frame {
            FromRunner::Started { pid } => {
                let entry = &self.dispatch.kept.entry;
                self.around.kernel.note(&format!(
                    "dispatch {}: {} runs for {} as process {pid}",
                    self.dispatch.id(),
                    entry.agent_name,
                    self.dispatch.kept.sender_id
                ));
            }
            FromRunner::Line(line) => {
                let line = String::from_utf8_lossy(&line);
                for event in self.adapter.line(self.at(), &self.secrets.hide_in_line(&line)) {
                    if let Event::Started { conversation_id: Some(conversation), .. } = &event {
                        self.dispatch.converse(conversation);
                    }
                    self.tell(&event);
                }
            }
            FromRunner::LongLine => {
                // It may have been a call with a whole file in it.
                self.dispatch.saw("", self.is_by_id);
                tracing::warn!(id = self.dispatch.id(), "a line of an agent was too long and is left out");
            }
            FromRunner::Ready { .. } | FromRunner::Ended(_) | FromRunner::Refused(_) => {}
        }
    }

    fn tell(&self, event: &Event) {
        if let Event::ToolStarted { name, .. } = event
            && SPAWNS.contains(&&**name)
        {
            let (id, agent) = (self.dispatch.id(), &self.dispatch.kept.entry.agent_name);
            self.around.kernel.note(&format!("dispatch {id}: {agent} spawned an agent by {name}"));
        }
        if let Event::ToolStarted { id, name, .. } = event
            && (COMMANDS.contains(&&**name) || WRITERS.contains(&&**name))
        {
            self.dispatch.saw(id, self.is_by_id);
        }
        let data = serde_json::to_value(event).expect("plain fields are JSON");
        let kind = data["type"].as_str().unwrap_or_default().to_owned();
        self.dispatch.tell(&kind, &data);
    }
}

/// The time from which a dispatch that is looked at after a crash was cut off.
pub fn since(started_at: Option<Timestamp>, now: Timestamp) -> u64 {
    let since = started_at.map_or(0, |at| now.as_millisecond().saturating_sub(at.as_millisecond()));
    u64::try_from(since).unwrap_or_default()
}
