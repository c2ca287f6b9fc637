//! `CUSTOMER_VPS_TLS_VERIFY` in the router: name, chain and pin of a machine's certificate.

use std::path::Path;

use anyhow::Result;
use http::StatusCode;
use jiff::SignedDuration;
use kit::ca::Ca;
use svc::http::tls::{Identity, self_signed};
use svc::machine::id::MachineId;

use super::machine::TestMachine;
use super::world::World;

const DOMAIN: &str = "hosts.example.test";
const DAY: SignedDuration = SignedDuration::from_hours(24);

fn name(id: MachineId) -> String {
    format!("{id}.{DOMAIN}")
}

/// A key, and a certificate for it that this authority issued for these names.
fn issued(ca: &Ca, names: &[&str], lifetime: SignedDuration) -> Result<Identity> {
    let key_pem = self_signed(&["svc-host".to_owned()])?.key_pem;
    Ok(Identity { cert_pem: ca.issue_for(names, &key_pem, lifetime)?, key_pem })
}

/// A router that trusts this authority. Rows without a registration have no grace left.
async fn verifying(roots: &Path, ca: &Ca, more: &[(&str, &str)]) -> Result<World> {
    std::fs::write(roots, ca.root_pem())?;
    let roots = roots.display().to_string();
    let own = [("CUSTOMER_VPS_TLS_VERIFY", "true"), ("HOST_DOMAIN", DOMAIN), ("SSL_CERT_FILE", &*roots)];
    World::start_with(&[&own[..], more].concat(), None).await
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_is_dialed_by_name_with_chain_and_pin() -> Result<()> {
    let (ca, roots) = (Ca::new()?, tempfile::NamedTempFile::new()?);
    let world = verifying(roots.path(), &ca, &[]).await?;
    let id = MachineId::new();
    let machine = TestMachine::start_as(id, &issued(&ca, &[&name(id)], DAY)?).await?;
    world.add(&machine, "user_1", "primary", "running").await?;
    world.until_status("user_1", StatusCode::OK).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn certificate_without_valid_chain_for_name_is_refused() -> Result<()> {
    let (ca, roots) = (Ca::new()?, tempfile::NamedTempFile::new()?);
    let world = verifying(roots.path(), &ca, &[]).await?;
    let ids: Vec<_> = (0..4).map(|_| MachineId::new()).collect();
    let other_name = name(MachineId::new());
    let wrong = [
        ("self-signed", self_signed(&[name(ids[0])])?),
        ("another authority", issued(&Ca::new()?, &[&name(ids[1])], DAY)?),
        ("another name", issued(&ca, &[&other_name, "127.0.0.1"], DAY)?),
        ("expired", issued(&ca, &[&name(ids[3])], SignedDuration::from_mins(-1))?),
    ];
    for (id, (what, identity)) in ids.iter().zip(wrong) {
        let user = format!("user_{}", what.replace([' ', '-'], ""));
        let machine = TestMachine::start_as(*id, &identity).await?;
        world.add(&machine, &user, "primary", "running").await?;
        world.until_status(&user, StatusCode::BAD_GATEWAY).await;
        assert_eq!(world.fetch(&user, "/").await.json()["code"], "upstream_unavailable", "{what}");
        assert!(machine.arrivals().is_empty(), "{what}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn valid_chain_with_another_pin_is_refused() -> Result<()> {
    let (ca, roots) = (Ca::new()?, tempfile::NamedTempFile::new()?);
    let world = verifying(roots.path(), &ca, &[]).await?;
    let id = MachineId::new();
    let mut machine = TestMachine::start_as(id, &issued(&ca, &[&name(id)], DAY)?).await?;
    machine.pin.0[0] ^= 1;
    world.add(&machine, "user_1", "primary", "running").await?;
    world.until_status("user_1", StatusCode::BAD_GATEWAY).await;
    assert!(machine.arrivals().is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn new_or_exempt_machine_is_reached_by_its_pin() -> Result<()> {
    let (ca, roots) = (Ca::new()?, tempfile::NamedTempFile::new()?);
    let (new, exempt, old) =
        (TestMachine::start().await?, TestMachine::start().await?, TestMachine::start().await?);
    let id = exempt.id.to_string();
    let grace = ("CUSTOMER_VPS_TLS_VERIFY_GRACE_SECONDS", "3");
    let world = verifying(roots.path(), &ca, &[("CUSTOMER_VPS_TLS_VERIFY_EXCEPT", &id), grace]).await?;
    for (machine, user) in [(&new, "user_new"), (&exempt, "user_exempt"), (&old, "user_old")] {
        world.add(machine, user, "primary", "recovering").await?;
    }
    let registered =
        "UPDATE user_machines SET status = 'running', registered_at = now() - CASE WHEN machine_id = ";
    let registered = format!("{registered}'{}' THEN interval '0' ELSE interval '1 hour' END", new.id);
    world.sql.batch_execute(&registered).await?;
    world.until_status("user_new", StatusCode::OK).await;
    world.until_status("user_exempt", StatusCode::OK).await;
    world.until_status("user_old", StatusCode::BAD_GATEWAY).await;
    // The grace ends without any change of the row. Open connections stay, so each is closed.
    tokio::time::sleep(std::time::Duration::from_millis(3200)).await;
    let later = world.another_process().await?;
    later.until_status("user_new", StatusCode::BAD_GATEWAY).await;
    later.until_status("user_exempt", StatusCode::OK).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_with_chain_is_reached_before_during_and_after_verification() -> Result<()> {
    let (ca, roots) = (Ca::new()?, tempfile::NamedTempFile::new()?);
    let id = MachineId::new();
    let machine = TestMachine::start_as(id, &issued(&ca, &[&name(id)], DAY)?).await?;
    let on = verifying(roots.path(), &ca, &[]).await?;
    on.add(&machine, "user_1", "primary", "running").await?;
    let off = on.process_with(&[("HOST_DOMAIN", DOMAIN)]).await?;
    let without_names = on.process_with(&[]).await?;
    // Processes of both settings run side by side while an installation changes.
    for world in [&off, &on, &without_names, &off] {
        world.until_status("user_1", StatusCode::OK).await;
    }
    Ok(())
}
