//! Rotates the release keys on a running machine: a release signed with the old key adds the new one, and a later
//! release, signed with the new key, drops the old one.

use std::fs;

use anyhow::{Context, Result};
use futures_util::StreamExt;
use kit::bundle::{KeySet, SigningKey};
use serde_json::{Value, json};
use svc::host::update::{KEY_FAILPOINTS, ROLLBACK_FAILPOINTS};

use super::machine::RunResult;
use super::update_fixture::{NEW_VERSION, OLD_VERSION, PublishedRelease, UpdateFixture, signing_key};

const UPDATE_ENV_FILE: &str = "opt/svc/env/update.env";

fn generate_key() -> Result<SigningKey> {
    SigningKey::from_pem(rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519)?.serialize_pem().as_bytes())
}

fn key_set(sequence: u32, keys: &[&SigningKey]) -> Option<KeySet> {
    Some(KeySet { sequence, keys: keys.iter().map(|key| key.public_key_base64()).collect() })
}

/// Publishes a release signed with the given keys.
fn publish(
    fixture: &UpdateFixture,
    mut published: PublishedRelease,
    signers: &[&SigningKey],
    keys: Option<KeySet>,
) -> Result<()> {
    published.manifest.trusted_keys = keys;
    published.serve(&fixture.source)?;
    let text = published.manifest.render()?;
    let lines: String = signers.iter().map(|key| key.signature_line(text.as_bytes())).collect();
    let path_suffix = format!("/{}/svc-host-bundle.tar.gz.json.sig", published.manifest.image_version);
    fixture.source.put(&path_suffix, Some(lines.into_bytes()));
    Ok(())
}

fn release(version: &str) -> Result<PublishedRelease> {
    PublishedRelease::new(version, &[])
}

/// Reads the sequence and the keys from `update.env`.
fn read_trusted_keys(fixture: &UpdateFixture) -> Result<(String, String)> {
    let text = fs::read_to_string(fixture.machine.path(UPDATE_ENV_FILE))?;
    let pairs =
        svc::config::parse_env_file(&text).map_err(|line| anyhow::anyhow!("line {line} of {text}"))?;
    let value = |name: &str| {
        let mut values =
            pairs.iter().filter(|(variable, _)| variable == name).map(|(_, value)| value.clone());
        let first = values.next().unwrap_or_default();
        assert_eq!(values.next(), None, "{name} occurs more than once");
        first
    };
    Ok((value("SVC_BUNDLE_KEYS_SEQUENCE"), value("SVC_BUNDLE_PUBLIC_KEYS")))
}

fn expected_keys(sequence: &str, keys: &[&SigningKey]) -> (String, String) {
    let keys: Vec<String> = keys.iter().map(|key| key.public_key_base64()).collect();
    (sequence.to_owned(), keys.join(","))
}

