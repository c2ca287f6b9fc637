//! The findings of `svcctl doctor platform` about a store that lacks capabilities: they name the missing ones.

use std::path::Path;

use anyhow::Result;
use kit::stores::StoreKind;
use kit::story::{BUCKET, HostBackend, RouterTransport, Stack};

use crate::ctl::report::{Report, run_report};

/// Runs the doctor on a platform with the given store.
async fn diagnose(kind: StoreKind) -> Result<Report> {
    let (svc, dir) = (Path::new(env!("CARGO_BIN_EXE_svc")), tempfile::tempdir_in("/tmp")?);
    let store = kind.start(dir.path(), BUCKET).await?;
    let (transport, backend) = (RouterTransport::Tls, HostBackend::Processes);
    let (stack, _) = Stack::start_with_store(svc, dir.path(), transport, backend, store, &[]).await?;
    let report = run_report(svc, &["doctor", "platform"], stack.platform_env()).await;
    let remaining = stack.store.objects(BUCKET, "system-doctor/");
    assert!(remaining.is_empty(), "probe objects remain: {remaining:?}");
    let remaining = stack.store.objects(BUCKET, "svc-doctor");
    assert!(remaining.is_empty(), "session objects remain: {remaining:?}");
    stack.stop().await;
    Ok(report)
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_reports_capabilities_that_moto_lacks() -> Result<()> {
    let report = diagnose(StoreKind::Moto).await?;
    report.expect("host-credentials", "problem", "reaches other slots: it wrote an object there");
    report.expect(
        "store",
        "problem",
        "Anyone who can reach the endpoint can read and delete every snapshot.",
    );
    report.expect("store", "warning", "A snapshot that was corrupted in transit is stored");
    assert_eq!(report.levels("store"), ["warning", "problem"], "{}", report.text);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_reports_capabilities_that_seaweedfs_lacks() -> Result<()> {
    if let Err(error) = tokio::task::spawn_blocking(|| kit::seaweed::fetch(&kit::fetch::target_dir())).await?
    {
        kit::skip::record(format_args!("SeaweedFS cannot be fetched: {error:#}"));
        return Ok(());
    }
    let report = diagnose(StoreKind::Seaweedfs).await?;
    report.expect("host-credentials", "warning", "STORE_HOST_CREDENTIALS=static");
    report.expect(
        "store",
        "problem",
        "Anyone who can reach the endpoint can read and delete every snapshot.",
    );
    report.expect("store-protection", "warning", "no versioning");
    Ok(())
}
