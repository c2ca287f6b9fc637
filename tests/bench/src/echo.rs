//! A WebSocket echo server behind TLS, which stands in for a machine. It is the same for all routers.

use std::io::{BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::connections::read_head;

/// Stack size of a connection thread: small, because there are thousands of idle threads.
const STACK_BYTES: usize = 256 * 1024;
/// RFC 6455, section 1.3.
const GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// Serves until the process ends; returns the address.
pub fn serve(cert_pem: &str, key_pem: &str) -> Result<SocketAddr> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from_pem_slice(cert_pem.as_bytes())?],
            PrivateKeyDer::from_pem_slice(key_pem.as_bytes())?,
        )?;
    let config = Arc::new(config);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let config = Arc::clone(&config);
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
            // An error only ends its own connection; the client reports it.
            let _ = thread.spawn(move || serve_connection(stream, config));
        }
    });
    Ok(address)
}

fn serve_connection(tcp: TcpStream, config: Arc<ServerConfig>) -> Result<()> {
    tcp.set_nodelay(true)?;
    let mut tls = BufReader::with_capacity(4096, StreamOwned::new(ServerConnection::new(config)?, tcp));
    let head = read_head(&mut tls)?;
    let key = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("sec-websocket-key").then(|| value.trim().to_owned())
    });
    let accept_key = accept_key(&key.context("the request has no WebSocket key")?);
    let response = format!(
        "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-accept: {accept_key}\r\n\r\n"
    );
    send(&mut tls, response.as_bytes())?;
    let mut frame = Vec::new();
    loop {
        let mut start = [0; 6];
        tls.read_exact(&mut start)?;
        let length = usize::from(start[1] & 0x7f);
        ensure!(start[1] & 0x80 != 0 && length < 126, "only short, masked frames are supported");
        let mask = &start[2..6];
        frame.clear();
        frame.extend([start[0], start[1] & 0x7f]);
        frame.resize(2 + length, 0);
        tls.read_exact(&mut frame[2..])?;
        frame[2..].iter_mut().zip(mask.iter().cycle()).for_each(|(byte, mask)| *byte ^= mask);
        send(&mut tls, &frame)?;
    }
}

fn send(tls: &mut BufReader<StreamOwned<ServerConnection, TcpStream>>, bytes: &[u8]) -> Result<()> {
    let stream = tls.get_mut();
    stream.write_all(bytes)?;
    Ok(stream.flush()?)
}

fn accept_key(key: &str) -> String {
    let text = format!("{key}{GUID}");
    STANDARD.encode(digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::super::connections::{self, Endpoint};
    use super::*;
    use kit::ca::Ca;

    #[test]
    fn accept_key_matches_rfc_6455_example() {
        assert_eq!(accept_key("dGhlIHNhbXBsZSBub25jZQ=="), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }

    #[test]
    fn server_echoes_on_many_connections() {
        let ca = Ca::new().expect("the CA is created");
        let (cert, key) = ca.issue(&["echo.test"]).expect("the certificate is issued");
        let address = serve(&cert, &key).expect("the server listens");
        let endpoint =
            Endpoint::new(address, "echo.test", "a=b", &ca.root_pem()).expect("the endpoint is valid");
        assert_eq!(
            connections::open_connections(10, || endpoint.websocket()).expect("the connections open").len(),
            10
        );
        assert!(connections::messages_per_second(&endpoint, 3, 1).expect("every message is echoed") > 10.0);
        assert!(endpoint.https().is_err(), "the echo server does not serve HTTP");
    }
}
