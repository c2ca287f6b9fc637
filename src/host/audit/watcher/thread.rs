//! The watcher itself: one thread that hears of the home's changes and of the agents' tool calls, in that order.
//!
//! Before a tool call begins and when it has ended, all that changed until then is settled; so each change belongs to
//! the calls that ran since the look before. Where that could not be, a gap says so.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::calls::{Call, Done, Right, bounded, right};
use super::diff;
use super::diff::{Change, Dirt};
use super::dispatches::Dispatches;
use super::home_watcher::Eye;
use super::peer::Speaker;
use super::state_file::{Kept, restored};
use super::tool_paths;
use super::tree::Tree;
use super::windows::{Agent, Window, Windows};
use crate::clock;
use crate::failpoint;
use crate::fsx::FileError;
use crate::host::audit::protocol::{Message, Phase, Process, Untold};
use crate::host::records::entry::{AuditEntry, Gap, GapLine, Op, Why};
use crate::host::records::writer::{Record, Records};
use crate::host::system::layout::Layout;

/// Between looks at what needs no word: processes that are gone, gaps that were left.
const TICK: Duration = Duration::from_secs(2);
/// What runs in the background is told of this often.
const BACKGROUND: Duration = Duration::from_secs(10);
/// So many names with something to look at are looked at while no tool runs.
const ENOUGH: usize = 5_000;
/// So many tool calls with a gap, and that have ended, are remembered.
const MOST_MISSED: usize = 512;

/// A message, and who waits for it to have been heard.
pub struct Told {
    pub message: Message,
    pub speaker: Speaker,
    pub heard: tokio::sync::oneshot::Sender<()>,
}

pub struct Watcher {
    home: PathBuf,
    state: PathBuf,
    gaps: PathBuf,
    records: Records,
    eye: Eye,
    tree: Tree,
    dirt: Dirt,
    windows: Windows,
    dispatches: Dispatches,
    /// Tool calls whose gap is noted.
    missed: VecDeque<String>,
    /// Tool calls that have ended. One whose hook let go is told twice: by what it left, and when it is heard after all.
    done: VecDeque<Done>,
    settled: Instant,
    was_short: bool,
}

impl Watcher {
    /// Looks at the whole home, and says what was missed since this was last done.
    ///
    /// # Errors
    /// When the home cannot be watched.
    pub fn begin(layout: &Layout, records: Records) -> Result<Self, FileError> {
        let home = layout.home();
        let home = std::fs::canonicalize(&home).map_err(FileError::at("find", &home))?;
        let mut eye = Eye::open(&home)?;
        let mut tree = Tree::new(eye.root());
        let begun = Instant::now();
        diff::fill(&mut tree, &mut eye);
        tracing::info!(
            names = tree.len(),
            folders = eye.watches(),
            ms = begun.elapsed().as_millis(),
            "watching"
        );
        let state = layout.tool_calls();
        let Kept { windows: open, dispatches } = restored(&state);
        let mut watcher = Self {
            home,
            state,
            gaps: layout.audit_gaps(),
            records,
            eye,
            tree,
            dirt: Dirt::default(),
            windows: Windows::default(),
            dispatches,
            missed: VecDeque::new(),
            done: VecDeque::new(),
            settled: Instant::now(),
            was_short: false,
        };
        if let Some(since) = open.iter().map(|window| window.opened).min() {
            watcher.gap(Why::Restarted, open.len(), since);
        }
        watcher.windows = Windows::restored(open);
        watcher.tell_shortage();
        watcher.tick();
        Ok(watcher)
    }

