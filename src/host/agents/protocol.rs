//! What the gateway and `svc-agent` say to each other over `agent.sock`: frames of a kind, a length and a payload.
//!
//! The gateway sends an order. The runner says which process it is, and starts the agent when the gateway has told the
//! watcher. Where the run is to end early, the gateway sends a cancellation; closing the connection cancels, too. The runner
//! passes on what the agent prints, line by line, and at last says how it ended.

use std::collections::BTreeMap;
use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::adapters::codex_sessions::Used;
use super::adapters::{Exit, Kind};

/// The socket in [`crate::host::system::layout::Layout::owner_sockets`].
pub const SOCKET: &str = "agent.sock";
/// The longest line of an agent that is passed on: a tool's input may be a whole file.
pub const LONGEST_LINE: usize = 8 << 20;
/// The largest frame: an order with its prompt, or a line.
const LARGEST: u32 = 16 << 20;
/// How long an agent that is told to end has before it is killed.
pub const GRACE: std::time::Duration = std::time::Duration::from_secs(5);

/// One run of an agent.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Order {
    pub version: u32,
    /// The dispatch's.
    pub id: String,
    pub agent_name: String,
    pub adapter: Kind,
    /// The program and its first arguments; the adapter adds its own.
    pub command: Vec<String>,
    pub model: Option<String>,
    pub conversation_id: Option<String>,
    pub prompt: String,
    /// Beside what every run has.
    pub environment: BTreeMap<String, String>,
}

impl Order {
    pub const VERSION: u32 = 2;
    /// Of a gateway of the release before, while an update is under way: it neither knows [`FromRunner::Ready`] nor says go.
    pub const WITHOUT_READY: u32 = 1;
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ended {
    pub exit: Exit,
    /// The end of what it wrote to standard error.
    pub said: String,
    /// What the program's own record says that it has used, where it keeps one that is read.
    #[serde(default)]
    pub used: Option<Used>,
}

/// What the gateway says.
pub enum ToRunner {
    Order(Box<Order>),
    /// The answer to [`FromRunner::Ready`].
    Go,
    Cancel,
}

/// What the runner says.
#[derive(Debug, PartialEq, Eq)]
pub enum FromRunner {
    /// The order is understood. Whatever the agent starts will run below this process.
    Ready { pid: u32 },
    /// The agent's process is there.
    Started { pid: u32 },
    /// A line of its standard output, without its end.
    Line(Vec<u8>),
    /// One that was longer than [`LONGEST_LINE`], and is left out.
    LongLine,
    /// The last frame: nothing of the run is left.
    Ended(Ended),
    /// The last frame, too: there was no run, for this reason.
    Refused(String),
}

const ORDER: u8 = b'O';
const GO: u8 = b'G';
const CANCEL: u8 = b'C';
const READY: u8 = b'P';
const STARTED: u8 = b'S';
const LINE: u8 = b'L';
const LONG_LINE: u8 = b'X';
const ENDED: u8 = b'E';
const REFUSED: u8 = b'R';

impl ToRunner {
    /// # Errors
    /// The connection's.
    pub async fn write(&self, out: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        match self {
            Self::Order(order) => write(out, ORDER, &json(order)).await,
            Self::Go => write(out, GO, &[]).await,
            Self::Cancel => write(out, CANCEL, &[]).await,
        }
    }

    /// `None` at the end of the connection.
    ///
    /// # Errors
    /// The connection's; a frame that is none of these.
    pub async fn read(input: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Self>> {
        let Some((kind, payload)) = read(input).await? else { return Ok(None) };
        match kind {
            ORDER => Ok(Some(Self::Order(parsed(&payload)?))),
            GO => Ok(Some(Self::Go)),
            CANCEL => Ok(Some(Self::Cancel)),
            _ => Err(strange()),
        }
    }
}

impl FromRunner {
    /// # Errors
    /// The connection's.
    pub async fn write(&self, out: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        match self {
            Self::Ready { pid } => write(out, READY, &json(pid)).await,
            Self::Started { pid } => write(out, STARTED, &json(pid)).await,
            Self::Line(line) => write(out, LINE, line).await,
            Self::LongLine => write(out, LONG_LINE, &[]).await,
            Self::Ended(ended) => write(out, ENDED, &json(ended)).await,
            Self::Refused(why) => write(out, REFUSED, why.as_bytes()).await,
        }
    }

    /// `None` at the end of the connection.
    ///
    /// # Errors
    /// The connection's; a frame that is none of these.
    pub async fn read(input: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Self>> {
        let Some((kind, payload)) = read(input).await? else { return Ok(None) };
        Ok(Some(match kind {
            READY => Self::Ready { pid: parsed(&payload)? },
            STARTED => Self::Started { pid: parsed(&payload)? },
            LINE => Self::Line(payload),
            LONG_LINE => Self::LongLine,
            ENDED => Self::Ended(parsed(&payload)?),
            REFUSED => Self::Refused(String::from_utf8_lossy(&payload).into_owned()),
            _ => return Err(strange()),
        }))
    }
}

fn json(of: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(of).expect("plain fields are JSON")
}

fn parsed<T: DeserializeOwned>(payload: &[u8]) -> io::Result<T> {
    serde_json::from_slice(payload).map_err(|_| strange())
}

fn strange() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a frame of another protocol")
}

async fn write(out: &mut (impl AsyncWrite + Unpin), kind: u8, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len()).ok().filter(|length| *length <= LARGEST);
    let length = length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a frame too large"))?;
    let mut head = [kind, 0, 0, 0, 0];
    head[1..].copy_from_slice(&length.to_be_bytes());
    out.write_all(&head).await?;
    out.write_all(payload).await?;
    out.flush().await
}

async fn read(input: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<(u8, Vec<u8>)>> {
    let mut head = [0; 5];
    if input.read(&mut head[..1]).await? == 0 {
        return Ok(None);
    }
    input.read_exact(&mut head[1..]).await?;
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
    if length > LARGEST {
        return Err(strange());
    }
    let mut payload = vec![0; length as usize];
    input.read_exact(&mut payload).await?;
    Ok(Some((head[0], payload)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_written_is_read() {
        let frames = [
            FromRunner::Started { pid: 7 },
            FromRunner::Line(b"{\"type\": \"x\"}\xff".to_vec()),
            FromRunner::LongLine,
            FromRunner::Ended(Ended {
                exit: Exit::Signal(9),
                said: "no".to_owned(),
                used: Some(Used::default()),
            }),
            FromRunner::Refused("why".to_owned()),
        ];
        let mut bytes = Vec::new();
        for frame in &frames {
            frame.write(&mut bytes).await.unwrap();
        }
        let mut input = &bytes[..];
        for frame in &frames {
            assert_eq!(FromRunner::read(&mut input).await.unwrap().as_ref(), Some(frame));
        }
        assert_eq!(FromRunner::read(&mut input).await.unwrap(), None);
    }

    #[tokio::test]
    async fn what_is_none_of_it_is_refused() {
        for bytes in [&b"S\0\0\0\x01x"[..], b"?\0\0\0\0", b"L\xff\xff\xff\xff", b"L\0\0\0\x05ab", b"S\0"] {
            assert!(FromRunner::read(&mut &bytes[..]).await.is_err(), "{bytes:?}");
        }
    }
}
