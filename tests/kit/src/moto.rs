//! moto, an independent S3 server, for tests of racing conditional puts that must not rely on the kit's own server.
//!
//! It serves requests one after another, so that conditional puts are atomic. It checks neither signatures nor
//! checksums; [`crate::s3`] checks both.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::s3_process::S3Process;
use crate::{child, fetch, net};

const VERSION: &str = "5.2.5";
const INSTALL_TIMEOUT: Duration = Duration::from_secs(300);
/// `moto[s3]`, Flask for its server, and their main dependencies, in versions that work together.
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

/// moto serves requests in several threads and checks a condition before it writes, so two concurrent conditional puts
/// could both succeed. S3 and R2 do not allow this; requests are therefore served sequentially.
const SEQUENTIAL_SERVER: &str = "
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication as App
serve, lock = App.__call__, threading.Lock()
def serve_locked(self, environ, start_response):
    with lock:
        return serve(self, environ, start_response)
App.__call__ = serve_locked
from moto.server import main
main(sys.argv[1:])
";

/// A running server, stopped on drop.
pub struct Moto(S3Process);

impl Moto {
    /// # Errors
    /// Fails if moto cannot be fetched or started.
    pub fn start() -> Result<Self> {
        let packages = fetch(&fetch::target_dir())?;
        let port = net::free_port()?;
        let log = tempfile::NamedTempFile::new()?;
        let mut server = Command::new("python3");
        server
            .args(["-c", SEQUENTIAL_SERVER, "--host", "127.0.0.1", "--port", &port.to_string()])
            .env("PYTHONPATH", &packages)
            .env("PYTHONDONTWRITEBYTECODE", "1");
        Ok(Self(S3Process::start("moto", server, port, log.path())?))
    }

    pub fn s3(&self) -> &S3Process {
        &self.0
    }
}

/// Fetches the server's packages once into `<target_dir>/tools`.
///
/// # Errors
/// Fails if pip fails.
pub fn fetch(target_dir: &Path) -> Result<std::path::PathBuf> {
    fetch::locate_or_create(target_dir, &format!("moto-{VERSION}"), |dir| {
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
        child::run(pip, INSTALL_TIMEOUT).map(drop)
    })
}
