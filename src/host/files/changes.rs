//! Asks the watcher what has changed in the home directory.

use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::audit::file_changes::{ChangesReply, ChangesRequest, MAX_REPLY_BYTES, SOCKET};

/// Timeout for a request. The watcher may be scanning a home directory with a million files.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Why the watcher did not answer.
#[derive(Debug, thiserror::Error)]
pub enum ChangesError {
    #[error("cannot ask svc-watch what has changed")]
    Io(#[from] std::io::Error),
    #[error("svc-watch did not answer within {} s", TIMEOUT.as_secs())]
    Timeout,
    #[error("svc-watch sent an invalid answer")]
    Invalid,
}

/// Returns the changes since the reply whose token is `saved`.
///
/// # Errors
/// [`ChangesError`].
pub async fn request(sockets: &Path, saved: Option<String>) -> Result<ChangesReply, ChangesError> {
    let exchange = async {
        let mut stream = UnixStream::connect(sockets.join(SOCKET)).await?;
        let mut line = serde_json::to_vec(&ChangesRequest { saved }).map_err(std::io::Error::from)?;
        line.push(b'\n');
        stream.write_all(&line).await?;
        let mut reply = Vec::new();
        stream.take(MAX_REPLY_BYTES).read_to_end(&mut reply).await?;
        Ok::<_, std::io::Error>(reply)
    };
    let reply = tokio::time::timeout(TIMEOUT, exchange).await.map_err(|_| ChangesError::Timeout)??;
    ChangesReply::decode(&reply).ok_or(ChangesError::Invalid)
}
