//! Tests machine certificates from provisioning to verification, with a real gateway and Pebble, an ACME server that
//! validates the gateway's name through the router.

use http::StatusCode;
use kit::ca::Ca;
use kit::net::free_port;
use kit::pebble::{Options, Pebble};
use serde_json::{Value, json};
use svc::http::tls::Identity;

use super::stack::{Process, Stack, UserDataSettings, heartbeat_of, registration};
use crate::gateway::host::{Host, Machine, UNREACHABLE_DATABASE};

const DOMAIN: &str = "hosts.example.test";

/// A platform whose router terminates TLS, and its settings.
struct Installation {
    stack: Stack,
    settings: Vec<(String, String)>,
    dir: tempfile::TempDir,
}

impl Installation {
    /// Prepares a platform that trusts the given roots, and whose router terminates TLS on the given port.
    async fn prepare(router_port: u16, directory_url: &str, roots: &std::path::Path) -> Self {
        let (stack, dir) = (Stack::start().await, tempfile::tempdir().unwrap());
        let (certificate, key) = Ca::new().unwrap().issue(&["app.test", "code.test"]).unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        std::fs::write(path("router.pem"), certificate).unwrap();
        std::fs::write(path("router.key"), key).unwrap();
        let settings = [
            ("ROUTER_LISTEN", format!("127.0.0.1:{router_port}")),
            ("ROUTER_TLS_CERT_FILE", path("router.pem")),
            ("ROUTER_TLS_KEY_FILE", path("router.key")),
            ("HOST_DOMAIN", DOMAIN.to_owned()),
            ("ACME_DIRECTORY_URL", directory_url.to_owned()),
            ("ACME_CONTACT", "ops@example.test".to_owned()),
            ("SSL_CERT_FILE", roots.display().to_string()),
            ("CUSTOMER_VPS_TLS_VERIFY_GRACE_SECONDS", "0".to_owned()),
        ];
        let settings = settings.map(|(name, value)| (name.to_owned(), value)).into();
        Self { stack, settings, dir }
    }

    fn start_platform(&self, extra_env: &[(&str, &str)]) -> Process {
        let settings = self.settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        self.stack.start_platform_with(&settings.chain(extra_env.iter().copied()).collect::<Vec<_>>())
    }

    /// Provisions a machine, starts its gateway with the host name from its user-data, registers it, and sends a
    /// heartbeat.
    async fn start_machine(
        &self,
        process: &Process,
        user: &str,
        roots: &std::path::Path,
    ) -> (UserDataSettings, Host) {
        let stack = &self.stack;
        let provisioned = stack.provision(process, user).await;
        let id = provisioned["machineId"].as_str().unwrap().to_owned();
        let host_settings = stack.wait_for_host_settings(process, &id).await;
        let server = stack.provider.server_by_name(&format!("svc-{id}")).unwrap();
        let mut machine = Machine::new(UNREACHABLE_DATABASE).unwrap();
        let env = [
            ("SVC_MACHINE_ID", id.clone()),
            ("SVC_USER_ID", user.to_owned()),
            ("GATEWAY_LISTEN", format!("{}:{}", server.ipv4, stack.provider.https_port())),
            ("SVC_HOST_NAME", host_settings.setting("SVC_HOST_NAME")),
            ("ACME_RETRY_SECONDS", "1".to_owned()),
            ("SSL_CERT_FILE", roots.display().to_string()),
        ];
        for (name, value) in env {
            machine.env.insert(name.into(), value);
        }
        let host = machine.start().unwrap();
        let path = |name: &str| host.machine.path(&format!("var/lib/svc/tls/{name}.pem"));
        let pin = Identity::read(&path("cert"), &path("key")).unwrap().pin().unwrap();
        let mut body = registration(&id, 1);
        body["tlsSpkiSha256"] = json!(pin.to_string());
        assert_eq!(stack.register_as(process, &host_settings.registration_token, &body).await.status, 200);
        let record =
            json!({"machineId": id, "sent": body.to_string(), "registeredAt": "2026-11-21T11:05:00.000Z"});
        host.machine.write("var/lib/svc/register.json", &record.to_string()).unwrap();
        let has_name = || async { reported_certificate(&host)["hostName"].is_string().then_some(()) };
        stack.eventually("the gateway reports its name", has_name).await;
        self.send_heartbeat(process, &host_settings, &host).await;
        (host_settings, host)
    }

