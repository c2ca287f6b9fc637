//! The gateway gets its certificate from an ACME server (Pebble), or from an operator's file.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use jiff::{SignedDuration, Timestamp};
use kit::ca::Ca;
use kit::net::{Proxy, free_port};
use kit::pebble::{Options, Pebble};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use svc::http::certificate::Chain;
use svc::http::tls::{ChainCheck, ChainVerifier, SpkiPin, pinned_client_config};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::host::{Host, Machine, UNREACHABLE_DATABASE};

const DOMAIN: &str = "hosts.example.test";

/// Returns a machine whose gateway listens on this port, and the machine's host name.
fn machine_listening_on(port: u16, roots: &std::path::Path) -> Result<(Machine, String)> {
    let mut machine = Machine::new(UNREACHABLE_DATABASE)?;
    machine.env.insert("GATEWAY_LISTEN".into(), format!("127.0.0.1:{port}"));
    machine.env.insert("SSL_CERT_FILE".into(), roots.display().to_string());
    machine.env.insert("ACME_RETRY_SECONDS".into(), "1".into());
    let name = format!("{}.{DOMAIN}", machine.id);
    let registration = json!({"machineId": machine.id, "imageVersion": "v1", "bundleSha256": "ab".repeat(32),
        "tlsSpkiSha256": "cd".repeat(32), "bootMs": 1});
    let record = json!({"machineId": machine.id, "sent": registration.to_string(),
        "registeredAt": "2026-11-21T11:05:00.000Z"});
    machine.write("var/lib/svc/register.json", &record.to_string())?;
    Ok((machine, name))
}

fn tls_settings(name: &str, directory: &str) -> Value {
    json!({"hostName": name, "acme": {"directoryUrl": directory, "contact": "mailto:ops@example.test"}})
}

/// Returns the gateway's report on its certificate.
fn read_report(machine: &Machine) -> Value {
    let text = std::fs::read_to_string(machine.path("var/lib/svc/certificate.json")).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

/// Waits until the report satisfies a condition, and returns the report.
async fn wait_until_reported(
    host: &Host,
    description: &str,
    condition: impl Fn(&Value) -> bool,
) -> Result<Value> {
    let check = async || Ok(condition(&read_report(&host.machine)));
    host.wait_until(description, check).await.with_context(|| read_report(&host.machine).to_string())?;
    Ok(read_report(&host.machine))
}

async fn wait_until_issued(host: &Host) -> Result<Value> {
    wait_until_reported(host, "a certificate is issued", |report| report["source"] == "acme").await
}

/// Returns the certificate that the gateway presents. The client verifies the pin and, with `roots`, the chain and
/// name.
async fn fetch_certificate(
    host: &Host,
    name: &str,
    roots: Option<&std::path::Path>,
) -> Result<CertificateDer<'static>> {
    let check = match roots {
        None => ChainCheck::PinOnly,
        Some(roots) => ChainCheck::PinAndChain {
            verifier: ChainVerifier::new(Some(roots.to_owned()))?,
            from: rustls::pki_types::UnixTime::since_unix_epoch(Duration::ZERO),
        },
    };
    let config = pinned_client_config(read_pin(&host.machine)?, check)?;
    let stream = TcpStream::connect(host.address.parse::<SocketAddr>()?).await?;
    let name = ServerName::try_from(name.to_owned())?;
    let connected = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    let certificates = connected.get_ref().1.peer_certificates().context("no certificates")?;
    Ok(certificates.first().context("no leaf certificate")?.clone().into_owned())
}

fn read_pin(machine: &Machine) -> Result<SpkiPin> {
    let certificate = std::fs::read(machine.path("var/lib/svc/tls/cert.pem"))?;
    Ok(SpkiPin::of_certificate(&CertificateDer::from_pem_slice(&certificate)?)?)
}

