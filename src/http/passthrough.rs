//! Forwards TLS-ALPN-01 challenges to the machine whose name they validate.
//!
//! A public CA resolves a machine's name to the router, but the machine must respond with its own certificate. Only the
//! ClientHello is inspected, by peeking, so the router can still serve other connections as usual.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls::server::Acceptor;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::address_limit;
use super::certificate::ACME_ALPN;
use super::rate_limit::RateLimit;

/// Maximum size of a validation's ClientHello. A larger one is not from a CA.
const MAX_HELLO_BYTES: usize = 8 << 10;
const RECORD_HEADER_BYTES: usize = 5;
const HANDSHAKE_RECORD: u8 = 22;
/// Initial interval between peeks at an incomplete ClientHello, which is polled because `peek` does not wait for more
/// data. The interval doubles while no data arrives.
const MIN_PEEK_INTERVAL: Duration = Duration::from_millis(1);
const MAX_PEEK_INTERVAL: Duration = Duration::from_millis(50);
/// A validation's ClientHello fits in one or two packets. A slower client is served without being inspected.
const PEEK_TIMEOUT: Duration = Duration::from_millis(500);

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const FORWARD_TIMEOUT: Duration = Duration::from_secs(8);
/// Maximum number of bytes in each direction: a handshake with one small certificate.
const MAX_FORWARDED_BYTES: u64 = 64 << 10;
/// Maximum number of validations that are forwarded at the same time.
const MAX_FORWARDED_CONNECTIONS: usize = 256;
/// Keeps a machine that leaves its connections open from using up [`MAX_FORWARDED_CONNECTIONS`]. A few connections
/// suffice, because a CA validates from only a few networks.
const MAX_CONNECTIONS_PER_NAME: usize = 16;
/// How long a validation waits while [`MAX_FORWARDED_CONNECTIONS`] are open.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(3);
/// Burst per name and client network, so that other networks cannot use up the CA's allowance. A CA repeats the
/// validation for each of the machine's attempts.
const VALIDATION_BURST: u32 = 20;
const VALIDATION_INTERVAL: Duration = Duration::from_secs(3);

/// A validation, and the address of the machine that must respond to it.
#[derive(Debug)]
pub struct Validation {
    name: String,
    machine: SocketAddr,
}

/// A function that finds the address of the machine with this name.
type FindMachine = dyn Fn(&str) -> Option<SocketAddr> + Send + Sync;

/// Finds and forwards the validations that reach a listener, within limits.
pub struct Passthrough {
    find_machine: Box<FindMachine>,
    connections: Semaphore,
    counts_by_name: Mutex<HashMap<String, usize>>,
    rate: RateLimit<(IpAddr, String)>,
}

impl Passthrough {
    /// `find_machine` receives names in lower case, and returns an address only for a routable machine.
    pub fn new(find_machine: impl Fn(&str) -> Option<SocketAddr> + Send + Sync + 'static) -> Self {
        Self {
            find_machine: Box::new(find_machine),
            connections: Semaphore::new(MAX_FORWARDED_CONNECTIONS),
            counts_by_name: Mutex::default(),
            rate: RateLimit::every(VALIDATION_INTERVAL, VALIDATION_BURST),
        }
    }

    /// Returns the validation that the connection's ClientHello starts; `None` if it starts none, or if no machine has
    /// its server name. Does not consume the ClientHello.
    pub async fn find_validation(&self, stream: &TcpStream) -> Option<Validation> {
        let name = parse_validated_name(&peek_hello(stream).await?)?;
        let machine = (self.find_machine)(&name)?;
        Some(Validation { name, machine })
    }

