//! Unix sockets for local services. Clients can connect if they're in the socket's group and can enter its directory.
//!
//! In production, systemd-tmpfiles creates the directories with the right owners. Elsewhere, this module creates them,
//! accessible only to the current user and group.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

use axum::Router;
use axum::extract::connect_info::Connected;
use axum::serve::IncomingStream;
use tokio::net::unix::UCred;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;

const SOCKET_MODE: u32 = 0o660;

/// Creates a socket directory and its parents if they don't exist.
///
/// # Errors
/// If the directory can't be created.
pub fn ensure_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o750).create(dir)
}

/// Binds `name` in `dir` for the directory's group. The socket is created under a temporary name and renamed once its
/// group and mode are set, so it never exists under `name` with other permissions.
///
/// # Errors
/// If the directory can't be created, or the socket can't be bound, chowned, chmodded or renamed.
pub fn bind(dir: &Path, name: &str) -> io::Result<UnixListener> {
    ensure_dir(dir)?;
    // Socket paths are limited to 107 bytes, so keep the temporary name short.
    let (target, temp) = (dir.join(name), dir.join(format!(".{}", std::process::id())));
    // A killed process with our pid may have left its socket behind. If the removal fails, so does `bind`.
    let _ = fs::remove_file(&temp);
    let listener = UnixListener::bind(&temp)?;
    let renamed = set_group_from_dir(dir, &temp)
        .and_then(|()| fs::set_permissions(&temp, Permissions::from_mode(SOCKET_MODE)))
        .and_then(|()| fs::rename(&temp, &target));
    if let Err(error) = renamed {
        // Best effort: at worst, an unused socket remains.
        let _ = fs::remove_file(&temp);
        return Err(error);
    }
    Ok(listener)
}

fn set_group_from_dir(dir: &Path, socket: &Path) -> io::Result<()> {
    let (dir_group, socket_group) = (fs::metadata(dir)?.gid(), fs::metadata(socket)?.gid());
    if dir_group != socket_group {
        std::os::unix::fs::chown(socket, None, Some(dir_group))?;
    }
    Ok(())
}

/// Peer process as recorded by the kernel (`SO_PEERCRED`); `None` for values it doesn't report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    pub uid: Option<u32>,
    pub pid: Option<i32>,
}

impl PeerCredentials {
    pub fn from_stream(stream: &UnixStream) -> Self {
        let credentials = stream.peer_cred().ok();
        Self { uid: credentials.as_ref().map(UCred::uid), pid: credentials.as_ref().and_then(UCred::pid) }
    }
}

impl Connected<IncomingStream<'_, UnixListener>> for PeerCredentials {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        Self::from_stream(stream.io())
    }
}

/// Serves until `stop` is cancelled. Requests carry `ConnectInfo<PeerCredentials>`.
pub async fn serve(listener: UnixListener, router: Router, stop: CancellationToken) {
    let router = router.into_make_service_with_connect_info::<PeerCredentials>();
    let served = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned());
    if let Err(error) = served.await {
        tracing::error!(%error, "Unix socket server failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bind_opens_socket_to_group_only() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("run/svc/gateway");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        ensure_dir(&dir).unwrap();
        // Simulate a process with our pid that was killed before the rename.
        drop(UnixListener::bind(dir.join(format!(".{}", std::process::id()))).unwrap());
        for _ in 0..2 {
            // The second bind replaces the socket of the first, as if that process had been killed.
            let _listener = bind(&dir, "gateway.sock").unwrap();
            assert_eq!((mode(&dir), mode(&dir.join("gateway.sock"))), (0o750, 0o660));
        }
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    }
}
