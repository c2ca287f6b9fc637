//! An update of a running machine is verified before the switch, is completed after a kill at any point, and is rolled
//! back if the release is unhealthy. A release that was rolled back is not retried.
//!
//! A fake service manager records its calls; a release that contains `app/broken` does not start.

use std::fs;

use anyhow::{Context, Result};
use futures_util::StreamExt;
use kit::bundle::Manifest;
use serde_json::Value;

use super::update_fixture::{
    CREATED_AT, NEW_VERSION, OLD_VERSION, PublishedRelease, UpdateFixture, signing_key,
};

fn broken_release() -> Result<PublishedRelease> {
    PublishedRelease::new(NEW_VERSION, &[("app/broken", "")])
}

#[tokio::test]
async fn signed_release_is_installed_and_becomes_current() -> Result<()> {
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[])?).await?;
    fixture.apply(NEW_VERSION).await?.expect(0);
    fixture.assert_running(NEW_VERSION)?;
    let last = fixture.last_update()?;
    assert_eq!(
        (&last["version"], &last["outcome"], &last["stage"]),
        (&NEW_VERSION.into(), &"updated".into(), &"done".into())
    );
    let expected_calls = [
        "start --no-block svc-db-backup-request.service",
        "stop svc-2026.1.0.service",
        "daemon-reload",
        "reset-failed svc-gateway.service",
        "restart svc-gateway.service",
        "reset-failed svc-shell.service",
        "restart svc-shell.service",
        "reset-failed svc-code.service",
        "restart svc-code.service",
        "reset-failed svc-sync-agent.service",
        "restart svc-sync-agent.service",
        "reset-failed svc-watch.service",
        "restart svc-watch.service",
        "reset-failed svc-files.service",
        "restart svc-files.service",
    ];
    assert_eq!(fixture.service_calls()?[1..], expected_calls, "unexpected calls after those of the boot");
    let requests = fixture.source.requests();
    assert!(
        requests
            .iter()
            .all(|request| request.authorization.as_deref() == Some("Bearer upgrade-token-of-a-machine"))
    );

    let request_count = requests.len();
    let repeated = fixture.apply(NEW_VERSION).await?.expect(0);
    assert!(repeated.stdout.contains("is current"), "{}", repeated.stdout);
    assert_eq!(fixture.source.requests().len(), request_count, "the current release was requested again");

    // A rollback quarantines the release, so a later update to it is refused.
    fixture.run(&["rollback"], None).await?.expect(0);
    fixture.assert_running(OLD_VERSION)?;
    assert!(fixture.status().await?["previous"].is_null(), "the current release is not the previous one");
    let refused = fixture.apply(NEW_VERSION).await?.expect(65);
    assert!(refused.stderr.contains("--allow-quarantined"), "{}", refused.stderr);
    let second_rollback = fixture.run(&["rollback"], None).await?.expect(65);
    assert!(
        second_rollback.stderr.contains("no previous release to roll back to"),
        "{}",
        second_rollback.stderr
    );
    fixture.run(&["apply", "--version", NEW_VERSION, "--allow-quarantined"], None).await?.expect(0);
    fixture.assert_running(NEW_VERSION)?;
    let status = fixture.status().await?;
    assert_eq!((&status["previous"], &status["quarantined"]), (&OLD_VERSION.into(), &serde_json::json!([])));
    let outcomes: Vec<Value> = fixture.history()?.iter().map(|line| line["outcome"].clone()).collect();
    assert_eq!(outcomes, ["updated", "updated", "refused", "updated"]);
    let history = fixture.run(&["history"], None).await?.expect(0).stdout;
    assert_eq!(history.lines().count(), 4, "{history}");
    Ok(())
}

