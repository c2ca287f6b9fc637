//! An operator's command that finds an interrupted update finishes it first, and then starts an update of its own only
//! if that is still needed.

use anyhow::Result;
use serde_json::Value;

use super::update_fixture::{NEW_VERSION, OLD_VERSION, PublishedRelease, UpdateFixture};

const KILL_AFTER_SWITCH: Option<&str> = Some("update.activating=return(kill)");

/// Starts an update to a release that does not start, and kills it after the switch.
async fn interrupt_broken_update(fixture: &UpdateFixture, version: &str) -> Result<()> {
    PublishedRelease::new(version, &[("app/broken", "")])?.serve(&fixture.source)?;
    fixture.run(&["apply", "--version", version], KILL_AFTER_SWITCH).await?.expect_killed();
    Ok(())
}

fn outcomes(fixture: &UpdateFixture) -> Result<Vec<Value>> {
    Ok(fixture.history()?.iter().map(|line| line["outcome"].clone()).collect())
}

#[tokio::test]
async fn rollback_abandons_an_interrupted_unhealthy_update() -> Result<()> {
    const BROKEN_VERSION: &str = "2026.3.0";
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[])?).await?;
    fixture.apply(NEW_VERSION).await?.expect(0);
    interrupt_broken_update(&fixture, BROKEN_VERSION).await?;
    let result = fixture.run(&["rollback"], None).await?.expect(0);
    assert!(result.stdout.contains("was rolled back to 2026.2.0"), "{}", result.stdout);
    fixture.assert_running(NEW_VERSION)?;
    assert_eq!(outcomes(&fixture)?, ["updated", "rolled_back"]);
    let status = fixture.status().await?;
    assert_eq!(status["previous"], OLD_VERSION, "the release before the running one must be kept");
    let quarantined = status["quarantined"].as_array().map(Vec::as_slice).unwrap_or_default();
    assert_eq!(quarantined.len(), 1, "{status}");
    assert_eq!(quarantined[0]["version"], BROKEN_VERSION);
    Ok(())
}

#[tokio::test]
async fn rollback_reverts_an_interrupted_healthy_update() -> Result<()> {
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[])?).await?;
    fixture.run(&["apply", "--version", NEW_VERSION], KILL_AFTER_SWITCH).await?.expect_killed();
    fixture.run(&["rollback"], None).await?.expect(0);
    fixture.assert_running(OLD_VERSION)?;
    assert_eq!(outcomes(&fixture)?, ["updated", "updated"]);
    Ok(())
}

#[tokio::test]
async fn repeated_rollback_finishes_the_interrupted_one() -> Result<()> {
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[])?).await?;
    fixture.apply(NEW_VERSION).await?.expect(0);
    fixture.run(&["rollback"], KILL_AFTER_SWITCH).await?.expect_killed();
    let result = fixture.run(&["rollback"], None).await?.expect(0);
    assert!(result.stdout.contains("2026.1.0 is current"), "{}", result.stdout);
    fixture.assert_running(OLD_VERSION)?;
    assert_eq!(outcomes(&fixture)?, ["updated", "updated"]);
    Ok(())
}

#[tokio::test]
async fn apply_reports_failed_rollback_of_resumed_update() -> Result<()> {
    let fixture = UpdateFixture::new().await?;
    interrupt_broken_update(&fixture, NEW_VERSION).await?;
    let args = ["apply", "--version", NEW_VERSION];
    let failed = fixture.run(&args, Some("update.reverting=return(error)")).await?.expect(70);
    assert!(failed.stderr.contains("the rollback failed"), "{}", failed.stderr);
    assert_eq!(fixture.last_update()?["stage"], "rollback");
    assert_eq!(outcomes(&fixture)?, ["failed"]);
    Ok(())
}

#[tokio::test]
async fn apply_does_not_retry_release_that_was_rolled_back() -> Result<()> {
    let fixture = UpdateFixture::new().await?;
    interrupt_broken_update(&fixture, NEW_VERSION).await?;
    let result = fixture.apply(NEW_VERSION).await?.expect(65);
    assert!(result.stderr.contains("the previous release is running again"), "{}", result.stderr);
    fixture.assert_running(OLD_VERSION)?;
    assert_eq!(fixture.last_update()?["outcome"], "rolled_back", "the outcome was replaced");
    assert_eq!(outcomes(&fixture)?, ["rolled_back"]);
    Ok(())
}
