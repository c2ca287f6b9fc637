//! Forwards TLS-ALPN-01 validations to the machine whose name they validate.
//!
//! A public CA resolves a machine's name to the router, and the machine must respond with its own certificate. Only the
//! ClientHello is inspected, and it is peeked, not read: other connections are then served as usual.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls::server::Acceptor;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::addresses;
use super::certificate::ACME_ALPN;
use super::rate::RateLimit;

/// Maximum size of a validation's ClientHello. A larger one belongs to another client.
const MAX_HELLO_BYTES: usize = 8 << 10;
const RECORD_HEADER_BYTES: usize = 5;
const HANDSHAKE_RECORD: u8 = 22;
/// Interval between peeks at an incomplete ClientHello; `peek` does not wait for more data.
const PEEK_INTERVAL: Duration = Duration::from_millis(1);
const MAX_PEEK_INTERVAL: Duration = Duration::from_millis(50);
/// A validation's ClientHello fits into one or two packets. A slower client is served without being inspected.
const PEEK_TIMEOUT: Duration = Duration::from_millis(500);

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const FORWARD_TIMEOUT: Duration = Duration::from_secs(8);
/// Maximum bytes in each direction: a handshake with one small certificate.
const MAX_FORWARDED_BYTES: u64 = 64 << 10;
const MAX_FORWARDED_CONNECTIONS: usize = 256;
/// A machine that keeps its connections open must not use up the connections of others. A CA validates from a few places.
const MAX_CONNECTIONS_PER_NAME: usize = 16;
const PERMIT_TIMEOUT: Duration = Duration::from_secs(3);
/// Burst per name and client network, so that other networks cannot use up the CA's allowance. A CA validates again with
/// each attempt of the machine.
const VALIDATION_BURST: u32 = 20;
const VALIDATION_INTERVAL: Duration = Duration::from_secs(3);

/// A validation of a machine that the listener knows.
#[derive(Debug)]
pub struct Validation {
    name: String,
    machine: SocketAddr,
}

/// Finds the address of the machine with a name.
type FindMachine = dyn Fn(&str) -> Option<SocketAddr> + Send + Sync;

/// The validations that a listener passes through.
pub struct Passthrough {
    find: Box<FindMachine>,
    connections: Semaphore,
    open: Mutex<HashMap<String, usize>>,
    rate: RateLimit<(IpAddr, String)>,
}

impl Passthrough {
    /// `find` gets names in lower case, and knows only live machines.
    pub fn new(find: impl Fn(&str) -> Option<SocketAddr> + Send + Sync + 'static) -> Self {
        Self {
            find: Box::new(find),
            connections: Semaphore::new(MAX_FORWARDED_CONNECTIONS),
            open: Mutex::default(),
            rate: RateLimit::every(VALIDATION_INTERVAL, VALIDATION_BURST),
        }
    }

    /// The validation that the connection starts, if its ClientHello is one. Does not consume it.
    pub async fn find_validation(&self, stream: &TcpStream) -> Option<Validation> {
        let name = validated_name(&peek_hello(stream).await?)?;
        let machine = (self.find)(&name)?;
        Some(Validation { name, machine })
    }

    /// Connects the two sides until the machine closes, within limits of time, size and number.
    pub async fn forward(&self, mut client: TcpStream, Validation { name, machine }: Validation) {
        let Ok(peer) = client.peer_addr() else { return };
        // Anyone can cause these, so they are not logged as warnings.
        if self.rate.check(&(addresses::network(peer.ip()), name.clone())).is_err() {
            tracing::debug!(%name, %peer, "validation refused: too many for this machine");
            return;
        }
        let Some(_of_name) = NamePermit::acquire(&self.open, &name) else {
            tracing::debug!(%name, %peer, "validation refused: too many at once for this machine");
            return;
        };
        let permit = tokio::time::timeout(PERMIT_TIMEOUT, self.connections.acquire()).await;
        let Ok(Ok(_permit)) = permit else {
            tracing::debug!(%name, %peer, "validation refused: too many at once");
            return;
        };
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(machine)).await;
        let mut host = match connected {
            Ok(Ok(host)) => host,
            Ok(Err(error)) => return tracing::debug!(%name, %error, "validation: machine unreachable"),
            Err(_) => return tracing::debug!(%name, "validation: timeout connecting to the machine"),
        };
        let (client_reader, mut client_writer) = client.split();
        let (host_reader, mut host_writer) = host.split();
        let (mut up, mut down) =
            (client_reader.take(MAX_FORWARDED_BYTES), host_reader.take(MAX_FORWARDED_BYTES));
        let upward = async {
            let _ = tokio::io::copy(&mut up, &mut host_writer).await;
            let _ = host_writer.shutdown().await;
        };
        let downward = async {
            let _ = tokio::io::copy(&mut down, &mut client_writer).await;
            let _ = client_writer.shutdown().await;
        };
        // A client that stays silent must not hold its permit once the machine has closed.
        let until_closed = async {
            tokio::pin!(downward);
            tokio::select! {
                () = upward => downward.await,
                () = &mut downward => {}
            }
        };
        match tokio::time::timeout(FORWARD_TIMEOUT, until_closed).await {
            Ok(_) => tracing::info!(%name, %machine, "validation passed through"),
            Err(_) => tracing::debug!(%name, %machine, "validation cut off: it took too long"),
        }
    }
}