#[tokio::test]
async fn invalid_or_unsuitable_release_is_refused() -> Result<()> {
    let fixture = UpdateFixture::new().await?;
    let good = PublishedRelease::new(NEW_VERSION, &[])?;
    let archive_path = format!("/{NEW_VERSION}/svc-host-bundle.tar.gz");
    let assert_refused = async |case: &str, failed_stage: &str, expected_error: &str| -> Result<()> {
        let result = fixture.apply(NEW_VERSION).await?.expect(65);
        assert!(result.stderr.contains(expected_error), "{case}: {}", result.stderr);
        let last = fixture.last_update()?;
        assert_eq!((&last["outcome"], &last["stage"]), (&"refused".into(), &failed_stage.into()), "{case}");
        fixture.assert_untouched().context(case.to_owned())
    };
    for suffix in [".json", ".json.sig"] {
        good.serve(&fixture.source)?;
        fixture.source.put(&format!("{archive_path}{suffix}"), None);
        assert_refused(suffix, "manifest", "404").await?;
    }
    good.serve(&fixture.source)?;
    let flip = |mut bytes: Vec<u8>, index: usize| {
        bytes[index] ^= 1;
        bytes
    };
    let manifest = good.manifest.render()?.into_bytes();
    fixture.source.put(&format!("{archive_path}.json"), Some(flip(manifest, 30)));
    assert_refused("a manifest with a flipped bit", "manifest", "does not match this manifest").await?;
    good.serve(&fixture.source)?;
    let signature = signing_key()?.signature_line(good.manifest.render()?.as_bytes()).into_bytes();
    fixture.source.put(&format!("{archive_path}.json.sig"), Some(flip(signature, 40)));
    assert_refused("a signature with a flipped bit", "manifest", "signature").await?;
    good.serve(&fixture.source)?;
    fixture.source.put(&archive_path, Some(flip(good.archive.clone(), good.archive.len() / 2)));
    assert_refused("an archive with a flipped bit", "download", "the archive is corrupt").await?;

    for (case, expected_error, failed_stage, manifest) in [
        (
            "expired",
            "expired",
            "manifest",
            Manifest { expires_at: CREATED_AT.to_owned(), ..good.manifest.clone() },
        ),
        (
            "a different version",
            "9.9.9",
            "manifest",
            Manifest { image_version: "9.9.9".to_owned(), ..good.manifest.clone() },
        ),
        (
            "a different digest",
            "SHA-256",
            "download",
            Manifest { sha256: "ab".repeat(32), ..good.manifest.clone() },
        ),
        ("a different size", "bytes", "download", Manifest { size_bytes: 7, ..good.manifest.clone() }),
        (
            "newer min_version",
            "requires at least",
            "preflight",
            Manifest { min_version: Some("2026.1.1".to_owned()), ..good.manifest.clone() },
        ),
        (
            "older",
            "--allow-downgrade",
            "preflight",
            Manifest { created_at: "2025-01-01T00:00:00.000Z".to_owned(), ..good.manifest.clone() },
        ),
    ] {
        good.serve(&fixture.source)?;
        let text = manifest.render()?;
        fixture.source.put(&format!("{archive_path}.json"), Some(text.clone().into_bytes()));
        fixture.source.put(
            &format!("{archive_path}.json.sig"),
            Some(signing_key()?.signature_line(text.as_bytes()).into_bytes()),
        );
        assert_refused(case, failed_stage, expected_error).await?;
    }
    fixture.run(&["apply", "--version", NEW_VERSION, "--allow-downgrade"], None).await?.expect(0);
    fixture.assert_running(NEW_VERSION)
}

#[tokio::test]
async fn keys_in_host_env_are_not_trusted() -> Result<()> {
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[])?).await?;
    fs::remove_file(fixture.machine.path("opt/svc/env/update.env"))?;
    let public_key = signing_key()?.public_key_base64();
    fixture.machine.set_env_vars("host.env", &[("SVC_BUNDLE_PUBLIC_KEYS", &public_key)])?;
    let refused = fixture.apply(NEW_VERSION).await?.expect(65);
    assert!(refused.stderr.contains("no key is trusted"), "{}", refused.stderr);
    fixture.assert_untouched()
}

#[tokio::test]
async fn release_with_failing_program_never_becomes_current() -> Result<()> {
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(
        NEW_VERSION,
        &[("bin/svc", "#!/no/such/thing\n")],
    )?)
    .await?;
    let refused = fixture.apply(NEW_VERSION).await?.expect(65);
    assert_eq!(fixture.last_update()?["stage"], "trial", "{}", refused.stderr);
    fixture.assert_untouched()
}

