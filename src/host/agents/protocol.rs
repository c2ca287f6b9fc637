//! The `agent.sock` protocol between the gateway and `svc-agent`. A frame is a kind, a length and a payload.
//!
//! The gateway sends a run request, and the runner (`svc-agent`) replies with its pid. The gateway registers the pid
//! with the watcher, then sends [`GatewayFrame::Go`]; only then does the runner start the agent. Cancelling the run or
//! closing the connection ends it early. The runner forwards the agent's output line by line and finally reports its
//! exit.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::adapters::codex_sessions::SessionUsage;
use super::adapters::{AdapterKind, Exit};

/// Socket name in [`crate::system::layout::Layout::owner_sockets`].
pub const SOCKET: &str = "agent.sock";
/// Maximum length of a forwarded line; tool input can be a whole file.
pub const MAX_LINE_BYTES: usize = 8 << 20;
/// Maximum payload size: a line, or a request including its prompt.
const MAX_FRAME_BYTES: u32 = 16 << 20;
/// Grace period between SIGINT and SIGTERM. Claude Code prints its cost within 0.3 s of SIGINT, but never after
/// SIGTERM.
pub const INTERRUPT_GRACE: Duration = Duration::from_secs(2);
/// Grace period between SIGTERM and SIGKILL.
pub const TERMINATE_GRACE: Duration = Duration::from_secs(5);
/// Deadline for the runner to end a cancelled run, including both grace periods.
pub const END_TIMEOUT: Duration =
    Duration::from_secs(15).saturating_add(INTERRUPT_GRACE).saturating_add(TERMINATE_GRACE);

/// A request to run an agent.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunRequest {
    pub version: u32,
    /// Dispatch id.
    pub id: String,
    pub agent_name: String,
    pub adapter: AdapterKind,
    /// The program and its leading arguments; the adapter appends more.
    pub command: Vec<String>,
    pub model: Option<String>,
    pub conversation_id: Option<String>,
    pub prompt: String,
    /// Environment variables on top of those set for every run.
    pub environment: BTreeMap<String, String>,
}

impl RunRequest {
    pub const PROTOCOL_VERSION: u32 = 2;
    /// Sent by the previous release's gateway during an update. It doesn't support [`RunnerFrame::Ready`] and never
    /// sends [`GatewayFrame::Go`].
    pub const PROTOCOL_VERSION_WITHOUT_READY: u32 = 1;
}

/// Outcome of a run, for [`RunnerFrame::Ended`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunResult {
    pub exit: Exit,
    /// Tail of the agent's stderr, with secrets from its environment redacted.
    #[serde(rename = "said")]
    pub stderr_tail: String,
    /// Usage read from the program's session files, if any.
    #[serde(rename = "used", default)]
    pub usage: Option<SessionUsage>,
    /// Whether the program resumed an earlier conversation.
    #[serde(default)]
    pub is_resumed: bool,
}

/// A frame sent by the gateway.
pub enum GatewayFrame {
    Run(Box<RunRequest>),
    /// Starts the agent, in response to [`RunnerFrame::Ready`].
    Go,
    Cancel,
}

/// A frame sent by the runner.
#[derive(Debug, PartialEq, Eq)]
pub enum RunnerFrame {
    /// The runner supports the request version. All agent processes will be descendants of `pid`.
    Ready { pid: u32 },
    /// The agent process has started.
    Started { pid: u32 },
    /// A line of stdout, without its terminator.
    Line(Vec<u8>),
    /// Replaces a line longer than [`MAX_LINE_BYTES`].
    LongLine,
    /// Final frame of a run, sent once all its processes are gone.
    Ended(RunResult),
    /// Sent instead of [`Self::Ended`], with the reason, if the agent was never started.
    Refused(String),
}

const RUN: u8 = b'O';
const GO: u8 = b'G';
const CANCEL: u8 = b'C';
const READY: u8 = b'P';
const STARTED: u8 = b'S';
const LINE: u8 = b'L';
const LONG_LINE: u8 = b'X';
const ENDED: u8 = b'E';
const REFUSED: u8 = b'R';

impl GatewayFrame {
    /// Writes the frame.
    ///
    /// # Errors
    /// The write failed, or the payload is larger than `MAX_FRAME_BYTES`.
    pub async fn write(&self, out: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        match self {
            Self::Run(request) => write_frame(out, RUN, &to_json(request)).await,
            Self::Go => write_frame(out, GO, &[]).await,
            Self::Cancel => write_frame(out, CANCEL, &[]).await,
        }
    }

