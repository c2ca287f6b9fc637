//! Tests for injected faults.

use std::time::{Duration, Instant};

use anyhow::Result;
use object_store::{Error, PutMode};

use super::{Fault, FaultRule, fixture, fixture_with, pattern};

#[tokio::test]
async fn lost_reply_leaves_the_write_committed() -> Result<()> {
    let fixture = fixture()?;
    let lost = fixture.server.add_fault(FaultRule::new(Fault::LostReply).method("PUT").key("pointer"));
    assert!(fixture.put_if("pointer", "one", PutMode::Create).await.is_err());
    assert_eq!(lost.hits(), 1);
    assert_eq!(fixture.get("pointer").await?, b"one");
    assert_eq!(fixture.server.requests()[0].status, None);

    // A retry fails on the precondition, because the first attempt was committed.
    let fixture = fixture_with(|builder| builder)?;
    let after_commit = fixture.server.add_fault(FaultRule::new(Fault::StatusAfterCommit(503)).method("PUT"));
    let result = fixture.put_if("pointer", "two", PutMode::Create).await;
    assert!(matches!(result, Err(Error::AlreadyExists { .. })), "{result:?}");
    assert_eq!((after_commit.hits(), fixture.get("pointer").await?.as_slice()), (1, &b"two"[..]));
    let statuses: Vec<_> = fixture.server.requests().iter().map(|request| request.status).collect();
    assert_eq!(statuses, [Some(503), Some(412), Some(200)]);
    Ok(())
}

#[tokio::test]
async fn rules_select_requests_and_count_faults() -> Result<()> {
    let fixture = fixture()?;
    fixture.server.write("fleet", "one", "content of one");
    fixture.server.write("fleet", "two", "content of two");
    let unavailable = fixture
        .server
        .add_fault(FaultRule::new(Fault::Status(503)).method("GET").key("one").after(1).times(2));
    let outcomes = [
        fixture.get("one").await.is_ok(),
        fixture.get("one").await.is_ok(),
        fixture.get("two").await.is_ok(),
    ];
    assert_eq!(outcomes, [true, false, true]);
    assert!(fixture.get("one").await.is_err());
    assert!(fixture.get("one").await.is_ok(), "the fault must occur only twice");
    assert_eq!(unavailable.hits(), 2);

    fixture.server.add_fault(FaultRule::new(Fault::Disconnect).method("PUT").always());
    assert!(fixture.put_if("three", "x", PutMode::Overwrite).await.is_err());
    assert!(fixture.server.read("fleet", "three").is_none());
    fixture.server.heal();
    fixture.put_if("three", "x", PutMode::Overwrite).await?;

    fixture.server.add_fault(FaultRule::new(Fault::Delay(Duration::from_millis(80))));
    let start = Instant::now();
    fixture.get("one").await?;
    assert!(start.elapsed() >= Duration::from_millis(80));
    Ok(())
}

#[tokio::test]
async fn bodies_are_truncated_and_corrupted() -> Result<()> {
    let fixture = fixture()?;
    for len in [1000, 1_000_000] {
        let content = pattern(len);
        fixture.server.write("fleet", "a", content.clone());
        for after in [0, 10, len as u64 / 2, len as u64] {
            fixture.server.add_fault(FaultRule::new(Fault::TruncateBody(after)).method("GET"));
            // A cut after the last byte is not noticed by the client.
            assert_eq!(fixture.get("a").await.is_ok(), after == len as u64, "{after} of {len}");
        }
        fixture.server.add_fault(FaultRule::new(Fault::CorruptBody).method("GET"));
        let corrupted = fixture.get("a").await?;
        let different = corrupted.iter().zip(&content).filter(|(a, b)| a != b).count();
        assert_eq!((corrupted.len(), different), (len, 1));
        assert!(fixture.get("a").await? == content);
    }
    Ok(())
}

#[tokio::test]
async fn stale_read_returns_previous_content() -> Result<()> {
    let fixture = fixture()?;
    fixture.server.add_fault(FaultRule::new(Fault::StaleRead).method("GET").always());
    fixture.put_if("a", "one", PutMode::Create).await?;
    assert!(matches!(fixture.get("a").await, Err(Error::NotFound { .. })));
    fixture.put_if("a", "two", PutMode::Overwrite).await?;
    assert_eq!(fixture.get("a").await?, b"one");
    fixture.server.heal();
    assert_eq!(fixture.get("a").await?, b"two");
    Ok(())
}

#[tokio::test]
async fn store_keeps_objects_and_port_across_outage() -> Result<()> {
    let fixture = fixture()?;
    fixture.put_if("a", "kept", PutMode::Create).await?;
    let endpoint = fixture.server.endpoint();
    for _ in 0..5 {
        fixture.server.take_down();
        let address = endpoint.trim_start_matches("http://");
        let refused = std::net::TcpStream::connect(address).expect_err("the connection is refused");
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        assert!(fixture.get("a").await.is_err());
        fixture.server.bring_up()?;
        assert_eq!(fixture.get("a").await?, b"kept");
    }
    assert_eq!(fixture.server.endpoint(), endpoint);
    Ok(())
}

#[tokio::test]
async fn error_codes_and_wrong_etags_are_injected() -> Result<()> {
    let fixture = fixture()?;
    fixture.server.write("fleet", "one", "content of one");
    fixture.server.add_fault(FaultRule::new(Fault::Code(403, "RequestTimeTooSkewed")));
    let error = fixture.get("one").await.expect_err("the request is rejected");
    assert!(format!("{error:#}").contains("RequestTimeTooSkewed"), "{error:#}");
    let expected = fixture.server.objects("fleet", "one").pop().map(|object| object.etag);
    fixture.server.add_fault(FaultRule::new(Fault::WrongEtag));
    let etag = async || -> Result<Option<String>> {
        let meta = object_store::ObjectStoreExt::head(&fixture.client, &"one".into()).await?;
        Ok(meta.e_tag.map(|etag| etag.trim_matches('"').to_owned()))
    };
    let (wrong, right) = (etag().await?, etag().await?);
    assert!(wrong != expected && right == expected, "{wrong:?}, {right:?}, {expected:?}");
    Ok(())
}
