//! A listener that can be closed, so that connections are refused, and reopened on the same port.
//!
//! When [`ReopenableListener::close`] or [`ReopenableListener::drop_connections`] returns, the affected tasks have
//! ended and send no more data, unless they take longer than 10 seconds to end.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::free_port;
use crate::runtime;

type Serve = Arc<dyn Fn(TcpStream) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// Serves each connection with a future on the kit's runtime; closed on drop.
pub(crate) struct ReopenableListener {
    addr: SocketAddr,
    serve: Serve,
    accepting: Mutex<Option<Tasks>>,
    connections: Arc<Mutex<Tasks>>,
}

/// Tasks that are cancelled and awaited together.
struct Tasks {
    stop: CancellationToken,
    /// Each task holds a clone; `ended` is disconnected once this sender and all clones have been dropped.
    alive: mpsc::Sender<()>,
    ended: mpsc::Receiver<()>,
    /// Each task holds a clone.
    counter: Arc<()>,
}

impl ReopenableListener {
    /// Opens a listener on a free loopback port.
    pub(crate) fn open<F, Fut>(serve: F) -> io::Result<Self>
    where
        F: Fn(TcpStream) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let listener = Self {
            addr: (Ipv4Addr::LOCALHOST, free_port()?).into(),
            serve: Arc::new(move |stream| Box::pin(serve(stream))),
            accepting: Mutex::default(),
            connections: Arc::default(),
        };
        listener.reopen()?;
        Ok(listener)
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Refuses new connections and closes existing ones.
    pub(crate) fn close(&self) {
        let accepting = self.accepting.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(accepting) = accepting {
            accepting.cancel_and_wait();
        }
        self.drop_connections();
    }

    /// Closes existing connections; new ones are served.
    pub(crate) fn drop_connections(&self) {
        let connections =
            std::mem::take(&mut *self.connections.lock().unwrap_or_else(PoisonError::into_inner));
        connections.cancel_and_wait();
    }

    /// Waits until no connection is open, so that the last requests of killed clients have been executed.
    pub(crate) async fn drain(&self, timeout: Duration) -> io::Result<()> {
        let drained = async {
            // Connections are accepted in order: once this one has been served, all earlier ones have been counted.
            let mut probe = TcpStream::connect(self.addr).await?;
            probe.shutdown().await?;
            probe.read_to_end(&mut Vec::new()).await?;
            while self.connections.lock().unwrap_or_else(PoisonError::into_inner).count() > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            Ok(())
        };
        tokio::time::timeout(timeout, drained).await?
    }

    /// Listens again on the same port; does nothing if already listening.
    pub(crate) fn reopen(&self) -> io::Result<()> {
        let mut accepting = self.accepting.lock().unwrap_or_else(PoisonError::into_inner);
        if accepting.is_none() {
            let listener = self.bind()?;
            let (serve, connections) = (Arc::clone(&self.serve), Arc::clone(&self.connections));
            let tasks = Tasks::default();
            tasks.spawn(accept(listener, serve, connections));
            *accepting = Some(tasks);
        }
        Ok(())
    }

    fn bind(&self) -> io::Result<TcpListener> {
        let deadline = Instant::now() + Duration::from_secs(5);
        let listener = loop {
            match std::net::TcpListener::bind(self.addr) {
                Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                result => break result?,
            }
        };
        listener.set_nonblocking(true)?;
        let _guard = runtime::handle().enter();
        TcpListener::from_std(listener)
    }
}

async fn accept(listener: TcpListener, serve: Serve, connections: Arc<Mutex<Tasks>>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                stream.set_nodelay(true).ok();
                connections.lock().unwrap_or_else(PoisonError::into_inner).spawn(serve(stream));
            }
            // The error may be temporary, such as a lack of file descriptors.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

impl Tasks {
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let (stop, alive, counted) = (self.stop.clone(), self.alive.clone(), Arc::clone(&self.counter));
        runtime::handle().spawn(async move {
            stop.run_until_cancelled_owned(task).await;
            drop((alive, counted));
        });
    }

    /// Returns the number of running tasks.
    fn count(&self) -> usize {
        Arc::strong_count(&self.counter) - 1
    }

    fn cancel_and_wait(self) {
        self.stop.cancel();
        drop(self.alive);
        self.ended.recv_timeout(Duration::from_secs(10)).ok();
    }
}

impl Default for Tasks {
    fn default() -> Self {
        let (alive, ended) = mpsc::channel();
        Self { stop: CancellationToken::new(), alive, ended, counter: Arc::default() }
    }
}

impl Drop for ReopenableListener {
    fn drop(&mut self) {
        self.close();
    }
}
