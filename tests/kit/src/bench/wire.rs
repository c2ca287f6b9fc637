//! Connections that the load is made of where wrk cannot: idle ones, and WebSockets.
//!
//! Blocking sockets and one thread for each connection in use: per message that is two system calls and the TLS record,
//! which are compiled with optimisation even where this code is not.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

const DEADLINE: Duration = Duration::from_secs(20);
/// Of one message, as large as fits into a frame's short form.
pub const MESSAGE: usize = 125;
const MASK: [u8; 4] = [0x5a, 0xa5, 0x3c, 0xc3];
const LONGEST_HEAD: usize = 16 * 1024;

/// How a front is reached: its address, its name, and the head fields that a request needs there.
#[derive(Clone)]
pub struct Door {
    pub address: SocketAddr,
    pub host: String,
    pub cookie: String,
    config: Arc<ClientConfig>,
}

type Tls = StreamOwned<ClientConnection, TcpStream>;

/// An open connection, upgraded or not.
pub struct Line {
    tls: Tls,
}

impl Door {
    pub fn new(address: SocketAddr, host: &str, cookie: &str, root_pem: &str) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(root_pem.as_bytes())?)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        // Every connection is a first one, as from another browser.
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Self { address, host: host.to_owned(), cookie: cookie.to_owned(), config: Arc::new(config) })
    }

    fn connect(&self) -> Result<Tls> {
        let tcp = TcpStream::connect_timeout(&self.address, DEADLINE)?;
        tcp.set_nodelay(true)?;
        tcp.set_read_timeout(Some(DEADLINE))?;
        tcp.set_write_timeout(Some(DEADLINE))?;
        let name = ServerName::try_from(self.host.clone())?;
        Ok(StreamOwned::new(ClientConnection::new(Arc::clone(&self.config), name)?, tcp))
    }

    /// A keep-alive connection after one request.
    pub fn https(&self) -> Result<Line> {
        let mut line = Line { tls: self.connect()? };
        let Self { host, cookie, .. } = self;
        line.send(format!("GET / HTTP/1.1\r\nhost: {host}\r\ncookie: {cookie}\r\n\r\n").as_bytes())?;
        let head = read_head(&mut line.tls)?;
        ensure!(head.starts_with("HTTP/1.1 200"), "GET /: {head}");
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
        });
        let mut body = vec![0; length.context("an answer without its length")?];
        line.tls.read_exact(&mut body)?;
        Ok(line)
    }

    /// A WebSocket after one message.
    pub fn websocket(&self) -> Result<Line> {
        let mut line = Line { tls: self.connect()? };
        let Self { host, cookie, .. } = self;
        let asked = format!(
            "GET /ws HTTP/1.1\r\nhost: {host}\r\ncookie: {cookie}\r\norigin: https://{host}\r\nconnection: \
             Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: \
             dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        line.send(asked.as_bytes())?;
        let head = read_head(&mut line.tls)?;
        ensure!(head.starts_with("HTTP/1.1 101"), "GET /ws: {head}");
        line.echo(&message(), &mut [0; MESSAGE + 2])?;
        Ok(line)
    }
}

impl Line {
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.tls.write_all(bytes)?;
        Ok(self.tls.flush()?)
    }

    /// Sends a message and waits until it is back.
    fn echo(&mut self, message: &[u8], back: &mut [u8]) -> Result<()> {
        self.send(message)?;
        self.tls.read_exact(back)?;
        ensure!(back[..2] == [0x82, MESSAGE as u8], "another frame came back: {:?}", &back[..2]);
        Ok(())
    }
}

/// A masked binary frame.
fn message() -> Vec<u8> {
    let mut frame = vec![0x82, 0x80 | MESSAGE as u8];
    frame.extend(MASK);
    frame.extend((0..MESSAGE).map(|at| (at as u8) ^ MASK[at % 4]));
    frame
}

/// Messages a second that go there and back, one under way on each connection.
pub fn messages_per_second(door: &Door, connections: usize, seconds: u32) -> Result<f64> {
    let begin = Arc::new(Barrier::new(connections + 1));
    let length = Duration::from_secs(u64::from(seconds));
    let threads: Vec<_> = (0..connections)
        .map(|_| {
            let (door, begin) = (door.clone(), Arc::clone(&begin));
            std::thread::spawn(move || -> Result<u64> {
                let line = door.websocket();
                // All wait for all, with or without a connection.
                begin.wait();
                let mut line = line?;
                let (message, mut back) = (message(), [0; MESSAGE + 2]);
                let until = Instant::now() + length;
                let mut sent = 0;
                while Instant::now() < until {
                    line.echo(&message, &mut back)?;
                    sent += 1;
                }
                Ok(sent)
            })
        })
        .collect();
    begin.wait();
    let began = Instant::now();
    let mut sent = 0;
    for thread in threads {
        sent += thread.join().map_err(|_| anyhow::anyhow!("a connection's thread panicked"))??;
    }
    Ok(sent as f64 / began.elapsed().as_secs_f64())
}

/// Opens this many, one after the other in each of a few threads.
pub fn open(count: usize, line: impl Fn() -> Result<Line> + Sync) -> Result<Vec<Line>> {
    const THREADS: usize = 4;
    std::thread::scope(|scope| {
        let parts: Vec<_> = (0..THREADS)
            .map(|part| {
                let (line, share) = (&line, count / THREADS + usize::from(part < count % THREADS));
                scope.spawn(move || (0..share).map(|_| line()).collect::<Result<Vec<_>>>())
            })
            .collect();
        let mut lines = Vec::with_capacity(count);
        for part in parts {
            lines.extend(part.join().map_err(|_| anyhow::anyhow!("a connecting thread panicked"))??);
        }
        Ok(lines)
    })
}

/// Reads to the empty line, not further.
pub fn read_head(stream: &mut impl Read) -> Result<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() >= LONGEST_HEAD || stream.read(&mut byte)? == 0 {
            bail!("no whole head: {}", String::from_utf8_lossy(&head));
        }
        head.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}