/// One of the connections for a name, until it is dropped.
struct NamePermit<'a> {
    open: &'a Mutex<HashMap<String, usize>>,
    name: String,
}

impl<'a> NamePermit<'a> {
    fn acquire(open: &'a Mutex<HashMap<String, usize>>, name: &str) -> Option<Self> {
        let mut counts = open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(name.to_owned()).or_default();
        if *count >= MAX_CONNECTIONS_PER_NAME {
            return None;
        }
        *count += 1;
        Some(Self { open, name: name.to_owned() })
    }
}

impl Drop for NamePermit<'_> {
    fn drop(&mut self) {
        let mut counts = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.name);
            }
        }
    }
}

/// Peeks at the first record; `None` if it is not the ClientHello of a validation.
async fn peek_hello(stream: &TcpStream) -> Option<Vec<u8>> {
    // A client that sends nothing costs no buffer.
    stream.readable().await.ok()?;
    let mut hello = vec![0; MAX_HELLO_BYTES];
    let (mut seen, mut interval) = (0, PEEK_INTERVAL);
    let started = Instant::now();
    while started.elapsed() < PEEK_TIMEOUT {
        let peeked = stream.peek(&mut hello).await.ok()?;
        // Nothing can follow if the client has closed its side.
        if peeked == 0 || *hello.first()? != HANDSHAKE_RECORD {
            return None;
        }
        if let Some(header) = hello.get(..peeked.min(RECORD_HEADER_BYTES))
            && let [_, _, _, high, low] = header
        {
            let whole = RECORD_HEADER_BYTES + usize::from(u16::from_be_bytes([*high, *low]));
            if whole > MAX_HELLO_BYTES {
                return None;
            }
            if peeked >= whole {
                hello.truncate(whole);
                let is_validation = hello.windows(ACME_ALPN.len()).any(|window| window == ACME_ALPN);
                return is_validation.then_some(hello);
            }
        }
        interval = if peeked > seen { PEEK_INTERVAL } else { (interval * 2).min(MAX_PEEK_INTERVAL) };
        seen = peeked;
        tokio::time::sleep(interval).await;
    }
    None
}

/// The name of a ClientHello that offers only `acme-tls/1`.
fn validated_name(hello: &[u8]) -> Option<String> {
    let mut acceptor = Acceptor::default();
    let mut unread = hello;
    while !unread.is_empty() {
        acceptor.read_tls(&mut unread).ok()?;
    }
    let accepted = acceptor.accept().ok()??;
    let hello = accepted.client_hello();
    let is_validation = hello.alpn()?.eq([ACME_ALPN]);
    let name = hello.server_name().filter(|_| is_validation)?;
    Some(name.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_one_name_leave_room_for_others() {
        let open = Mutex::default();
        let held: Vec<_> =
            (0..MAX_CONNECTIONS_PER_NAME).map(|_| NamePermit::acquire(&open, "a").unwrap()).collect();
        assert!(NamePermit::acquire(&open, "a").is_none());
        assert!(NamePermit::acquire(&open, "b").is_some());
        drop(held);
        assert!(open.lock().unwrap().is_empty());
        assert!(NamePermit::acquire(&open, "a").is_some());
    }
}