    /// Forwards bytes in both directions until the machine closes the connection, within the limits on time, bytes and
    /// connections.
    pub async fn forward(&self, mut client: TcpStream, Validation { name, machine }: Validation) {
        let Ok(peer) = client.peer_addr() else { return };
        // Anyone can cause these rejections, so they are not logged as warnings.
        if self.rate.check(&(address_limit::client_network(peer.ip()), name.clone())).is_err() {
            tracing::debug!(%name, %peer, "validation refused: too many validations for this machine from this network");
            return;
        }
        let Some(_name_permit) = NamePermit::acquire(&self.counts_by_name, &name) else {
            tracing::debug!(%name, %peer, "validation refused: too many concurrent validations for this machine");
            return;
        };
        let permit = tokio::time::timeout(PERMIT_TIMEOUT, self.connections.acquire()).await;
        let Ok(Ok(_permit)) = permit else {
            tracing::debug!(%name, %peer, "validation refused: too many concurrent validations");
            return;
        };
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(machine)).await;
        let mut host = match connected {
            Ok(Ok(host)) => host,
            Ok(Err(error)) => {
                return tracing::debug!(%name, %error, "validation failed: cannot connect to the machine");
            }
            Err(_) => {
                return tracing::debug!(%name, "validation failed: timeout while connecting to the machine");
            }
        };
        let (client_reader, mut client_writer) = client.split();
        let (host_reader, mut host_writer) = host.split();
        let (mut client_reader, mut host_reader) =
            (client_reader.take(MAX_FORWARDED_BYTES), host_reader.take(MAX_FORWARDED_BYTES));
        let to_host = async {
            let _ = tokio::io::copy(&mut client_reader, &mut host_writer).await;
            let _ = host_writer.shutdown().await;
        };
        let to_client = async {
            let _ = tokio::io::copy(&mut host_reader, &mut client_writer).await;
            let _ = client_writer.shutdown().await;
        };
        // A client that stays silent must not hold its permit once the machine has closed the connection.
        let until_closed = async {
            tokio::pin!(to_client);
            tokio::select! {
                () = to_host => to_client.await,
                () = &mut to_client => {}
            }
        };
        match tokio::time::timeout(FORWARD_TIMEOUT, until_closed).await {
            Ok(_) => tracing::info!(%name, %machine, "validation forwarded"),
            Err(_) => tracing::debug!(%name, %machine, "validation aborted: timeout"),
        }
    }
}

/// Counts one connection for a name until dropped.
struct NamePermit<'a> {
    counts_by_name: &'a Mutex<HashMap<String, usize>>,
    name: String,
}

impl<'a> NamePermit<'a> {
    fn acquire(counts_by_name: &'a Mutex<HashMap<String, usize>>, name: &str) -> Option<Self> {
        let mut counts = counts_by_name.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(name.to_owned()).or_default();
        if *count >= MAX_CONNECTIONS_PER_NAME {
            return None;
        }
        *count += 1;
        Some(Self { counts_by_name, name: name.to_owned() })
    }
}

impl Drop for NamePermit<'_> {
    fn drop(&mut self) {
        let mut counts = self.counts_by_name.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.name);
            }
        }
    }
}

/// Peeks at the first TLS record, and returns it if it is complete within [`PEEK_TIMEOUT`] of its first byte and may be
/// a validation's ClientHello.
async fn peek_hello(stream: &TcpStream) -> Option<Vec<u8>> {
    // No buffer is allocated for a client that sends nothing.
    stream.readable().await.ok()?;
    let mut hello = vec![0; MAX_HELLO_BYTES];
    let (mut last_peeked, mut interval) = (0, MIN_PEEK_INTERVAL);
    let started_at = Instant::now();
    while started_at.elapsed() < PEEK_TIMEOUT {
        let peeked = stream.peek(&mut hello).await.ok()?;
        // A peek returns 0 bytes if the client has closed its side, so no more data can follow.
        if peeked == 0 || *hello.first()? != HANDSHAKE_RECORD {
            return None;
        }
        if let Some(header) = hello.get(..peeked.min(RECORD_HEADER_BYTES))
            && let [_, _, _, high, low] = header
        {
            let record_bytes = RECORD_HEADER_BYTES + usize::from(u16::from_be_bytes([*high, *low]));
            if record_bytes > MAX_HELLO_BYTES {
                return None;
            }
            if peeked >= record_bytes {
                hello.truncate(record_bytes);
                // A cheap check, so that an ordinary ClientHello is not parsed twice.
                let may_be_challenge = hello.windows(ACME_ALPN.len()).any(|window| window == ACME_ALPN);
                return may_be_challenge.then_some(hello);
            }
        }
        interval =
            if peeked > last_peeked { MIN_PEEK_INTERVAL } else { (interval * 2).min(MAX_PEEK_INTERVAL) };
        last_peeked = peeked;
        tokio::time::sleep(interval).await;
    }
    None
}

/// Returns the server name in a ClientHello that offers only `acme-tls/1`.
fn parse_validated_name(hello: &[u8]) -> Option<String> {
    let mut acceptor = Acceptor::default();
    let mut unread = hello;
    while !unread.is_empty() {
        acceptor.read_tls(&mut unread).ok()?;
    }
    let accepted = acceptor.accept().ok()??;
    let hello = accepted.client_hello();
    let is_challenge = hello.alpn()?.eq([ACME_ALPN]);
    let name = hello.server_name().filter(|_| is_challenge)?;
    Some(name.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_permit_limits_each_name_separately() {
        let counts = Mutex::default();
        let held: Vec<_> =
            (0..MAX_CONNECTIONS_PER_NAME).map(|_| NamePermit::acquire(&counts, "a").unwrap()).collect();
        assert!(NamePermit::acquire(&counts, "a").is_none());
        assert!(NamePermit::acquire(&counts, "b").is_some());
        drop(held);
        assert!(counts.lock().unwrap().is_empty());
        assert!(NamePermit::acquire(&counts, "a").is_some());
    }
}