#[tokio::test]
async fn unhealthy_release_is_rolled_back_and_not_retried() -> Result<()> {
    let fixture = UpdateFixture::with_release(&broken_release()?).await?;
    fixture.request_update(NEW_VERSION)?;
    let result = fixture.run(&["apply", "--request"], None).await?.expect(0);
    assert!(result.stdout.contains("the previous release is running again"), "{}", result.stdout);
    fixture.assert_running(OLD_VERSION)?;
    let last = fixture.last_update()?;
    assert_eq!(
        (&last["outcome"], &last["stage"], &last["requestId"]),
        (&"rolled_back".into(), &"health".into(), &"update-request-1".into())
    );
    assert!(last["error"].as_str().is_some_and(|text| text.contains("svc-gateway.service failed")), "{last}");
    assert_eq!(fixture.status().await?["quarantined"][0]["version"], NEW_VERSION);
    let request_count = fixture.source.requests().len();
    fixture.request_update(NEW_VERSION)?;
    fixture.run(&["apply", "--request"], None).await?.expect(0);
    assert_eq!(fixture.last_update()?["outcome"], "refused");
    assert_eq!(fixture.source.requests().len(), request_count, "the release was fetched again");
    fixture.assert_running(OLD_VERSION)?;
    assert!(
        !fixture.machine.path("opt/svc/releases").join(NEW_VERSION).exists(),
        "the failed release was not removed"
    );
    Ok(())
}

#[tokio::test]
async fn manual_rollback_works_after_the_automatic_one_failed() -> Result<()> {
    let fixture = UpdateFixture::with_release(&broken_release()?).await?;
    let args = ["apply", "--version", NEW_VERSION];
    fixture.run(&args, Some("update.reverting=return(error)")).await?.expect(70);
    let last = fixture.last_update()?;
    assert_eq!((&last["outcome"], &last["stage"]), (&"failed".into(), &"rollback".into()), "{last}");
    fs::write(fixture.machine.path("gateway"), "active\n")?;
    fixture.run(&["rollback"], None).await?.expect(0);
    fixture.assert_running(OLD_VERSION)
}

#[tokio::test]
async fn boot_does_not_change_the_current_release() -> Result<()> {
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[])?).await?;
    fixture.apply(NEW_VERSION).await?.expect(0);
    let unit = fixture.machine.path(&format!("etc/systemd/system/svc-{NEW_VERSION}.service"));
    fs::remove_file(&unit)?;
    let request_count = fixture.source.requests().len();
    fixture.run(&["boot"], None).await?.expect(0);
    fixture.assert_running(NEW_VERSION)?;
    assert_eq!(fixture.source.requests().len(), request_count, "the release named in user-data was fetched");

    fixture.run(&["rollback"], Some("update.activating=return(kill)")).await?.expect_killed();
    let refused = fixture.run(&["boot"], None).await?.expect(75);
    assert!(refused.stderr.contains("run `svc-update resume` to finish it"), "{}", refused.stderr);
    fixture.run(&["resume"], None).await?.expect(0);
    fixture.run(&["boot"], None).await?.expect(0);
    fixture.assert_running(OLD_VERSION)
}

#[tokio::test]
async fn release_that_crashes_repeatedly_is_rolled_back() -> Result<()> {
    let fixture =
        UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[("app/crashing", "")])?).await?;
    fixture.apply(NEW_VERSION).await?.expect(65);
    fixture.assert_running(OLD_VERSION)?;
    let last = fixture.last_update()?;
    assert_eq!((&last["outcome"], &last["stage"]), (&"rolled_back".into(), &"health".into()), "{last}");
    assert_eq!(last["error"], "svc-gateway.service was restarted 3 times (exit-code)");
    Ok(())
}

#[tokio::test]
async fn gateway_that_crashes_repeatedly_can_be_updated() -> Result<()> {
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[])?).await?;
    fixture.set_restarts("svc-gateway.service", 5)?;
    fixture.apply(NEW_VERSION).await?.expect(0);
    fixture.assert_running(NEW_VERSION)?;
    fixture.set_restarts("svc-gateway.service", 5)?;
    fixture.run(&["rollback"], None).await?.expect(0);
    fixture.assert_running(OLD_VERSION)
}

