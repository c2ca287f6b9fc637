//! Checks that `svcctl doctor platform` names the capabilities that a store lacks.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use kit::s3::{Fault, FaultRule};
use kit::scenario::{BUCKET, HostBackend, RouterTransport, Stack};
use kit::stores::StoreKind;
use svc::config::Env;
use svc::platform::doctor;
use svc::platform::store_access_issuer::HostCredentials;
use svc::store::capabilities::{RaceLimits, Support};
use svc::store::config::StoreConfig;

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
    report.expect("host-credentials", "problem", "can access other slots: the session wrote an object");
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

#[tokio::test]
async fn failed_session_probe_is_inconclusive() -> Result<()> {
    svc::http::tls::install_provider();
    let dir = tempfile::tempdir()?;
    let store = StoreKind::Kit.start(dir.path(), BUCKET).await?;
    let mut pairs = store.env(BUCKET);
    pairs.extend(store.sts_env());
    let mut env = Env::from_pairs(pairs.iter().map(|(name, value)| (&**name, &**value)));
    let config = StoreConfig::read(&mut env);
    let credentials = HostCredentials::read(&mut env, config.as_ref());
    let (config, credentials) = env.finish(config.zip(credentials))?;
    let fault = FaultRule::new(Fault::StatusAfterCommit(503)).method("PUT");
    let failed = store.add_fault(fault.key("svc-doctor/").key_suffix(".dump").always());
    let races = RaceLimits { rounds: 1, timeout: Duration::from_secs(10) };
    let probes = doctor::probe_store(&config, &credentials, races).await;
    assert!(failed.hits() > 0);
    let session_probe = probes.into_iter().find(|probe| probe.capability == doctor::SESSION_WRITE_ONCE);
    let support = session_probe.context("the capability was not probed")?.support;
    assert!(matches!(support, Support::Unknown(_)), "{support:?}");
    let remaining = store.objects(BUCKET, "svc-doctor");
    assert!(remaining.is_empty(), "session objects remain: {remaining:?}");
    Ok(())
}
