//! What Codex keeps of its threads: `sessions/YYYY/MM/DD/rollout-TIME-THREAD.jsonl` below its home, as of 0.169
//! (`tests/agents/README.md`).
//!
//! Its output says what a thread has used when a turn ends well, and nothing of its subagents' threads nor of its model.
//! Here is what each call of the model used, also of a run that was cut off.

use std::fs::{DirEntry, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};

/// So many files are looked at, and so much of one.
const MOST_FILES: usize = 100_000;
const LARGEST: u64 = 256 << 20;
/// Lines of the kinds that are read have some hundred bytes, the first one some ten thousand.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// What a run has used, subagents included.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Used {
    pub model: Option<String>,
    pub tokens_in: u64,
    pub tokens_out: u64,
    /// Of the input: what the model's service had already.
    pub tokens_cached: u64,
}

#[derive(Deserialize)]
struct Line<T> {
    #[serde(default)]
    timestamp: Option<Timestamp>,
    payload: T,
}

/// The first line of a thread.
#[derive(Deserialize)]
struct Meta {
    id: String,
    /// The thread that began it all: of a subagent's, its first parent.
    session_id: Option<String>,
}

#[derive(Deserialize)]
struct Context {
    model: Option<String>,
}

/// One call of the model, written as soon as it is over.
#[derive(Deserialize)]
struct Record {
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

impl Used {
    fn add(&mut self, tokens: &Tokens) {
        self.tokens_in = self.tokens_in.saturating_add(tokens.input_tokens);
        self.tokens_out = self.tokens_out.saturating_add(tokens.output_tokens);
        self.tokens_cached = self.tokens_cached.saturating_add(tokens.cached_input_tokens);
    }
}

/// What a thread and those below it have used since a time; `None` where nothing tells.
pub fn used(sessions: &Path, thread: &str, since: Timestamp) -> Option<Used> {
    let (mut all, mut is_told) = (Used::default(), false);
    for file in rollouts(sessions) {
        let is_its_own = is_of(&file, thread);
        let modified = || Timestamp::try_from(file.metadata().ok()?.modified().ok()?).ok();
        if is_its_own || modified().is_some_and(|modified| modified >= since) {
            is_told |= read(&file.path(), thread, since, &mut all) == Some(true);
        }
    }
    is_told.then_some(all)
}

/// Whether there is such a thread, which can be gone on with.
pub fn has(sessions: &Path, thread: &str) -> bool {
    uuid::Uuid::try_parse(thread).is_ok() && rollouts(sessions).any(|file| is_of(&file, thread))
}

fn is_of(file: &DirEntry, thread: &str) -> bool {
    file.file_name().to_str().is_some_and(|name| {
        name.strip_suffix(".jsonl")
            .and_then(|name| name.strip_suffix(thread))
            .is_some_and(|name| name.ends_with('-'))
    })
}

/// All threads: by years, months, and days.
fn rollouts(sessions: &Path) -> impl Iterator<Item = DirEntry> {
    let inner = |dir: PathBuf| std::fs::read_dir(dir).into_iter().flatten().flatten();
    let years = inner(sessions.to_owned());
    let months = years.flat_map(move |year| inner(year.path()));
    let days = months.flat_map(move |month| inner(month.path()));
    days.flat_map(move |day| inner(day.path())).take(MOST_FILES)
}

/// Adds what one thread has used since a time, if it is one of this session; whether it tells of any.
fn read(path: &Path, session: &str, since: Timestamp, all: &mut Used) -> Option<bool> {
    let mut lines = BufReader::new(open(path)?.take(LARGEST));
    let mut line = Vec::new();
    next_line(&mut lines, &mut line).ok()?;
    let meta = serde_json::from_slice::<Line<Meta>>(&line).ok()?.payload;
    if meta.id != session && meta.session_id.as_deref() != Some(session) {
        return None;
    }
    let mut is_told = false;
    loop {
        if !next_line(&mut lines, &mut line).ok()? {
            return Some(is_told);
        }
        // Most lines are long, and of something else.
        if begins_with(&line, b"\"token_usage_record\"") {
            let Ok(Line { timestamp, payload }) = serde_json::from_slice::<Line<Record>>(&line) else {
                continue;
            };
            // A thread that begins as a copy of another has the other's records, too.
            if payload.thread_id == meta.id && timestamp.is_none_or(|at| at >= since) {
                all.add(&payload.usage);
                is_told = true;
            }
        } else if meta.id == session && begins_with(&line, b"\"turn_context\"") {
            let context = serde_json::from_slice::<Line<Context>>(&line).ok();
            all.model = context.and_then(|context| context.payload.model).or(all.model.take());
        }
    }
}

/// A regular file; the agent can put a FIFO there, which would never open.
fn open(path: &Path) -> Option<File> {
    let file = File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path).ok()?;
    file.metadata().ok()?.is_file().then_some(file)
}

