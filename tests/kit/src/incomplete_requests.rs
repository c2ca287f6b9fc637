//! Opens HTTPS connections with incomplete request heads, and measures the memory of the server.

use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

const TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Connections with a completed TLS handshake.
pub struct OpenConnections {
    streams: Vec<StreamOwned<ClientConnection, TcpStream>>,
}

impl OpenConnections {
    /// Opens `count` connections sequentially.
    pub fn open(address: SocketAddr, config: &Arc<ClientConfig>, count: usize) -> Result<Self> {
        let name = ServerName::from(address.ip());
        let open = || {
            let tcp = TcpStream::connect_timeout(&address, TIMEOUT)?;
            tcp.set_read_timeout(Some(TIMEOUT))?;
            tcp.set_write_timeout(Some(TIMEOUT))?;
            let mut tls = StreamOwned::new(ClientConnection::new(Arc::clone(config), name.clone())?, tcp);
            tls.conn.complete_io(&mut tls.sock)?;
            Ok(tls)
        };
        let streams = (0..count).map(|_| open()).collect::<Result<_>>()?;
        Ok(Self { streams })
    }

    /// Sends an incomplete request head of `head_bytes` bytes on each connection.
    pub fn send_incomplete_requests(&mut self, head_bytes: usize) -> Result<()> {
        let mut head = b"GET / HTTP/1.1\r\nhost: app.test\r\nx-padding: ".to_vec();
        head.resize(head_bytes, b'x');
        self.streams.iter_mut().try_for_each(|tls| {
            tls.write_all(&head)?;
            tls.flush()
        })?;
        Ok(())
    }

    /// Fails if the server has closed a connection or sent a response.
    pub fn ensure_open(&mut self) -> Result<()> {
        for tls in &mut self.streams {
            tls.sock.set_nonblocking(true)?;
            // Session tickets arrive after the handshake; they are not a response.
            let read_error = loop {
                match tls.conn.read_tls(&mut tls.sock) {
                    Ok(0) => break None,
                    Ok(_) => {
                        tls.conn.process_new_packets()?;
                    }
                    Err(error) => break Some(error.kind()),
                }
            };
            ensure!(read_error == Some(ErrorKind::WouldBlock), "a connection was closed: {read_error:?}");
            let state = tls.conn.process_new_packets()?;
            ensure!(
                !state.peer_has_closed() && state.plaintext_bytes_to_read() == 0,
                "the server has sent a response or closed a connection"
            );
        }
        Ok(())
    }
}

/// Waits until a process's resident memory stops growing, and returns it in bytes.
pub fn wait_for_settled_memory(pid: u32) -> Result<u64> {
    let deadline = Instant::now() + TIMEOUT;
    let mut previous = resident_bytes(pid)?;
    loop {
        std::thread::sleep(POLL_INTERVAL);
        let current = resident_bytes(pid)?;
        if current <= previous {
            return Ok(current);
        }
        ensure!(Instant::now() < deadline, "the memory of process {pid} is still growing after {TIMEOUT:?}");
        previous = current;
    }
}

fn resident_bytes(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .context("/proc/PID/status has no VmRSS")?;
    let kib = line.split_whitespace().next().context("VmRSS has no value")?;
    Ok(kib.parse::<u64>()? * 1024)
}
