//! moto, somebody else's S3 server, for what should not be judged by our own alone: conditional puts under races.
//!
//! It keeps conditional puts exact and checks neither signatures nor checksums; [`crate::s3`] does both.

use std::fs::File;
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::child::{self, AtExit};
use crate::{fetch, net};

const VERSION: &str = "5.2.5";
const BUCKET: &str = "svc-test";
const INSTALL_DEADLINE: Duration = Duration::from_secs(300);
const START_DEADLINE: Duration = Duration::from_secs(60);
/// Of everything that `moto[s3]` and its server need, as one resolution gave it.
const REQUIREMENTS: [&str; 9] = [
    "moto[s3]==5.2.5",
    "boto3==1.44.5",
    "botocore==1.44.5",
    "cryptography==50.0.2",
    "Flask==3.1.3",
    "flask-cors==6.0.5",
    "Werkzeug==3.1.9",
    "py-partiql-parser==0.6.3",
    "PyYAML==6.0.3",
];

/// Its server looks at a condition and then writes, in threads: of two conditional puts at once, both may succeed. A store
/// that promises conditions does not do that, so its requests are served one after the other.
const ONE_AT_A_TIME: &str = "
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication as App
serve, turn = App.__call__, threading.Lock()
def one(self, environ, start_response):
    with turn:
        return serve(self, environ, start_response)
App.__call__ = one
from moto.server import main
main(sys.argv[1:])
";

/// A running server with one empty bucket; it ends when this is dropped.
pub struct Moto {
    server: Child,
    port: u16,
}

impl Moto {
    /// # Errors
    /// When it cannot be fetched, or does not answer in time.
    pub fn start() -> Result<Self> {
        let place = fetched(&fetch::target_dir())?;
        let port = net::free_port()?;
        let log = tempfile::NamedTempFile::new()?;
        let mut server = Command::new("python3");
        server
            .args(["-c", ONE_AT_A_TIME, "--host", "127.0.0.1", "--port", &port.to_string()])
            .env("PYTHONPATH", &place)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(log.path())?);
        let server = server.spawn().context("start moto's server")?;
        child::end_with_us(server.id(), AtExit::Kill);
        let mut moto = Self { server, port };
        let deadline = Instant::now() + START_DEADLINE;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            if moto.server.try_wait()?.is_some() || Instant::now() > deadline {
                bail!("moto does not listen: {}", std::fs::read_to_string(log.path())?);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(moto)
    }

    /// Makes the bucket.
    ///
    /// # Errors
    /// When the server refuses.
    pub async fn make_bucket(&self) -> Result<()> {
        let url = format!("{}/{BUCKET}", self.endpoint());
        let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(30)).build()?;
        client.put(url).send().await?.error_for_status()?;
        Ok(())
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The product's configuration for it.
    pub fn env(&self) -> Vec<(String, String)> {
        let pairs = [
            ("OBJECT_STORE_URL", format!("s3://{BUCKET}")),
            ("OBJECT_STORE_ENDPOINT", self.endpoint()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", "moto".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "moto".to_owned()),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value)).into()
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        // What has ended by itself needs no signal.
        self.server.kill().ok();
        self.server.wait().ok();
        child::ended(self.server.id());
    }
}

/// The server's packages, fetched once into `<target_dir>/tools`.
///
/// # Errors
/// When pip cannot get them.
pub fn fetched(target_dir: &Path) -> Result<std::path::PathBuf> {
    fetch::once(target_dir, &format!("moto-{VERSION}"), |dir| {
        let mut pip = Command::new("python3");
        pip.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--only-binary",
            ":all:",
        ]);
        pip.arg("--target").arg(dir).args(REQUIREMENTS);
        child::run(pip, INSTALL_DEADLINE).map(drop)
    })
}
