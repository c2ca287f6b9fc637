//! The watcher thread: processes file events in the home directory and messages from hooks.
//!
//! All pending changes are collected before a tool call starts and after it ends, so each change belongs to the calls
//! that ran since the last check. If we can't guarantee that, we record a gap.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::call_windows::{CallWindow, CallWindows, ClaimedPath};
use super::calls::{Authority, Call, EndedCall, determine_authority, sanitize_names, trim_remembered};
use super::change_log::ChangeLog;
use super::diff;
use super::diff::DirtySet;
use super::dispatches::Dispatches;
use super::home_watcher::HomeWatcher;
use super::peer::Peer;
use super::request::{HookRequest, Request};
use super::state_file::{WatcherState, load_state, save_state};
use super::tool_paths::{find_reported_write, resolve_written_paths};
use super::tree::Tree;
use crate::audit::file_changes::ChangesReply;
use crate::audit::protocol::{Message, Phase, Process, UndeliveredHook};
use crate::records::entry::{AuditEntry, Gap, GapLine, GapReason};
use crate::records::writer::{LogFile, Records};
use crate::system::layout::Layout;
use svc_base::clock;
use svc_base::failpoint;
use svc_base::fsx::FileError;

/// Interval between checks for exited processes and saved messages.
const TICK_INTERVAL: Duration = Duration::from_secs(2);
/// Interval between home directory checks while only background calls are running.
const BACKGROUND_INTERVAL: Duration = Duration::from_secs(10);
/// Dirty names beyond this limit trigger a check while no tool is running.
const MAX_IDLE_DIRTY_NAMES: usize = 5_000;

pub struct Watcher {
    home: PathBuf,
    state_file: PathBuf,
    gap_file: PathBuf,
    records: Records,
    home_watcher: HomeWatcher,
    tree: Tree,
    dirty: DirtySet,
    change_log: ChangeLog,
    windows: CallWindows,
    dispatches: Dispatches,
    /// Tool calls whose gap is already recorded.
    calls_with_gap: VecDeque<String>,
    /// Finished tool calls. If a hook disconnects, its call may be reported twice: live, and through the saved message.
    ended_calls: VecDeque<EndedCall>,
    last_check: Instant,
    /// When the current message was received or collected, if its sender is no longer waiting for a reply.
    orphaned_since: Option<Instant>,
    was_at_watch_limit: bool,
}

impl Watcher {
    /// Scans the entire home directory, and records a gap for calls that were running across a restart.
    ///
    /// # Errors
    /// If the home directory can't be resolved, opened or watched.
    pub fn start(layout: &Layout, records: Records) -> Result<Self, FileError> {
        let home = layout.home();
        let home = std::fs::canonicalize(&home).map_err(FileError::wrap("resolve", &home))?;
        let mut home_watcher = HomeWatcher::open(&home)?;
        let mut tree = Tree::new(home_watcher.root());
        let start = Instant::now();
        diff::fill_tree(&mut tree, &mut home_watcher);
        tracing::info!(
            names = tree.len(),
            directories = home_watcher.watch_count(),
            ms = start.elapsed().as_millis(),
            "watching the home directory"
        );
        let state_file = layout.tool_calls();
        let WatcherState { windows: open_windows, dispatches } = load_state(&state_file);
        let mut watcher = Self {
            home,
            state_file,
            gap_file: layout.audit_gaps(),
            records,
            home_watcher,
            tree,
            dirty: DirtySet::default(),
            change_log: ChangeLog::new(),
            windows: CallWindows::default(),
            dispatches,
            calls_with_gap: VecDeque::new(),
            ended_calls: VecDeque::new(),
            last_check: Instant::now(),
            orphaned_since: None,
            was_at_watch_limit: false,
        };
        if let Some(since) = open_windows.iter().map(|window| window.opened).min() {
            watcher.record_gap(GapReason::Restarted, open_windows.len(), since);
        }
        watcher.windows = CallWindows::restore(open_windows);
        watcher.report_watch_limit();
        watcher.tick();
        Ok(watcher)
    }

