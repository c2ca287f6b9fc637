//! A TCP proxy that behaves as a bad network does.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::Gate;

/// Stands before one upstream. A fault holds for connections and bytes from then on, until [`Proxy::heal`]; dropped, the
/// proxy is gone with all its connections.
pub struct Proxy {
    gate: Gate,
    wire: Arc<Wire>,
}

struct Wire {
    upstream: SocketAddr,
    faults: Mutex<Faults>,
    connections: AtomicUsize,
}

#[derive(Clone, Copy, Default)]
struct Faults {
    delay: Duration,
    reset_after: Option<u64>,
    silent: bool,
}

impl Proxy {
    pub fn start(upstream: SocketAddr) -> io::Result<Self> {
        let wire = Arc::new(Wire { upstream, faults: Mutex::default(), connections: AtomicUsize::new(0) });
        let on_wire = Arc::clone(&wire);
        let gate = Gate::open(move |stream| carry(stream, Arc::clone(&on_wire)))?;
        Ok(Self { gate, wire })
    }

    /// Where clients connect to.
    pub fn addr(&self) -> SocketAddr {
        self.gate.addr()
    }

    /// How many connections have been accepted so far.
    pub fn connections(&self) -> usize {
        self.wire.connections.load(Ordering::SeqCst)
    }

    /// Breaks the connections there are; new ones work.
    pub fn cut(&self) {
        self.gate.cut();
    }

    /// Each piece of data waits this long, in both directions.
    pub fn delay(&self, delay: Duration) {
        self.wire.change(|faults| faults.delay = delay);
    }

    /// Each connection is reset (RST) when it has carried this many bytes to the client.
    pub fn reset_after(&self, bytes: u64) {
        self.wire.change(|faults| faults.reset_after = Some(bytes));
    }

    /// Nothing arrives any more, and nobody is told: for deadlines.
    pub fn silence(&self) {
        self.wire.change(|faults| faults.silent = true);
    }

    /// Connections are refused, and those there are broken.
    pub fn refuse(&self) {
        self.gate.close();
    }

    /// A good network again; what was broken stays broken.
    pub fn heal(&self) {
        self.wire.change(|faults| *faults = Faults::default());
        self.gate
            .reopen()
            .expect("the proxy's own port, which no other process was given, can be bound again");
    }
}

impl Wire {
    fn faults(&self) -> Faults {
        *self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.faults.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits as long as the network makes data wait.
    async fn hold(&self) {
        tokio::time::sleep(self.faults().delay).await;
        while self.faults().silent {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn carry(client: TcpStream, wire: Arc<Wire>) {
    wire.connections.fetch_add(1, Ordering::SeqCst);
    let Ok(upstream) = TcpStream::connect(wire.upstream).await else {
        return;
    };
    upstream.set_nodelay(true).ok();
    let ((from_client, to_client), (from_upstream, to_upstream)) =
        (client.into_split(), upstream.into_split());
    let up = pass(from_client, Sink(Some(to_upstream)), &wire, |_| None);
    let down = pass(from_upstream, Sink(Some(to_client)), &wire, |faults| faults.reset_after);
    // One broken direction ends both.
    tokio::try_join!(up, down).ok();
}

/// Carries one direction to its end. `Err` is a broken connection.
async fn pass(
    mut from: OwnedReadHalf,
    mut sink: Sink,
    wire: &Wire,
    limit: impl Fn(&Faults) -> Option<u64>,
) -> io::Result<()> {
    let mut chunk = vec![0; 16 * 1024];
    let mut carried = 0;
    loop {
        let read = from.read(&mut chunk).await?;
        wire.hold().await;
        if read == 0 {
            return sink.finish().await;
        }
        let left = limit(&wire.faults()).map_or(u64::MAX, |limit| limit.saturating_sub(carried));
        let allowed = read.min(usize::try_from(left).unwrap_or(usize::MAX));
        sink.write(&chunk[..allowed]).await?;
        carried += allowed as u64;
        if allowed as u64 == left {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
    }
}

/// Where one direction goes. Dropped before it is finished, the connection is reset: data was lost, and an orderly end
/// would hide that.
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
            // Its own drop would say an orderly goodbye first.
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

    /// An upstream that answers each connection's bytes with the same bytes.
    fn echo() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let addr = listener.local_addr().expect("bound");
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                std::thread::spawn(move || {
                    std::io::copy(&mut stream.try_clone().expect("clone"), &mut &stream)
                });
            }
        });
        addr
    }

