//! What goes wrong on demand.

use std::time::{Duration, Instant};

use anyhow::Result;
use object_store::{Error, PutMode};

use super::{Fault, Rule, pattern, rig, rig_with};

#[tokio::test]
async fn a_lost_reply_is_a_write_that_was_done() -> Result<()> {
    let rig = rig()?;
    let lost = rig.server.fault(Rule::new(Fault::LostReply).method("PUT").key("pointer"));
    assert!(rig.put_if("pointer", "one", PutMode::Create).await.is_err());
    assert_eq!(lost.hits(), 1);
    assert_eq!(rig.get("pointer").await?, b"one");
    assert_eq!(rig.server.requests()[0].status, None);

    // A client that tries again finds its own write in its way.
    let rig = rig_with(|builder| builder)?;
    let late = rig.server.fault(Rule::new(Fault::StatusAfterCommit(503)).method("PUT"));
    let result = rig.put_if("pointer", "two", PutMode::Create).await;
    assert!(matches!(result, Err(Error::AlreadyExists { .. })), "{result:?}");
    assert_eq!((late.hits(), rig.get("pointer").await?.as_slice()), (1, &b"two"[..]));
    let statuses: Vec<_> = rig.server.requests().iter().map(|request| request.status).collect();
    assert_eq!(statuses, [Some(503), Some(412), Some(200)]);
    Ok(())
}

#[tokio::test]
async fn faults_happen_to_whom_and_as_often_as_said() -> Result<()> {
    let rig = rig()?;
    rig.server.write("fleet", "one", "content of one");
    rig.server.write("fleet", "two", "content of two");
    let unavailable =
        rig.server.fault(Rule::new(Fault::Status(503)).method("GET").key("one").after(1).times(2));
    let outcomes = [rig.get("one").await.is_ok(), rig.get("one").await.is_ok(), rig.get("two").await.is_ok()];
    assert_eq!(outcomes, [true, false, true]);
    assert!(rig.get("one").await.is_err());
    assert!(rig.get("one").await.is_ok(), "twice, and no more");
    assert_eq!(unavailable.hits(), 2);

    rig.server.fault(Rule::new(Fault::Refuse).method("PUT").always());
    assert!(rig.put_if("three", "x", PutMode::Overwrite).await.is_err());
    assert!(rig.server.read("fleet", "three").is_none());
    rig.server.heal();
    rig.put_if("three", "x", PutMode::Overwrite).await?;

    rig.server.fault(Rule::new(Fault::Delay(Duration::from_millis(80))));
    let start = Instant::now();
    rig.get("one").await?;
    assert!(start.elapsed() >= Duration::from_millis(80));
    Ok(())
}

#[tokio::test]
async fn bodies_break_off_and_rot() -> Result<()> {
    let rig = rig()?;
    for len in [1000, 1_000_000] {
        let content = pattern(len);
        rig.server.write("fleet", "a", content.clone());
        for after in [0, 10, len as u64 / 2, len as u64] {
            rig.server.fault(Rule::new(Fault::TruncateBody(after)).method("GET"));
            // All of it and then a cut: to the client, that is all of it.
            assert_eq!(rig.get("a").await.is_ok(), after == len as u64, "{after} of {len}");
        }
        rig.server.fault(Rule::new(Fault::CorruptBody).method("GET"));
        let rotten = rig.get("a").await?;
        let different = rotten.iter().zip(&content).filter(|(a, b)| a != b).count();
        assert_eq!((rotten.len(), different), (len, 1));
        assert!(rig.get("a").await? == content);
    }
    Ok(())
}

#[tokio::test]
async fn a_stale_read_sees_what_was_before() -> Result<()> {
    let rig = rig()?;
    rig.server.fault(Rule::new(Fault::StaleRead).method("GET").always());
    rig.put_if("a", "one", PutMode::Create).await?;
    assert!(matches!(rig.get("a").await, Err(Error::NotFound { .. })));
    rig.put_if("a", "two", PutMode::Overwrite).await?;
    assert_eq!(rig.get("a").await?, b"one");
    rig.server.heal();
    assert_eq!(rig.get("a").await?, b"two");
    Ok(())
}

#[tokio::test]
async fn down_refuses_and_up_has_everything_on_the_same_port() -> Result<()> {
    let rig = rig()?;
    rig.put_if("a", "kept", PutMode::Create).await?;
    let endpoint = rig.server.endpoint();
    for _ in 0..5 {
        rig.server.down();
        let address = endpoint.trim_start_matches("http://");
        let refused = std::net::TcpStream::connect(address).expect_err("refused");
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        assert!(rig.get("a").await.is_err());
        rig.server.up()?;
        assert_eq!(rig.get("a").await?, b"kept");
    }
    assert_eq!(rig.server.endpoint(), endpoint);
    Ok(())
}

#[tokio::test]
async fn an_error_has_the_code_that_it_was_given_and_an_etag_is_another() -> Result<()> {
    let rig = rig()?;
    rig.server.write("fleet", "one", "content of one");
    rig.server.fault(Rule::new(Fault::Code(403, "RequestTimeTooSkewed")));
    let error = rig.get("one").await.expect_err("refused");
    assert!(format!("{error:#}").contains("RequestTimeTooSkewed"), "{error:#}");
    let told = rig.server.objects("fleet", "one").pop().map(|object| object.etag);
    rig.server.fault(Rule::new(Fault::WrongEtag));
    let etag = async || -> Result<Option<String>> {
        let meta = object_store::ObjectStoreExt::head(&rig.client, &"one".into()).await?;
        Ok(meta.e_tag.map(|etag| etag.trim_matches('"').to_owned()))
    };
    let (wrong, right) = (etag().await?, etag().await?);
    assert!(wrong != told && right == told, "{wrong:?}, {right:?}, {told:?}");
    Ok(())
}