#[tokio::test]
async fn signing_request_has_machine_name_and_key() -> Result<()> {
    let roots = tempfile::NamedTempFile::new()?;
    std::fs::write(roots.path(), Ca::new()?.root_pem())?;
    let (mut machine, name) = machine_listening_on(free_port()?, roots.path())?;
    let print_signing_request = |machine: &Machine| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_svc"));
        command.args(["svc-gateway", "certificate-request"]).env_clear();
        command.env("SVC_ROOT", machine.path("")).envs(&machine.env).output()
    };
    let unnamed = print_signing_request(&machine)?;
    assert_eq!(unnamed.status.code(), Some(78));
    assert!(String::from_utf8_lossy(&unnamed.stderr).contains("HOST_DOMAIN"), "{unnamed:?}");
    machine.env.insert("SVC_HOST_NAME".into(), name.clone());
    let host = machine.start()?;
    let printed = print_signing_request(&host.machine)?;
    let request = rustls::pki_types::CertificateSigningRequestDer::from_pem_slice(&printed.stdout)?;
    let key = std::fs::read_to_string(host.machine.path("var/lib/svc/tls/key.pem"))?;
    let key = rcgen::PublicKeyData::subject_public_key_info(&rcgen::KeyPair::from_pem(&key)?);
    for part in [name.as_bytes(), &key] {
        assert!(request.windows(part.len()).any(|window| window == part), "{printed:?}");
    }
    assert!(!request.windows(7).any(|window| window == b"PRIVATE"));
    Ok(())
}

fn parse_expiry(report: &Value) -> Timestamp {
    report["expiresAt"].as_str().expect("the report has an expiry").parse().expect("the expiry is a time")
}

