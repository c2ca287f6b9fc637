//! Reads Codex session files: `sessions/YYYY/MM/DD/rollout-TIME-THREAD.jsonl` in its home directory, as of release
//! 0.169 (see `tests/agents/README.md`).
//!
//! Codex prints a thread's usage only when a turn succeeds, without the model or subagents. Session files record the
//! usage of every model call, including those of interrupted runs.

use std::fs::{DirEntry, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};

/// Maximum number of session files considered.
const MAX_SESSION_FILES: usize = 100_000;
/// Maximum number of bytes read per file.
const MAX_FILE_BYTES: u64 = 256 << 20;
/// Maximum length of a parsed line in bytes. Relevant lines are a few hundred bytes long, and the first line is about
/// 10,000 bytes.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// Usage of a run, including its subagents.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SessionUsage {
    pub model: Option<String>,
    pub tokens_in: u64,
    pub tokens_out: u64,
    /// Input tokens served from the model provider's cache. Included in `tokens_in`.
    pub tokens_cached: u64,
}

#[derive(Deserialize)]
struct SessionLine<T> {
    #[serde(default)]
    timestamp: Option<Timestamp>,
    payload: T,
}

/// The first line of a session file.
#[derive(Deserialize)]
struct SessionMeta {
    id: String,
    /// The root thread, which for a subagent is the run's thread.
    session_id: Option<String>,
}

#[derive(Deserialize)]
struct TurnContext {
    model: Option<String>,
}

/// Usage of one model call, written when the call completes.
#[derive(Deserialize)]
struct UsageRecord {
    thread_id: String,
    usage: Tokens,
}

#[derive(Deserialize)]
struct Tokens {
    input_tokens: u64,
    output_tokens: u64,
    #[serde(default)]
    cached_input_tokens: u64,
}

impl SessionUsage {
    fn add(&mut self, tokens: &Tokens) {
        self.tokens_in = self.tokens_in.saturating_add(tokens.input_tokens);
        self.tokens_out = self.tokens_out.saturating_add(tokens.output_tokens);
        self.tokens_cached = self.tokens_cached.saturating_add(tokens.cached_input_tokens);
    }
}

/// Sums the usage of a thread and its subagents since `since`. Returns `None` if none is recorded.
pub fn read_usage(sessions: &Path, thread: &str, since: Timestamp) -> Option<SessionUsage> {
    let (mut total, mut has_usage) = (SessionUsage::default(), false);
    for file in list_session_files(sessions) {
        let is_own_file = is_file_for_thread(&file, thread);
        let modified = || Timestamp::try_from(file.metadata().ok()?.modified().ok()?).ok();
        if is_own_file || modified().is_some_and(|modified| modified >= since) {
            has_usage |= add_usage(&file.path(), thread, since, &mut total) == Some(true);
        }
    }
    has_usage.then_some(total)
}

/// Whether the thread has a session file and can therefore be resumed.
pub fn has_thread(sessions: &Path, thread: &str) -> bool {
    uuid::Uuid::try_parse(thread).is_ok()
        && list_session_files(sessions).any(|file| is_file_for_thread(&file, thread))
}

fn is_file_for_thread(file: &DirEntry, thread: &str) -> bool {
    file.file_name().to_str().is_some_and(|name| {
        name.strip_suffix(".jsonl")
            .and_then(|name| name.strip_suffix(thread))
            .is_some_and(|name| name.ends_with('-'))
    })
}

/// Lists session files, which are grouped into directories by year, month and day.
fn list_session_files(sessions: &Path) -> impl Iterator<Item = DirEntry> {
    let entries = |dir: PathBuf| std::fs::read_dir(dir).into_iter().flatten().flatten();
    let years = entries(sessions.to_owned());
    let months = years.flat_map(move |year| entries(year.path()));
    let days = months.flat_map(move |month| entries(month.path()));
    days.flat_map(move |day| entries(day.path())).take(MAX_SESSION_FILES)
}

/// Adds the usage in a file since `since`. Returns whether there is any, or `None` if the file is unreadable or doesn't
/// belong to the thread or one of its subagents.
fn add_usage(path: &Path, thread: &str, since: Timestamp, total: &mut SessionUsage) -> Option<bool> {
    let mut lines = BufReader::new(open_regular(path)?.take(MAX_FILE_BYTES));
    let mut line = Vec::new();
    read_line(&mut lines, &mut line).ok()?;
    let meta = serde_json::from_slice::<SessionLine<SessionMeta>>(&line).ok()?.payload;
    if meta.id != thread && meta.session_id.as_deref() != Some(thread) {
        return None;
    }
    let mut has_usage = false;
    loop {
        if !read_line(&mut lines, &mut line).ok()? {
            return Some(has_usage);
        }
        // Most lines are long and irrelevant, so check the type before parsing.
        if has_type(&line, b"\"token_usage_record\"") {
            let Ok(SessionLine { timestamp, payload }) =
                serde_json::from_slice::<SessionLine<UsageRecord>>(&line)
            else {
                continue;
            };
            // A forked thread's file also contains its parent thread's records.
            if payload.thread_id == meta.id && timestamp.is_none_or(|at| at >= since) {
                total.add(&payload.usage);
                has_usage = true;
            }
        } else if meta.id == thread && has_type(&line, b"\"turn_context\"") {
            let context = serde_json::from_slice::<SessionLine<TurnContext>>(&line).ok();
            total.model = context.and_then(|context| context.payload.model).or(total.model.take());
        }
    }
}

