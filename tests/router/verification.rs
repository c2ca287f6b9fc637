//! With `CUSTOMER_VPS_TLS_VERIFY`, the router verifies the name, chain and pin of a machine's certificate.

use std::path::Path;

use anyhow::Result;
use http::StatusCode;
use jiff::SignedDuration;
use kit::ca::Ca;
use svc::http::tls::{Identity, generate_self_signed};
use svc::machine::id::MachineId;

use super::machine::TestMachine;
use super::test_router::TestRouter;

const DOMAIN: &str = "hosts.example.test";
const DAY: SignedDuration = SignedDuration::from_hours(24);

fn host_name(id: MachineId) -> String {
    format!("{id}.{DOMAIN}")
}

/// Creates a key, and a certificate for it from the given authority with the given names.
fn issue_identity(ca: &Ca, names: &[&str], lifetime: SignedDuration) -> Result<Identity> {
    let key_pem = generate_self_signed(&["svc-host".to_owned()])?.key_pem;
    Ok(Identity { cert_pem: ca.issue_for(names, &key_pem, lifetime)?, key_pem })
}

/// Starts a router that verifies certificates and trusts the given authority. For rows without a registration time, the
/// grace period has ended.
async fn start_verifying_router(roots: &Path, ca: &Ca, extra: &[(&str, &str)]) -> Result<TestRouter> {
    std::fs::write(roots, ca.root_pem())?;
    let roots = roots.display().to_string();
    let verification_settings =
        [("CUSTOMER_VPS_TLS_VERIFY", "true"), ("HOST_DOMAIN", DOMAIN), ("SSL_CERT_FILE", &*roots)];
    TestRouter::start_with(&[&verification_settings[..], extra].concat(), None).await
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_is_dialed_by_name_with_chain_and_pin() -> Result<()> {
    let (ca, roots) = (Ca::new()?, tempfile::NamedTempFile::new()?);
    let router = start_verifying_router(roots.path(), &ca, &[]).await?;
    let id = MachineId::new();
    let machine = TestMachine::start_as(id, &issue_identity(&ca, &[&host_name(id)], DAY)?).await?;
    router.add_machine(&machine, "user_1", "primary", "running").await?;
    router.wait_for_status("user_1", StatusCode::OK).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn certificate_without_valid_chain_for_name_is_refused() -> Result<()> {
    let (ca, roots) = (Ca::new()?, tempfile::NamedTempFile::new()?);
    let router = start_verifying_router(roots.path(), &ca, &[]).await?;
    let ids: Vec<_> = (0..4).map(|_| MachineId::new()).collect();
    let other_name = host_name(MachineId::new());
    let invalid_identities = [
        ("self-signed", generate_self_signed(&[host_name(ids[0])])?),
        ("another authority", issue_identity(&Ca::new()?, &[&host_name(ids[1])], DAY)?),
        ("another name", issue_identity(&ca, &[&other_name, "127.0.0.1"], DAY)?),
        ("expired", issue_identity(&ca, &[&host_name(ids[3])], SignedDuration::from_mins(-1))?),
    ];
    for (id, (flaw, identity)) in ids.iter().zip(invalid_identities) {
        let user = format!("user_{}", flaw.replace([' ', '-'], ""));
        let machine = TestMachine::start_as(*id, &identity).await?;
        router.add_machine(&machine, &user, "primary", "running").await?;
        router.wait_for_status(&user, StatusCode::BAD_GATEWAY).await;
        assert_eq!(router.fetch(&user, "/").await.json()["code"], "upstream_unavailable", "{flaw}");
        assert!(machine.requests().is_empty(), "{flaw}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn valid_chain_with_another_pin_is_refused() -> Result<()> {
    let (ca, roots) = (Ca::new()?, tempfile::NamedTempFile::new()?);
    let router = start_verifying_router(roots.path(), &ca, &[]).await?;
    let id = MachineId::new();
    let mut machine = TestMachine::start_as(id, &issue_identity(&ca, &[&host_name(id)], DAY)?).await?;
    machine.pin.0[0] ^= 1;
    router.add_machine(&machine, "user_1", "primary", "running").await?;
    router.wait_for_status("user_1", StatusCode::BAD_GATEWAY).await;
    assert!(machine.requests().is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn new_or_exempt_machine_is_verified_only_by_pin() -> Result<()> {
    let (ca, roots) = (Ca::new()?, tempfile::NamedTempFile::new()?);
    let (new, exempt, old) =
        (TestMachine::start().await?, TestMachine::start().await?, TestMachine::start().await?);
    let id = exempt.id.to_string();
    let grace = ("CUSTOMER_VPS_TLS_VERIFY_GRACE_SECONDS", "3");
    let router =
        start_verifying_router(roots.path(), &ca, &[("CUSTOMER_VPS_TLS_VERIFY_EXCEPT", &id), grace]).await?;
    for (machine, user) in [(&new, "user_new"), (&exempt, "user_exempt"), (&old, "user_old")] {
        router.add_machine(machine, user, "primary", "recovering").await?;
    }
    let sql = format!(
        "UPDATE user_machines SET status = 'running', registered_at = now() - \
         CASE WHEN machine_id = '{}' THEN interval '0' ELSE interval '1 hour' END",
        new.id
    );
    router.sql.batch_execute(&sql).await?;
    router.wait_for_status("user_new", StatusCode::OK).await;
    router.wait_for_status("user_exempt", StatusCode::OK).await;
    router.wait_for_status("user_old", StatusCode::BAD_GATEWAY).await;
    // The grace period ends without a change to the row. Open connections remain usable, so a second router is used.
    tokio::time::sleep(std::time::Duration::from_millis(3200)).await;
    let second_router = router.start_second_router().await?;
    second_router.wait_for_status("user_new", StatusCode::BAD_GATEWAY).await;
    second_router.wait_for_status("user_exempt", StatusCode::OK).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_with_chain_is_reachable_with_every_setting() -> Result<()> {
    let (ca, roots) = (Ca::new()?, tempfile::NamedTempFile::new()?);
    let id = MachineId::new();
    let machine = TestMachine::start_as(id, &issue_identity(&ca, &[&host_name(id)], DAY)?).await?;
    let verifying = start_verifying_router(roots.path(), &ca, &[]).await?;
    verifying.add_machine(&machine, "user_1", "primary", "running").await?;
    let non_verifying = verifying.start_router_with(&[("HOST_DOMAIN", DOMAIN)]).await?;
    let without_names = verifying.start_router_with(&[]).await?;
    // While an installation changes its settings, routers with old and new settings run at the same time.
    for router in [&non_verifying, &verifying, &without_names, &non_verifying] {
        router.wait_for_status("user_1", StatusCode::OK).await;
    }
    Ok(())
}
