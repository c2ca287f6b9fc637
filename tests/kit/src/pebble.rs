//! Pebble, a certificate authority that speaks ACME, with a name server that resolves every name to loopback.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use serde_json::{Value, json};

use crate::ca::Ca;
use crate::child::OwnedChild;
use crate::net::free_port;
use crate::packages::{Deb, DebTool, FetchedProgram};

const PEBBLE: DebTool = DebTool {
    debs: &[Deb {
        name: "pebble",
        version: "2.4.0+ds1-2+b4",
        sha256: "ad144cb969adb92df94eba76670fa28595ba78fbb875036ae4a5b068939e102e",
    }],
    path: "usr/bin/pebble",
};
/// Pebble's name server, in the same package.
const NAME_SERVER: DebTool = DebTool { path: "usr/bin/pebble-challtestsrv", ..PEBBLE };
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Fetches the package once into `target/tools`.
///
/// # Errors
/// Fails if the architecture is not x86_64, or if apt-get cannot download the package.
pub fn fetch() -> Result<FetchedProgram> {
    PEBBLE.locate_or_fetch()
}

/// Options for an authority.
pub struct Options {
    /// The port to which the authority connects to validate a name with TLS-ALPN-01.
    pub validation_port: u16,
    pub certificate_lifetime_seconds: u64,
    /// A domain for which the authority refuses orders.
    pub blocked_domain: Option<String>,
    /// The id and the MAC key (base64url) of the only external account to which ACME accounts can be bound.
    pub external_account: Option<(String, String)>,
}

impl Options {
    pub fn for_validation_port(validation_port: u16) -> Self {
        let certificate_lifetime_seconds = 90 * 86_400;
        Self { validation_port, certificate_lifetime_seconds, blocked_domain: None, external_account: None }
    }
}

/// A running authority, stopped on drop. It keeps its accounts and its root in memory.
pub struct Pebble {
    dir: tempfile::TempDir,
    api_address: SocketAddr,
    management_address: SocketAddr,
    name_server: OwnedChild,
    server: OwnedChild,
}