/// Opens regular files only, without blocking: an agent-created FIFO would block the reader forever.
fn open_regular(path: &Path) -> Option<File> {
    let file = File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path).ok()?;
    file.metadata().ok()?.is_file().then_some(file)
}

/// Reads the next line. Lines longer than [`MAX_LINE_BYTES`] are truncated, which makes them invalid JSON. Returns
/// `false` at the end of the file.
fn read_line(lines: &mut impl BufRead, line: &mut Vec<u8>) -> std::io::Result<bool> {
    line.clear();
    let read = lines.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', line)?;
    if read as u64 == MAX_LINE_BYTES && !line.ends_with(b"\n") {
        lines.skip_until(b'\n')?;
    }
    Ok(read > 0)
}

/// Whether the line has the given type. Checks only the first 200 bytes, which contain the type.
fn has_type(line: &[u8], kind: &[u8]) -> bool {
    line[..line.len().min(200)].windows(kind.len()).any(|part| part == kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREAD: &str = "01a20129-46c0-7e12-862a-5371ec4ee03f";

    fn write(dir: &Path, name: &str, lines: &[String]) {
        std::fs::create_dir_all(dir).unwrap();
        std::fs::write(dir.join(name), lines.concat()).unwrap();
    }

    fn meta_line(id: &str, session: &str) -> String {
        format!(
            "{{\"timestamp\":\"2026-11-22T02:50:12.000Z\",\"type\":\"session_meta\",\"payload\":{{\"session_id\":\"{session}\",\"id\":\"{id}\"}}}}\n"
        )
    }

    fn usage_line(at: &str, thread: &str, tokens_in: u64, tokens_out: u64) -> String {
        format!(
            "{{\"timestamp\":\"2026-11-22T{at}Z\",\"ordinal\":2,\"type\":\"token_usage_record\",\"payload\":{{\"thread_id\":\"{thread}\",\
             \"usage\":{{\"input_tokens\":{tokens_in},\"cached_input_tokens\":1,\"output_tokens\":{tokens_out}}}}}}}\n"
        )
    }

    /// A usage record that is ignored for being too long.
    fn long_line() -> String {
        let line = usage_line("03:00:02.500", THREAD, 5000, 5000);
        let padding = "x".repeat(usize::try_from(MAX_LINE_BYTES).unwrap());
        line.replace("\"payload\"", &format!("\"padding\":\"{padding}\",\"payload\""))
    }

    #[test]
    fn read_usage_sums_thread_and_subagents_since_start() {
        let dir = tempfile::tempdir().unwrap();
        let sessions = dir.path().join("sessions");
        let since: Timestamp = "2026-11-22T03:00:00Z".parse().unwrap();
        assert_eq!(read_usage(&sessions, THREAD, since), None);
        let context = "{\"timestamp\":\"2026-11-22T02:50:12.000Z\",\"type\":\"turn_context\",\"payload\":{\"model\":\"gpt-5.5\"}}\n";
        // A resumed thread's file stays in the directory for the day it was created.
        write(
            &sessions.join("2026/11/21"),
            &format!("rollout-2026-11-21T02-50-12-{THREAD}.jsonl"),
            &[
                meta_line(THREAD, THREAD),
                context.to_owned(),
                usage_line("02:50:13.000", THREAD, 1000, 100),
                "not JSON: \"token_usage_record\"\n".to_owned(),
                usage_line("03:00:01.000", THREAD, 500, 50),
                usage_line("03:00:02.000", THREAD, 200, 30),
                long_line(),
                usage_line("03:00:03.000", THREAD, 1, 1),
                "{\"timestamp\": \"2026-11-22T0".to_owned(),
            ],
        );
        let day = sessions.join("2026/11/22");
        let subagent = "01a20129-47df-7410-b5ee-defcf2221170";
        write(
            &day,
            &format!("rollout-x-{subagent}.jsonl"),
            &[
                meta_line(subagent, THREAD),
                usage_line("03:00:01.400", THREAD, 9000, 900),
                usage_line("03:00:01.500", subagent, 30, 3),
            ],
        );
        let other = "01a20129-0000-7410-b5ee-defcf2221170";
        write(
            &day,
            &format!("rollout-x-{other}.jsonl"),
            &[meta_line(other, other), usage_line("03:00:01.500", other, 7, 7)],
        );
        write(&day, "something else", &["x".to_owned()]);
        nix::unistd::mkfifo(&day.join(format!("fifo-{THREAD}.jsonl")), nix::sys::stat::Mode::S_IRWXU)
            .unwrap();
        let expected = SessionUsage {
            model: Some("gpt-5.5".to_owned()),
            tokens_in: 731,
            tokens_out: 84,
            tokens_cached: 4,
        };
        assert_eq!(read_usage(&sessions, THREAD, since), Some(expected));
        let later = "2026-11-22T03:10:00Z".parse().unwrap();
        assert_eq!(read_usage(&sessions, THREAD, later), None, "no usage since then");
        assert!(has_thread(&sessions, THREAD) && has_thread(&sessions, other));
        assert!(
            !has_thread(&sessions, "46c0-7e12-862a-5371ec4ee03f")
                && !has_thread(&sessions, "")
                && !has_thread(&sessions, "telegram:7")
        );
    }
}
