//! The trusted unix socket, which only the machine's own services can open: there, no token stands for the owner.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use axum::Router;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

pub const NAME: &str = "gateway.sock";

/// Binds `gateway.sock` in `dir`. It gets its mode under another name and then its place, so that there is no moment at
/// which anybody else could open it.
///
/// # Errors
/// When the directory cannot be made or the socket not bound.
pub fn bind(dir: &Path) -> io::Result<UnixListener> {
    std::fs::create_dir_all(dir)?;
    let (place, first) = (dir.join(NAME), fresh_name(dir));
    let listener = UnixListener::bind(&first)?;
    let placed = std::fs::set_permissions(&first, std::fs::Permissions::from_mode(0o600))
        .and_then(|()| std::fs::rename(&first, &place));
    if let Err(error) = placed {
        // A socket without its name serves nobody.
        let _ = std::fs::remove_file(&first);
        return Err(error);
    }
    Ok(listener)
}

/// A socket's path has at most 107 bytes, and the directory may be deep.
fn fresh_name(dir: &Path) -> PathBuf {
    dir.join(format!(".gw{}", std::process::id()))
}

/// Serves until `stop`.
pub async fn serve(listener: UnixListener, router: Router, stop: CancellationToken) {
    let served = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned());
    if let Err(error) = served.await {
        tracing::error!(%error, "the unix socket is no longer served");
    }
}
