//! Unix sockets of the machine's own services: whoever may enter a socket's directory and is of its group may connect.
//!
//! On a machine the directories are made by tmpfiles, with their owners; where nobody did, they are made here, closed to
//! all other users.

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

const MODE: u32 = 0o660;

/// Makes the directory of a socket, unless it is there.
///
/// # Errors
/// The file system's.
pub fn ensure_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o750).create(dir)
}

/// Binds `name` in `dir`, for the directory's group. It gets its mode under another name and then its place, so that
/// there is no moment at which anybody else could open it.
///
/// # Errors
/// When the directory cannot be made or the socket not bound.
pub fn bind(dir: &Path, name: &str) -> io::Result<UnixListener> {
    ensure_dir(dir)?;
    // A socket's path has at most 107 bytes, and the directory may be deep.
    let (place, first) = (dir.join(name), dir.join(format!(".{}", std::process::id())));
    let listener = UnixListener::bind(&first)?;
    let placed = give_to_group_of(dir, &first)
        .and_then(|()| fs::set_permissions(&first, Permissions::from_mode(MODE)))
        .and_then(|()| fs::rename(&first, &place));
    if let Err(error) = placed {
        // A socket without its name serves nobody.
        let _ = fs::remove_file(&first);
        return Err(error);
    }
    Ok(listener)
}

fn give_to_group_of(dir: &Path, socket: &Path) -> io::Result<()> {
    let (group, own) = (fs::metadata(dir)?.gid(), fs::metadata(socket)?.gid());
    if group != own {
        std::os::unix::fs::chown(socket, None, Some(group))?;
    }
    Ok(())
}

/// The process that connected, as the kernel noted it at that moment (`SO_PEERCRED`); `None` where it does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    pub uid: Option<u32>,
    pub pid: Option<i32>,
}

impl PeerCredentials {
    pub fn of(stream: &UnixStream) -> Self {
        let credentials = stream.peer_cred().ok();
        Self { uid: credentials.as_ref().map(UCred::uid), pid: credentials.as_ref().and_then(UCred::pid) }
    }
}

impl Connected<IncomingStream<'_, UnixListener>> for PeerCredentials {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        Self::of(stream.io())
    }
}

/// Serves until `stop`; requests carry `ConnectInfo<PeerCredentials>`.
pub async fn serve(listener: UnixListener, router: Router, stop: CancellationToken) {
    let router = router.into_make_service_with_connect_info::<PeerCredentials>();
    let served = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned());
    if let Err(error) = served.await {
        tracing::error!(%error, "the unix socket is no longer served");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_is_open_to_its_group_in_a_directory_closed_to_others() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("run/svc/gateway");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        for _ in 0..2 {
            // The second takes the place of one that a kill left behind.
            let _listener = bind(&dir, "gateway.sock").unwrap();
            assert_eq!((mode(&dir), mode(&dir.join("gateway.sock"))), (0o750, 0o660));
        }
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    }
}
