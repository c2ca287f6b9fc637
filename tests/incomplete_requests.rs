//! Many clients open connections to :443 and never complete a request head. The gateway and the router must use no more
//! memory per connection than the connection limit assumes, and far less while the connections are idle.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;
use kit::incomplete_requests::{OpenConnections, wait_for_settled_memory};
use svc::http::tls::{ChainCheck, Identity, generate_self_signed, pinned_client_config};

use super::gateway::host::{Machine, UNREACHABLE_DATABASE};
use super::platform::stack::Stack;

const CONNECTIONS: usize = 1000;
/// Slightly below `max_head_bytes` in `http::server`.
const HEAD_BYTES: usize = 31 * 1024;
/// The memory per connection that `http::server` assumes for the connection limit.
const MAX_BYTES_PER_CONNECTION: u64 = 128 * 1024;
/// Enough for a TLS session, its socket and its task. hyper's buffers would exceed it, so an idle connection must
/// release them.
const MAX_IDLE_BYTES_PER_CONNECTION: u64 = 16 * 1024;

/// Bytes of memory per connection.
struct ConnectionMemory {
    idle: u64,
    with_incomplete_head: u64,
}

/// Measures the memory per connection while all connections are idle, and after all have sent an incomplete head.
fn measure_connection_memory(pid: u32, address: SocketAddr, identity: &Identity) -> Result<ConnectionMemory> {
    let config = Arc::new(pinned_client_config(identity.pin()?, ChainCheck::PinOnly)?);
    // One-time allocations of the first connections do not count.
    drop(OpenConnections::open(address, &config, 20)?);
    let before = wait_for_settled_memory(pid)?;
    let mut connections = OpenConnections::open(address, &config, CONNECTIONS)?;
    let while_idle = wait_for_settled_memory(pid)?;
    connections.send_incomplete_requests(HEAD_BYTES)?;
    let with_heads = wait_for_settled_memory(pid)?;
    connections.ensure_open()?;
    let per_connection = |bytes: u64| bytes.saturating_sub(before) / CONNECTIONS as u64;
    let memory = ConnectionMemory {
        idle: per_connection(while_idle),
        with_incomplete_head: per_connection(with_heads),
    };
    println!(
        "{CONNECTIONS} connections: {} KiB each while idle, {} KiB with an incomplete head",
        memory.idle >> 10,
        memory.with_incomplete_head >> 10
    );
    Ok(memory)
}

fn assert_within_bounds(memory: &ConnectionMemory) {
    let ConnectionMemory { idle, with_incomplete_head } = *memory;
    assert!(idle <= MAX_IDLE_BYTES_PER_CONNECTION, "{idle} bytes per idle connection");
    assert!(
        with_incomplete_head >= HEAD_BYTES as u64 / 2,
        "the server has not read the heads: {with_incomplete_head} bytes per connection"
    );
    assert!(with_incomplete_head <= MAX_BYTES_PER_CONNECTION, "{with_incomplete_head} bytes per connection");
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_bounds_memory_of_incomplete_requests() -> Result<()> {
    let host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    let file = |name: &str| host.machine.path("var/lib/svc/tls").join(name);
    let identity = Identity::read(&file("cert.pem"), &file("key.pem"))?;
    let (pid, address) = (host.pid(), host.address.parse()?);
    let measure = move || measure_connection_memory(pid, address, &identity);
    assert_within_bounds(&tokio::task::spawn_blocking(measure).await??);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn router_bounds_memory_of_incomplete_requests() -> Result<()> {
    let stack = Stack::start().await;
    let identity = generate_self_signed(&["app.test".to_owned()])?;
    let dir = tempfile::tempdir()?;
    let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    std::fs::write(&cert, &identity.cert_pem)?;
    std::fs::write(&key, &identity.key_pem)?;
    let files = [("ROUTER_TLS_CERT_FILE", cert.to_str()), ("ROUTER_TLS_KEY_FILE", key.to_str())];
    let files = files.map(|(name, path)| (name, path.unwrap_or_default()));
    let platform = stack.start_platform_with(&files);
    let (_, authority) = platform.router.split_once("://").unwrap_or(("", &platform.router));
    let (pid, address) = (platform.pid(), authority.parse()?);
    let measure = move || measure_connection_memory(pid, address, &identity);
    assert_within_bounds(&tokio::task::spawn_blocking(measure).await??);
    Ok(())
}