#[tokio::test]
async fn units_stop_with_their_release() -> Result<()> {
    let fixture = UpdateFixture::with_release(&broken_release()?).await?;
    // svc-code is still starting when the update begins; the update does not wait for it.
    fs::write(fixture.machine.path("state-svc-code.service"), "activating\n")?;
    fixture.apply(NEW_VERSION).await?.expect(65);
    fixture.assert_running(OLD_VERSION)?;
    let service_calls = fixture.service_calls()?;
    let update_calls = [
        "stop svc-2026.1.0.service",
        "daemon-reload",
        "reset-failed svc-gateway.service",
        "restart svc-gateway.service",
    ];
    assert_eq!(
        service_calls[2..6],
        update_calls,
        "unexpected calls after those of the boot and the snapshot"
    );
    let rollback_start = service_calls
        .iter()
        .position(|call| call == "stop svc-2026.2.0.service")
        .context("the removed unit was not stopped")?;
    assert_eq!(
        service_calls[rollback_start + 1],
        "daemon-reload",
        "the unit file must exist until the unit is stopped: {service_calls:?}"
    );
    for calls in [&service_calls[..rollback_start], &service_calls[rollback_start..]] {
        assert!(calls.iter().any(|call| call == "restart svc-shell.service"), "{service_calls:?}");
        assert!(
            calls.iter().any(|call| call == "try-restart --no-block svc-code.service"),
            "{service_calls:?}"
        );
    }
    assert!(!service_calls.iter().any(|call| call == "restart svc-code.service"), "{service_calls:?}");
    Ok(())
}

#[tokio::test]
async fn release_without_a_required_part_never_becomes_current() -> Result<()> {
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[])?).await?;
    let current = fixture.machine.path("opt/svc/releases").join(OLD_VERSION);
    for part in ["app/shell", "runtime/postgres/bin/pg_dump"] {
        let part_dir = current.join(part);
        fs::create_dir_all(&part_dir)?;
        let refused = fixture.apply(NEW_VERSION).await?.expect(65);
        assert!(refused.stderr.contains(&format!("lacks {part}")), "{}", refused.stderr);
        let last = fixture.last_update()?;
        assert_eq!((&last["outcome"], &last["stage"]), (&"refused".into(), &"preflight".into()));
        fixture.assert_untouched()?;
        fs::remove_dir(&part_dir)?;
    }
    // Any other part may be missing, unless the current `release.json` lists it.
    fs::create_dir_all(current.join("runtime/code-server"))?;
    fixture.apply(NEW_VERSION).await?.expect(0);
    fixture.assert_running(NEW_VERSION)
}

#[tokio::test]
async fn release_that_removes_a_part_requires_allow_removal() -> Result<()> {
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[])?).await?;
    let current = fixture.machine.path("opt/svc/releases").join(OLD_VERSION);
    let path = current.join("release.json");
    let mut release: Value = serde_json::from_slice(&fs::read(&path)?)?;
    for name in ["code-server", "agents/claude"] {
        let part = serde_json::json!({ "name": name, "version": "1", "path": format!("runtime/{name}") });
        release["components"].as_array_mut().context("no components")?.push(part);
        fs::create_dir_all(current.join("runtime").join(name))?;
    }
    fs::write(&path, release.to_string())?;
    let refused = fixture.apply(NEW_VERSION).await?.expect(65);
    assert!(refused.stderr.contains("lacks code-server, agents/claude"), "{}", refused.stderr);
    let last = fixture.last_update()?;
    assert_eq!((&last["outcome"], &last["stage"]), (&"refused".into(), &"preflight".into()));
    fixture.assert_untouched()?;
    // This signed manifest permits the removal of only one of the two parts.
    let mut removing_release = PublishedRelease::new(NEW_VERSION, &[])?;
    removing_release.manifest.removes = vec!["code-server".to_owned()];
    removing_release.serve(&fixture.source)?;
    let refused = fixture.apply(NEW_VERSION).await?.expect(65);
    assert!(refused.stderr.contains("lacks agents/claude,"), "{}", refused.stderr);
    PublishedRelease::new(NEW_VERSION, &[])?.serve(&fixture.source)?;
    // `--allow-removal` cannot be combined with a request from the platform.
    fixture.run(&["apply", "--request", "--allow-removal", "code-server"], None).await?.expect(64);
    let apply = ["apply", "--version", NEW_VERSION, "--allow-removal", "code-server"];
    fixture.run(&apply, None).await?.expect(65);
    let apply: Vec<&str> = apply.into_iter().chain(["--allow-removal", "agents/claude"]).collect();
    fixture.run(&apply, None).await?.expect(0);
    fixture.assert_running(NEW_VERSION)
}

