//! An interrupted download of a machine's first release is resumed. The release is verified before the switch, and is
//! either complete or absent.

use std::fs;

use anyhow::{Context, Result};
use kit::net::Proxy;

use super::bundle::{self, BundleSource};
use super::machine::{Machine, RunEnv, RunResult};

const VERSION: &str = "2026.1.0";

async fn start_source() -> Result<(BundleSource, String)> {
    let content = bundle::build_bundle(VERSION)?;
    let digest = bundle::digest(&content);
    Ok((BundleSource::start(content).await?, digest))
}

fn create_machine(addr: std::net::SocketAddr, digest: &str) -> Result<Machine> {
    let machine = Machine::bare(1)?;
    let url = format!("http://{addr}/system-bundles/{VERSION}/svc-host-bundle.tar.gz?signature=secret");
    machine.write_boot_env(&[("SVC_IMAGE_VERSION", VERSION)])?;
    machine.write_update_env(&url, digest)?;
    Ok(machine)
}

/// Runs `svc-update boot`, and waits for it on another thread, because the test's runtime serves the bundle.
async fn boot(machine: &Machine, extra_env: RunEnv<'_>) -> Result<RunResult> {
    let running = machine.spawn(&["svc-update", "boot"], extra_env)?;
    tokio::task::spawn_blocking(move || running.wait()).await?
}

fn assert_current(machine: &Machine) -> Result<()> {
    let opt = machine.path("opt/svc");
    assert_eq!(fs::read_link(opt.join("current"))?, std::path::Path::new("releases").join(VERSION));
    for name in ["bin", "app", "runtime"] {
        assert_eq!(fs::read_link(opt.join(name))?, std::path::Path::new("current").join(name));
    }
    assert_eq!(fs::read(opt.join("bin/svc-gateway"))?, b"#!/bin/sh\n");
    assert_eq!(fs::metadata(opt.join("runtime/noise/39"))?.len(), 32_000);
    assert_eq!(list_names(&opt.join("releases"))?, [VERSION]);
    assert_eq!(list_names(&opt)?, ["app", "bin", "current", "env", "releases", "runtime"]);
    Ok(())
}

fn assert_untouched(machine: &Machine) -> Result<()> {
    assert_eq!(list_names(&machine.path("opt/svc"))?, ["env", "releases"]);
    assert_eq!(list_names(&machine.path("opt/svc/releases"))?, Vec::<String>::new());
    Ok(())
}

