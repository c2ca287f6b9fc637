//! The story with one thing broken: it has to fail, and at the step that is about that thing.

use std::path::Path;

use kit::story::{self, Breakage, Options};

async fn fails_at_its_step(breakage: Breakage) {
    let svc = Path::new(env!("CARGO_BIN_EXE_svc")).to_owned();
    let options = Options { svc, breakage: Some(breakage), keep: false, report: None };
    let report = story::run(options).await.unwrap();
    let failed = report.failed().map(|step| step.name.as_str());
    assert!(!report.ok);
    assert_eq!(failed, Some(breakage.fails_at()), "{:#?}", report.steps);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_refuses_snapshots_fails_the_backup() {
    fails_at_its_step(Breakage::Backup).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_corrupts_snapshots_fails_the_recovery() {
    fails_at_its_step(Breakage::Restore).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_with_another_key_than_registered_is_not_used() {
    fails_at_its_step(Breakage::Pin).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fence_that_is_taken_away_is_noticed() {
    fails_at_its_step(Breakage::Fence).await;
}