fn read_reported_keys(fixture: &UpdateFixture) -> Result<Value> {
    let path = fixture.machine.path("var/lib/svc/update/trusted-keys.json");
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

fn assert_signature_refused(result: &RunResult) {
    assert!(result.stderr.contains("not signed by a key that is trusted here"), "{}", result.stderr);
}

#[tokio::test]
async fn new_key_is_adopted_and_old_key_is_dropped() -> Result<()> {
    let (old, new) = (signing_key()?, generate_key()?);
    let fixture = UpdateFixture::new().await?;
    assert_eq!(
        read_reported_keys(&fixture)?,
        json!({"sequence": 0, "ids": [old.id()]}),
        "the keys must be reported from the first boot"
    );
    publish(&fixture, release("2026.3.0")?, &[&new], None)?;
    assert_signature_refused(&fixture.apply("2026.3.0").await?.expect(65));

    publish(&fixture, release(NEW_VERSION)?, &[&old], key_set(1, &[&old, &new]))?;
    fixture.apply(NEW_VERSION).await?.expect(0);
    fixture.assert_running(NEW_VERSION)?;
    assert_eq!(read_trusted_keys(&fixture)?, expected_keys("1", &[&old, &new]));
    assert_eq!(read_reported_keys(&fixture)?, json!({"sequence": 1, "ids": [old.id(), new.id()]}));

    fixture.apply("2026.3.0").await?.expect(0);
    assert_eq!(
        read_trusted_keys(&fixture)?,
        expected_keys("1", &[&old, &new]),
        "a release without a key set must change no key"
    );

    publish(&fixture, release("2026.4.0")?, &[&new], key_set(2, &[&new]))?;
    fixture.apply("2026.4.0").await?.expect(0);
    assert_eq!(read_trusted_keys(&fixture)?, expected_keys("2", &[&new]));
    assert_eq!(read_reported_keys(&fixture)?, json!({"sequence": 2, "ids": [new.id()]}));

    publish(&fixture, release("2026.5.0")?, &[&old], key_set(3, &[&old]))?;
    assert_signature_refused(&fixture.apply("2026.5.0").await?.expect(65));

    // A rollback to the previous release needs no verification, and keeps the keys.
    fixture.run(&["rollback"], None).await?.expect(0);
    fixture.assert_running("2026.3.0")?;
    assert_eq!(read_trusted_keys(&fixture)?, expected_keys("2", &[&new]));
    // An older release that is signed again with the new key does not bring the old key back.
    publish(&fixture, release(NEW_VERSION)?, &[&new], key_set(1, &[&old, &new]))?;
    fixture.run(&["apply", "--version", NEW_VERSION, "--allow-downgrade"], None).await?.expect(0);
    fixture.assert_running(NEW_VERSION)?;
    assert_eq!(read_trusted_keys(&fixture)?, expected_keys("2", &[&new]));
    assert_signature_refused(&fixture.apply("2026.5.0").await?.expect(65));
    publish(&fixture, release("2026.6.0")?, &[&new], None)?;
    fixture.apply("2026.6.0").await?.expect(0);
    fixture.assert_running("2026.6.0")
}

/// A release signed with both keys is accepted by every machine, even one that was off during the overlap.
#[tokio::test]
async fn release_signed_with_both_keys_updates_stale_machine() -> Result<()> {
    let (old, new) = (signing_key()?, generate_key()?);
    let fixture = UpdateFixture::new().await?;
    publish(&fixture, release(NEW_VERSION)?, &[&old, &new], key_set(2, &[&new]))?;
    fixture.apply(NEW_VERSION).await?.expect(0);
    assert_eq!(read_trusted_keys(&fixture)?, expected_keys("2", &[&new]));
    // Such a release is also accepted where the old key is no longer trusted.
    publish(&fixture, release("2026.3.0")?, &[&old, &new], key_set(2, &[&new]))?;
    fixture.apply("2026.3.0").await?.expect(0);
    fixture.assert_running("2026.3.0")
}

#[tokio::test]
async fn rolled_back_release_changes_no_key() -> Result<()> {
    let (old, new) = (signing_key()?, generate_key()?);
    let fixture = UpdateFixture::new().await?;
    let before = fs::read(fixture.machine.path(UPDATE_ENV_FILE))?;
    publish(
        &fixture,
        PublishedRelease::new(NEW_VERSION, &[("app/broken", "")])?,
        &[&old, &new],
        key_set(1, &[&new]),
    )?;
    fixture.apply(NEW_VERSION).await?.expect(65);
    fixture.assert_running(OLD_VERSION)?;
    assert_eq!(fixture.last_update()?["outcome"], "rolled_back");
    assert_eq!(fs::read(fixture.machine.path(UPDATE_ENV_FILE))?, before);
    assert_eq!(read_reported_keys(&fixture)?["sequence"], 0);
    publish(&fixture, release("2026.3.0")?, &[&old], None)?;
    fixture.apply("2026.3.0").await?.expect(0);
    fixture.assert_running("2026.3.0")
}

#[tokio::test]
async fn key_set_that_could_lock_the_machine_out_is_refused() -> Result<()> {
    let (old, new) = (signing_key()?, generate_key()?);
    let fixture = UpdateFixture::new().await?;
    fixture.machine.set_env_vars("update.env", &[("SVC_BUNDLE_KEYS_SEQUENCE", "5")])?;
    let before = fs::read(fixture.machine.path(UPDATE_ENV_FILE))?;
    for (case, signers, keys, expected_error) in [
        ("a new key that did not sign", &[&old][..], key_set(6, &[&new]), "has signed it"),
        (
            "signed with an untrusted key",
            &[&new][..],
            key_set(6, &[&old, &new]),
            "not signed by a key that is trusted here",
        ),
        ("no key", &[&old][..], key_set(6, &[]), "has no key"),
        ("a sequence in use", &[&old][..], key_set(5, &[&old, &new]), "use a higher sequence"),
        ("a mistyped sequence", &[&old][..], key_set(4_000_000_000, &[&old, &new]), "at most 1005"),
    ] {
        publish(&fixture, release(NEW_VERSION)?, signers, keys)?;
        let result = fixture.apply(NEW_VERSION).await?.expect(65);
        assert!(result.stderr.contains(expected_error), "{case}: {}", result.stderr);
        assert_eq!(fixture.last_update()?["stage"], "manifest", "{case}");
        fixture.assert_untouched().context(case)?;
        assert_eq!(fs::read(fixture.machine.path(UPDATE_ENV_FILE))?, before, "{case}");
    }
    // The served manifest contains a different key than the signed one.
    publish(&fixture, release(NEW_VERSION)?, &[&old], key_set(6, &[&old, &new]))?;
    let mut forged = release(NEW_VERSION)?;
    forged.manifest.trusted_keys = key_set(6, &[&old, &generate_key()?]);
    let path_suffix = format!("/{NEW_VERSION}/svc-host-bundle.tar.gz.json");
    fixture.source.put(&path_suffix, Some(forged.manifest.render()?.into_bytes()));
    let result = fixture.apply(NEW_VERSION).await?.expect(65);
    assert!(result.stderr.contains("does not match this manifest"), "{}", result.stderr);
    fixture.assert_untouched()?;
    assert_eq!(fs::read(fixture.machine.path(UPDATE_ENV_FILE))?, before);
    Ok(())
}

#[tokio::test]
async fn adoption_killed_at_any_step_is_finished_by_the_next_run() -> Result<()> {
    let (old, new) = (signing_key()?, generate_key()?);
    let (old, new) = (&old, &new);
    let check_point = |point: &'static str| async move {
        let fixture = UpdateFixture::new().await?;
        publish(&fixture, release(NEW_VERSION)?, &[old, new], key_set(1, &[new]))?;
        fixture.request_update(NEW_VERSION)?;
        let kill = format!("{point}=return(kill)");
        fixture.run(&["apply", "--request"], Some(&kill)).await?.expect_killed();
        let is_adopted = KEY_FAILPOINTS[1..].contains(&point) || point == "update.outcome_recorded";
        let expected = if is_adopted { expected_keys("1", &[new]) } else { expected_keys("", &[old]) };
        assert_eq!(
            read_trusted_keys(&fixture)?,
            expected,
            "{point}: keys must be adopted only with a healthy release, and completely"
        );
        // One run completes the killed update, adopts the new key and verifies the next release with it.
        publish(&fixture, release("2026.3.0")?, &[new], None)?;
        fixture.apply("2026.3.0").await?.expect(0);
        fixture.assert_running("2026.3.0").context(point)?;
        assert_eq!(read_trusted_keys(&fixture)?, expected_keys("1", &[new]), "{point}");
        assert_eq!(read_reported_keys(&fixture)?, json!({"sequence": 1, "ids": [new.id()]}), "{point}");
        let outcomes: Vec<Value> = fixture.history()?.iter().map(|line| line["outcome"].clone()).collect();
        assert_eq!(outcomes, ["updated", "updated"], "{point}");
        anyhow::Ok(())
    };
    let points = KEY_FAILPOINTS.iter().copied().chain([
        "update.manifest_verified",
        "update.activating",
        "update.healthy",
        "update.ended",
        "update.outcome_recorded",
    ]);
    let checks: Vec<_> = points.map(check_point).collect();
    let results: Vec<Result<()>> = futures_util::stream::iter(checks).buffer_unordered(4).collect().await;
    results.into_iter().collect()
}

