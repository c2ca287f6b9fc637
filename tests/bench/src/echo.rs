//! A WebSocket echo server over TLS, which stands in for a machine. It is the same for all routers.

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

/// Stack size of a connection thread: small, because there are a thousand idle threads.
const STACK_BYTES: usize = 256 * 1024;
/// RFC 6455, section 1.3.
const GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// Starts a server that runs until the process exits, and returns its address.
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
            // An error ends only its own connection; the client reports it.
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
    let response = upgrade_response(&key.context("the request has no WebSocket key")?);
    send(&mut tls, response.as_bytes())?;
    loop {
        let mut header = [0; FRAME_HEADER_BYTES];
        tls.read_exact(&mut header)?;
        let mut echo = EchoFrame::new(header)?;
        tls.read_exact(echo.payload_mut())?;
        send(&mut tls, echo.unmask())?;
    }
}

/// The bytes before the payload of a short, masked frame.
pub const FRAME_HEADER_BYTES: usize = 6;

/// A frame that is sent back without its mask.
pub struct EchoFrame {
    frame: Vec<u8>,
    mask: [u8; 4],
}

impl EchoFrame {
    /// Starts a frame; the caller reads its payload into [`Self::payload_mut`].
    pub fn new(header: [u8; FRAME_HEADER_BYTES]) -> Result<Self> {
        let [opcode, length, mask @ ..] = header;
        let is_masked = length & 0x80 != 0;
        let length = length & 0x7f;
        ensure!(is_masked && length < 126, "only short, masked frames are supported");
        let mut frame = vec![opcode, length];
        frame.resize(2 + usize::from(length), 0);
        Ok(Self { frame, mask })
    }

    pub fn payload_mut(&mut self) -> &mut [u8] {
        &mut self.frame[2..]
    }

    pub fn unmask(&mut self) -> &[u8] {
        let mask = self.mask;
        self.payload_mut().iter_mut().zip(mask.iter().cycle()).for_each(|(byte, mask)| *byte ^= mask);
        &self.frame
    }
}

pub fn upgrade_response(key: &str) -> String {
    format!(
        "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-accept: {}\r\n\r\n",
        accept_key(key)
    )
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
            connections::open_connections(10, || endpoint.open_websocket())
                .expect("the connections open")
                .len(),
            10
        );
        let rate =
            connections::measure_messages_per_second(&endpoint, 3, 1).expect("every message is echoed");
        assert!(rate > 10.0, "{rate} messages/s");
        assert!(endpoint.open_https().is_err(), "the echo server does not serve HTTP");
    }
}