#[tokio::test]
async fn authority_issues_certificate_for_registered_key() -> Result<()> {
    let port = free_port()?;
    let pebble = Pebble::start(&Options::for_validation_port(port)).await?;
    let (machine, name) = machine_listening_on(port, &pebble.roots())?;
    let host = machine.start()?;
    assert!(
        fetch_certificate(&host, &name, Some(&pebble.roots())).await.is_err(),
        "the first certificate must be self-signed"
    );
    let self_signed = fetch_certificate(&host, &name, None).await?;
    let pin = read_pin(&host.machine)?;
    let delivered = tls_settings(&name, &pebble.directory_url());
    host.machine.write("var/lib/svc/tls/settings.json", &delivered.to_string())?;
    let report = wait_until_issued(&host).await?;
    assert_eq!(
        (&report["hostName"], &report["isTrusted"], &report["error"]),
        (&json!(name), &json!(true), &Value::Null)
    );
    // Neither the process nor the key has changed; the client verifies that the key has this pin.
    assert_eq!(read_pin(&host.machine)?, pin);
    let issued = fetch_certificate(&host, &name, Some(&pebble.roots())).await?;
    assert_ne!(issued, self_signed);
    let wrong_name = fetch_certificate(&host, "another.example.test", Some(&pebble.roots())).await;
    assert!(wrong_name.unwrap_err().to_string().contains("not valid for name"), "the name must be verified");
    for file in ["chain.pem", "acme-account.json"] {
        let mode =
            std::fs::metadata(host.machine.path(&format!("var/lib/svc/tls/{file}")))?.permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
    // A restart needs no new certificate.
    let host = host.restart()?;
    assert_eq!(fetch_certificate(&host, &name, Some(&pebble.roots())).await?, issued);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(pebble.issued_count(), 1, "{}", host.log());
    Ok(())
}

#[tokio::test]
async fn renewal_keeps_key_and_survives_unreachable_authority() -> Result<()> {
    let port = free_port()?;
    let options = Options { certificate_lifetime_seconds: 24, ..Options::for_validation_port(port) };
    let pebble = Pebble::start(&options).await?;
    let network = Proxy::start(pebble.api_address())?;
    let (machine, name) = machine_listening_on(port, &pebble.roots())?;
    let directory = format!("https://{}/dir", network.addr());
    machine.write("var/lib/svc/tls/settings.json", &tls_settings(&name, &directory).to_string())?;
    let host = machine.start()?;
    let first = wait_until_issued(&host).await?;
    let pin = read_pin(&host.machine)?;
    network.refuse();
    let failed =
        wait_until_reported(&host, "the renewal fails", |report| report["error"].is_string()).await?;
    assert_eq!(failed["expiresAt"], first["expiresAt"], "the presented certificate must be unchanged");
    assert!(failed["nextAttemptAt"].is_string(), "{failed}");
    fetch_certificate(&host, &name, Some(&pebble.roots())).await?;
    network.heal();
    let renewed = wait_until_reported(&host, "the certificate is renewed", |report| {
        report["error"].is_null() && report["expiresAt"] != first["expiresAt"]
    });
    let renewed = renewed.await?;
    ensure!(parse_expiry(&renewed) > parse_expiry(&first), "{renewed}");
    // The client verifies that the key has this pin.
    assert_eq!(read_pin(&host.machine)?, pin);
    fetch_certificate(&host, &name, Some(&pebble.roots())).await?;
    Ok(())
}

#[tokio::test]
async fn changed_authority_setting_replaces_certificate() -> Result<()> {
    let port = free_port()?;
    let first = Pebble::start(&Options::for_validation_port(port)).await?;
    let second = Pebble::start(&Options::for_validation_port(port)).await?;
    let roots = tempfile::NamedTempFile::new()?;
    let both_roots = [first.roots(), second.roots()].map(std::fs::read_to_string);
    std::fs::write(roots.path(), both_roots.into_iter().collect::<std::io::Result<String>>()?)?;
    let (machine, name) = machine_listening_on(port, roots.path())?;
    let write_settings = |machine: &Machine, pebble: &Pebble| {
        machine
            .write("var/lib/svc/tls/settings.json", &tls_settings(&name, &pebble.directory_url()).to_string())
    };
    write_settings(&machine, &first)?;
    let host = machine.start()?;
    wait_until_issued(&host).await?;
    // The machine knows which authority issued its certificate even after a restart.
    let host = host.restart()?;
    let from_first = fetch_certificate(&host, &name, Some(&first.roots())).await?;
    write_settings(&host.machine, &second)?;
    let is_from_second = async || Ok(fetch_certificate(&host, &name, Some(&second.roots())).await.is_ok());
    host.wait_until("the second authority's certificate is presented", is_from_second).await?;
    assert_ne!(fetch_certificate(&host, &name, None).await?, from_first);
    assert_eq!((second.issued_count(), &read_report(&host.machine)["error"]), (1, &Value::Null));
    assert_eq!(first.issued_count(), 1);
    Ok(())
}

#[tokio::test]
async fn unstorable_certificate_is_presented_and_not_ordered_again() -> Result<()> {
    let port = free_port()?;
    let pebble = Pebble::start(&Options::for_validation_port(port)).await?;
    let (machine, name) = machine_listening_on(port, &pebble.roots())?;
    let delivered = tls_settings(&name, &pebble.directory_url());
    machine.write("var/lib/svc/tls/settings.json", &delivered.to_string())?;
    // A file cannot replace a non-empty directory.
    machine.write("var/lib/svc/tls/chain.pem/in-the-way", "")?;
    let host = machine.start()?;
    let report =
        wait_until_reported(&host, "the certificate cannot be stored", |report| report["error"].is_string())
            .await?;
    assert!(report["error"].as_str().unwrap_or_default().contains("cannot be stored"), "{report}");
    fetch_certificate(&host, &name, Some(&pebble.roots())).await?;
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(pebble.issued_count(), 1, "{}", host.log());
    std::fs::remove_dir_all(host.machine.path("var/lib/svc/tls/chain.pem"))?;
    wait_until_reported(&host, "the certificate is stored", |report| report["error"].is_null()).await?;
    let host = host.restart()?;
    fetch_certificate(&host, &name, Some(&pebble.roots())).await?;
    assert_eq!(pebble.issued_count(), 1, "{}", host.log());
    Ok(())
}

#[tokio::test]
async fn refused_order_is_reported_and_backoff_survives_restart() -> Result<()> {
    let port = free_port()?;
    let options = Options { blocked_domain: Some(DOMAIN.to_owned()), ..Options::for_validation_port(port) };
    let pebble = Pebble::start(&options).await?;
    let (mut machine, name) = machine_listening_on(port, &pebble.roots())?;
    machine.env.insert("ACME_RETRY_SECONDS".into(), "600".into());
    let delivered = tls_settings(&name, &pebble.directory_url());
    machine.write("var/lib/svc/tls/settings.json", &delivered.to_string())?;
    let host = machine.start()?;
    let report =
        wait_until_reported(&host, "the order is refused", |report| report["error"].is_string()).await?;
    assert!(report["error"].as_str().unwrap_or_default().contains("did not accept the order"), "{report}");
    assert_eq!((&report["source"], &report["isTrusted"]), (&json!("self_signed"), &json!(false)));
    let next: Timestamp = report["nextAttemptAt"].as_str().context("no time")?.parse()?;
    let delay = next.duration_since(Timestamp::now()).as_secs();
    ensure!((500..=1300).contains(&delay), "delay of {delay} s");
    fetch_certificate(&host, &name, None).await?;
    // A restart continues the backoff.
    let orders_before =
        pebble.log().matches("new-order").count() + pebble.log().matches("/order-plz").count();
    let host = host.restart()?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(read_report(&host.machine)["nextAttemptAt"], report["nextAttemptAt"], "{}", host.log());
    let orders_after = pebble.log().matches("new-order").count() + pebble.log().matches("/order-plz").count();
    assert_eq!(orders_after, orders_before);
    Ok(())
}

#[tokio::test]
async fn failed_validation_is_reported_with_reason() -> Result<()> {
    // The authority connects to a different port, on which nothing is listening.
    let pebble = Pebble::start(&Options::for_validation_port(free_port()?)).await?;
    let (machine, name) = machine_listening_on(free_port()?, &pebble.roots())?;
    let delivered = tls_settings(&name, &pebble.directory_url());
    machine.write("var/lib/svc/tls/settings.json", &delivered.to_string())?;
    let host = machine.start()?;
    let report =
        wait_until_reported(&host, "the validation fails", |report| report["error"].is_string()).await?;
    let error = report["error"].as_str().unwrap_or_default();
    assert!(
        error.contains(&format!("could not validate {name}")) && error.contains("Failed to connect"),
        "{error}"
    );
    Ok(())
}

#[tokio::test]
async fn account_is_bound_to_external_account() -> Result<()> {
    let port = free_port()?;
    let key = "zWNDZM6eQGHWpSRTPal5eIUYFTu7EajVIoguysqZ9wG44nMEtx3MUAsUDkMTQ12W";
    let external_account = Some(("kid-1".to_owned(), key.to_owned()));
    let pebble = Pebble::start(&Options { external_account, ..Options::for_validation_port(port) }).await?;
    let (machine, name) = machine_listening_on(port, &pebble.roots())?;
    let mut delivered = tls_settings(&name, &pebble.directory_url());
    machine.write("var/lib/svc/tls/settings.json", &delivered.to_string())?;
    let host = machine.start()?;
    let refused =
        wait_until_reported(&host, "the account is refused", |report| report["error"].is_string()).await?;
    assert!(refused["error"].as_str().unwrap_or_default().contains("create an ACME account"), "{refused}");
    delivered["acme"]["externalAccount"] = json!({"keyId": "kid-1", "hmacKey": key});
    host.machine.write("var/lib/svc/tls/settings.json", &delivered.to_string())?;
    wait_until_issued(&host).await?;
    assert!(!host.log().contains(key), "the key was logged");
    Ok(())
}

#[tokio::test]
async fn lost_account_is_replaced() -> Result<()> {
    let port = free_port()?;
    let first = Pebble::start(&Options::for_validation_port(port)).await?;
    let (machine, name) = machine_listening_on(port, &first.roots())?;
    machine
        .write("var/lib/svc/tls/settings.json", &tls_settings(&name, &first.directory_url()).to_string())?;
    let host = machine.start()?;
    wait_until_issued(&host).await?;
    let account = host.machine.path("var/lib/svc/tls/acme-account.json");
    // Moves the account to an authority that does not know it.
    let second = Pebble::start(&Options::for_validation_port(port)).await?;
    let stored = std::fs::read_to_string(&account)?;
    let moved = stored.replace(&first.api_address().to_string(), &second.api_address().to_string());
    std::fs::write(&account, moved)?;
    std::fs::copy(second.roots(), first.roots())?;
    std::fs::remove_file(host.machine.path("var/lib/svc/tls/chain.pem"))?;
    let delivered = tls_settings(&name, &second.directory_url());
    host.machine.write("var/lib/svc/tls/settings.json", &delivered.to_string())?;
    let host = host.restart()?;
    host.wait_until("the new authority issues a certificate", async || Ok(second.issued_count() == 1))
        .await?;
    let is_presented = async || Ok(fetch_certificate(&host, &name, Some(&second.roots())).await.is_ok());
    host.wait_until("the new authority's certificate is presented", is_presented).await?;
    Ok(())
}

#[tokio::test]
async fn deactivated_account_is_replaced() -> Result<()> {
    let port = free_port()?;
    let pebble = Pebble::start(&Options::for_validation_port(port)).await?;
    let (machine, name) = machine_listening_on(port, &pebble.roots())?;
    let delivered = tls_settings(&name, &pebble.directory_url()).to_string();
    machine.write("var/lib/svc/tls/settings.json", &delivered)?;
    let host = machine.start()?;
    wait_until_issued(&host).await?;
    let account = host.machine.path("var/lib/svc/tls/acme-account.json");
    let stored: Value = serde_json::from_slice(&std::fs::read(&account)?)?;
    pebble.deactivate_account(&stored["credentials"]).await?;
    std::fs::remove_file(host.machine.path("var/lib/svc/tls/chain.pem"))?;
    host.machine.write("var/lib/svc/tls/settings.json", &delivered)?;
    let host = host.restart()?;
    host.wait_until("a new account gets a certificate", async || Ok(pebble.issued_count() == 2)).await?;
    let replacement: Value = serde_json::from_slice(&std::fs::read(&account)?)?;
    assert_ne!(replacement["credentials"]["id"], stored["credentials"]["id"]);
    Ok(())
}

#[tokio::test]
async fn validation_handshake_needs_challenge_in_progress() -> Result<()> {
    let roots = tempfile::NamedTempFile::new()?;
    std::fs::write(roots.path(), Ca::new()?.root_pem())?;
    let (machine, name) = machine_listening_on(free_port()?, roots.path())?;
    let host = machine.start()?;
    let mut config = pinned_client_config(read_pin(&host.machine)?, ChainCheck::PinOnly)?;
    config.alpn_protocols = vec![b"acme-tls/1".to_vec()];
    let stream = TcpStream::connect(host.address.parse::<SocketAddr>()?).await?;
    let name = ServerName::try_from(name)?;
    assert!(TlsConnector::from(Arc::new(config)).connect(name, stream).await.is_err());
    Ok(())
}

#[test]
fn chain_is_verified_at_the_given_time() -> Result<()> {
    let ca = Ca::new()?;
    let dir = tempfile::tempdir()?;
    let roots = dir.path().join("roots.pem");
    std::fs::write(&roots, ca.root_pem())?;
    let verifier = ChainVerifier::new(Some(roots))?;
    let chain = Chain::from_pem(ca.issue(&["a.example.test"])?.0.as_bytes())?;
    let verify = |at: Timestamp| chain.verify(&verifier, "a.example.test", at);
    assert_eq!(verify(chain.not_before()), Ok(()));
    assert!(verify(chain.not_before().checked_sub(SignedDuration::from_secs(1))?).is_err(), "not valid yet");
    assert!(verify(chain.not_after().checked_add(SignedDuration::from_secs(1))?).is_err(), "expired");
    Ok(())
}

#[tokio::test]
async fn certificate_file_is_reloaded_and_must_match_key() -> Result<()> {
    let ca = Ca::new()?;
    let dir = tempfile::tempdir()?;
    let (roots, file) = (dir.path().join("roots.pem"), dir.path().join("chain.pem"));
    std::fs::write(&roots, ca.root_pem())?;
    let (mut machine, name) = machine_listening_on(free_port()?, &roots)?;
    machine.env.insert("GATEWAY_TLS_CERT_FILE".into(), file.display().to_string());
    machine.write("var/lib/svc/tls/settings.json", &json!({"hostName": name}).to_string())?;
    let host = machine.start()?;
    let missing =
        wait_until_reported(&host, "the file is missing", |report| report["error"].is_string()).await?;
    assert!(missing["error"].as_str().unwrap_or_default().contains("cannot be opened"), "{missing}");

    let key = std::fs::read_to_string(host.machine.path("var/lib/svc/tls/key.pem"))?;
    let issue = |names: &[&str], hours: i64| ca.issue_for(names, &key, SignedDuration::from_hours(hours));
    std::fs::write(&file, issue(&[&name], 24)?)?;
    let first = wait_until_reported(&host, "the file is used", |report| report["source"] == "file").await?;
    assert_eq!((&first["isTrusted"], &first["error"]), (&json!(true), &Value::Null));
    let presented_first = fetch_certificate(&host, &name, Some(&roots)).await?;

    for (content, reason) in [
        (ca.issue(&[&name])?.0, "a different key"),
        (issue(&["other.example.test"], 24)?, "not for the name"),
        (issue(&[&name], -1)?, "expired"),
        ("no certificate".to_owned(), "no PEM certificate"),
    ] {
        std::fs::write(&file, content)?;
        let refused = wait_until_reported(&host, reason, |report| {
            report["error"].as_str().is_some_and(|error| error.contains(reason))
        });
        let refused = refused.await?;
        assert_eq!(refused["expiresAt"], first["expiresAt"]);
        assert_eq!(fetch_certificate(&host, &name, Some(&roots)).await?, presented_first, "{reason}");
    }

    std::fs::write(&file, issue(&[&name], 48)?)?;
    let later = wait_until_reported(&host, "the new file is used", |report| {
        report["error"].is_null() && report["expiresAt"] != first["expiresAt"]
    });
    later.await?;
    assert_ne!(fetch_certificate(&host, &name, Some(&roots)).await?, presented_first);
    Ok(())
}
