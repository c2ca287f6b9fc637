//! The tunnel after an accepted upgrade: copies bytes both ways until both sides have ended or one fails, the proxy is
//! closed, or the request's time limit is reached.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio_util::sync::CancellationToken;

use super::time_limit::TimeLimit;
use svc_base::error_chain::format_chain;

/// Connects both sides once both have switched protocols.
pub(super) fn open(
    client: OnUpgrade,
    upstream: OnUpgrade,
    closed: CancellationToken,
    time_limit: Option<TimeLimit>,
) {
    tokio::spawn(async move {
        let copying = async {
            let (client, upstream) = tokio::try_join!(client, upstream).map_err(std::io::Error::other)?;
            let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
            tokio::io::copy_bidirectional(&mut client, &mut upstream).await
        };
        let time_limit = async {
            match time_limit {
                Some(limit) => limit.wait().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = closed.cancelled() => {}
            () = time_limit => {}
            result = copying => if let Err(error) = result {
                tracing::debug!(error = %format_chain(&error), "tunnel ended");
            }
        }
    });
}