impl Pebble {
    /// # Errors
    /// Fails if Pebble cannot be fetched or does not start; the latter error contains its log.
    pub async fn start(options: &Options) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let loopback = || anyhow::Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?)));
        let (api_address, management_address, dns_address, dns_management_address) =
            (loopback()?, loopback()?, loopback()?, loopback()?);
        let ca = Ca::new()?;
        let (certificate, key) = ca.issue(&["127.0.0.1"])?;
        let path = |name: &str| dir.path().join(name);
        fs::write(path("cert.pem"), certificate)?;
        fs::write(path("key.pem"), key)?;
        fs::write(path("api-root.pem"), ca.root_pem())?;
        let mac_keys: serde_json::Map<_, _> =
            options.external_account.iter().map(|(id, key)| (id.clone(), json!(key))).collect();
        let blocked: Vec<_> = options.blocked_domain.iter().collect();
        let config = json!({ "pebble": {
            "listenAddress": api_address.to_string(),
            "managementListenAddress": management_address.to_string(),
            "certificate": path("cert.pem"),
            "privateKey": path("key.pem"),
            "httpPort": free_port()?,
            "tlsPort": options.validation_port,
            "ocspResponderURL": "",
            "externalAccountBindingRequired": !mac_keys.is_empty(),
            "externalAccountMACKeys": mac_keys,
            "domainBlocklist": blocked,
            "certificateValidityPeriod": options.certificate_lifetime_seconds,
        }});
        fs::write(path("config.json"), config.to_string())?;
        let mut name_server = NAME_SERVER.locate_or_fetch()?.command();
        name_server.args([
            "-defaultIPv4",
            "127.0.0.1",
            "-defaultIPv6",
            "",
            "-http01",
            "",
            "-https01",
            "",
            "-tlsalpn01",
            "",
        ]);
        name_server.args(["-dns01", &dns_address.to_string()]);
        name_server.args(["-management", &dns_management_address.to_string()]);
        let log = |name: &str| fs::File::create(path(name));
        name_server.stdin(Stdio::null()).stdout(log("names.log")?).stderr(log("names.err")?);
        let name_server = OwnedChild::spawn(&mut name_server).context("cannot start the name server")?;
        let mut server = fetch()?.command();
        // Without these variables, Pebble waits up to 15 seconds before each validation, rejects some valid nonces at
        // random, and reuses some authorizations at random.
        server.env("PEBBLE_VA_NOSLEEP", "1").env("PEBBLE_WFE_NONCEREJECT", "0").env("PEBBLE_AUTHZREUSE", "0");
        server
            .arg("-strict")
            .arg("-config")
            .arg(path("config.json"))
            .args(["-dnsserver", &dns_address.to_string()]);
        server.stdin(Stdio::null()).stdout(log("pebble.log")?).stderr(log("pebble.err")?);
        let server = OwnedChild::spawn(&mut server).context("cannot start pebble")?;
        let mut pebble = Self { dir, api_address, management_address, name_server, server };
        pebble.wait_until_listening(dns_management_address)?;
        pebble.write_roots(&ca.root_pem()).await?;
        Ok(pebble)
    }

    fn wait_until_listening(&mut self, dns_management_address: SocketAddr) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        for address in [dns_management_address, self.api_address, self.management_address] {
            while TcpStream::connect(address).is_err() {
                let has_ended = self.server.status().is_some() || self.name_server.status().is_some();
                ensure!(!has_ended && Instant::now() < deadline, "pebble did not start: {}", self.log());
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    }

    /// Writes the roots of the authority's API and of the certificates that it issues.
    async fn write_roots(&self, api_root: &str) -> Result<()> {
        // The crypto provider is installed once per process; later attempts fail harmlessly.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let url = format!("https://{}/roots/0", self.management_address);
        let issuer_root = client(api_root)?.get(url).send().await?.error_for_status()?.text().await?;
        fs::write(self.roots(), format!("{api_root}{issuer_root}"))?;
        Ok(())
    }

    pub fn directory_url(&self) -> String {
        format!("https://{}/dir", self.api_address)
    }

    pub fn api_address(&self) -> SocketAddr {
        self.api_address
    }

    /// Returns the path of a file with root certificates, for `SSL_CERT_FILE`.
    pub fn roots(&self) -> PathBuf {
        self.dir.path().join("roots.pem")
    }

    pub fn log(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.dir.path().join(name)).unwrap_or_default();
        ["names.err", "pebble.log", "pebble.err"].map(read).concat()
    }

    /// Returns the number of certificates issued so far.
    pub fn issued_count(&self) -> usize {
        self.log().matches("Issued certificate serial").count()
    }

    /// Deactivates an account (RFC 8555, 7.3.6), as if its holder had done so from elsewhere. `credentials` are those
    /// that `instant-acme` stores: the account's URL as `id`, and its key as `key_pkcs8`.
    ///
    /// # Errors
    /// Fails if the authority does not deactivate the account.
    pub async fn deactivate_account(&self, credentials: &Value) -> Result<()> {
        let client = client(&fs::read_to_string(self.roots())?)?;
        let text = |name: &str| credentials[name].as_str().with_context(|| format!("no {name}"));
        let (account, key) = (text("id")?, URL_SAFE_NO_PAD.decode(text("key_pkcs8")?)?);
        let nonce_url = format!("https://{}/nonce-plz", self.api_address);
        let nonce = client.head(nonce_url).send().await?.error_for_status()?;
        let nonce = nonce.headers().get("replay-nonce").context("the response has no nonce")?.to_str()?;
        let header = json!({"alg": "ES256", "kid": account, "nonce": nonce, "url": account});
        let encode = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let (header, payload) = (encode(header), encode(json!({"status": "deactivated"})));
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &key, &random)
            .map_err(|error| anyhow!("cannot parse the account's key: {error}"))?;
        let signature = key.sign(&random, format!("{header}.{payload}").as_bytes());
        let signature = URL_SAFE_NO_PAD.encode(signature.map_err(|_| anyhow!("cannot sign the request"))?);
        let body = json!({"protected": header, "payload": payload, "signature": signature});
        let request =
            client.post(account).header("content-type", "application/jose+json").body(body.to_string());
        let response = request.send().await?;
        let (status, text) = (response.status(), response.text().await?);
        ensure!(status.is_success() && text.contains("deactivated"), "{status}: {text}");
        Ok(())
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// Returns a client that trusts only these roots.
fn client(roots: &str) -> Result<reqwest::Client> {
    let roots = reqwest::Certificate::from_pem_bundle(roots.as_bytes())?;
    Ok(reqwest::Client::builder().tls_certs_only(roots).no_proxy().timeout(START_TIMEOUT).build()?)
}