#[tokio::test]
async fn rollback_killed_at_any_step_changes_no_key() -> Result<()> {
    let (old, new) = (signing_key()?, generate_key()?);
    let (old, new) = (&old, &new);
    let check_point = |point: &'static str| async move {
        let fixture = UpdateFixture::new().await?;
        publish(
            &fixture,
            PublishedRelease::new(NEW_VERSION, &[("app/broken", "")])?,
            &[old, new],
            key_set(1, &[new]),
        )?;
        fixture.request_update(NEW_VERSION)?;
        let kill = format!("{point}=return(kill)");
        fixture.run(&["apply", "--request"], Some(&kill)).await?.expect_killed();
        fixture.run(&["apply", "--request"], None).await?.expect(0);
        fixture.assert_running(OLD_VERSION).context(point)?;
        assert_eq!(fixture.last_update()?["outcome"], "rolled_back", "{point}");
        assert_eq!(read_trusted_keys(&fixture)?, expected_keys("", &[old]), "{point}");
        anyhow::Ok(())
    };
    let checks: Vec<_> = ROLLBACK_FAILPOINTS.iter().copied().map(check_point).collect();
    let results: Vec<Result<()>> = futures_util::stream::iter(checks).buffer_unordered(4).collect().await;
    results.into_iter().collect()
}
