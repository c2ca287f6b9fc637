//! What follows an accepted upgrade: bytes both ways until one side ends, or the way is closed.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio_util::sync::CancellationToken;

/// Joins both sides once both have switched.
pub(super) fn open(client: OnUpgrade, upstream: OnUpgrade, closed: CancellationToken) {
    tokio::spawn(async move {
        let joined = async {
            let (client, upstream) = tokio::try_join!(client, upstream).map_err(std::io::Error::other)?;
            let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
            tokio::io::copy_bidirectional(&mut client, &mut upstream).await
        };
        tokio::select! {
            () = closed.cancelled() => {}
            ended = joined => if let Err(error) = ended {
                tracing::debug!(%error, "tunnel ended");
            }
        }
    });
}
