//! Release keys rotate on a running machine: a release signed with the old key adds the new one, and a later one,
//! signed with the new key, drops the old.

use std::fs;

use anyhow::{Context, Result};
use futures_util::StreamExt;
use kit::bundle::{KeySet, SigningKey};
use serde_json::{Value, json};
use svc::host::update::{KEY_FAILPOINTS, ROLLBACK_FAILPOINTS};

use super::machine::RunResult;
use super::stage::{NEW, OLD, Published, Stage, key};

const ENV: &str = "opt/svc/env/update.env";

fn new_key() -> Result<SigningKey> {
    SigningKey::from_pem(rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519)?.serialize_pem().as_bytes())
}

fn key_set(sequence: u32, keys: &[&SigningKey]) -> Option<KeySet> {
    Some(KeySet { sequence, keys: keys.iter().map(|key| key.public_key_base64()).collect() })
}

/// Publishes a release signed with these keys.
fn publish(
    stage: &Stage,
    mut published: Published,
    signers: &[&SigningKey],
    keys: Option<KeySet>,
) -> Result<()> {
    published.manifest.trusted_keys = keys;
    published.serve(&stage.source)?;
    let text = published.manifest.text()?;
    let lines: String = signers.iter().map(|key| key.signature_line(text.as_bytes())).collect();
    let end = format!("/{}/svc-host-bundle.tar.gz.json.sig", published.manifest.image_version);
    stage.source.put(&end, Some(lines.into_bytes()));
    Ok(())
}

fn release(version: &str) -> Result<Published> {
    Published::new(version, &[])
}

/// Reads the sequence and the keys from root's file.
fn read_trusted(stage: &Stage) -> Result<(String, String)> {
    let text = fs::read_to_string(stage.machine.path(ENV))?;
    let pairs =
        svc::config::parse_env_file(&text).map_err(|line| anyhow::anyhow!("line {line} of {text}"))?;
    let value = |name: &str| {
        let mut values = pairs.iter().filter(|(known, _)| known == name).map(|(_, value)| value.clone());
        let first = values.next().unwrap_or_default();
        assert_eq!(values.next(), None, "{name} occurs twice");
        first
    };
    Ok((value("SVC_BUNDLE_KEYS_SEQUENCE"), value("SVC_BUNDLE_PUBLIC_KEYS")))
}

fn expected_keys(sequence: &str, keys: &[&SigningKey]) -> (String, String) {
    let keys: Vec<String> = keys.iter().map(|key| key.public_key_base64()).collect();
    (sequence.to_owned(), keys.join(","))
}