    fn connect(proxy: &Proxy) -> Stream {
        let stream = Stream::connect(proxy.addr()).expect("connects");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        stream
    }

    fn round_trip(stream: &mut Stream, data: &[u8]) -> io::Result<Vec<u8>> {
        stream.write_all(data)?;
        let mut answer = vec![0; data.len()];
        stream.read_exact(&mut answer)?;
        Ok(answer)
    }

    #[test]
    fn a_good_wire_carries_everything_and_the_end() {
        let proxy = Proxy::start(echo()).expect("starts");
        let mut stream = connect(&proxy);
        let sent = vec![7; 3_000_000];
        let mut writing = stream.try_clone().expect("clone");
        let expected = sent.clone();
        let writer = std::thread::spawn(move || {
            writing.write_all(&sent).expect("written");
            writing.shutdown(std::net::Shutdown::Write).expect("half closed");
        });
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("an orderly end");
        writer.join().expect("writer");
        assert!(answer == expected, "{} bytes came back", answer.len());
        assert_eq!(proxy.connections(), 1);
    }

    #[test]
    fn cut_breaks_what_is_there_and_nothing_else() {
        let proxy = Proxy::start(echo()).expect("starts");
        let mut stream = connect(&proxy);
        assert_eq!(round_trip(&mut stream, b"hi").expect("echo"), b"hi");
        proxy.cut();
        assert_eq!(stream.read(&mut [0]).expect_err("broken").kind(), ErrorKind::ConnectionReset);
        assert_eq!(round_trip(&mut connect(&proxy), b"hi").expect("echo"), b"hi");
    }

    #[test]
    fn reset_comes_after_that_many_bytes() {
        let proxy = Proxy::start(echo()).expect("starts");
        proxy.reset_after(5);
        let mut stream = connect(&proxy);
        stream.write_all(b"123456789").expect("sent");
        let mut answer = Vec::new();
        assert_eq!(stream.read_to_end(&mut answer).expect_err("reset").kind(), ErrorKind::ConnectionReset);
        // A reset may overtake data, never add to it.
        assert!(b"12345".starts_with(&answer[..]), "{answer:?}");
        proxy.heal();
        assert_eq!(round_trip(&mut connect(&proxy), b"123456789").expect("echo"), b"123456789");
    }

    #[test]
    fn delay_holds_both_ways_and_silence_until_healed() {
        let proxy = Proxy::start(echo()).expect("starts");
        let mut stream = connect(&proxy);
        proxy.delay(Duration::from_millis(50));
        let start = Instant::now();
        round_trip(&mut stream, b"x").expect("echo");
        assert!(start.elapsed() >= Duration::from_millis(100), "{:?}", start.elapsed());

        proxy.silence();
        stream.write_all(b"y").expect("sent");
        stream.set_read_timeout(Some(Duration::from_millis(200))).expect("set");
        assert!(matches!(
            stream.read(&mut [0]).expect_err("silence").kind(),
            ErrorKind::WouldBlock | ErrorKind::TimedOut
        ));
        proxy.heal();
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("what was held arrives");
        assert_eq!(&byte, b"y");
    }

    #[test]
    fn refused_until_healed_on_the_same_port() {
        let proxy = Proxy::start(echo()).expect("starts");
        let mut stream = connect(&proxy);
        round_trip(&mut stream, b"x").expect("echo");
        proxy.refuse();
        assert_eq!(Stream::connect(proxy.addr()).expect_err("refused").kind(), ErrorKind::ConnectionRefused);
        assert!(stream.read(&mut [0]).is_err(), "the open connection is broken too");
        proxy.heal();
        round_trip(&mut connect(&proxy), b"x").expect("echo");
    }
}
