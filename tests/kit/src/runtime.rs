//! The runtime that the kit's own servers live on.
//!
//! It is not the test's runtime: a test may block its thread on a child process that talks to one of these servers,
//! and a server shared by tests has to outlive each of them.

use std::sync::OnceLock;

use tokio::runtime::{Builder, Handle, Runtime};

pub(crate) fn servers() -> &'static Handle {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME
        .get_or_init(|| {
            Builder::new_multi_thread()
                .worker_threads(2)
                .thread_name("kit-servers")
                .enable_all()
                .build()
                .expect("two threads can be started")
        })
        .handle()
}
