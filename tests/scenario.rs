//! Runs the main scenario with one injected defect, which must make the matching step fail, and on third-party stores.

use std::path::Path;

use kit::scenario::{self, InjectedDefect, ScenarioOptions};
use kit::stores::StoreKind;

async fn assert_fails_at_its_step(defect: InjectedDefect) {
    let svc = Path::new(env!("CARGO_BIN_EXE_svc")).to_owned();
    let options =
        ScenarioOptions { svc, defect: Some(defect), store: StoreKind::Kit, keep: false, report: None };
    let report = scenario::run(options).await.unwrap();
    let failed = report.failed_step().map(|step| step.name.as_str());
    assert!(!report.ok);
    assert_eq!(failed, Some(defect.failing_step()), "{:#?}", report.steps);
}

#[tokio::test(flavor = "multi_thread")]
async fn store_that_refuses_snapshots_fails_backup() {
    assert_fails_at_its_step(InjectedDefect::Backup).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn store_that_corrupts_snapshots_fails_recovery() {
    assert_fails_at_its_step(InjectedDefect::Restore).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn host_with_unregistered_key_is_not_used() {
    assert_fails_at_its_step(InjectedDefect::Pin).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_fence_is_detected() {
    assert_fails_at_its_step(InjectedDefect::Fence).await;
}

async fn assert_passes_on(store: StoreKind) {
    let svc = Path::new(env!("CARGO_BIN_EXE_svc")).to_owned();
    let options = ScenarioOptions { svc, defect: None, store, keep: false, report: None };
    let report = scenario::run(options).await.unwrap();
    assert!(report.ok, "{:#?}", report.steps);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: the whole scenario on a third-party store"]
async fn scenario_passes_on_seaweedfs() {
    assert_passes_on(StoreKind::Seaweedfs).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: the whole scenario on a third-party store"]
async fn scenario_passes_on_moto() {
    assert_passes_on(StoreKind::Moto).await;
}