fn list_names(dir: &std::path::Path) -> Result<Vec<String>> {
    let read = fs::read_dir(dir).with_context(|| dir.display().to_string())?;
    let mut names: Vec<String> =
        read.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

#[tokio::test]
async fn bundle_becomes_the_current_release_once() -> Result<()> {
    let (source, digest) = start_source().await?;
    let machine = create_machine(source.addr, &digest)?;
    boot(&machine, &[]).await?.expect(0);
    assert_current(&machine)?;
    boot(&machine, &[]).await?.expect(0);
    assert_eq!(source.requests().len(), 1, "an installed release must not be fetched again");

    let json = machine.run(&["svc-update", "status", "--json"])?.expect(0).stdout;
    let status: serde_json::Value = serde_json::from_str(&json)?;
    assert_eq!(status["current"], VERSION);
    assert_eq!(status["releases"][0]["bundleSha256"], digest);
    assert_eq!(status["releases"][0]["components"][0]["name"], "svc");
    let table = machine.run(&["svc-update", "status"])?.expect(0).stdout;
    assert!(table.contains(&format!("* {VERSION}")), "{table}");
    Ok(())
}

#[tokio::test]
async fn interrupted_download_is_resumed_and_verified() -> Result<()> {
    let (source, digest) = start_source().await?;
    let proxy = Proxy::start(source.addr)?;
    let machine = create_machine(proxy.addr(), &digest)?;
    proxy.reset_after_bytes(400_000);
    let result = boot(&machine, &[]).await?.expect(0);
    assert!(!result.stderr.contains("signature=secret"), "{}", result.stderr);
    assert_current(&machine)?;
    let requests = source.requests();
    assert!(requests.len() >= 4, "{requests:?}");
    assert!(requests[1..].iter().all(|request| request.range.is_some()), "{requests:?}");
    Ok(())
}

#[tokio::test]
async fn download_restarts_if_source_ignores_range() -> Result<()> {
    let (source, digest) = start_source().await?;
    source.disable_ranges();
    let proxy = Proxy::start(source.addr)?;
    let machine = create_machine(proxy.addr(), &digest)?;
    proxy.reset_after_bytes(700_000);
    let running = machine.spawn(&["svc-update", "boot"], &[])?;
    super::machine::wait_until("a second attempt", || source.requests().len() >= 2).await?;
    proxy.heal();
    tokio::task::spawn_blocking(move || running.wait()).await??.expect(0);
    assert_current(&machine)
}

#[tokio::test]
async fn bundle_that_changes_during_download_is_refused() -> Result<()> {
    let (source, digest) = start_source().await?;
    let proxy = Proxy::start(source.addr)?;
    let machine = create_machine(proxy.addr(), &digest)?;
    proxy.reset_after_bytes(400_000);
    source.replace_after_next_request(bundle::build_bundle("9.9.9")?);
    let result = boot(&machine, &[]).await?.expect(69);
    assert!(result.stderr.contains("the file has changed"), "{}", result.stderr);
    assert_untouched(&machine)
}

#[tokio::test]
async fn invalid_bundle_does_not_switch_releases() -> Result<()> {
    let (source, _) = start_source().await?;
    let wrong_digest_machine = create_machine(source.addr, &"ab".repeat(32))?;
    let result = boot(&wrong_digest_machine, &[]).await?.expect(70);
    assert!(result.stderr.contains("SHA-256"), "{}", result.stderr);
    assert_untouched(&wrong_digest_machine)?;

    let other_bundle = bundle::build_bundle("9.9.9")?;
    let machine = create_machine(source.addr, &bundle::digest(&other_bundle))?;
    source.replace(other_bundle);
    let result = boot(&machine, &[]).await?.expect(70);
    assert!(result.stderr.contains("9.9.9"), "{}", result.stderr);
    assert_untouched(&machine)?;

    source.replace(b"not an archive".to_vec());
    machine.set_env_vars("update.env", &[("SVC_BUNDLE_SHA256", &bundle::digest(b"not an archive"))])?;
    boot(&machine, &[]).await?.expect(70);
    assert_untouched(&machine)?;
    Ok(())
}

#[tokio::test]
async fn token_is_sent_only_to_the_platform() -> Result<()> {
    let (source, digest) = start_source().await?;
    let other_host_machine = create_machine(source.addr, &digest)?;
    boot(&other_host_machine, &[]).await?.expect(0);
    assert_eq!(source.requests()[0].authorization, None);

    let (platform, digest) = start_source().await?;
    let platform_host_machine = create_machine(platform.addr, &digest)?;
    platform_host_machine
        .set_env_vars("host.env", &[("PLATFORM_INTERNAL_URL", &format!("http://{}", platform.addr))])?;
    boot(&platform_host_machine, &[]).await?.expect(0);
    assert_eq!(platform.requests()[0].authorization.as_deref(), Some("Bearer upgrade-token-of-a-machine"));
    Ok(())
}

#[tokio::test]
async fn boot_killed_at_any_step_can_be_rerun() -> Result<()> {
    let (source, digest) = start_source().await?;
    for point in svc::host::update::BOOT_FAILPOINTS {
        let machine = create_machine(source.addr, &digest)?;
        let kill = format!("{point}=return(kill)");
        boot(&machine, &[("FAILPOINTS", &kill)]).await?.expect_killed();
        let current = machine.path("opt/svc/current");
        // `svc-gateway` is the bundle's last entry. `exists` would be false for a dangling link, which must fail here.
        assert!(
            !current.is_symlink() || current.join("bin/svc-gateway").is_file(),
            "{point}: current does not name a complete release"
        );
        boot(&machine, &[]).await?.expect(0);
        assert_current(&machine).context(*point)?;
    }
    Ok(())
}

#[tokio::test]
async fn failed_step_leaves_no_partial_release() -> Result<()> {
    let (source, digest) = start_source().await?;
    for point in svc::host::update::BOOT_FAILPOINTS {
        let machine = create_machine(source.addr, &digest)?;
        let error = format!("{point}=return(error)");
        let exit_code = boot(&machine, &[("FAILPOINTS", &error)]).await?.exit_code;
        assert!(exit_code.is_some_and(|exit_code| exit_code != 0), "{point}: {exit_code:?}");
        let remaining = list_names(&machine.path("opt/svc/releases")).unwrap_or_default();
        assert!(!remaining.iter().any(|name| name.contains(".partial-")), "{point}: {remaining:?}");
        boot(&machine, &[]).await?.expect(0);
        assert_current(&machine).context(*point)?;
    }
    Ok(())
}
