//! Requests from other tasks to the watcher thread.

use std::time::Instant;

use tokio::sync::oneshot;

use super::peer::Peer;
use crate::audit::file_changes::ChangesReply;
use crate::audit::protocol::Message;

/// A hook message, with a channel that signals when it has been processed.
pub struct HookRequest {
    pub message: Message,
    pub peer: Peer,
    pub received_at: Instant,
    pub done: oneshot::Sender<()>,
}

pub enum Request {
    Hook(Box<HookRequest>),
    /// Requests the changes since the reply with token `last_saved_token`. With `None`, the reply says that anything
    /// may have changed.
    Changes {
        last_saved_token: Option<String>,
        reply: oneshot::Sender<ChangesReply>,
    },
}
