//! moto, somebody else's S3 server, for what should not be judged by our own alone: conditional puts under races.
//!
//! It keeps conditional puts exact and checks neither signatures nor checksums; [`crate::s3`] does both.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::s3_process::S3Process;
use crate::{child, fetch, net};

const VERSION: &str = "5.2.5";
const INSTALL_DEADLINE: Duration = Duration::from_secs(300);
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

/// A running server; it ends when this is dropped.
pub struct Moto(S3Process);

impl Moto {
    /// # Errors
    /// When it cannot be fetched, or does not answer in time.
    pub fn start() -> Result<Self> {
        let place = fetch(&fetch::target_dir())?;
        let port = net::free_port()?;
        let log = tempfile::NamedTempFile::new()?;
        let mut server = Command::new("python3");
        server
            .args(["-c", ONE_AT_A_TIME, "--host", "127.0.0.1", "--port", &port.to_string()])
            .env("PYTHONPATH", &place)
            .env("PYTHONDONTWRITEBYTECODE", "1");
        Ok(Self(S3Process::start("moto", server, port, log.path())?))
    }

    pub fn s3(&self) -> &S3Process {
        &self.0
    }
}

/// The server's packages, fetched once into `<target_dir>/tools`.
///
/// # Errors
/// When pip cannot get them.
pub fn fetch(target_dir: &Path) -> Result<std::path::PathBuf> {
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