    /// Sends a heartbeat with the certificate that the gateway reports. Stores the response as the sync agent does.
    async fn send_heartbeat(
        &self,
        process: &Process,
        host_settings: &UserDataSettings,
        host: &Host,
    ) -> Value {
        let mut body = heartbeat_of(host_settings);
        body["certificate"] = reported_certificate(host);
        let response = self.stack.send_heartbeat(process, host_settings, &body).await;
        assert_eq!(response.status, 200, "{response:?}");
        host.machine.write("var/lib/svc/proof-keys.json", &response.body["proofKeys"].to_string()).unwrap();
        let path = "var/lib/svc/tls/settings.json";
        host.machine.write(path, &response.body["certificate"].to_string()).unwrap();
        response.body
    }

    async fn wait_until_trusted(&self, host: &Host) {
        let is_trusted = || async { (reported_certificate(host)["isTrusted"] == true).then_some(()) };
        self.stack.eventually("the certificate is trusted", is_trusted).await;
    }

    /// Whether the platform can call the host.
    async fn can_reach_host(&self, process: &Process, id: &str) -> bool {
        let response = self.stack.get(process, &format!("/vps/{id}/usage")).await;
        response.status == StatusCode::OK
    }
}

fn reported_certificate(host: &Host) -> Value {
    let text = std::fs::read_to_string(host.machine.path("var/lib/svc/certificate.json"));
    serde_json::from_str(&text.unwrap_or_default()).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_is_validated_through_router_and_its_chain_verified() {
    let port = free_port().unwrap();
    let pebble = Pebble::start(&Options::for_validation_port(port)).await.unwrap();
    let installation = Installation::prepare(port, &pebble.directory_url(), &pebble.roots()).await;
    let stack = &installation.stack;
    let mut process = installation.start_platform(&[]);
    let (host_settings, host) = installation.start_machine(&process, "user_1", &pebble.roots()).await;
    let id = host_settings.machine.clone();
    installation.wait_until_trusted(&host).await;
    assert_eq!(reported_certificate(&host)["hostName"], json!(format!("{id}.{DOMAIN}")));
    assert!(
        stack.log().contains("validation forwarded"),
        "the authority must reach the name through the router"
    );

    let response = installation.send_heartbeat(&process, &host_settings, &host).await;
    let delivered = &response["certificate"];
    assert_eq!(delivered["hostName"], json!(format!("{id}.{DOMAIN}")));
    assert_eq!(delivered["acme"]["contact"], "mailto:ops@example.test");
    let fleet = stack.get(&process, "/vps/fleet").await.body;
    let summary = &fleet["certificates"];
    assert_eq!(
        (&summary["isRequired"], &summary["trusted"], &summary["missing"]),
        (&json!(false), &json!(1), &json!(0))
    );
    let record = stack.get(&process, &format!("/vps/{id}")).await.body;
    assert_eq!(record["certificate"]["source"], "acme");
    let is_reachable = || async { installation.can_reach_host(&process, &id).await.then_some(()) };
    stack.eventually("the platform can call the host", is_reachable).await;

    // Whether verification is on or off, the new process can call the host immediately.
    for verify in ["true", "false", "true"] {
        process.kill();
        process = installation.start_platform(&[("CUSTOMER_VPS_TLS_VERIFY", verify)]);
        assert!(installation.can_reach_host(&process, &id).await, "verify={verify}: {}", stack.log());
    }

    // A platform that does not trust the authority's root refuses to call the host.
    process.kill();
    let other_roots = installation.dir.path().join("other.pem");
    std::fs::write(&other_roots, Ca::new().unwrap().root_pem()).unwrap();
    let other_roots = other_roots.display().to_string();
    let distrusting =
        installation.start_platform(&[("CUSTOMER_VPS_TLS_VERIFY", "true"), ("SSL_CERT_FILE", &other_roots)]);
    let refused = stack.get(&distrusting, &format!("/vps/{id}/usage")).await;
    refused.assert_problem(502, "host_unreachable");
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_certificate_is_reported_with_verification_off_and_on() {
    let (roots, port) = (tempfile::NamedTempFile::new().unwrap(), free_port().unwrap());
    std::fs::write(roots.path(), Ca::new().unwrap().root_pem()).unwrap();
    // No certificate authority is listening at this address.
    let directory = format!("https://127.0.0.1:{}/dir", free_port().unwrap());
    let installation = Installation::prepare(port, &directory, roots.path()).await;
    let stack = &installation.stack;
    let mut process = installation.start_platform(&[]);
    let (host_settings, host) = installation.start_machine(&process, "user_1", roots.path()).await;
    let has_failed = || async { reported_certificate(&host)["error"].is_string().then_some(()) };
    stack.eventually("the certificate request fails", has_failed).await;
    installation.send_heartbeat(&process, &host_settings, &host).await;
    let reasons = |fleet: &Value| fleet["attention"][0]["reasons"].clone();
    let fleet = stack.get(&process, "/vps/fleet").await.body;
    assert_eq!(fleet["certificates"]["missingHandles"], json!(["h-user-1"]));
    assert_eq!(
        reasons(&fleet),
        Value::Null,
        "a missing certificate must not be reported before it is required"
    );
    assert!(installation.can_reach_host(&process, &host_settings.machine).await);

    process.kill();
    process = installation.start_platform(&[("CUSTOMER_VPS_TLS_VERIFY", "true")]);
    let warning = "CUSTOMER_VPS_TLS_VERIFY is on, but machines have no trusted certificate";
    assert!(stack.log().contains(warning), "{}", stack.log());
    let fleet = stack.get(&process, "/vps/fleet").await.body;
    assert_eq!(reasons(&fleet), json!(["certificate_missing"]));
    assert!(!installation.can_reach_host(&process, &host_settings.machine).await);

    process.kill();
    let except =
        [("CUSTOMER_VPS_TLS_VERIFY", "true"), ("CUSTOMER_VPS_TLS_VERIFY_EXCEPT", &*host_settings.machine)];
    process = installation.start_platform(&except);
    assert!(
        installation.can_reach_host(&process, &host_settings.machine).await,
        "an exempt machine must be reachable"
    );
    let fleet = stack.get(&process, "/vps/fleet").await.body;
    assert_eq!((reasons(&fleet), &fleet["certificates"]["exempt"]), (Value::Null, &json!(1)));
}

#[tokio::test(flavor = "multi_thread")]
async fn passthrough_serves_only_validations_of_known_machines() {
    use std::sync::Arc;

    use rustls::pki_types::ServerName;
    use svc::http::tls::{ChainCheck, pinned_client_config};
    use tokio::net::TcpStream;
    use tokio_rustls::TlsConnector;

    let (roots, port) = (tempfile::NamedTempFile::new().unwrap(), free_port().unwrap());
    std::fs::write(roots.path(), Ca::new().unwrap().root_pem()).unwrap();
    let installation = Installation::prepare(port, "https://127.0.0.1:1/dir", roots.path()).await;
    let process = installation.start_platform(&[]);
    let (host_settings, _host) = installation.start_machine(&process, "user_1", roots.path()).await;
    installation.stack.wait_for_routes(&process).await;
    let path = |name: &str| installation.dir.path().join(name);
    let router = Identity::read(&path("router.pem"), &path("router.key")).unwrap().pin().unwrap();
    let name = format!("{}.{DOMAIN}", host_settings.machine);
    let unknown = format!("{}.{DOMAIN}", svc::machine::id::MachineId::new());
    let connect = async |name: &str, protocols: &[&str]| {
        let mut config = pinned_client_config(router, ChainCheck::PinOnly).unwrap();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    };
    // The router presents its own key for every connection except a validation.
    for (name, protocols) in
        [(&*name, &["http/1.1"][..]), (&*name, &[]), (&*name, &["http/1.1", "acme-tls/1"]), ("app.test", &[])]
    {
        connect(name, protocols).await.unwrap_or_else(|error| panic!("{name} {protocols:?}: {error}"));
    }
    assert!(
        connect(&unknown, &["acme-tls/1"]).await.is_err(),
        "the router itself must not support this protocol"
    );
    // The machine refuses the connection, because no validation is in progress.
    assert!(connect(&name, &["acme-tls/1"]).await.is_err());
    let stack = &installation.stack;
    let log_line = format!("validation forwarded name={name}");
    let is_logged = || async { stack.log().contains(&log_line).then_some(()) };
    stack.eventually("the validation is forwarded", is_logged).await;
    // The log already contains the later validation, so it would also contain the unknown machine's.
    assert!(!stack.log().contains(&unknown), "an unknown machine must not be dialed");
}