    /// Runs until all handles are dropped. `wakeups` becomes readable when requests are queued.
    pub fn run(mut self, requests: &Receiver<Request>, wakeups: &UnixStream, has_progressed: &AtomicBool) {
        let mut last_tick = Instant::now();
        loop {
            has_progressed.store(true, Ordering::Relaxed);
            let is_idle = match requests.try_recv() {
                Ok(request) => {
                    self.process_request(request);
                    false
                }
                Err(TryRecvError::Empty) => true,
                Err(TryRecvError::Disconnected) => return self.check_home(),
            };
            if last_tick.elapsed() >= TICK_INTERVAL {
                has_progressed.store(true, Ordering::Relaxed);
                self.tick();
                last_tick = Instant::now();
            } else if self.windows.is_empty() && self.dirty.name_count() > MAX_IDLE_DIRTY_NAMES {
                self.check_home();
            }
            if is_idle {
                self.wait_for_events(wakeups, TICK_INTERVAL.saturating_sub(last_tick.elapsed()));
                self.home_watcher.drain(&mut self.dirty);
                let mut bytes = [0; 64];
                // Non-blocking; the bytes only wake this thread.
                while std::io::Read::read(&mut &*wakeups, &mut bytes).is_ok_and(|read| read > 0) {}
            }
        }
    }

    fn process_request(&mut self, request: Request) {
        let HookRequest { message, peer, received_at, done } = match request {
            Request::Hook(hook) => *hook,
            Request::Changes { last_saved_token, reply } => {
                let _ = reply.send(self.take_changes(last_saved_token.as_deref()));
                return;
            }
        };
        if done.is_closed() {
            // The client hung up before the reply. Hooks save the message in that case, to be collected later.
            self.orphaned_since = Some(received_at);
        } else {
            self.collect_saved();
        }
        self.process_message(message, &peer);
        self.orphaned_since = None;
        // The hook may have disconnected.
        let _ = done.send(());
    }

    /// Returns the changes not yet saved by the file backup.
    fn take_changes(&mut self, last_saved_token: Option<&str>) -> ChangesReply {
        self.home_watcher.drain(&mut self.dirty);
        if self.home_watcher.is_at_watch_limit() {
            self.change_log.record_everything();
        }
        self.change_log.record(&self.dirty, &self.tree);
        self.change_log.take(last_saved_token, self.home_watcher.event_count())
    }