#[tokio::test]
async fn signed_manifest_permits_removal_of_a_part() -> Result<()> {
    let mut removing_release = PublishedRelease::new(NEW_VERSION, &[])?;
    removing_release.manifest.removes = vec!["code-server".to_owned(), "never-installed".to_owned()];
    let fixture = UpdateFixture::with_release(&removing_release).await?;
    let current = fixture.machine.path("opt/svc/releases").join(OLD_VERSION);
    let path = current.join("release.json");
    let mut release: Value = serde_json::from_slice(&fs::read(&path)?)?;
    let part = serde_json::json!({ "name": "code-server", "version": "1", "path": "runtime/code-server" });
    release["components"].as_array_mut().context("no components")?.push(part);
    fs::create_dir_all(current.join("runtime/code-server"))?;
    fs::write(&path, release.to_string())?;
    fixture.apply(NEW_VERSION).await?.expect(0);
    fixture.assert_running(NEW_VERSION)
}

/// The log belongs to the gateway's user, who could not append to a file that root owns.
#[tokio::test]
async fn activity_log_belongs_to_the_directory_owner() -> Result<()> {
    const GATEWAY_UID: u32 = 4940;
    let published = PublishedRelease::new(NEW_VERSION, &[])?;
    let fixture = UpdateFixture::with_release(&published).await?;
    let logs = fixture.machine.path("home/svc/home/system/logs");
    fs::create_dir_all(&logs)?;
    let is_root = nix::unistd::geteuid().is_root();
    if is_root {
        std::os::unix::fs::chown(&logs, Some(GATEWAY_UID), Some(GATEWAY_UID))?;
    }
    fixture.source.put(&format!("/{NEW_VERSION}/svc-host-bundle.tar.gz.json"), None);
    fixture.apply(NEW_VERSION).await?.expect(65);
    published.serve(&fixture.source)?;
    fixture.apply(NEW_VERSION).await?.expect(0);
    let text = fs::read_to_string(logs.join("activity.log"))?;
    let lines: Vec<&str> = text.lines().filter_map(|line| Some(line.split_once(' ')?.1)).collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[0].starts_with(&format!("the update to {NEW_VERSION} was refused (manifest): ")), "{text}");
    assert_eq!(lines[1], format!("the machine was updated from {OLD_VERSION} to {NEW_VERSION}"));
    if is_root {
        use std::os::unix::fs::MetadataExt;
        let meta = fs::metadata(logs.join("activity.log"))?;
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o777), (GATEWAY_UID, GATEWAY_UID, 0o640));
    }
    Ok(())
}

#[tokio::test]
async fn apply_without_valid_request_changes_nothing() -> Result<()> {
    let fixture = UpdateFixture::new().await?;
    fixture.run(&["apply", "--request"], None).await?.expect(0);
    fixture.run(&["resume"], None).await?.expect(0);
    let path = fixture.machine.path("var/lib/svc/requests/update");
    svc::fsx::write_atomic(&path, b"{\"imageVersion\":\"../../etc\"}", 0o600)?;
    fixture.run(&["apply", "--request"], None).await?.expect(65);
    fixture.assert_untouched()?;
    fs::write(fixture.machine.path("var/lib/svc/superseded.json"), "{}")?;
    let refused = fixture.apply(NEW_VERSION).await?.expect(65);
    assert!(refused.stderr.contains("has been replaced or deleted"), "{}", refused.stderr);
    fixture.assert_untouched()
}

