//! Resolves host names with hickory, which is pure Rust: a static glibc binary must not call getaddrinfo.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hickory_resolver::TokioResolver;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);

/// A failed DNS lookup.
#[derive(Debug, thiserror::Error)]
#[error("cannot resolve {name}: {reason}")]
pub struct ResolveError {
    name: String,
    reason: String,
}

/// Resolves a host name or address literal; `localhost` is 127.0.0.1, without DNS.
///
/// # Errors
/// [`ResolveError`] if the system's resolver configuration cannot be read, or if the lookup fails, takes longer than
/// 5 s, or finds no address.
pub async fn lookup_addresses(name: &str) -> Result<Vec<IpAddr>, ResolveError> {
    let resolve_error = |reason: String| ResolveError { name: name.to_owned(), reason };
    if let Ok(ip) = name.trim_start_matches('[').trim_end_matches(']').parse() {
        return Ok(vec![ip]);
    }
    if name == "localhost" {
        return Ok(vec![IpAddr::from([127, 0, 0, 1])]);
    }
    let resolver = resolver().map_err(&resolve_error)?;
    let lookup = tokio::time::timeout(LOOKUP_TIMEOUT, resolver.lookup_ip(name)).await;
    let response = lookup.map_err(|_| resolve_error("no response in time".to_owned()))?;
    let addresses: Vec<IpAddr> = response.map_err(|error| resolve_error(error.to_string()))?.iter().collect();
    if addresses.is_empty() { Err(resolve_error("no address found".to_owned())) } else { Ok(addresses) }
}

fn resolver() -> Result<&'static TokioResolver, String> {
    static RESOLVER: OnceLock<TokioResolver> = OnceLock::new();
    if let Some(resolver) = RESOLVER.get() {
        return Ok(resolver);
    }
    // A failure is not stored: a process may start before the system's resolver configuration exists.
    let created = TokioResolver::builder_tokio().and_then(hickory_resolver::ResolverBuilder::build);
    let created = created.map_err(|error| error.to_string())?;
    Ok(RESOLVER.get_or_init(|| created))
}

/// The resolver for reqwest.
#[derive(Clone, Copy, Default)]
pub struct HickoryResolver;

impl Resolve for HickoryResolver {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let addresses = lookup_addresses(name.as_str()).await?;
            let addrs: Addrs = Box::new(addresses.into_iter().map(|ip| SocketAddr::new(ip, 0)));
            Ok(addrs)
        })
    }
}

pub fn reqwest_resolver() -> Arc<HickoryResolver> {
    Arc::new(HickoryResolver)
}
