//! Tests the effect of a sign-out, or of a switch to another account, on streams, WebSockets and app tokens, at the
//! same router and at others.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::{SinkExt, StreamExt};
use http::StatusCode;
use reqwest::Response;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::{WebSocketStream, client_async};

use super::machine::TestMachine;
use super::test_router::{APP_HOST, CODE_HOST, ROUTE_UPDATE_TIMEOUT, TestRouter, send};

/// A browser's open connections: some with its session, and one with an app token.
struct OpenConnections {
    socket: WebSocketStream<TcpStream>,
    streams: [Response; 2],
    token: String,
}

/// Waits for the first chunk of a stream.
async fn wait_for_start(mut stream: Response) -> Result<Response> {
    assert_eq!(stream.chunk().await?.as_deref(), Some(&b"started\n"[..]));
    Ok(stream)
}

impl OpenConnections {
    async fn open(router: &TestRouter, session: &str) -> Result<Self> {
        let stream = TcpStream::connect(router.addr).await?;
        let mut request = format!("ws://{APP_HOST}/ws").into_client_request()?;
        request.headers_mut().insert("cookie", session.parse()?);
        request.headers_mut().insert("origin", format!("http://{APP_HOST}").parse()?);
        let (mut socket, _) = client_async(request, stream).await?;
        socket.send(Message::text("hello")).await?;
        socket.next().await.context("the WebSocket closed")??;
        let request = router.post(APP_HOST, "/_svc/app-token").header("cookie", session);
        let minted = send(request.json(&json!({ "app": "notes" }))).await;
        let token = minted.json()["token"].as_str().context("the response has no token")?.to_owned();
        let session_stream =
            wait_for_start(router.get(APP_HOST, "/endless").header("cookie", session).send().await?).await?;
        let app_stream =
            wait_for_start(router.get(APP_HOST, "/endless").bearer_auth(&token).send().await?).await?;
        Ok(Self { socket, streams: [session_stream, app_stream], token })
    }

    async fn assert_closed_soon(&mut self, router: &TestRouter) -> Result<()> {
        let started = Instant::now();
        let remaining = || ROUTE_UPDATE_TIMEOUT.saturating_sub(started.elapsed());
        let end = timeout(remaining(), self.socket.next()).await.context("the WebSocket is still open")?;
        ensure!(!matches!(end, Some(Ok(_))), "{end:?}");
        for stream in &mut self.streams {
            // The stream is aborted, so that no client accepts it as complete.
            ensure!(timeout(remaining(), stream.chunk()).await.context("a stream is still open")?.is_err());
        }
        let late = send(router.get(APP_HOST, "/").bearer_auth(&self.token)).await;
        assert_eq!(late.status, StatusCode::UNAUTHORIZED, "the app token is still valid");
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_close_when_their_session_ends() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let session = router.open_session(APP_HOST, "user_1").await;
    let mut opened = OpenConnections::open(&router, &session).await?;
    let response = send(router.post(APP_HOST, "/_svc/sign-out").header("cookie", &session)).await;
    assert_eq!(response.status, StatusCode::NO_CONTENT);
    opened.assert_closed_soon(&router).await
}

#[tokio::test(flavor = "multi_thread")]
async fn account_switch_ends_streams_and_app_tokens() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let session = router.open_session(APP_HOST, "user_1").await;
    let mut opened = OpenConnections::open(&router, &session).await?;
    let cookies = format!("{session}; __session={}", router.token("user_2"));
    let choice = router.post(APP_HOST, "/_svc/account").header("cookie", cookies);
    let response = send(choice.json(&json!({ "account": "provider" }))).await;
    assert_eq!(response.status, StatusCode::SEE_OTHER, "{response:?}");
    opened.assert_closed_soon(&router).await
}

