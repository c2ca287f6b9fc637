//! Checks the gateway from the router's perspective, and its key against the registered one.

use std::path::PathBuf;

use serde::Deserialize;

use super::services_env;
use crate::system::layout::Layout;
use crate::system::probe;
use crate::system::probe::GatewayClient;
use crate::system::vars;
use svc_base::diagnosis::Findings;
use svc_base::fsx;

/// Returns the path to the gateway's trusted socket.
pub fn socket_path(layout: &Layout) -> PathBuf {
    layout.gateway_sockets().join("gateway.sock")
}

pub async fn check(layout: &Layout) -> Findings {
    let findings = Findings::new("gateway");
    let next = "run `systemctl status svc-gateway; journalctl -u svc-gateway -n 50`";
    let listen = services_env(layout).or_default(&vars::GATEWAY_LISTEN);
    let pin = match probe::read_pin(layout) {
        Ok(Some(pin)) => pin,
        Ok(None) => return findings.problem("the gateway has no TLS key yet: it has never started", next),
        Err(error) => {
            return findings
                .skipped(format!("the gateway's key cannot be read: {error:#}; run the doctor as root"));
        }
    };
    let Ok(gateway) = GatewayClient::new(listen, pin) else {
        return findings.problem("cannot create an HTTPS client for the gateway's certificate", next);
    };
    if gateway.is_ready().await {
        findings.ok(format!("the gateway is ready on {listen} and uses the key in tls/key.pem"))
    } else {
        let what = format!("the gateway is not ready on {listen}, or its key differs from tls/key.pem");
        findings.problem(what, next)
    }
}

/// `register.json`, written by `svc-register`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RegistrationFile {
    machine_id: String,
    sent: String,
    registered_at: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SentRegistration {
    tls_spki_sha256: String,
}

pub fn check_key(layout: &Layout) -> Findings {
    let findings = Findings::new("tls-key");
    let pin = match probe::read_pin(layout) {
        Ok(Some(pin)) => pin.to_string(),
        Ok(None) => return findings.skipped("the gateway has no key yet"),
        Err(error) => {
            return findings.skipped(format!("the key cannot be read: {error:#}; run the doctor as root"));
        }
    };
    let next = "run `journalctl -u svc-register -n 50`; operators can see the boot's result with `svcctl status \
                MACHINE`";
    let registration = match fsx::read_if_exists(&layout.registration()) {
        Ok(Some(text)) => serde_json::from_slice::<RegistrationFile>(&text).ok(),
        Ok(None) => None,
        Err(error) => return findings.skipped(format!("{error}; run the doctor as root")),
    };
    let Some(registration) = registration else {
        let what = "no valid register.json: this machine has not registered, so no traffic is routed to it";
        return findings.problem(what, next);
    };
    let Some(at) = &registration.registered_at else {
        return findings
            .problem("the platform has not accepted the registration: no traffic is routed here", next);
    };
    if services_env(layout).text(&vars::SVC_MACHINE_ID).is_some_and(|id| id != registration.machine_id) {
        let what = format!("register.json belongs to another machine, {}", registration.machine_id);
        return findings.problem(what, "this disk is a copy: recover the slot");
    }
    match serde_json::from_str::<SentRegistration>(&registration.sent) {
        Ok(sent) if sent.tls_spki_sha256 == pin => findings.ok(format!("the key was registered at {at}")),
        Ok(_) => findings.problem(
            "the key in tls/key.pem differs from the registered one: the router refuses to connect",
            "restore tls/key.pem, or recover the slot; a machine registers only once",
        ),
        Err(_) => findings.problem("register.json is not a valid registration", next),
    }
}