    /// Reads the next frame, or returns `None` at EOF.
    ///
    /// # Errors
    /// The read failed, or the frame is invalid.
    pub async fn read(input: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Self>> {
        let Some((kind, payload)) = read_frame(input).await? else { return Ok(None) };
        match kind {
            RUN => Ok(Some(Self::Run(parse_payload(&payload)?))),
            GO => Ok(Some(Self::Go)),
            CANCEL => Ok(Some(Self::Cancel)),
            _ => Err(invalid_frame()),
        }
    }
}

impl RunnerFrame {
    /// Writes the frame.
    ///
    /// # Errors
    /// The write failed, or the payload is larger than `MAX_FRAME_BYTES`.
    pub async fn write(&self, out: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        match self {
            Self::Ready { pid } => write_frame(out, READY, &to_json(pid)).await,
            Self::Started { pid } => write_frame(out, STARTED, &to_json(pid)).await,
            Self::Line(line) => write_frame(out, LINE, line).await,
            Self::LongLine => write_frame(out, LONG_LINE, &[]).await,
            Self::Ended(ended) => write_frame(out, ENDED, &to_json(ended)).await,
            Self::Refused(reason) => write_frame(out, REFUSED, reason.as_bytes()).await,
        }
    }

    /// Reads the next frame, or returns `None` at EOF.
    ///
    /// # Errors
    /// The read failed, or the frame is invalid.
    pub async fn read(input: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Self>> {
        let Some((kind, payload)) = read_frame(input).await? else { return Ok(None) };
        Ok(Some(match kind {
            READY => Self::Ready { pid: parse_payload(&payload)? },
            STARTED => Self::Started { pid: parse_payload(&payload)? },
            LINE => Self::Line(payload),
            LONG_LINE => Self::LongLine,
            ENDED => Self::Ended(parse_payload(&payload)?),
            REFUSED => Self::Refused(String::from_utf8_lossy(&payload).into_owned()),
            _ => return Err(invalid_frame()),
        }))
    }
}

fn to_json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain fields serialize to JSON")
}

fn parse_payload<T: DeserializeOwned>(payload: &[u8]) -> io::Result<T> {
    serde_json::from_slice(payload).map_err(|_| invalid_frame())
}

fn invalid_frame() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "invalid frame")
}

async fn write_frame(out: &mut (impl AsyncWrite + Unpin), kind: u8, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len()).ok().filter(|length| *length <= MAX_FRAME_BYTES);
    let length = length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "frame too large"))?;
    let mut head = [kind, 0, 0, 0, 0];
    head[1..].copy_from_slice(&length.to_be_bytes());
    out.write_all(&head).await?;
    out.write_all(payload).await?;
    out.flush().await
}

async fn read_frame(input: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<(u8, Vec<u8>)>> {
    let mut head = [0; 5];
    if input.read(&mut head[..1]).await? == 0 {
        return Ok(None);
    }
    input.read_exact(&mut head[1..]).await?;
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
    if length > MAX_FRAME_BYTES {
        return Err(invalid_frame());
    }
    let mut payload = vec![0; length as usize];
    input.read_exact(&mut payload).await?;
    Ok(Some((head[0], payload)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_round_trip() {
        let frames = [
            RunnerFrame::Started { pid: 7 },
            RunnerFrame::Line(b"{\"type\": \"x\"}\xff".to_vec()),
            RunnerFrame::LongLine,
            RunnerFrame::Ended(RunResult {
                exit: Exit::Signal(9),
                stderr_tail: "no".to_owned(),
                usage: Some(SessionUsage::default()),
                is_resumed: true,
            }),
            RunnerFrame::Refused("why".to_owned()),
        ];
        let mut bytes = Vec::new();
        for frame in &frames {
            frame.write(&mut bytes).await.unwrap();
        }
        let mut input = &bytes[..];
        for frame in &frames {
            assert_eq!(RunnerFrame::read(&mut input).await.unwrap().as_ref(), Some(frame));
        }
        assert_eq!(RunnerFrame::read(&mut input).await.unwrap(), None);
    }

    #[tokio::test]
    async fn read_rejects_invalid_frames() {
        for bytes in [&b"S\0\0\0\x01x"[..], b"?\0\0\0\0", b"L\xff\xff\xff\xff", b"L\0\0\0\x05ab", b"S\0"] {
            assert!(RunnerFrame::read(&mut &bytes[..]).await.is_err(), "{bytes:?}");
        }
    }
}