#[tokio::test(flavor = "multi_thread")]
async fn sign_out_at_second_router_closes_only_older_streams() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let second_router = router.start_second_router().await?;
    for _ in 0..3 {
        let session = router.open_session(APP_HOST, "user_1").await;
        let mut opened = OpenConnections::open(&router, &session).await?;
        let response = send(second_router.post(APP_HOST, "/_svc/sign-out").header("cookie", &session)).await;
        assert_eq!(response.status, StatusCode::NO_CONTENT);
        opened.assert_closed_soon(&router).await?;
        let late = send(second_router.get(APP_HOST, "/").bearer_auth(&opened.token)).await;
        assert_eq!(late.status, StatusCode::UNAUTHORIZED);
    }
    // A router that starts after the sign-out also enforces it.
    let session = router.open_session(APP_HOST, "user_1").await;
    let opened = OpenConnections::open(&router, &session).await?;
    send(second_router.post(APP_HOST, "/_svc/sign-out").header("cookie", &session)).await;
    let late = router.start_second_router().await?;
    late.wait_for_status("user_1", StatusCode::OK).await;
    assert_eq!(
        send(late.get(APP_HOST, "/").bearer_auth(&opened.token)).await.status,
        StatusCode::UNAUTHORIZED
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sign_out_keeps_streams_of_other_users() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let another = TestMachine::start().await?;
    router.add_machine(&another, "user_2", "primary", "running").await?;
    router.wait_for_status("user_2", StatusCode::OK).await;
    let (session_1, session_2) =
        (router.open_session(APP_HOST, "user_1").await, router.open_session(APP_HOST, "user_2").await);
    let mut opened = OpenConnections::open(&router, &session_2).await?;
    send(router.post(APP_HOST, "/_svc/sign-out").header("cookie", &session_1)).await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    opened.socket.send(Message::text("still here")).await?;
    let echoed =
        timeout(Duration::from_secs(5), opened.socket.next()).await?.context("the WebSocket closed")??;
    assert_eq!(echoed, Message::text("still here"));
    assert_eq!(send(router.get(APP_HOST, "/").bearer_auth(&opened.token)).await.status, StatusCode::OK);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_ends_when_its_session_expires() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let session = router.open_session(APP_HOST, "user_1").await;
    router.sql.batch_execute("UPDATE sessions SET expires_at = now() + interval '3 seconds'").await?;
    tokio::time::sleep(Duration::from_millis(700)).await;
    let mut stream =
        wait_for_start(router.get(APP_HOST, "/endless").header("cookie", &session).send().await?).await?;
    let end = timeout(Duration::from_secs(5), stream.chunk()).await.context("the stream is still open")?;
    ensure!(end.is_err());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn late_stream_ends_when_its_session_expires() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let session = router.open_session(APP_HOST, "user_1").await;
    router.sql.batch_execute("UPDATE sessions SET expires_at = now() + interval '7 seconds'").await?;
    let updated = Instant::now();
    tokio::time::sleep(Duration::from_millis(700)).await;
    let mut stream =
        wait_for_start(router.get(APP_HOST, "/late-endless").header("cookie", &session).send().await?)
            .await?;
    // If the session's remaining lifetime were counted from the response head, the stream would end after 10 s or more.
    let remaining = Duration::from_secs(9).saturating_sub(updated.elapsed());
    let end = timeout(remaining, stream.chunk()).await.context("the stream is still open")?;
    ensure!(end.is_err());
    Ok(())
}

/// A code is valid for a minute, but could open a twelve-hour session.
#[tokio::test(flavor = "multi_thread")]
async fn code_issued_before_sign_out_is_refused() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    let session = router.open_session(APP_HOST, "user_1").await;
    let issued = router.get(APP_HOST, "/_svc/code-session?state=nonce").header("cookie", &session);
    let issued = send(issued).await;
    let (_, code) = issued.location().split_once("code=").context("the redirect has no code")?;
    send(router.post(APP_HOST, "/_svc/sign-out").header("cookie", &session)).await;
    let path = format!("/_svc/session?code={code}");
    let late = send(router.get(CODE_HOST, &path).header("cookie", "svc_code_state=nonce")).await;
    assert_eq!(late.status, StatusCode::UNAUTHORIZED, "{late:?}");
    Ok(())
}

/// Two hours after a sign-out, its row is deleted, so a router that starts later never reads it.
#[tokio::test(flavor = "multi_thread")]
async fn old_sign_out_does_not_block_later_tokens() -> Result<()> {
    let (router, _machine) = TestRouter::start_with_machine("user_1").await?;
    router
        .sql
        .batch_execute(
            "INSERT INTO sign_outs (idp_user_id, generation) VALUES ('user_1', 7); \
             ALTER TABLE sign_outs DISABLE TRIGGER sign_outs_changed; \
             UPDATE sign_outs SET changed_at = now() - interval '90 minutes'",
        )
        .await?;
    // `earlier` has read the row; `later` starts after the row's deletion.
    let earlier = router.start_second_router().await?;
    earlier.wait_for_status("user_1", StatusCode::OK).await;
    router.sql.batch_execute("DELETE FROM sign_outs").await?;
    let later = router.start_second_router().await?;
    later.wait_for_status("user_1", StatusCode::OK).await;
    for (issuer, verifier) in [(&later, &earlier), (&earlier, &later)] {
        let session = issuer.open_session(APP_HOST, "user_1").await;
        let minted = issuer.post(APP_HOST, "/_svc/app-token").header("cookie", &session);
        let minted = send(minted.json(&json!({ "app": "notes" }))).await;
        let token = minted.json()["token"].as_str().context("the response has no token")?.to_owned();
        assert_eq!(send(verifier.get(APP_HOST, "/").bearer_auth(&token)).await.status, StatusCode::OK);
    }
    Ok(())
}