    /// Until nobody can tell it anything any more. `waker` is readable when there is something.
    pub fn run(mut self, told: &Receiver<Told>, waker: &UnixStream, alive: &Arc<AtomicBool>) {
        let mut ticked = Instant::now();
        loop {
            alive.store(true, Ordering::Relaxed);
            self.wait(waker, TICK.saturating_sub(ticked.elapsed()));
            self.eye.drain(&mut self.dirt);
            let mut byte = [0; 64];
            // It does not block, and what it says is only that there is something.
            while std::io::Read::read(&mut &*waker, &mut byte).is_ok_and(|read| read > 0) {}
            loop {
                match told.try_recv() {
                    Ok(Told { message, speaker, heard }) => {
                        self.collect();
                        self.hear(message, &speaker);
                        // The hook may have let go.
                        let _ = heard.send(());
                    }
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        self.look();
                        return;
                    }
                }
            }
            if ticked.elapsed() >= TICK {
                self.tick();
                ticked = Instant::now();
            } else if self.windows.is_empty() && self.dirt.names() > ENOUGH {
                self.look();
            }
        }
    }

    fn wait(&self, waker: &UnixStream, longest: Duration) {
        let mut ends =
            [PollFd::new(self.eye.as_fd(), PollFlags::POLLIN), PollFd::new(waker.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(longest).unwrap_or(PollTimeout::ZERO);
        // Interrupted or not, what there is is read.
        let _ = poll(&mut ends, timeout);
        if ends[0].any() == Some(true) && ends[1].any() == Some(false) {
            // Who writes much is let write on for a moment: the queue takes it.
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn tick(&mut self) {
        self.collect();
        let is_due = if self.windows.is_empty() {
            !self.dirt.is_clean()
        } else {
            self.windows.is_background() && self.settled.elapsed() >= BACKGROUND
        };
        let is_gone = |window: &Window| window.process.is_some_and(Process::is_gone);
        if self.windows.all().iter().any(is_gone) {
            self.end(is_gone);
        } else if is_due {
            self.look();
        }
    }

    fn hear(&mut self, message: Message, speaker: &Speaker) {
        let message = bounded(message);
        if matches!(message.phase, Phase::DispatchBegin | Phase::DispatchEnd) {
            return self.hear_dispatcher(message, speaker);
        }
        let message = self.of_speaker(message, speaker);
        let (session, tool_use) =
            (message.session_id.clone(), message.tool_use_id.clone().unwrap_or_default());
        let is_of_call = matches!(message.phase, Phase::Pre | Phase::Post | Phase::Failed);
        let call = Call { session, tool_use, process: message.process };
        if is_of_call && let Some(done) = self.done.iter().find(|done| done.call == call) {
            // What a hook left is heard again when it was heard after all. But a program's hook tells of an end once: it was
            // told before by somebody else, who had the same parent.
            if done.is_live && speaker.is_known() {
                self.gap(Why::Forged, 1, message.sent_at);
            }
            return;
        }
        let Call { session, tool_use, process } = call;
        if is_of_call && !self.may_speak_of(&message, &session, &tool_use, speaker) {
            return;
        }
        match message.phase {
            Phase::Pre => {
                self.look();
                self.open(&message);
            }
            Phase::Post => {
                let is_known = self.windows.has(&session, &tool_use);
                if !is_known && message.path.is_some() {
                    // What it wrote is told by itself.
                    self.open(&message);
                } else if !is_known {
                    self.unpaired(&tool_use, &message);
                }
                self.note(&message, &session, &tool_use);
                self.look();
                self.succeed(&message, &session, &tool_use);
                self.is_done(Call { session, tool_use, process }, speaker);
            }
            Phase::Failed => {
                if !self.windows.has(&session, &tool_use) && message.path.is_none() {
                    self.unpaired(&tool_use, &message);
                }
                self.note(&message, &session, &tool_use);
                self.end(|window| window.session == session && window.tool_use == tool_use);
                self.is_done(Call { session, tool_use, process }, speaker);
            }
            Phase::TurnEnd => self.end_all(&message, speaker, |window| {
                window.session == session && window.subagent == message.subagent && !window.is_background
            }),
            Phase::SessionEnd => self.end_all(&message, speaker, |window| window.session == session),
            Phase::DispatchBegin | Phase::DispatchEnd => {}
        }
    }

    /// A call whose beginning was seen, or that says what it wrote, was told whole.
    fn note(&mut self, message: &Message, session: &str, tool_use: &str) {
        if let Some(dispatch) = &message.dispatch_id
            && self.windows.has(session, tool_use)
        {
            self.dispatches.note(dispatch, tool_use);
        }
    }

    /// The dispatcher's word, which only the gateway's user may give.
    fn hear_dispatcher(&mut self, message: Message, speaker: &Speaker) {
        let Some(id) = message.dispatch_id.filter(|_| speaker.is_gateway) else {
            return self.gap(Why::Forged, 1, message.sent_at);
        };
        match message.process {
            Some(runner) if message.phase == Phase::DispatchBegin => {
                self.dispatches.begin(id, message.agent_name, runner);
                self.keep();
            }
            _ => {
                self.end(|window| window.agent.dispatch.as_ref() == Some(&id));
                let lost = self.dispatches.end(&id, &message.seen.unwrap_or_default());
                if lost > 0 {
                    self.gap(Why::Unseen, usize::try_from(lost).unwrap_or(usize::MAX), message.sent_at);
                }
                self.keep();
            }
        }
    }

    /// The message with what the kernel says of its teller in place of what it says itself.
    fn of_speaker(&self, mut message: Message, speaker: &Speaker) -> Message {
        let tool_use = message.tool_use_id.as_deref().unwrap_or_default();
        if !speaker.is_known()
            && let Some(window) = self.windows.get(&message.session_id, tool_use)
        {
            // Of a call that is known, whoever was not there to be asked.
            message.process = window.process;
            message.dispatch_id.clone_from(&window.agent.dispatch);
            message.agent_name.clone_from(&window.agent.name);
            return message;
        }
        message.process = speaker.caller();
        message.dispatch_id = None;
        if let Some(dispatch) = self.dispatches.of(speaker) {
            message.dispatch_id = Some(dispatch.id.clone());
            message.agent_name.clone_from(&dispatch.agent_name);
        }
        message
    }

    /// Whether this teller is heard on this call. What it is not believed is told by a gap.
    fn may_speak_of(&self, message: &Message, session: &str, tool_use: &str, speaker: &Speaker) -> bool {
        let Some(window) = self.windows.get(session, tool_use) else { return true };
        let right = right(window, speaker);
        match right {
            Right::None => self.gap(Why::Forged, 1, message.sent_at),
            Right::Unproven if message.phase != Phase::Pre => self.gap(Why::Unproven, 1, message.sent_at),
            Right::Proven | Right::Unproven => {}
        }
        right != Right::None
    }

    /// Ends those calls of these that are the teller's.
    fn end_all(&mut self, message: &Message, speaker: &Speaker, ends: impl Fn(&Window) -> bool) {
        let count = |wanted| {
            self.windows
                .all()
                .iter()
                .filter(|window| ends(window) && right(window, speaker) == wanted)
                .count()
        };
        for (right, why) in [(Right::None, Why::Forged), (Right::Unproven, Why::Unproven)] {
            let calls = count(right);
            if calls > 0 {
                self.gap(why, calls, message.sent_at);
            }
        }
        self.end(|window| ends(window) && right(window, speaker) != Right::None);
    }

    fn is_done(&mut self, call: Call, speaker: &Speaker) {
        self.done.push_back(Done { call, is_live: speaker.is_known() });
        if self.done.len() > MOST_MISSED {
            self.done.pop_front();
        }
    }

    fn unpaired(&mut self, tool_use: &str, message: &Message) {
        if !self.missed.iter().any(|missed| missed == tool_use) {
            self.gap(Why::Unpaired, 1, message.sent_at);
        }
    }

    fn open(&mut self, message: &Message) {
        let claim =
            message.path.as_ref().map(|path| tool_paths::paths(&self.home, message.cwd.as_deref(), path));
        let window = Window {
            session: message.session_id.clone(),
            tool_use: message.tool_use_id.clone().unwrap_or_default(),
            tool: message.tool.clone().unwrap_or_default(),
            agent: Agent {
                actor: message.actor.clone(),
                name: message.agent_name.clone(),
                dispatch: message.dispatch_id.clone(),
            },
            subagent: message.subagent.clone(),
            process: message.process,
            opened: clock::now_ms(),
            claim,
            is_background: false,
        };
        if let Some(given_up) = self.windows.begin(window) {
            self.gap(Why::Crowded, 1, given_up.opened);
        }
        self.keep();
    }

    fn succeed(&mut self, message: &Message, session: &str, tool_use: &str) {
        if message.is_background {
            self.windows.put_into_background(session, tool_use);
        } else {
            let otherwise = message.path.as_ref().and_then(|path| self.as_said(message.cwd.as_deref(), path));
            let entries = self.windows.succeed(session, tool_use, otherwise, clock::now_ms());
            self.write(entries);
        }
        self.keep();
    }

    /// What a tool says that it wrote, where the tree shows nothing: a file was written with what was in it, or another
    /// call's look has seen it before.
    fn as_said(&self, cwd: Option<&str>, path: &str) -> Option<Change> {
        let paths = tool_paths::paths(&self.home, cwd, path);
        let path = paths.last()?;
        let meta = std::fs::symlink_metadata(self.home.join(path)).ok();
        // A link that leads out of the home: what was written is not in it.
        if meta.as_ref().is_some_and(std::fs::Metadata::is_symlink) {
            return None;
        }
        let size = meta.map_or(0, |meta| meta.len());
        Some(Change { op: Op::Write, path: path.clone().into_bytes(), size })
    }

    /// Settles what there is, then ends these calls.
    fn end(&mut self, ends: impl Fn(&Window) -> bool) {
        self.look();
        let entries = self.windows.end(ends);
        self.write(entries);
        self.keep();
    }

    /// Settles all that happened before this.
    fn look(&mut self) {
        self.eye.drain(&mut self.dirt);
        if failpoint::pass("watch.look").is_err() || self.eye.is_short() {
            self.dirt.mark_all();
            self.eye.hope();
        }
        self.settled = Instant::now();
        if self.dirt.is_clean() {
            return;
        }
        let dirt = std::mem::take(&mut self.dirt);
        let settled = diff::settle(&mut self.tree, &dirt, &mut self.eye);
        self.eye.forget(&settled.left);
        self.tell_shortage();
        let entries = self.windows.attribute(settled.changes, clock::now_ms());
        self.write(entries);
    }

    fn tell_shortage(&mut self) {
        if self.eye.is_short() != self.was_short {
            self.was_short = self.eye.is_short();
            let what = if self.was_short {
                "the file audit cannot watch all folders (fs.inotify.max_user_watches): it looks through the whole home at each tool call"
            } else {
                "the file audit watches all folders again"
            };
            // What has no room there is counted there.
            let _ = self.records.note(what);
        }
    }

    fn write(&self, entries: Vec<AuditEntry>) {
        for entry in entries {
            // What has no room is told by the writer.
            let _ = self.records.append(Record::Audit, &entry);
        }
    }

    fn gap(&self, why: Why, calls: usize, since: Timestamp) {
        tracing::warn!(?why, calls, "tool calls were not seen");
        let gap = Gap { lost: calls as u64, since, why: Some(why) };
        // As above.
        let _ = self.records.append(Record::Audit, &GapLine { version: 1, timestamp: clock::now_ms(), gap });
    }

    /// Notes what hooks could tell nobody, and obeys it as far as it still can be.
    fn collect(&mut self) {
        let mut left = Untold::collect(&self.gaps);
        // Who let go at the end of a call was late for nothing: all that came before was the call's.
        let is_gap = |untold: &Untold| {
            untold.why != Why::Late || untold.message.as_ref().is_none_or(|told| told.phase == Phase::Pre)
        };
        left.sort_by_key(|untold| (untold.why, untold.at));
        let gaps: Vec<&Untold> = left.iter().filter(|untold| is_gap(untold)).collect();
        for all in gaps.chunk_by(|one, other| one.why == other.why) {
            self.gap(all[0].why, all.len(), all[0].at);
        }
        let ids = left.iter().filter(|untold| is_gap(untold));
        let ids = ids.filter_map(|untold| untold.message.as_ref()?.tool_use_id.clone());
        self.missed.extend(ids);
        while self.missed.len() > MOST_MISSED {
            self.missed.pop_front();
        }
        left.sort_by_key(|untold| untold.at);
        for Untold { why, message, .. } in left {
            let Some(message) = message.filter(|message| message.phase != Phase::Pre) else { continue };
            let tool_use = message.tool_use_id.as_deref().unwrap_or_default();
            // Who let go too early may have been heard all the same.
            if why == Why::Unheard || self.windows.has(&message.session_id, tool_use) {
                // Whoever left it is not there to be asked.
                self.hear(message, &Speaker::default());
            }
        }
    }

    /// Keeps the calls that run, for a next life. A power cut may lose it: then no call runs any more, either.
    fn keep(&self) {
        let kept = Kept { windows: self.windows.all().to_vec(), dispatches: self.dispatches.clone() };
        let kept = serde_json::to_vec(&kept).map_err(std::io::Error::from).and_then(|text| {
            let new = self.state.with_extension("new");
            std::fs::write(&new, text)?;
            std::fs::rename(new, &self.state)
        });
        if let Err(error) = kept {
            tracing::error!(%error, path = %self.state.display(), "cannot keep which tools run");
        }
    }
}