fn read_reported(stage: &Stage) -> Result<Value> {
    let path = stage.machine.path("var/lib/svc/update/trusted-keys.json");
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

fn assert_refused_by_key(ended: &RunResult) {
    assert!(ended.stderr.contains("none of the keys that are trusted here"), "{}", ended.stderr);
}

#[tokio::test]
async fn key_is_added_used_and_the_old_one_dropped() -> Result<()> {
    let (old, new) = (key()?, new_key()?);
    let stage = Stage::new().await?;
    assert_eq!(read_reported(&stage)?, json!({"sequence": 0, "ids": [old.id()]}), "from the first boot");
    publish(&stage, release("2026.3.0")?, &[&new], None)?;
    assert_refused_by_key(&stage.apply("2026.3.0").await?.expect(65));

    publish(&stage, release(NEW)?, &[&old], key_set(1, &[&old, &new]))?;
    stage.apply(NEW).await?.expect(0);
    stage.assert_running(NEW)?;
    assert_eq!(read_trusted(&stage)?, expected_keys("1", &[&old, &new]));
    assert_eq!(read_reported(&stage)?, json!({"sequence": 1, "ids": [old.id(), new.id()]}));

    stage.apply("2026.3.0").await?.expect(0);
    assert_eq!(
        read_trusted(&stage)?,
        expected_keys("1", &[&old, &new]),
        "a release without a set changes none"
    );

    publish(&stage, release("2026.4.0")?, &[&new], key_set(2, &[&new]))?;
    stage.apply("2026.4.0").await?.expect(0);
    assert_eq!(read_trusted(&stage)?, expected_keys("2", &[&new]));
    assert_eq!(read_reported(&stage)?, json!({"sequence": 2, "ids": [new.id()]}));

    publish(&stage, release("2026.5.0")?, &[&old], key_set(3, &[&old]))?;
    assert_refused_by_key(&stage.apply("2026.5.0").await?.expect(65));

    // A rollback to the previous release needs no verification, and keeps the keys.
    stage.run(&["rollback"], None).await?.expect(0);
    stage.assert_running("2026.3.0")?;
    assert_eq!(read_trusted(&stage)?, expected_keys("2", &[&new]));
    // An older release that is signed again with the new key does not bring the old key back.
    publish(&stage, release(NEW)?, &[&new], key_set(1, &[&old, &new]))?;
    stage.run(&["apply", "--version", NEW, "--allow-downgrade"], None).await?.expect(0);
    stage.assert_running(NEW)?;
    assert_eq!(read_trusted(&stage)?, expected_keys("2", &[&new]));
    assert_refused_by_key(&stage.apply("2026.5.0").await?.expect(65));
    publish(&stage, release("2026.6.0")?, &[&new], None)?;
    stage.apply("2026.6.0").await?.expect(0);
    stage.assert_running("2026.6.0")
}

/// A release signed with both keys is valid on every machine, even one that was off during the overlap.
#[tokio::test]
async fn release_signed_with_both_keys_updates_a_late_machine() -> Result<()> {
    let (old, new) = (key()?, new_key()?);
    let stage = Stage::new().await?;
    publish(&stage, release(NEW)?, &[&old, &new], key_set(2, &[&new]))?;
    stage.apply(NEW).await?.expect(0);
    assert_eq!(read_trusted(&stage)?, expected_keys("2", &[&new]));
    // Also where the old key is no longer trusted.
    publish(&stage, release("2026.3.0")?, &[&old, &new], key_set(2, &[&new]))?;
    stage.apply("2026.3.0").await?.expect(0);
    stage.assert_running("2026.3.0")
}

#[tokio::test]
async fn rolled_back_release_changes_no_key() -> Result<()> {
    let (old, new) = (key()?, new_key()?);
    let stage = Stage::new().await?;
    let before = fs::read(stage.machine.path(ENV))?;
    publish(&stage, Published::new(NEW, &[("app/broken", "")])?, &[&old, &new], key_set(1, &[&new]))?;
    stage.apply(NEW).await?.expect(65);
    stage.assert_running(OLD)?;
    assert_eq!(stage.last_update()?["outcome"], "rolled_back");
    assert_eq!(fs::read(stage.machine.path(ENV))?, before);
    assert_eq!(read_reported(&stage)?["sequence"], 0);
    publish(&stage, release("2026.3.0")?, &[&old], None)?;
    stage.apply("2026.3.0").await?.expect(0);
    stage.assert_running("2026.3.0")
}

#[tokio::test]
async fn key_set_that_could_lock_the_machine_out_is_refused() -> Result<()> {
    let (old, new) = (key()?, new_key()?);
    let stage = Stage::new().await?;
    stage.machine.add_env("update.env", &[("SVC_BUNDLE_KEYS_SEQUENCE", "5")])?;
    let before = fs::read(stage.machine.path(ENV))?;
    for (what, signers, keys, words) in [
        ("a new key that did not sign", &[&old][..], key_set(6, &[&new]), "has signed it"),
        (
            "signed with an untrusted key",
            &[&new][..],
            key_set(6, &[&old, &new]),
            "none of the keys that are trusted here",
        ),
        ("no key", &[&old][..], key_set(6, &[]), "has no key"),
        ("a sequence in use", &[&old][..], key_set(5, &[&old, &new]), "use a higher sequence"),
        ("a mistyped sequence", &[&old][..], key_set(4_000_000_000, &[&old, &new]), "at most 1005"),
    ] {
        publish(&stage, release(NEW)?, signers, keys)?;
        let ended = stage.apply(NEW).await?.expect(65);
        assert!(ended.stderr.contains(words), "{what}: {}", ended.stderr);
        assert_eq!(stage.last_update()?["stage"], "manifest", "{what}");
        stage.assert_untouched().context(what)?;
        assert_eq!(fs::read(stage.machine.path(ENV))?, before, "{what}");
    }
    // Another key replaces one in the signed manifest.
    publish(&stage, release(NEW)?, &[&old], key_set(6, &[&old, &new]))?;
    let mut forged = release(NEW)?;
    forged.manifest.trusted_keys = key_set(6, &[&old, &new_key()?]);
    let end = format!("/{NEW}/svc-host-bundle.tar.gz.json");
    stage.source.put(&end, Some(forged.manifest.text()?.into_bytes()));
    let ended = stage.apply(NEW).await?.expect(65);
    assert!(ended.stderr.contains("does not match this manifest"), "{}", ended.stderr);
    stage.assert_untouched()?;
    assert_eq!(fs::read(stage.machine.path(ENV))?, before);
    Ok(())
}

#[tokio::test]
async fn adoption_killed_at_any_step_is_finished_by_the_next_run() -> Result<()> {
    let (old, new) = (key()?, new_key()?);
    let (old, new) = (&old, &new);
    let check_point = |point: &'static str| async move {
        let stage = Stage::new().await?;
        publish(&stage, release(NEW)?, &[old, new], key_set(1, &[new]))?;
        stage.request_update(NEW)?;
        let kill = format!("{point}=return(kill)");
        stage.run(&["apply", "--request"], Some(&kill)).await?.expect_killed();
        let is_adopted = KEY_FAILPOINTS[1..].contains(&point) || point == "update.outcome_told";
        let current = if is_adopted { expected_keys("1", &[new]) } else { expected_keys("", &[old]) };
        assert_eq!(
            read_trusted(&stage)?,
            current,
            "{point}: keys are adopted only with a healthy release, and completely"
        );
        // The next release is verified in the run that completes this one.
        publish(&stage, release("2026.3.0")?, &[new], None)?;
        stage.apply("2026.3.0").await?.expect(0);
        stage.assert_running("2026.3.0").context(point)?;
        assert_eq!(read_trusted(&stage)?, expected_keys("1", &[new]), "{point}");
        assert_eq!(read_reported(&stage)?, json!({"sequence": 1, "ids": [new.id()]}), "{point}");
        let outcomes: Vec<Value> = stage.history()?.iter().map(|line| line["outcome"].clone()).collect();
        assert_eq!(outcomes, ["updated", "updated"], "{point}");
        anyhow::Ok(())
    };
    let points = KEY_FAILPOINTS.iter().copied().chain([
        "update.believed",
        "update.activating",
        "update.well",
        "update.ended",
        "update.outcome_told",
    ]);
    let all: Vec<_> = points.map(check_point).collect();
    let ends: Vec<Result<()>> = futures_util::stream::iter(all).buffer_unordered(4).collect().await;
    ends.into_iter().collect()
}

#[tokio::test]
async fn rollback_killed_at_any_step_changes_no_key() -> Result<()> {
    let (old, new) = (key()?, new_key()?);
    let (old, new) = (&old, &new);
    let check_point = |point: &'static str| async move {
        let stage = Stage::new().await?;
        publish(&stage, Published::new(NEW, &[("app/broken", "")])?, &[old, new], key_set(1, &[new]))?;
        stage.request_update(NEW)?;
        let kill = format!("{point}=return(kill)");
        stage.run(&["apply", "--request"], Some(&kill)).await?.expect_killed();
        stage.run(&["apply", "--request"], None).await?.expect(0);
        stage.assert_running(OLD).context(point)?;
        assert_eq!(stage.last_update()?["outcome"], "rolled_back", "{point}");
        assert_eq!(read_trusted(&stage)?, expected_keys("", &[old]), "{point}");
        anyhow::Ok(())
    };
    let all: Vec<_> = ROLLBACK_FAILPOINTS.iter().copied().map(check_point).collect();
    let ends: Vec<Result<()>> = futures_util::stream::iter(all).buffer_unordered(4).collect().await;
    ends.into_iter().collect()
}