    fn wait_for_events(&self, wakeups: &UnixStream, timeout: Duration) {
        let mut sources = [
            PollFd::new(self.home_watcher.as_fd(), PollFlags::POLLIN),
            PollFd::new(wakeups.as_fd(), PollFlags::POLLIN),
        ];
        let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::ZERO);
        // Errors such as EINTR are harmless: the caller drains the available events anyway.
        let _ = poll(&mut sources, timeout);
        if sources[0].any() == Some(true) && sources[1].any() == Some(false) {
            // Let events from a busy writer batch up in the kernel queue.
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn tick(&mut self) {
        self.collect_saved();
        self.end_killed_calls();
        let is_due = if self.windows.is_empty() {
            !self.dirty.is_clean()
        } else {
            self.windows.has_only_background_calls() && self.last_check.elapsed() >= BACKGROUND_INTERVAL
        };
        if is_due {
            self.check_home();
        }
    }

    /// Ends the calls whose process has exited, after collecting their changes.
    fn end_killed_calls(&mut self) {
        let processes = self.windows.all().iter().filter_map(|window| window.process);
        let exited: Vec<Process> = processes.filter(|process| process.has_ended()).collect();
        if exited.is_empty() {
            return;
        }
        // A check shared with other messages may have started before these processes exited.
        let orphaned_since = self.orphaned_since.take();
        self.check_home();
        self.orphaned_since = orphaned_since;
        let is_killed = |window: &CallWindow| window.process.is_some_and(|process| exited.contains(&process));
        let entries = self.windows.end_killed(is_killed);
        self.write_entries(entries);
        self.save_state();
    }

    fn process_message(&mut self, message: Message, peer: &Peer) {
        let message = sanitize_names(message);
        if matches!(message.phase, Phase::DispatchBegin | Phase::DispatchEnd) {
            return self.process_dispatch(message, peer);
        }
        let message = self.with_peer_identity(message, peer);
        let (session, tool_use) =
            (message.session_id.clone(), message.tool_use_id.clone().unwrap_or_default());
        let is_call_report = matches!(message.phase, Phase::Pre | Phase::Post | Phase::Failed);
        let call = Call { session, tool_use, process: message.process };
        if is_call_report && let Some(ended) = self.ended_calls.iter().find(|ended| ended.call == call) {
            // A saved message may duplicate a live report. A second live report, though, means that another process
            // with the same parent forged the first one: a program's hook reports the end of a call only once.
            if ended.is_live && peer.is_identified() {
                self.record_gap(GapReason::Forged, 1, message.sent_at);
            }
            return;
        }
        let Call { session, tool_use, process } = call;
        if is_call_report && !self.check_authority(&message, &session, &tool_use, peer) {
            return;
        }
        match message.phase {
            Phase::Pre => {
                self.check_home();
                self.open_window(&message);
            }
            Phase::Post => {
                let has_window = self.windows.contains(&session, &tool_use);
                if !has_window && message.path.is_some() {
                    // The message itself contains the written path.
                    self.open_window(&message);
                } else if !has_window {
                    self.record_unpaired(&tool_use, &message);
                }
                self.count_reported_call(&message, &session, &tool_use);
                self.check_home();
                self.end_successful_call(&message, &session, &tool_use);
                self.remember_ended(Call { session, tool_use, process }, peer);
            }
            Phase::Failed => {
                if !self.windows.contains(&session, &tool_use) && message.path.is_none() {
                    self.record_unpaired(&tool_use, &message);
                }
                self.count_reported_call(&message, &session, &tool_use);
                self.end_windows(|window| window.session == session && window.tool_use == tool_use);
                self.remember_ended(Call { session, tool_use, process }, peer);
            }
            Phase::TurnEnd => self.end_calls_of_peer(&message, peer, |window| {
                window.session == session && window.subagent == message.subagent && !window.is_background
            }),
            Phase::SessionEnd => self.end_calls_of_peer(&message, peer, |window| window.session == session),
            Phase::DispatchBegin | Phase::DispatchEnd => {}
        }
    }

    /// Counts the call as reported for its dispatch, if it has a window.
    fn count_reported_call(&mut self, message: &Message, session: &str, tool_use: &str) {
        if let Some(dispatch) = &message.dispatch_id
            && self.windows.contains(session, tool_use)
        {
            self.dispatches.add_call(dispatch, tool_use);
        }
    }

    /// Processes a dispatcher message, which only root and the gateway user may send.
    fn process_dispatch(&mut self, message: Message, peer: &Peer) {
        let Some(id) = message.dispatch_id.filter(|_| peer.may_report_dispatches) else {
            return self.record_gap(GapReason::Forged, 1, message.sent_at);
        };
        match message.process {
            Some(runner) if message.phase == Phase::DispatchBegin => {
                self.dispatches.begin(id, message.agent_name, runner);
                self.save_state();
            }
            _ => {
                self.end_killed_calls();
                self.end_windows(|window| window.agent.dispatch.as_ref() == Some(&id));
                let unreported = self.dispatches.end(&id, &message.seen.unwrap_or_default());
                if unreported > 0 {
                    self.record_gap(
                        GapReason::Unseen,
                        usize::try_from(unreported).unwrap_or(usize::MAX),
                        message.sent_at,
                    );
                }
                self.save_state();
            }
        }
    }

    /// Replaces the identity claimed by the sender with the one reported by the kernel.
    fn with_peer_identity(&self, mut message: Message, peer: &Peer) -> Message {
        let tool_use = message.tool_use_id.as_deref().unwrap_or_default();
        if !peer.is_identified()
            && let Some(window) = self.windows.get(&message.session_id, tool_use)
        {
            // The sender has exited, but the call has a window: use the identity recorded when the call started.
            message.process = window.process;
            message.dispatch_id.clone_from(&window.agent.dispatch);
            message.agent_name.clone_from(&window.agent.name);
            return message;
        }
        message.process = peer.caller();
        message.dispatch_id = None;
        if let Some(dispatch) = self.dispatches.find(peer) {
            message.dispatch_id = Some(dispatch.id.clone());
            message.agent_name.clone_from(&dispatch.agent_name);
        }
        message
    }

    /// Returns whether this peer may report on this call. Records rejected reports and unproven ends as gaps.
    fn check_authority(&self, message: &Message, session: &str, tool_use: &str, peer: &Peer) -> bool {
        let Some(window) = self.windows.get(session, tool_use) else { return true };
        let authority = determine_authority(window, peer);
        match authority {
            Authority::None => self.record_gap(GapReason::Forged, 1, message.sent_at),
            Authority::Unproven if message.phase != Phase::Pre => {
                self.record_gap(GapReason::Unproven, 1, message.sent_at);
            }
            Authority::Proven | Authority::Unproven => {}
        }
        authority != Authority::None
    }

    /// Ends the matching calls, except those owned by other processes. Records forged and unproven ends as gaps.
    fn end_calls_of_peer(&mut self, message: &Message, peer: &Peer, is_match: impl Fn(&CallWindow) -> bool) {
        let count_with = |authority| {
            self.windows
                .all()
                .iter()
                .filter(|window| is_match(window) && determine_authority(window, peer) == authority)
                .count()
        };
        for (authority, reason) in
            [(Authority::None, GapReason::Forged), (Authority::Unproven, GapReason::Unproven)]
        {
            let calls = count_with(authority);
            if calls > 0 {
                self.record_gap(reason, calls, message.sent_at);
            }
        }
        self.end_windows(|window| is_match(window) && determine_authority(window, peer) != Authority::None);
    }

    fn remember_ended(&mut self, call: Call, peer: &Peer) {
        self.ended_calls.push_back(EndedCall { call, is_live: peer.is_identified() });
        trim_remembered(&mut self.ended_calls);
    }

    fn record_unpaired(&mut self, tool_use: &str, message: &Message) {
        if !self.calls_with_gap.iter().any(|call| call == tool_use) {
            self.record_gap(GapReason::Unpaired, 1, message.sent_at);
        }
    }

    fn open_window(&mut self, message: &Message) {
        let claim = message.path.as_ref().map(|path| {
            let paths = resolve_written_paths(&self.home, message.cwd.as_deref(), path);
            paths.into_iter().map(ClaimedPath).collect()
        });
        if let Some(evicted) = self.windows.begin(CallWindow::new(message, claim, clock::now_ms())) {
            self.record_gap(GapReason::TooManyCalls, 1, evicted.opened);
        }
        self.save_state();
    }

    fn end_successful_call(&mut self, message: &Message, session: &str, tool_use: &str) {
        if message.is_background {
            self.windows.mark_as_background(session, tool_use);
        } else {
            let find_write = |path: &String| find_reported_write(&self.home, message.cwd.as_deref(), path);
            let fallback = message.path.as_ref().and_then(find_write);
            let entries = self.windows.end_successful(session, tool_use, fallback, clock::now_ms());
            self.write_entries(entries);
        }
        self.save_state();
    }

    /// Collects pending changes, then ends the matching calls.
    fn end_windows(&mut self, should_end: impl Fn(&CallWindow) -> bool) {
        self.check_home();
        let entries = self.windows.end(should_end);
        self.write_entries(entries);
        self.save_state();
    }

    /// Collects and attributes all pending changes.
    ///
    /// At the watch limit, a check takes seconds, so messages with no waiting sender share one that started after they
    /// were received. Otherwise, messages could arrive faster than we process them.
    fn check_home(&mut self) {
        let is_shared = self.orphaned_since.is_some_and(|since| self.last_check >= since);
        if is_shared && self.home_watcher.is_at_watch_limit() {
            return;
        }
        self.home_watcher.drain(&mut self.dirty);
        if failpoint::trigger("watch.check").is_err() || self.home_watcher.is_at_watch_limit() {
            self.dirty.mark_all();
            self.home_watcher.retry_watches();
        }
        self.last_check = Instant::now();
        if self.dirty.is_clean() {
            return;
        }
        let dirty = std::mem::take(&mut self.dirty);
        self.change_log.record(&dirty, &self.tree);
        let update = diff::update_tree(&mut self.tree, &dirty, &mut self.home_watcher);
        self.change_log.record(&dirty, &self.tree);
        self.change_log.record_changes(&update.changes);
        self.home_watcher.unwatch(&update.removed_dirs);
        self.report_watch_limit();
        let entries = self.windows.attribute(update.changes, clock::now_ms());
        self.write_entries(entries);
    }

    fn report_watch_limit(&mut self) {
        if self.home_watcher.is_at_watch_limit() != self.was_at_watch_limit {
            self.was_at_watch_limit = self.home_watcher.is_at_watch_limit();
            let note = if self.was_at_watch_limit {
                "the file audit cannot watch all directories, so it scans the whole home directory at each \
                 tool call: raise fs.inotify.max_user_watches"
            } else {
                "the file audit watches all directories again"
            };
            // The writer reports a dropped line as a gap.
            let _ = self.records.note(note);
        }
    }

    fn write_entries(&self, entries: Vec<AuditEntry>) {
        for entry in entries {
            // The writer reports dropped entries as a gap.
            let _ = self.records.append(LogFile::Audit, &entry);
        }
    }

    fn record_gap(&self, reason: GapReason, calls: usize, since: Timestamp) {
        tracing::warn!(%reason, calls, "recorded a file-audit gap");
        let gap = Gap { lost: calls as u64, since, why: Some(reason) };
        // The writer reports a dropped line as a gap.
        let _ = self.records.append(LogFile::Audit, &GapLine { version: 1, timestamp: clock::now_ms(), gap });
    }

    /// Records saved messages as gaps, except late end reports, and processes the end reports that the watcher hasn't
    /// processed yet.
    fn collect_saved(&mut self) {
        let mut saved = UndeliveredHook::collect(&self.gap_file);
        // A late end report isn't a gap: all changes up to that point belong to the call.
        let is_gap = |saved: &UndeliveredHook| {
            saved.why != GapReason::Late
                || saved.message.as_ref().is_none_or(|message| message.phase == Phase::Pre)
        };
        saved.sort_by_key(|hook| (hook.why, hook.at));
        let gaps: Vec<&UndeliveredHook> = saved.iter().filter(|hook| is_gap(hook)).collect();
        for hooks in gaps.chunk_by(|a, b| a.why == b.why) {
            self.record_gap(hooks[0].why, hooks.len(), hooks[0].at);
        }
        let ids = gaps.iter().filter_map(|hook| hook.message.as_ref()?.tool_use_id.clone());
        self.calls_with_gap.extend(ids);
        trim_remembered(&mut self.calls_with_gap);
        saved.sort_by_key(|hook| hook.at);
        self.orphaned_since = Some(Instant::now());
        for UndeliveredHook { why: reason, message, .. } in saved {
            let Some(message) = message.filter(|message| message.phase != Phase::Pre) else { continue };
            let tool_use = message.tool_use_id.as_deref().unwrap_or_default();
            // The message may have been processed even though its hook timed out.
            if reason == GapReason::Undelivered || self.windows.contains(&message.session_id, tool_use) {
                // The hook process has exited.
                self.process_message(message, &Peer::default());
            }
        }
        self.orphaned_since = None;
    }

    /// Saves the running calls and dispatches without fsync: a power failure may lose the file, but it ends all calls
    /// too.
    fn save_state(&self) {
        let (windows, dispatches) = (self.windows.all().to_vec(), self.dispatches.clone());
        if let Err(error) = save_state(&self.state_file, &WatcherState { windows, dispatches }) {
            tracing::error!(%error, path = %self.state_file.display(), "cannot save watcher state");
        }
    }
}