/// Kills an update to `published` at each point, completes it with the unit's own command, and checks the result.
async fn assert_completed_after_kills(
    points: &[&str],
    published: &PublishedRelease,
    expected_version: &str,
    expected_outcome: &str,
) -> Result<()> {
    let kill_and_complete = |point: String| async move {
        let fixture = UpdateFixture::with_release(published).await?;
        fixture.request_update(NEW_VERSION)?;
        let kill = format!("{point}=return(kill)");
        fixture.run(&["apply", "--request"], Some(&kill)).await?.expect_killed();
        let journal = fixture.machine.path("var/lib/svc/update/journal.json");
        assert!(journal.exists(), "{point}: the journal is missing");
        fixture.run(&["apply", "--request"], None).await?.expect(0);
        fixture.assert_running(expected_version).context(point.clone())?;
        assert_eq!(fixture.last_update()?["outcome"], expected_outcome, "{point}");
        assert_eq!(fixture.history()?.len(), 1, "{point}");
        anyhow::Ok(())
    };
    let runs: Vec<_> = points.iter().map(|point| kill_and_complete((*point).to_owned())).collect();
    let results: Vec<Result<()>> = futures_util::stream::iter(runs).buffer_unordered(4).collect().await;
    results.into_iter().collect()
}

#[tokio::test]
async fn update_killed_at_any_step_is_completed_by_next_run() -> Result<()> {
    let good = PublishedRelease::new(NEW_VERSION, &[])?;
    let mut points: Vec<&str> = Vec::new();
    for point in svc::host::update::APPLY_FAILPOINTS {
        points.push(point);
    }
    // An update shares these and the following fail points with `svc-update boot`.
    let shared =
        ["update.downloading", "update.unpacked", "update.verified", "update.synced", "update.renamed"];
    points.extend(shared);
    points.extend(["update.switched", "update.linked"]);
    points.extend(["update.units_planned", "update.units_written", "update.units_recorded"]);
    assert_completed_after_kills(&points, &good, NEW_VERSION, "updated").await
}

#[tokio::test]
async fn rollback_killed_at_any_step_is_completed_by_next_run() -> Result<()> {
    let mut points: Vec<&str> = Vec::new();
    for point in svc::host::update::ROLLBACK_FAILPOINTS {
        points.push(point);
    }
    points.extend(["update.restarted", "update.ended", "update.outcome_recorded", "update.request_done"]);
    assert_completed_after_kills(&points, &broken_release()?, OLD_VERSION, "rolled_back").await
}

#[tokio::test]
async fn repeatedly_killed_update_is_abandoned() -> Result<()> {
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[])?).await?;
    fixture.request_update(NEW_VERSION)?;
    for _ in 0..5 {
        fixture.run(&["apply", "--request"], Some("update.restarted=return(kill)")).await?.expect_killed();
    }
    fixture.run(&["resume"], None).await?.expect(0);
    fixture.assert_running(OLD_VERSION)?;
    let last = fixture.last_update()?;
    assert_eq!((&last["outcome"], &last["stage"]), (&"rolled_back".into(), &"restart".into()));
    Ok(())
}

#[tokio::test]
async fn failed_step_keeps_the_old_release_running() -> Result<()> {
    let good = PublishedRelease::new(NEW_VERSION, &[])?;
    let before_switch =
        ["update.opened", "update.manifest_verified", "update.unpacked", "update.smoke_tested"];
    let switch_and_later =
        ["update.prepared", "update.activating", "update.reloaded", "update.restarted", "update.healthy"];
    for point in before_switch.iter().chain(&switch_and_later) {
        let fixture = UpdateFixture::with_release(&good).await?;
        let error = format!("{point}=1*return(error)");
        fixture.run(&["apply", "--version", NEW_VERSION], Some(&error)).await?;
        fixture.assert_running(OLD_VERSION).context(*point)?;
        let expected = if before_switch.contains(point) { "failed" } else { "rolled_back" };
        assert_eq!(fixture.last_update()?["outcome"], expected, "{point}");
    }
    Ok(())
}
