//! A TCP proxy that simulates a bad network.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::ReopenableListener;

/// Forwards connections to one upstream. A fault stays active until [`Proxy::heal`]. Dropping the proxy resets all
/// connections.
pub struct Proxy {
    listener: ReopenableListener,
    shared: Arc<Shared>,
}

struct Shared {
    upstream: SocketAddr,
    faults: Mutex<Faults>,
    connections: AtomicUsize,
}

#[derive(Clone, Copy, Default)]
struct Faults {
    delay: Duration,
    reset_after_bytes: Option<u64>,
    is_silent: bool,
}

impl Proxy {
    pub fn start(upstream: SocketAddr) -> io::Result<Self> {
        let shared =
            Arc::new(Shared { upstream, faults: Mutex::default(), connections: AtomicUsize::new(0) });
        let task_shared = Arc::clone(&shared);
        let listener = ReopenableListener::open(move |stream| forward(stream, Arc::clone(&task_shared)))?;
        Ok(Self { listener, shared })
    }

    /// Returns the address for clients.
    pub fn addr(&self) -> SocketAddr {
        self.listener.addr()
    }

    /// Returns the number of connections accepted so far.
    pub fn connection_count(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Resets existing connections; new ones are served.
    pub fn drop_connections(&self) {
        self.listener.drop_connections();
    }

    /// Delays each chunk of data in both directions.
    pub fn delay(&self, delay: Duration) {
        self.shared.update_faults(|faults| faults.delay = delay);
    }

    /// Resets each connection (RST) after this many bytes to the client.
    pub fn reset_after_bytes(&self, bytes: u64) {
        self.shared.update_faults(|faults| faults.reset_after_bytes = Some(bytes));
    }

    /// Withholds all data without closing connections, to trigger timeouts.
    pub fn silence(&self) {
        self.shared.update_faults(|faults| faults.is_silent = true);
    }

    /// Refuses new connections, and resets existing ones.
    pub fn refuse(&self) {
        self.listener.close();
    }

    /// Removes all faults; broken connections stay broken.
    pub fn heal(&self) {
        self.shared.update_faults(|faults| *faults = Faults::default());
        self.listener.reopen().expect("the reserved port can be bound again");
    }
}

impl Shared {
    fn faults(&self) -> Faults {
        *self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update_faults(&self, update: impl FnOnce(&mut Faults)) {
        update(&mut self.faults.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits for the configured delay, and until data is no longer withheld.
    async fn apply_delays(&self) {
        tokio::time::sleep(self.faults().delay).await;
        while self.faults().is_silent {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn forward(client: TcpStream, shared: Arc<Shared>) {
    shared.connections.fetch_add(1, Ordering::SeqCst);
    let Ok(upstream) = TcpStream::connect(shared.upstream).await else {
        return;
    };
    upstream.set_nodelay(true).ok();
    let ((from_client, to_client), (from_upstream, to_upstream)) =
        (client.into_split(), upstream.into_split());
    let up = copy(from_client, Sink(Some(to_upstream)), &shared, |_| None);
    let down = copy(from_upstream, Sink(Some(to_client)), &shared, |faults| faults.reset_after_bytes);
    // If one direction breaks, both end.
    tokio::try_join!(up, down).ok();
}

/// Copies data in one direction until the end of the stream. `Err` means a broken connection.
async fn copy(
    mut from: OwnedReadHalf,
    mut sink: Sink,
    shared: &Shared,
    limit: impl Fn(&Faults) -> Option<u64>,
) -> io::Result<()> {
    let mut chunk = vec![0; 16 * 1024];
    let mut copied = 0;
    loop {
        let read = from.read(&mut chunk).await?;
        shared.apply_delays().await;
        if read == 0 {
            return sink.finish().await;
        }
        let remaining = limit(&shared.faults()).map_or(u64::MAX, |limit| limit.saturating_sub(copied));
        let allowed = read.min(usize::try_from(remaining).unwrap_or(usize::MAX));
        sink.write(&chunk[..allowed]).await?;
        copied += allowed as u64;
        if allowed as u64 == remaining {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
    }
}

/// The receiving side of one direction. If it is dropped before `finish`, the connection is reset, because an orderly
/// close would hide the data loss.
struct Sink(Option<OwnedWriteHalf>);

impl Sink {
    async fn write(&mut self, data: &[u8]) -> io::Result<()> {
        match &mut self.0 {
            Some(half) => half.write_all(data).await,
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    async fn finish(&mut self) -> io::Result<()> {
        match self.0.take() {
            Some(mut half) => half.shutdown().await,
            None => Ok(()),
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if let Some(half) = self.0.take() {
            half.as_ref().set_zero_linger().ok();
            // Dropping it would close the connection in an orderly way.
            half.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{Ipv4Addr, TcpListener, TcpStream as Stream};
    use std::time::Instant;

    use super::*;

    fn start_echo_server() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("the server binds");
        let addr = listener.local_addr().expect("the listener is bound");
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                std::thread::spawn(move || {
                    std::io::copy(&mut stream.try_clone().expect("the stream is cloned"), &mut &stream)
                });
            }
        });
        addr
    }

    fn connect(proxy: &Proxy) -> Stream {
        let stream = Stream::connect(proxy.addr()).expect("the proxy accepts");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("the timeout is set");
        stream
    }

    fn round_trip(stream: &mut Stream, data: &[u8]) -> io::Result<Vec<u8>> {
        stream.write_all(data)?;
        let mut received = vec![0; data.len()];
        stream.read_exact(&mut received)?;
        Ok(received)
    }

    #[test]
    fn proxy_forwards_all_data_and_the_end_of_stream() {
        let proxy = Proxy::start(start_echo_server()).expect("the proxy starts");
        let mut stream = connect(&proxy);
        let sent = vec![7; 3_000_000];
        let mut write_half = stream.try_clone().expect("the stream is cloned");
        let expected = sent.clone();
        let writer = std::thread::spawn(move || {
            write_half.write_all(&sent).expect("the data is written");
            write_half.shutdown(std::net::Shutdown::Write).expect("the stream is half closed");
        });
        let mut received = Vec::new();
        stream.read_to_end(&mut received).expect("the stream ends cleanly");
        writer.join().expect("the writer ends");
        assert!(received == expected, "received {} bytes", received.len());
        assert_eq!(proxy.connection_count(), 1);
    }

    #[test]
    fn drop_connections_resets_only_open_ones() {
        let proxy = Proxy::start(start_echo_server()).expect("the proxy starts");
        let mut stream = connect(&proxy);
        assert_eq!(round_trip(&mut stream, b"hi").expect("the data is echoed"), b"hi");
        proxy.drop_connections();
        assert_eq!(
            stream.read(&mut [0]).expect_err("the connection is broken").kind(),
            ErrorKind::ConnectionReset
        );
        assert_eq!(round_trip(&mut connect(&proxy), b"hi").expect("the data is echoed"), b"hi");
    }

    #[test]
    fn reset_after_bytes_resets_at_the_limit() {
        let proxy = Proxy::start(start_echo_server()).expect("the proxy starts");
        proxy.reset_after_bytes(5);
        let mut stream = connect(&proxy);
        stream.write_all(b"123456789").expect("the data is sent");
        let mut received = Vec::new();
        assert_eq!(
            stream.read_to_end(&mut received).expect_err("the connection is reset").kind(),
            ErrorKind::ConnectionReset
        );
        // A reset may discard data, but never adds any.
        assert!(b"12345".starts_with(&received[..]), "{received:?}");
        proxy.heal();
        assert_eq!(round_trip(&mut connect(&proxy), b"123456789").expect("the data is echoed"), b"123456789");
    }

    #[test]
    fn delay_and_silence_withhold_data() {
        let proxy = Proxy::start(start_echo_server()).expect("the proxy starts");
        let mut stream = connect(&proxy);
        proxy.delay(Duration::from_millis(50));
        let start = Instant::now();
        round_trip(&mut stream, b"x").expect("the data is echoed");
        assert!(start.elapsed() >= Duration::from_millis(100), "{:?}", start.elapsed());

        proxy.silence();
        stream.write_all(b"y").expect("the data is sent");
        stream.set_read_timeout(Some(Duration::from_millis(200))).expect("the timeout is set");
        assert!(matches!(
            stream.read(&mut [0]).expect_err("no data arrives").kind(),
            ErrorKind::WouldBlock | ErrorKind::TimedOut
        ));
        proxy.heal();
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("the timeout is set");
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("withheld data arrives");
        assert_eq!(&byte, b"y");
    }

    #[test]
    fn refuse_lasts_until_heal_on_same_port() {
        let proxy = Proxy::start(start_echo_server()).expect("the proxy starts");
        let mut stream = connect(&proxy);
        round_trip(&mut stream, b"x").expect("the data is echoed");
        proxy.refuse();
        assert_eq!(
            Stream::connect(proxy.addr()).expect_err("the connection is refused").kind(),
            ErrorKind::ConnectionRefused
        );
        assert!(stream.read(&mut [0]).is_err(), "the existing connection still works");
        proxy.heal();
        round_trip(&mut connect(&proxy), b"x").expect("the data is echoed");
    }
}
