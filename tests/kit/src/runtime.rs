//! The runtime for the kit's servers.
//!
//! It is separate from a test's runtime: a test may block its thread on a child process that talks to one of these
//! servers, and a shared server must outlive each test.

use std::sync::OnceLock;

use tokio::runtime::{Builder, Handle, Runtime};

pub(crate) fn handle() -> &'static Handle {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME
        .get_or_init(|| {
            Builder::new_multi_thread()
                .worker_threads(2)
                .thread_name("kit-servers")
                .enable_all()
                .build()
                .expect("cannot start the kit's runtime")
        })
        .handle()
}
