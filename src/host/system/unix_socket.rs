//! Unix sockets for the machine's own services. Members of a socket's group who can enter its directory may connect.
//!
//! On a machine, systemd-tmpfiles creates the directories with their owners. Elsewhere, this module creates them,
//! accessible only to this process's user and group.

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

/// Creates a socket's directory and its parents, unless they exist.
///
/// # Errors
/// If the directory cannot be created.
pub fn ensure_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o750).create(dir)
}

/// Binds `name` in `dir`, for the directory's group. The group and mode are set under a temporary name before the
/// rename, so that the socket never exists under `name` with different permissions.
///
/// # Errors
/// If the directory cannot be created, or the socket cannot be bound, given to the group or renamed.
pub fn bind(dir: &Path, name: &str) -> io::Result<UnixListener> {
    ensure_dir(dir)?;
    // A socket's path is limited to 107 bytes, so the temporary name is short.
    let (target, temp) = (dir.join(name), dir.join(format!(".{}", std::process::id())));
    // A killed process with the same id may have left its socket behind. If it cannot be removed, `bind` fails.
    let _ = fs::remove_file(&temp);
    let listener = UnixListener::bind(&temp)?;
    let renamed = set_group_from_dir(dir, &temp)
        .and_then(|()| fs::set_permissions(&temp, Permissions::from_mode(SOCKET_MODE)))
        .and_then(|()| fs::rename(&temp, &target));
    if let Err(error) = renamed {
        // If the removal fails too, an unused socket remains; only the first error is reported.
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

/// The connecting process as the kernel recorded it (`SO_PEERCRED`); `None` for values that the kernel does not
/// report.
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

/// Serves until `stop` is cancelled; requests carry `ConnectInfo<PeerCredentials>`.
pub async fn serve(listener: UnixListener, router: Router, stop: CancellationToken) {
    let router = router.into_make_service_with_connect_info::<PeerCredentials>();
    let served = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned());
    if let Err(error) = served.await {
        tracing::error!(%error, "the Unix socket failed");
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
        // Leave the socket of a process with this id that was killed before the rename.
        drop(UnixListener::bind(dir.join(format!(".{}", std::process::id()))).unwrap());
        for _ in 0..2 {
            // The second bind replaces the first one's socket, as after a killed process.
            let _listener = bind(&dir, "gateway.sock").unwrap();
            assert_eq!((mode(&dir), mode(&dir.join("gateway.sock"))), (0o750, 0o660));
        }
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    }
}
