//! Tests long bodies and WebSockets.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http::StatusCode;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::{WebSocketStream, client_async};

use super::test_router::{APP_HOST, ROUTE_UPDATE_TIMEOUT, TestRouter, send};

const CHUNK_BYTES: usize = 64 * 1024;
const CHUNKS: usize = 160;

async fn open_websocket(router: &TestRouter, user: &str) -> Result<WebSocketStream<TcpStream>> {
    let stream = TcpStream::connect(router.addr).await?;
    let mut request = format!("ws://{APP_HOST}/ws").into_client_request()?;
    request.headers_mut().insert("authorization", format!("Bearer {}", router.token(user)).parse()?);
    request.headers_mut().insert("origin", format!("http://{APP_HOST}").parse()?);
    let (socket, response) = client_async(request, stream).await?;
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    Ok(socket)
}

#[tokio::test(flavor = "multi_thread")]
async fn websocket_forwards_messages_both_ways() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let mut socket = open_websocket(&router, "user_1").await?;
    for message in [Message::text("hello"), Message::binary(vec![0; 300_000]), Message::text("")] {
        socket.send(message.clone()).await?;
        let echoed =
            timeout(Duration::from_secs(10), socket.next()).await?.context("the WebSocket closed")??;
        assert_eq!(echoed, message);
    }
    let received = machine.last_request();
    router.verify_proof(&machine, &received.headers);
    assert!(!received.headers.contains_key("authorization"));
    socket.close(None).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_machine_loses_websockets_and_streams() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let mut socket = open_websocket(&router, "user_1").await?;
    socket.send(Message::text("hello")).await?;
    socket.next().await.context("the WebSocket closed")??;
    let mut endless = router.get(APP_HOST, "/endless").bearer_auth(router.token("user_1")).send().await?;
    assert_eq!(endless.chunk().await?.as_deref(), Some(&b"started\n"[..]));
    router.set_status(&machine, "failed").await?;
    let started = Instant::now();
    let end = timeout(ROUTE_UPDATE_TIMEOUT, socket.next()).await?;
    assert!(!matches!(end, Some(Ok(_))), "{end:?}");
    let end = timeout(ROUTE_UPDATE_TIMEOUT.saturating_sub(started.elapsed()), endless.chunk()).await?;
    assert!(end.is_err(), "{end:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn unrelated_change_keeps_websockets_open() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let mut socket = open_websocket(&router, "user_1").await?;
    router.sql.batch_execute("UPDATE user_machines SET proof_kids = '{k1}'").await?;
    router.set_status(&machine, "running").await?;
    tokio::time::sleep(Duration::from_millis(700)).await;
    socket.send(Message::text("still here")).await?;
    assert_eq!(
        timeout(Duration::from_secs(5), socket.next()).await?.context("the WebSocket closed")??,
        Message::text("still here")
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_mebibyte_bodies_are_forwarded_completely() -> Result<()> {
    let (router, machine) = TestRouter::start_with_machine("user_1").await?;
    let upload =
        router
            .post(APP_HOST, "/count")
            .bearer_auth(router.token("user_1"))
            .body(vec![1; CHUNK_BYTES * CHUNKS]);
    assert_eq!(send(upload).await.body, (CHUNK_BYTES * CHUNKS).to_string());
    assert_eq!(machine.last_request().headers["content-length"], (CHUNK_BYTES * CHUNKS).to_string());
    let download = router.fetch("user_1", "/large").await;
    assert_eq!(download.body.len(), CHUNK_BYTES * CHUNKS);
    Ok(())
}

/// Each chunk is sent only after the previous one has been echoed, so the test passes only if neither direction waits
/// for the end of a body.
#[tokio::test(flavor = "multi_thread")]
async fn bodies_are_streamed_in_both_directions() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let (sender, receiver) = mpsc::channel::<Result<Bytes, std::io::Error>>(1);
    let chunks = futures_util::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|chunk| (chunk, receiver))
    });
    let request = router.post(APP_HOST, "/echo").bearer_auth(router.token("user_1"));
    let chunk = |index: usize| Bytes::from(vec![index as u8; CHUNK_BYTES]);
    sender.send(Ok(chunk(0))).await?;
    let mut response = request.body(reqwest::Body::wrap_stream(chunks)).send().await?;
    assert_eq!(response.status(), StatusCode::OK);
    for index in 0..CHUNKS {
        let mut echoed = Vec::new();
        while echoed.len() < CHUNK_BYTES {
            let part = timeout(Duration::from_secs(10), response.chunk()).await??;
            echoed.extend_from_slice(&part.context("the body ended early")?);
        }
        assert_eq!(echoed, chunk(index), "chunk {index}");
        if index + 1 < CHUNKS {
            sender.send(Ok(chunk(index + 1))).await?;
        }
    }
    drop(sender);
    assert_eq!(timeout(Duration::from_secs(10), response.chunk()).await??, None);
    Ok(())
}
