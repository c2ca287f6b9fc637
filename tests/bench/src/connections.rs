//! Client connections that wrk cannot create: idle connections and WebSockets.
//!
//! Uses blocking sockets and one thread per active connection: a round trip costs two system calls, and one TLS record
//! in each direction. The TLS code is optimized even in dev builds.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

const TIMEOUT: Duration = Duration::from_secs(20);
/// A message's payload size: the maximum for a frame with a 7-bit length.
pub const MESSAGE_BYTES: usize = 125;
const MASK: [u8; 4] = [0x5a, 0xa5, 0x3c, 0xc3];
const MAX_HEAD_BYTES: usize = 16 * 1024;

/// A server's address and host name, and the cookie to send.
#[derive(Clone)]
pub struct Endpoint {
    pub address: SocketAddr,
    pub host: String,
    pub cookie: String,
    config: Arc<ClientConfig>,
}

type Tls = StreamOwned<ClientConnection, TcpStream>;

/// An open connection, upgraded or not.
pub struct Connection {
    tls: Tls,
}

impl Endpoint {
    pub fn new(address: SocketAddr, host: &str, cookie: &str, root_pem: &str) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(root_pem.as_bytes())?)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        // No session resumption: every connection is new, as if it came from a different browser.
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Self { address, host: host.to_owned(), cookie: cookie.to_owned(), config: Arc::new(config) })
    }

    fn connect(&self) -> Result<Tls> {
        let tcp = TcpStream::connect_timeout(&self.address, TIMEOUT)?;
        tcp.set_nodelay(true)?;
        tcp.set_read_timeout(Some(TIMEOUT))?;
        tcp.set_write_timeout(Some(TIMEOUT))?;
        let name = ServerName::try_from(self.host.clone())?;
        Ok(StreamOwned::new(ClientConnection::new(Arc::clone(&self.config), name)?, tcp))
    }

    /// Opens a keep-alive connection and sends one request.
    pub fn open_https(&self) -> Result<Connection> {
        let mut connection = Connection { tls: self.connect()? };
        let Self { host, cookie, .. } = self;
        connection.send(format!("GET / HTTP/1.1\r\nhost: {host}\r\ncookie: {cookie}\r\n\r\n").as_bytes())?;
        let head = read_head(&mut connection.tls)?;
        ensure!(head.starts_with("HTTP/1.1 200"), "unexpected response to GET /: {head}");
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
        });
        let mut body = vec![0; length.context("the response has no content-length")?];
        connection.tls.read_exact(&mut body)?;
        Ok(connection)
    }

    /// Opens a WebSocket and sends one message.
    pub fn open_websocket(&self) -> Result<Connection> {
        let mut connection = Connection { tls: self.connect()? };
        let Self { host, cookie, .. } = self;
        let request = format!(
            "GET /ws HTTP/1.1\r\nhost: {host}\r\ncookie: {cookie}\r\norigin: https://{host}\r\nconnection: \
             Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: \
             dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        connection.send(request.as_bytes())?;
        let head = read_head(&mut connection.tls)?;
        ensure!(head.starts_with("HTTP/1.1 101"), "unexpected response to GET /ws: {head}");
        let mut reply = [0; MESSAGE_BYTES + 2];
        connection.echo(&build_message(), &mut reply)?;
        ensure!(reply[2..].iter().copied().eq(0..MESSAGE_BYTES as u8), "the echo differs from the message");
        Ok(connection)
    }
}

impl Connection {
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.tls.write_all(bytes)?;
        Ok(self.tls.flush()?)
    }

    /// Sends a message and waits for its echo; checks only the echo's header, so that a measurement stays cheap.
    fn echo(&mut self, message: &[u8], reply: &mut [u8]) -> Result<()> {
        self.send(message)?;
        self.tls.read_exact(reply)?;
        ensure!(reply[..2] == [0x82, MESSAGE_BYTES as u8], "unexpected frame: {:?}", &reply[..2]);
        Ok(())
    }
}

/// Builds a masked binary frame with the payload 0, 1, 2 and so on.
pub fn build_message() -> Vec<u8> {
    let mut frame = vec![0x82, 0x80 | MESSAGE_BYTES as u8];
    frame.extend(MASK);
    frame.extend((0..MESSAGE_BYTES).map(|index| (index as u8) ^ MASK[index % 4]));
    frame
}

/// Measures the message round trips per second, with one message in flight per connection.
pub fn measure_messages_per_second(endpoint: &Endpoint, connections: usize, seconds: u32) -> Result<f64> {
    let start_barrier = Arc::new(Barrier::new(connections + 1));
    let duration = Duration::from_secs(u64::from(seconds));
    let threads: Vec<_> = (0..connections)
        .map(|_| {
            let (endpoint, start_barrier) = (endpoint.clone(), Arc::clone(&start_barrier));
            std::thread::spawn(move || -> Result<u64> {
                let connection = endpoint.open_websocket();
                // Every thread waits here, even if its connection failed; otherwise the barrier would never open.
                start_barrier.wait();
                let mut connection = connection?;
                let (message, mut reply) = (build_message(), [0; MESSAGE_BYTES + 2]);
                let deadline = Instant::now() + duration;
                let mut round_trips = 0;
                while Instant::now() < deadline {
                    connection.echo(&message, &mut reply)?;
                    round_trips += 1;
                }
                Ok(round_trips)
            })
        })
        .collect();
    start_barrier.wait();
    let started = Instant::now();
    let mut round_trips = 0;
    for thread in threads {
        round_trips += thread.join().map_err(|_| anyhow::anyhow!("a connection's thread panicked"))??;
    }
    Ok(round_trips as f64 / started.elapsed().as_secs_f64())
}

/// Opens `count` connections, sequentially in each of a few threads.
pub fn open_connections(
    count: usize,
    connect: impl Fn() -> Result<Connection> + Sync,
) -> Result<Vec<Connection>> {
    const THREADS: usize = 4;
    std::thread::scope(|scope| {
        let parts: Vec<_> = (0..THREADS)
            .map(|part| {
                let (connect, share) = (&connect, count / THREADS + usize::from(part < count % THREADS));
                scope.spawn(move || (0..share).map(|_| connect()).collect::<Result<Vec<_>>>())
            })
            .collect();
        let mut connections = Vec::with_capacity(count);
        for part in parts {
            connections.extend(part.join().map_err(|_| anyhow::anyhow!("a connecting thread panicked"))??);
        }
        Ok(connections)
    })
}

/// Reads the head of a request or response, up to and including the empty line.
pub fn read_head(stream: &mut impl Read) -> Result<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() >= MAX_HEAD_BYTES || stream.read(&mut byte)? == 0 {
            bail!("incomplete head: {}", String::from_utf8_lossy(&head));
        }
        head.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}
