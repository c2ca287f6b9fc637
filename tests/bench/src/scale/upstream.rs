//! A local service behind the gateway, in place of the shell: it echoes WebSocket messages and discards other bodies.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};

use super::super::echo::{EchoFrame, FRAME_HEADER_BYTES, upgrade_response};

/// Serves until the runtime ends.
pub fn serve(socket: &Path) -> Result<()> {
    let listener =
        UnixListener::bind(socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            // An error ends only its own connection; the client reports it.
            tokio::spawn(serve_connection(stream));
        }
    });
    Ok(())
}

async fn serve_connection(stream: UnixStream) -> Result<()> {
    let mut stream = BufReader::with_capacity(1024, stream);
    loop {
        let (mut websocket_key, mut content_length) = (None, 0_u64);
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).await? == 0 {
                return Ok(());
            }
            let line = line.trim_end();
            if line.is_empty() {
                break;
            }
            let Some((name, value)) = line.split_once(':') else { continue };
            match name.to_ascii_lowercase().as_str() {
                "sec-websocket-key" => websocket_key = Some(value.trim().to_owned()),
                "content-length" => content_length = value.trim().parse()?,
                _ => {}
            }
        }
        if let Some(key) = websocket_key {
            return echo(stream, &key).await;
        }
        discard(&mut stream, content_length).await?;
        stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await?;
    }
}

async fn discard(stream: &mut BufReader<UnixStream>, bytes: u64) -> Result<()> {
    let mut buffer = vec![0; 256 << 10];
    let mut body = stream.take(bytes);
    while body.read(&mut buffer).await? > 0 {}
    ensure!(body.limit() == 0, "the request body is incomplete");
    Ok(())
}

async fn echo(mut stream: BufReader<UnixStream>, key: &str) -> Result<()> {
    stream.write_all(upgrade_response(key).as_bytes()).await?;
    loop {
        let mut header = [0; FRAME_HEADER_BYTES];
        stream.read_exact(&mut header).await?;
        let mut echo = EchoFrame::new(header)?;
        stream.read_exact(echo.payload_mut()).await?;
        stream.write_all(echo.unmask()).await?;
    }
}