/// The next line, as far as [`MAX_LINE_BYTES`]; a longer one is cut, so that it is no JSON. `false` at the end.
fn next_line(lines: &mut impl BufRead, line: &mut Vec<u8>) -> std::io::Result<bool> {
    line.clear();
    let read = lines.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', line)?;
    if read as u64 == MAX_LINE_BYTES && !line.ends_with(b"\n") {
        lines.skip_until(b'\n')?;
    }
    Ok(read > 0)
}

/// Whether its type, which stands at its beginning, is this.
fn begins_with(line: &[u8], kind: &[u8]) -> bool {
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

    fn meta(id: &str, session: &str) -> String {
        format!(
            "{{\"timestamp\":\"2026-11-22T02:50:12.000Z\",\"type\":\"session_meta\",\"payload\":{{\"session_id\":\"{session}\",\"id\":\"{id}\"}}}}\n"
        )
    }

    fn call(at: &str, thread: &str, tokens_in: u64, tokens_out: u64) -> String {
        format!(
            "{{\"timestamp\":\"2026-11-22T{at}Z\",\"ordinal\":2,\"type\":\"token_usage_record\",\"payload\":{{\"thread_id\":\"{thread}\",\
             \"usage\":{{\"input_tokens\":{tokens_in},\"cached_input_tokens\":1,\"output_tokens\":{tokens_out}}}}}}}\n"
        )
    }

    /// Would count, if it were not longer than any line of its kind.
    fn long_line() -> String {
        let call = call("03:00:02.500", THREAD, 5000, 5000);
        let padding = "x".repeat(usize::try_from(MAX_LINE_BYTES).unwrap());
        call.replace("\"payload\"", &format!("\"padding\":\"{padding}\",\"payload\""))
    }

    #[test]
    fn a_run_has_used_what_its_threads_have_since_it_began() {
        let dir = tempfile::tempdir().unwrap();
        let sessions = dir.path().join("sessions");
        let since: Timestamp = "2026-11-22T03:00:00Z".parse().unwrap();
        assert_eq!(used(&sessions, THREAD, since), None);
        let context = "{\"timestamp\":\"2026-11-22T02:50:12.000Z\",\"type\":\"turn_context\",\"payload\":{\"model\":\"gpt-5.5\"}}\n";
        // A thread that is gone on with, in the folder of its first day.
        write(
            &sessions.join("2026/11/21"),
            &format!("rollout-2026-11-21T02-50-12-{THREAD}.jsonl"),
            &[
                meta(THREAD, THREAD),
                context.to_owned(),
                call("02:50:13.000", THREAD, 1000, 100),
                "not JSON: \"token_usage_record\"\n".to_owned(),
                call("03:00:01.000", THREAD, 500, 50),
                call("03:00:02.000", THREAD, 200, 30),
                long_line(),
                call("03:00:03.000", THREAD, 1, 1),
                "{\"timestamp\": \"2026-11-22T0".to_owned(),
            ],
        );
        let day = sessions.join("2026/11/22");
        let sub = "01a20129-47df-7410-b5ee-defcf2221170";
        write(
            &day,
            &format!("rollout-x-{sub}.jsonl"),
            &[meta(sub, THREAD), call("03:00:01.400", THREAD, 9000, 900), call("03:00:01.500", sub, 30, 3)],
        );
        let other = "01a20129-0000-7410-b5ee-defcf2221170";
        write(
            &day,
            &format!("rollout-x-{other}.jsonl"),
            &[meta(other, other), call("03:00:01.500", other, 7, 7)],
        );
        write(&day, "something else", &["x".to_owned()]);
        nix::unistd::mkfifo(&day.join(format!("fifo-{THREAD}.jsonl")), nix::sys::stat::Mode::S_IRWXU)
            .unwrap();
        let expected =
            Used { model: Some("gpt-5.5".to_owned()), tokens_in: 731, tokens_out: 84, tokens_cached: 4 };
        assert_eq!(used(&sessions, THREAD, since), Some(expected));
        assert_eq!(used(&sessions, THREAD, "2026-11-22T03:10:00Z".parse().unwrap()), None, "nothing since");
        assert!(has(&sessions, THREAD) && has(&sessions, other));
        assert!(
            !has(&sessions, "46c0-7e12-862a-5371ec4ee03f")
                && !has(&sessions, "")
                && !has(&sessions, "telegram:7")
        );
    }
}
